"""A chat answer with its tokens: read as it passes, and shown to the client as if they had not been asked for.

Knows: chat's chunks and whole answers, what tokens must be like to be trained on.
Does not know: where a kind of server puts them (its `read` takes them out), sockets, releases' files.

- The name that the server was asked by is not the client's business: it sees the base model's.
- Log-probs that cannot be what was sampled make the answer untrainable, and say so; the client gets its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from reef.core.errors import EngineError
from reef.core.nouns import Choice, Json, Span, Usage
from reef.engines import Answer
from reef.engines.dialect import chat
from reef.engines.dialect.value import dump, load
from reef.engines.remote import Request, Server, Taken
from reef.engines.sse import Event

SLACK = 1e-3  # above zero a log-prob may be: a sum that was rounded
CUT = ("abort", "error")  # finish reasons of answers that somebody stopped, or that failed
LOST = -9000.0  # servers write a log-prob that is no number as -9999


Check = Callable[[Sequence[int], Sequence[tuple[Choice, Sequence[int]]]], str | None]


class Said(chat.Reader):
    """One answer. `name` is what the server was asked by, `shown` what the client sees in its place; `check` says what
    is wrong with the prompt's tokens and those of each choice."""

    def __init__(self, server: Server, request: Request, name: str, shown: str, check: Check) -> None:
        super().__init__()
        self._check = check
        self._server, self._request = server, request
        self._name, self._as = name, shown
        self._prompt: Sequence[int] | None = None
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[float]] = {}
        self._flaw: str | None = None
        self._ended = set[int]()
        self._made: dict[int, bytes] = {}

    def event(self, event: Event) -> bool:
        if event.data is None:
            return False
        if event.data == chat.DONE:
            return True
        if isinstance(chunk := load(event.data), dict):
            self._made[id(event)] = b"data: " + dump(self._take(chunk)) + b"\n\n"
        return self.error is not None

    def show(self, event: Event) -> bytes:
        """An event's bytes as the client gets them."""
        return self._made.pop(id(event), event.raw)

    def body(self, data: bytes) -> bytes:
        """Read an answer that was not streamed; its bytes as the client gets them."""
        found = load(data)
        return dump(self._take(found)) if isinstance(found, dict | list) else data

    def answer(self, release_id: str) -> Answer:
        """What is recorded, once the answer ended."""
        choices = self.choices()
        prompt = tuple(self._prompt or ())
        flaw = self._request.untrainable or self._flaw or (None if prompt else "the server gave no prompt tokens")
        if flaw is None:
            flaw = next((why for each in choices if (why := self._wrong(each.index)) is not None), None)
            flaw = flaw or self._check(prompt, [(each, self._ids[each.index]) for each in choices])
        usage = self.usage
        if prompt and not any(self._wrong(each.index) for each in choices):
            counted = Usage(len(prompt), sum(len(self._ids[each.index]) for each in choices))
            if usage is not None and usage != counted and self.error is None:
                flaw = flaw or (
                    f"the server gave {counted.prompt_tokens} + {counted.completion_tokens} token ids for "
                    f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
                )
            usage = usage or counted
        return Answer(
            choices=tuple(self._with_tokens(each, release_id) for each in choices),
            prompt_ids=prompt or None,
            sampling=self._request.sampling,
            usage=usage,
            model=self._as,
            untrainable=flaw,
            id=self.id,
            error=self.error,
        )

    def _take(self, chunk: Json) -> dict[str, Any]:
        model = chunk.get("model") if isinstance(chunk, dict) else None
        if isinstance(model, str) and model != self._name:
            raise EngineError(
                f"{self._server.url} was asked for {self._name} and answered as {model}; these are other weights. "
                "Check that engines.model names what the server serves"
            )
        taken: Taken = self._server.read(self._request, chunk)
        if taken.prompt is not None:
            self._prompt = taken.prompt
        for index, ids, logprobs in taken.drawn:
            if ids and index in self._ended and self._flaw is None:
                self._flaw = "the server went on with an answer that it had ended"
            self._ids.setdefault(index, []).extend(ids)
            self._logprobs.setdefault(index, []).extend(logprobs)
        if taken.flaws and self._flaw is None:
            self._flaw = taken.flaws[0]
        if "model" in taken.shown:
            taken.shown["model"] = self._as
        self._note_ends(taken.shown.get("choices"))
        self.add(taken.shown)
        return taken.shown

    def _note_ends(self, choices: Json) -> None:
        """Which choices ended. EngineError for one that was not brought to its end."""
        for each in choices if isinstance(choices, list) else ():
            finish = each.get("finish_reason") if isinstance(each, dict) else None
            if finish in CUT:
                raise EngineError(f"{self._server.url} ended an answer before its end ({finish}); try again")
            if finish is not None:
                self._ended.add(each.get("index") or 0)

    def _wrong(self, index: int) -> str | None:
        """What is wrong with a choice's tokens."""
        ids, logprobs = self._ids.get(index), self._logprobs.get(index)
        if not ids or not logprobs:
            return "the server gave no token ids; docs/vllm.md and docs/sglang.md say how to start it"
        if len(ids) != len(logprobs):
            return f"the server gave {len(logprobs)} log-probs for {len(ids)} tokens"
        if not all(math.isfinite(each) and LOST < each <= SLACK for each in logprobs):
            return "the server gave log-probs that are none (not finite, or above zero)"
        return None

    def _with_tokens(self, choice: Choice, release_id: str) -> Choice:
        if self._wrong(choice.index) is not None:
            return choice
        ids = tuple(self._ids[choice.index])
        logprobs = tuple(min(0.0, each) for each in self._logprobs[choice.index])
        return replace(choice, output_ids=ids, logprobs=logprobs, spans=(Span(release_id, 0, len(ids)),))
