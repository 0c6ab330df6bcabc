"""An Anthropic message written out of a chat answer: events as the chunks come, and the message they amount to.

Knows: chat chunks, Anthropic's events, blocks and error objects.
Does not know: requests (`turns`), engines, or who reads the bytes.

- Blocks follow one another and never overlap, whatever the chunks do: what belongs to a later block waits for the
  present one. A tool call is over when its arguments are a whole JSON object and something else began.
- A tool's block begins when its name is known: one that the request offers, or whatever it is once it is over.
- Nothing raises on strange JSON: what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from reef.core.nouns import Json
from reef.engines.dialect.value import DEEP, depth, dump, mend, name_of, ready, say

Object = dict[str, Any]

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
REASONS |= {"function_call": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error"}
_KINDS |= {404: "not_found_error", 413: "request_too_large", 422: "invalid_request_error", 429: "rate_limit_error"}
_KINDS |= {503: "overloaded_error", 529: "overloaded_error"}


def read_arguments(text: str) -> Object | None:
    """A tool's arguments as an object; None for what is none, or is nested too deeply to be written again."""
    try:
        found = json.loads(text, parse_constant=_refuse)  # whole numbers of any size, as a model may write them
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if text.count("[") + text.count("{") > DEEP and depth(found) > DEEP:
        return None
    return found


def _refuse(name: str) -> Json:
    raise ValueError(f"{name} is no JSON")


