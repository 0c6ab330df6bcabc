"""What a request says so far: its messages in one normal form for every dialect, as digests that can be compared.

Knows: the messages of chat, responses and messages requests, and what clients change when they send them again.
Does not know: how a request is read at little cost (`reader`), sessions, or who asked.

- A transcript is a list of steps: what one side said in one go. The system prompt at its beginning stands apart.
- `cache_control` and thinking play no part; a string is one text block; a tool's arguments are JSON values; the results
  of one go of calls are one step, in the order of the calls whatever the order they came in.
- An answer is compared without its reasoning, and with its space and Unicode forms evened out.
- A step's `rolled` is a digest of all steps up to it, so two transcripts with the same one are the same up to there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from reef.core.nouns import Choice, Json, Record
from reef.core.text import deeper
from reef.engines.dialect.items import free, join
from reef.engines.dialect.value import DEEP, load
from reef.experience.holdout import even

START = b"\0" * 16
ARRAYS = {"chat": "messages", "messages": "messages", "responses": "input"}
"""Where each dialect's requests have their messages."""


@dataclass(slots=True)
class Said:
    """What one side said in one message or item. `parts` are texts, and other things as JSON values."""

    role: str  # system, user, assistant, tool
    parts: list[Json] = field(default_factory=list)
    calls: list[tuple[str | None, str, Json]] = field(default_factory=list)  # id, name, arguments
    call: str | None = None  # the call that a tool's message answers

    @property
    def text(self) -> str:
        """Its texts: an assistant's are pieces of one, all others' stand for themselves."""
        between = "" if self.role == "assistant" else "\n\n"
        return between.join(part for part in self.parts if isinstance(part, str))


class Step(NamedTuple):
    role: str
    digest: bytes  # of what was said
    rolled: bytes  # of all steps up to this one
    calls: bytes | None = None  # digest of an assistant's call ids; None: it called nothing


@dataclass(frozen=True, slots=True)
class Transcript:
    system: bytes  # digest of the system prompt that it begins with
    tools: bytes | None  # digest of the tools that are offered; None: none are
    steps: Sequence[Step]
    earlier: str | None = None  # the id of the answer that it goes on from without saying it again

    @property
    def whole(self) -> bytes:
        """Equal for equal requests, whatever they ask of sampling or streaming."""
        return digest([self.earlier, self.system.hex(), self.tools and self.tools.hex(), self.end.hex()])

    @property
    def end(self) -> bytes:
        return self.steps[-1].rolled if self.steps else START


# --- digests ----------------------------------------------------------------------------------------------------------


def digest(value: Json) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # halves of characters, numbers beyond 64 bits, or nested too deeply
        data = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def roll(before: bytes, made: bytes) -> bytes:
    return hashlib.blake2b(before + made, digest_size=16).digest()


def answer(choice: Choice) -> tuple[bytes, bytes | None]:
    """The digest of an answer as a step, and of its call ids."""
    said = Said("assistant", [choice.text] if choice.text else [])
    if isinstance(choice.message, dict):
        found = _of_chat({**choice.message, "role": "assistant"})
        said = found[0] if found else said
    return digest_of([said], {}), ids_of([said])


def digest_of(group: Sequence[Said], order: Mapping[str, int]) -> bytes:
    """The digest of one step. `order`: the place of each call that the step before made, by id."""
    first = group[0]
    if first.role == "assistant":
        text = even("".join(said.text for said in group).rpartition("</think>")[2])
        return digest(["assistant", text, [[name, _plain(given)] for said in group for _, name, given in said.calls]])
    if first.role == "tool":
        results = [[order.get(said.call or "", said.call), said.parts] for said in group]
        return digest(["tool", sorted(results, key=lambda result: str(result[0]).zfill(9))])
    return digest([first.role, [part for said in group for part in said.parts]])


def ids_of(group: Sequence[Said]) -> bytes | None:
    ids = [known for said in group for known, _, _ in said.calls if known]
    return digest(sorted(ids)) if ids else None


