"""An answer of SGLang's `/generate`, put into chat's form as it comes.

Knows: pieces that hold all of an answer so far or what is new, its tokens and log-probs, finish reasons, calls in it.
Does not know: HTTP, or how it was asked for.

- The text is what the token ids say, by the tokenizer here: they are what is recorded. Where the server says another
  text, or gives ids and log-probs that do not belong together, the answer is flawed; the client gets it all the same.
- An answer from other weights than those that were asked for is an error, whichever piece says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reef.core.errors import ContextError, EngineError
from reef.core.nouns import Json
from reef.engines.local.text import BROKEN, Stream, Text
from reef.engines.local.tools import Call, Sieve
from reef.engines.remote import Lost, Taken

UNKNOWN = re.compile(r"never been loaded|not loaded|does not exist")
"""What a server says of an adapter that it does not have."""


@dataclass(slots=True)
class Part:
    """One choice as it grows: what of it was read, and what the client was told."""

    sieve: Sieve
    stream: Stream
    ids: list[int] = field(default_factory=list)
    text: str = ""  # as the server says it
    ours: str = ""  # as the tokens say it
    calls: int = 0
    begun: bool = False  # the role was told
    finish: str | None = None


class Native:
    """One answer. `versions`: what a server may call the weights that it is for; `parts`: its choices, still empty."""

    def __init__(
        self,
        url: str,
        text: Text,
        *,
        receipt: str,
        model: str,
        versions: Sequence[str],
        prompt: Sequence[int],
        streamed: bool,
        usage: bool,
        logprobs: bool,
        parts: list[Part],
    ) -> None:
        self._url, self._text = url, text
        self._receipt, self._model, self._versions = receipt, model, versions
        self._prompt, self._parts = prompt, parts
        self._streamed, self._usage, self._logprobs = streamed, usage, logprobs
        self._created = int(time.time())

    def take(self, chunk: Json) -> Taken:
        """What a piece of a stream, or a whole answer, holds. EngineError: it is none, or is of other weights."""
        answers = chunk if isinstance(chunk, list) else [chunk]
        if not self._streamed and len(answers) != len(self._parts):
            raise EngineError(f"{self._url} gave {len(answers)} answers, {len(self._parts)} were asked for")
        choices, drawn, flaws = list[dict[str, Json]](), list[tuple[int, list[int], list[float]]](), list[str]()
        for place, answer in enumerate(answers):
            self._check(answer)
            index = answer.get("index") if self._streamed and len(self._parts) > 1 else place
            if not isinstance(index, int) or not 0 <= index < len(self._parts):
                raise EngineError(f"{self._url} numbered an answer {index!r}; {len(self._parts)} were asked for")
            part = self._parts[index]
            if part.finish is not None:
                continue  # it ended: what still comes says it again
            ids, scored = _new(part, answer, flaws)
            part.ids += ids
            drawn.append((index, ids, [_value(each) for each in scored]))
            read = answer["meta_info"].get("prompt_tokens")
            if read != len(self._prompt):
                flaws.append(f"the server read {read} prompt tokens, {len(self._prompt)} were sent")
            choices.append(
                self._choice(index, ids, self._end(answer), self._public(scored, answer["meta_info"]), flaws)
            )
        return Taken(self._shown(choices), self._prompt, drawn, flaws)

    def _check(self, answer: Json) -> None:
        """That this is an answer, and from the weights that were asked for."""
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url} answered with something that is no answer; look at its log")
        if (error := answer.get("error")) is not None:
            told = str(error.get("message") if isinstance(error, dict) else error)
            if self._model in told and UNKNOWN.search(told):
                raise Lost(f"{self._url} does not have {self._model[:12]}… any more ({told[:200]})")
            if "longer than" in told or "context length" in told:
                raise ContextError(told, param="messages")
            raise EngineError(f"{self._url} broke off: {told[:300]}")
        if not isinstance(answer.get("meta_info"), dict):
            raise EngineError(f"{self._url} answered with something that is no answer; look at its log")
        version = answer["meta_info"].get("weight_version")
        if version not in self._versions:
            raise Lost(
                f"{self._url} answered with the weights {version!r} in place of {self._versions[0]!r}: somebody else "
                "changed them, or it was started anew"
            )

    def _end(self, answer: dict[str, Any]) -> str | None:
        """Why a choice ended; None: it goes on. EngineError when it was not brought to its end."""
        reason = answer["meta_info"].get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind is None or kind in ("stop", "length"):
            return kind
        told = reason.get("message") if isinstance(reason, dict) else None
        raise EngineError(f"{self._url} ended an answer ({kind}): {str(told)[:200]}; try again")

    def _choice(
        self,
        index: int,
        ids: Sequence[int],
        finish: str | None,
        content: list[dict[str, Json]] | None,
        flaws: list[str],
    ) -> dict[str, Json]:
        """A choice as chat has it: what is new of it in a stream, else all."""
        part = self._parts[index]
        said = "".join([part.stream.push(token) for token in ids])
        said += part.stream.finish() if finish is not None else ""
        part.ours += said
        if finish is not None and part.text and part.text.strip() != part.ours.strip():
            flaws.append("the server's text is not what its token ids say")
            if part.text.startswith(part.ours):  # ids are missing: the client is not to lack the words
                said += part.text[len(part.ours) :]
        items = part.sieve.push(said) + (part.sieve.finish() if finish is not None else [])
        text = "".join(each for each in items if isinstance(each, str))
        calls = [self._call(index, each) for each in items if isinstance(each, Call)]
        part.finish = "tool_calls" if finish == "stop" and part.calls else finish
        told: dict[str, Json] = {"content": text} if text or not (self._streamed or calls) else {}
        if calls:
            told["tool_calls"] = [{"index": at, **call} if self._streamed else call for at, call in calls]
        if not part.begun:
            part.begun = True
            told = {"role": "assistant", "content": None if calls else "", "refusal": None} | told
        scores = None if content is None else {"content": content, "refusal": None}
        kind = "delta" if self._streamed else "message"
        return {"index": index, kind: told, "logprobs": scores, "finish_reason": part.finish}

    def _call(self, index: int, call: Call) -> tuple[int, dict[str, Json]]:
        part = self._parts[index]
        number = part.calls
        part.calls += 1
        # One row of numbers for all choices, which does not depend on the order they call in.
        name = f"call_{self._receipt}_{number * len(self._parts) + index}"
        function = {"name": call.name, "arguments": call.arguments}
        return number, {"id": name, "type": "function", "function": function}

    def _public(self, scored: Sequence[Any], meta: Mapping[str, Any]) -> list[dict[str, Json]] | None:
        """Log-probs in chat's form, if they were asked for. Tokens without a text (the one that ends the answer) are
        left out."""
        if not self._logprobs:
            return None
        tops = meta.get("output_top_logprobs")
        tops = tops[-len(scored) :] if scored and isinstance(tops, list) else []
        found = []
        for at, each in enumerate(scored):
            if not _pair(each) or not (piece := self._text.piece(each[1])):
                continue
            top = tops[at] if at < len(tops) and isinstance(tops[at], list) else []
            shown = [_scored(self._text.piece(other[1]), other[0]) for other in top if _pair(other)]
            found.append({**_scored(piece, each[0]), "top_logprobs": shown})
        return found

    def _shown(self, choices: list[dict[str, Json]]) -> dict[str, Json]:
        kind = "chat.completion.chunk" if self._streamed else "chat.completion"
        frame: dict[str, Json] = {"id": f"chatcmpl-{self._receipt}", "object": kind, "created": self._created}
        frame |= {"model": self._model, "choices": choices}
        done = all(part.finish is not None for part in self._parts)
        if done and (self._usage or not self._streamed):
            prompt, made = len(self._prompt), sum(len(part.ids) for part in self._parts)
            frame["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return frame


def _new(part: Part, answer: dict[str, Any], flaws: list[str]) -> tuple[list[int], list[Any]]:
    """What a piece adds to a choice: its ids, and their entries of log-probs. Pieces hold all of it so far, or (a
    server with --incremental-streaming-output) what is new; how many tokens there are by now tells which."""
    meta, known = answer["meta_info"], len(part.ids)
    ids, scored, text = answer.get("output_ids"), meta.get("output_token_logprobs"), answer.get("text")
    scored = scored if isinstance(scored, list) else []
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        if ids is not None:
            flaws.append("the server gave token ids that are none")
        ids = [each[1] for each in scored if _pair(each)]
    count = meta.get("completion_tokens")
    whole = count is None or count == len(ids)
    if not whole and count != known + len(ids):
        flaws.append(f"the server gave {len(ids)} token ids and counts {count} tokens")
    if isinstance(text, str):
        part.text = text if whole or text.startswith(part.text) else part.text + text
    if whole:
        if ids[:known] != part.ids:
            flaws.append("the server took back tokens that it had given")
        ids = ids[known:]
    fresh = scored[known:] if len(scored) > len(ids) or (whole and known) else scored
    if [each[1] if _pair(each) else None for each in fresh] != ids:
        flaws.append("the server's log-probs are not those of its token ids")
    return ids, fresh


def _pair(entry: Any) -> bool:
    """Whether this is a log-prob and its token, as `[value, id, text]`."""
    return isinstance(entry, list) and len(entry) > 1 and type(entry[1]) is int and entry[1] >= 0


def _value(entry: Any) -> float:
    try:
        return float(entry[0])
    except (IndexError, TypeError, ValueError):
        return float("nan")


def _scored(text: str, logprob: Json) -> dict[str, Json]:
    """`bytes` is null for a token that is only a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}