def text_of(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def objects(value: Json) -> list[Object]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number_of(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def event(kind: str, fields: Object) -> bytes:
    """One event of a Messages stream."""
    return b"event: " + kind.encode() + b"\ndata: " + dump({"type": kind, **fields}) + b"\n\n"


def error_body(message: str, receipt: str, *, status: int = 500, kind: str | None = None) -> Object:
    """Anthropic's error object; its type follows from the status unless it is known."""
    kind = kind or _KINDS.get(status) or ("invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": receipt}


def error_text(body: Json) -> str | None:
    """The message of OpenAI's error object, or of what stands in its place."""
    error = body.get("error") if isinstance(body, dict) else None
    if error is None:
        return name_of(body.get("message") or body.get("detail")) if isinstance(body, dict) else None
    return say((error.get("message") if isinstance(error, dict) else error) or "the engine answered with an error")


class _Block:
    """One block on its way. `parts` are all of it, `fresh` what was not sent yet."""

    __slots__ = ("begun", "fresh", "given", "id", "kind", "name", "parts")

    def __init__(self, kind: str) -> None:
        self.kind, self.begun = kind, False
        self.id: str | None = None
        self.given: str | None = None  # the id, if the server told one
        self.name = ""
        self.parts: list[str] = []
        self.fresh: list[str] = []

    def add(self, piece: str) -> None:
        if piece:
            self.parts.append(piece)
            self.fresh.append(piece)

    @property
    def whole(self) -> bool:
        """Whether a tool's call says all: some servers name it behind its arguments."""
        return bool(self.name) and self.arguments is not None

    @property
    def arguments(self) -> Object | None:
        """A tool's arguments, once they are a whole object."""
        last = next((piece for piece in reversed(self.parts) if not piece.isspace()), "")
        return read_arguments(mend("".join(self.parts))) if last.rstrip().endswith("}") else None


class Message:
    """Takes chat chunks (or one whole completion) and gives events; afterwards `whole()` is the same as one object."""

    def __init__(self, receipt: str, model: str, tools: Collection[str] = ()) -> None:
        self.error: str | None = None
        self._kind = "api_error"
        self.begun = False  # whether the answer said anything of its one choice
        self.closed = False  # whether it is whole
        self._receipt, self._model, self._tools = receipt, model, tools
        self._usage: Object = _usage(None)
        self._blocks: list[_Block] = []
        self._calls: dict[int, _Block] = {}
        self._at = 0  # blocks before this one were sent to their end
        self._finish: str | None = None
        self._refused = False
        self._started = False

    @property
    def id(self) -> str:
        return f"msg_{self._receipt}"

    @property
    def finished(self) -> bool:
        """Whether the answer said why it stopped."""
        return self._finish is not None

    def take(self, chunk: Json) -> bytes:
        """The events that a chunk adds."""
        if not isinstance(chunk, dict):
            return b""
        if chunk.get("error") is not None:
            self.error, self._kind = error_text(chunk), _kind_of(chunk["error"])
            return b""
        self._model = text_of(chunk.get("model")) or self._model
        if isinstance(chunk.get("usage"), dict):
            self._usage = _usage(chunk["usage"])
        for choice in objects(chunk.get("choices")):
            if choice.get("index") in (0, None):
                self.begun = True
                # A whole answer has `message` where a chunk has `delta`; the fields are the same.
                delta = choice.get("delta") or choice.get("message")
                if isinstance(delta, dict):
                    self._extend(delta)
                self._finish = text_of(choice.get("finish_reason")) or self._finish
        return b"".join([*self._start(), *self._send(self._finish is not None)])

    def close(self) -> bytes:
        """The events up to the end, without `message_stop`."""
        self.closed = True
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        last = event("message_delta", {"delta": delta, "usage": self._usage})
        return b"".join([*self._start(), *self._send(True), last])

    def failure(self) -> Object:
        """The error object: an event that ends a stream, or an answer's body."""
        return error_body(self.error or "the engine broke off", self._receipt, kind=self._kind)

    def whole(self) -> Object:
        """The message. Arguments that are no JSON object cannot be said in it: `input` is empty then."""
        self.closed = True
        content: list[Object] = []
        for block in self._blocks:
            if block.kind == "tool_use":
                content.append(self._open(block) | {"input": block.arguments or {}})
            else:
                content.append(self._open(block) | {block.kind: "".join(block.parts)})
        return self._frame(content, self._reason(), self._usage)

    def _extend(self, delta: Object) -> None:
        self._say("thinking", delta.get("reasoning_content") or delta.get("reasoning"))
        content = delta.get("content")
        if isinstance(content, list):  # some providers answer with content parts
            content = "".join(text_of(part.get("text")) or "" for part in objects(content))
        self._say("text", content)
        if refusal := text_of(delta.get("refusal")):
            self._refused = True
            self._say("text", refusal)
        for place, part in enumerate(objects(delta.get("tool_calls"))):
            index = number_of(part.get("index"))
            self._call(place if index is None else index, part)

    def _say(self, kind: str, piece: Json) -> None:
        if not isinstance(piece, str) or not piece:
            return
        last = self._blocks[-1] if len(self._blocks) > self._at else None
        if last is None or last.kind != kind:
            last = _Block(kind)
            self._blocks.append(last)
        last.add(piece)

    def _call(self, index: int, part: Object) -> None:
        block, known = self._calls.get(index), text_of(part.get("id"))
        # Some servers number every call 0: another id begins another call.
        if block is None or (known and block.given not in (None, known)):
            block = self._calls[index] = _Block("tool_use")
            self._blocks.append(block)
        elif block in self._blocks[: self._at]:
            return  # its block has ended: its arguments were whole
        function = part.get("function")
        if not block.begun:  # what was said of it stays
            block.id = block.given = block.given or known
            block.name += (text_of(function.get("name")) or "") if isinstance(function, dict) else ""
        if isinstance(function, dict):
            given = function.get("arguments")
            block.add(dump(given).decode() if isinstance(given, dict) else text_of(given) or "")

    def _start(self) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield event("message_start", {"message": self._frame([], None, self._usage | {"output_tokens": 0})})

    def _send(self, ended: bool) -> Iterator[bytes]:
        """What can be sent now, in order. `ended`: nothing more belongs to any block."""
        while self._at < len(self._blocks):
            index, block = self._at, self._blocks[self._at]
            is_tool = block.kind == "tool_use"
            over = ended or (index + 1 < len(self._blocks) and (not is_tool or block.whole))
            if not block.begun:
                if not over and is_tool and not (block.parts and block.name in self._tools):
                    return
                block.begun = True
                yield event("content_block_start", {"index": index, "content_block": self._open(block)})
            if block.fresh:
                piece = "".join(ready(block.fresh, ended=over))
                field = "partial_json" if is_tool else block.kind
                delta = {"type": "input_json_delta" if is_tool else f"{block.kind}_delta", field: piece}
                if piece:
                    yield event("content_block_delta", {"index": index, "delta": delta})
            if not over:
                return
            yield event("content_block_stop", {"index": index})
            self._at += 1

    def _open(self, block: _Block) -> Object:
        """A block as it begins."""
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        block.id = block.id or f"toolu_{self._receipt}_{self._blocks.index(block)}"
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}

    def _reason(self) -> str:
        if self._refused:
            return "refusal"
        found = REASONS.get(self._finish or "stop", "end_turn")
        return "tool_use" if found == "end_turn" and self._calls else found

    def _frame(self, content: list[Object], reason: str | None, usage: Object) -> Object:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _usage(given: Json) -> Object:
    """Chat's counts in Anthropic's words, where tokens read from a cache are counted beside the others."""
    given = given if isinstance(given, dict) else {}
    details = given.get("prompt_tokens_details")
    cached = (number_of(details.get("cached_tokens")) if isinstance(details, dict) else None) or 0
    prompt = number_of(given.get("prompt_tokens")) or 0
    cached = cached if 0 < cached <= prompt else 0
    return {
        "input_tokens": prompt - cached,
        "output_tokens": number_of(given.get("completion_tokens")) or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _kind_of(error: Json) -> str:
    """The type of an in-band error, from the words or the status that a chat server gives it."""
    if isinstance(error, dict):
        status = next((each for each in (error.get("code"), error.get("status")) if number_of(each)), None)
        if status in _KINDS:
            return _KINDS[status]
        said = f"{error.get('type')} {error.get('code')}"
        for word, kind in (("rate_limit", "rate_limit_error"), ("overloaded", "overloaded_error")):
            if word in said:
                return kind
    return "api_error"