def _plain(value: Json) -> Json:
    """A value as JSON means it: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


# --- messages of each dialect -----------------------------------------------------------------------------------------


def _of_chat(message: Json) -> list[Said]:
    if not isinstance(message, dict):
        return []
    role = str(message.get("role"))
    said = Said("system" if role == "developer" else "tool" if role == "function" else role)
    said.parts = parts_of(message.get("content"))
    if isinstance(refusal := message.get("refusal"), str):
        said.parts.append(refusal)
    if said.role == "tool":
        said.call = text_of(message.get("tool_call_id")) or text_of(message.get("name"))
    given = message.get("tool_calls")
    for call in given if isinstance(given, list) else []:
        function = (call.get("function") or call.get("custom")) if isinstance(call, dict) else None
        if isinstance(function, dict):
            words = function.get("arguments") if "arguments" in function else function.get("input")
            said.calls.append((text_of(call.get("id")), str(function.get("name")), _arguments(words)))
    if isinstance(function := message.get("function_call"), dict):
        said.calls.append((None, str(function.get("name")), _arguments(function.get("arguments"))))
    return [said]


def _of_messages(message: Json) -> list[Said]:
    """A user's message is its tool results, then the rest."""
    if not isinstance(message, dict):
        return []
    content, said = message.get("content"), Said(str(message.get("role")))
    results: list[Said] = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict):
            said.parts += parts_of(block)
            continue
        kind = block.get("type")
        if kind == "tool_use":
            said.calls.append((text_of(block.get("id")), str(block.get("name")), block.get("input") or {}))
        elif kind == "tool_result":
            parts = [*parts_of(block.get("content")), *([{"is_error": True}] if block.get("is_error") is True else [])]
            results.append(Said("tool", parts, call=text_of(block.get("tool_use_id"))))
        elif kind not in ("thinking", "redacted_thinking"):
            said.parts += parts_of([block])
    return [*results, said] if said.parts or said.calls or not results else results


def _of_responses(item: Json) -> list[Said]:
    if not isinstance(item, dict):
        return []
    kind, role = item.get("type"), item.get("role")
    if kind in ("function_call", "custom_tool_call"):
        name = join(text_of(item.get("namespace")), str(item.get("name")))
        words = free(text_of(item.get("input")) or "") if kind == "custom_tool_call" else item.get("arguments")
        return [Said("assistant", calls=[(text_of(item.get("call_id")), name, _arguments(words))])]
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        parts = parts_of(output.get("content") if isinstance(output, dict) else output)
        return [Said("tool", parts, call=text_of(item.get("call_id")))]
    if kind in ("message", None) and isinstance(role, str):
        return [Said("system" if role == "developer" else role, parts_of(item.get("content")))]
    return []  # reasoning, and what a provider did by itself


OF = {"chat": _of_chat, "messages": _of_messages, "responses": _of_responses}


def parts_of(content: Json) -> list[Json]:
    """Content as its parts: each text as a string, whatever else as it is."""
    found: list[Json] = []
    for part in content if isinstance(content, list) else [content]:
        words = part
        if isinstance(part, dict):
            words = part.get("text") if isinstance(part.get("text"), str) else part.get("refusal")
            if not isinstance(words, str):
                words = {name: value for name, value in part.items() if name != "cache_control"}
        if words is not None and words != "":
            found.append(words)
    return found


def _arguments(words: Json) -> Json:
    """What a call is given, as a value; as text where it is no JSON, or too deep for whoever takes it apart."""
    if not isinstance(words, str):
        return words or {}
    if not words.strip():
        return {}
    read = load(words)
    return words.strip() if read is None or deeper(read, DEEP) else read


def text_of(value: Json) -> str | None:
    return value if isinstance(value, str) and value else None


# --- what follows an answer -------------------------------------------------------------------------------------------


def trailing(record: Record) -> list[Said]:
    """What a request says behind the last answer in it, oldest first. Empty when nothing can be read."""
    given: Any = load(record.request)
    name = ARRAYS.get(record.dialect, "")
    messages = given.get(name) if isinstance(given, dict) else None
    if isinstance(messages, str):
        return [Said("user", [messages])]
    found: list[Said] = []
    for said in _backwards(record.dialect, messages if isinstance(messages, list) else []):
        if said.role != "assistant":
            found.append(said)
        elif found:
            break
    return found[::-1]


def _backwards(dialect: str, messages: Sequence[Json]) -> Iterator[Said]:
    for message in reversed(messages):
        yield from reversed(OF[dialect](message))
