"""`reef chat`: a person talks to the served model and says what was good.

Knows: the public chat stream and reports on the last answer. Does not know: what becomes of a report.
Works on a terminal and on piped lines alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from reef.cli import options
from reef.cli.api import Api, connect, refusal, silent
from reef.core.errors import InputError, ReefError, WireError

HELP = """\
/good        the last answer was good (score 1)
/bad         the last answer was bad (score 0)
/fix TEXT    what the last answer should have been; the talk goes on as if it had been
/release     the release that answered last, and the one served now
/new         begin a new conversation
/help        this
/quit        end (also Ctrl-D)
Anything else is said to the model. Ctrl-C stops an answer."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to the served model; /good, /bad and /fix report on its answers",
        description="Talk to the served model.\n\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.server(parser)
    parser.add_argument("--as", dest="asked", metavar="MODEL", help="an alias, or the model to ask for (default: none)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="length of an answer (default 256)")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as api:
        api.get("/readyz")
        talk = Talk(api, model=args.asked, system=args.system, max_tokens=args.max_tokens)
        if sys.stdin.isatty():
            print(f"{api.found.url}, scenario {api.found.scenario}. /help lists the commands.")
        failed = False
        for line in _lines():
            try:
                if not talk.hear(line):
                    break
            except ReefError as error:
                print(f"reef: {error.message}", file=sys.stderr, flush=True)
                failed = True
    return 1 if failed and not sys.stdin.isatty() else 0


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives input() editing and history)

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


class Talk:
    """One conversation: what was said, and the receipt of the last answer."""

    def __init__(self, api: Api, *, model: str | None, system: str | None, max_tokens: int) -> None:
        self._api = api
        self._model = {"model": model} if model else {}
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = list(self._start)
        self._max_tokens = max_tokens
        self._receipt: str | None = None
        self._told: dict[str, list[str]] = {}  # what this talk said of each answer already
        self._release: str | None = None

    def hear(self, line: str) -> bool:
        """Do what a line says. False: it was the end."""
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return False
        if word == "/help":
            print(HELP, flush=True)
        elif word == "/good":
            self._report({"score": 1.0}, "good")
        elif word == "/bad":
            self._report({"score": 0.0}, "bad")
        elif word == "/fix":
            self._fix(rest.strip())
        elif word == "/release":
            self._show_release()
        elif word == "/new":
            self._messages, self._receipt = list(self._start), None
            print("a new conversation", flush=True)
        elif word.startswith("/"):
            raise InputError(f"no command {word}; /help lists them")
        elif word:
            self._say(line)
        return True

    def _say(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {**self._model, "messages": messages, "stream": True, "max_tokens": self._max_tokens}
        answer = ""
        try:
            for piece in self._stream(body):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        finally:
            print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        import httpx

        client, headers = self._api.client, {"x-reef-scenario": self._api.found.scenario}
        done = False
        try:
            with client.stream("POST", "/v1/chat/completions", json=body, headers=headers, timeout=180.0) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refusal(self._api.found, answer)
                self._receipt = answer.headers.get("x-reef-agent-record-id")
                self._release = answer.headers.get("x-reef-release-id")
                for line in answer.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        done = True
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise WireError(str(event["error"].get("message", event["error"])))
                    for choice in event.get("choices", ())[:1]:
                        if piece := (choice.get("delta") or {}).get("content"):
                            yield piece
        except httpx.ConnectError:
            raise WireError(silent(self._api.found)) from None
        except httpx.HTTPError:
            raise WireError("the answer was cut off; say it again") from None
        if not done:
            raise WireError("the answer was cut off; say it again")

    def _report(self, body: dict[str, Any], word: str) -> None:
        if self._receipt is None:
            raise InputError("there is no answer to report on yet; say something first")
        answer = self._api.post("/reef/report", {**body, "references": [self._receipt]})
        (kind,), before = body, self._told.setdefault(self._receipt, [])
        rest = "; it was known already" if answer.get("duplicate") else self._unheard(kind, before)
        print(f"reported as {word} ({answer['agent_record_id']}){rest}", flush=True)
        before.append(kind)

    def _unheard(self, kind: str, before: list[str]) -> str:
        """Why this report will train nothing, as far as can be told; empty when it may. `before`: what was said of the
        same answer."""
        try:
            shown = self._api.get("/reef/status")["scenarios"].get(self._api.found.scenario) or {}
        except ReefError:  # the token may not look
            shown = {}
        parts = (shown.get("learner") or {}).get("parts") or {}
        known = {part: work["signals"] for part, work in parts.items() if "signals" in work}
        if shown.get("recipe") == "record" and not parts:
            return "; this scenario only keeps records, so nothing learns from it: it is kept"
        if known and len(known) == len(parts) and not any(kind in signals for signals in known.values()):
            told = ", ".join(f"{part} from {' or '.join(signals)}" for part, signals in known.items())
            return f"; no recipe of this scenario learns from a {kind} ({told}): it is kept"
        heard = [signals for signals in known.values() if kind in signals] or [[kind]]
        if all(set(before) & set(signals) for signals in heard):
            return "; this answer had a report already, and only the first one trains: this one is kept"
        return ""

    def _fix(self, text: str) -> None:
        if not text:
            raise InputError("write what the answer should have been: /fix TEXT")
        self._report({"demonstration": text}, "fixed")
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages[-1] = {"role": "assistant", "content": text}

    def _show_release(self) -> None:
        status = self._api.get("/reef/status")["scenarios"].get(self._api.found.scenario)
        now = "nothing" if status is None else f"{status['release_id'][:12]} (seq {status['seq']})"
        last = "" if self._release is None else f"; the last answer came from {self._release[:12]}"
        print(f"served now: {now}{last}", flush=True)
