"""Tools for a model that only reads and writes text: how they are told to it, and its calls taken out of its answer.

Knows: `tools`, `tool_choice` and `parallel_tool_calls` of a chat request, and the tags <tools>, <tool_call> and
<tool_response> that small instruct models were trained with. Does not know: templates, tokens, the answer's JSON.

- A call counts only when it is whole JSON and names a tool of the request. Anything else stays the text that it is.
- What comes out of a `Sieve` does not depend on how the text was cut on its way in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reef.core.errors import InputError
from reef.core.nouns import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKS = re.compile(r'\\.|"', re.DOTALL)  # in JSON, where strings begin and end


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request. `sent` is the request's own list; `functions` what of it can be called here."""

    sent: tuple[dict[str, Json], ...]
    functions: tuple[dict[str, Json], ...]  # name, description, parameters
    open: bool = True  # False: none may be called now (tool_choice none); the transcript may still hold calls
    wanted: str | None = None  # the function that must be called; empty: any one must be
    single: bool = False  # at most one call an answer

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each["name"] for each in self.functions)


@dataclass(frozen=True, slots=True)
class Call:
    """One call out of an answer; `arguments` is a JSON object as text."""

    name: str
    arguments: str


def read_offer(given: dict[str, Any]) -> Offer | None:
    """The tools of a chat request; None when it has none that can be called. InputError names what is wrong."""
    sent = given.get("tools")
    if sent is not None and not (isinstance(sent, list) and all(isinstance(each, dict) for each in sent)):
        raise InputError("tools must be a list of objects", param="tools")
    functions = tuple(_functions(sent or ()))
    if not functions:
        return None
    choice, wanted = given.get("tool_choice"), None
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        wanted = choice["function"].get("name")
        if wanted not in [each["name"] for each in functions]:
            place = "tool_choice.function.name"
            raise InputError(f"{place} is {wanted!r}, which is not among the request's tools", param=place)
    elif choice == "required":
        wanted = ""
    single = given.get("parallel_tool_calls") is False
    return Offer(tuple(sent or ()), functions, choice != "none", wanted, single)


def _functions(sent: Sequence[dict[str, Any]]) -> Iterator[dict[str, Json]]:
    for tool in sent:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
            yield {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}


# --- into the prompt --------------------------------------------------------------------------------------------------


def describe(offer: Offer) -> str:
    """What the model has to know to call the tools, for the system message."""
    listed = [{"type": "function", "function": function} for function in offer.functions]
    example = '{"name": "name of the function", "arguments": {"name of an argument": "its value"}}'
    lines = [
        "You can call functions. These are their signatures, as JSON:",
        f"<tools>{_dump(listed)}</tools>",
        "",
        "To call one, write its name and its arguments as a JSON object between these tags, and end your answer:",
        f"{OPEN}{example}{CLOSE}",
        "Call only functions that are listed, with arguments that their signatures name. What a function returns comes "
        "in the next message, between <tool_response> and </tool_response>. Without need for a function, answer in "
        "plain words.",
    ]
    if offer.single:
        lines.append("Make no more than one call in an answer.")
    if offer.wanted is not None:
        lines.append(f"This time you must call {offer.wanted or 'one of the functions'}.")
    return "\n".join(lines)


def tell(messages: Sequence[dict[str, Json]], offer: Offer) -> list[dict[str, Json]]:
    """The messages for a template that knows no tools: signatures, past calls and results as text.

    Results become the user's words, those of one turn in one message, since many templates want the roles to alternate.
    """
    told: list[dict[str, Json]] = []
    results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role in ("tool", "function"):
            result = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result})
        elif role == "assistant" and message.get("tool_calls"):
            lines = [content] if content else []
            told.append({"role": role, "content": "\n".join([*lines, *map(_written, message["tool_calls"])])})
        else:
            told.append(dict(message))
        results = role in ("tool", "function")
    if offer.open and told[0]["role"] in ("system", "developer"):
        told[0]["content"] = f"{told[0]['content']}\n\n{describe(offer)}".lstrip()
    elif offer.open:
        told.insert(0, {"role": "system", "content": describe(offer)})
    return told


def opened(message: dict[str, Json]) -> dict[str, Json]:
    """A message whose calls have their arguments as objects, which is how templates that know tools want them."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict):
            call = {**call, "function": {**function, "arguments": _loaded(function.get("arguments"))}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _written(call: dict[str, Any]) -> str:
    """A past call as the model is asked to write one."""
    function = call.get("function")
    if not isinstance(function, dict):
        return f"{OPEN}{_dump(call)}{CLOSE}"
    said = {"name": function.get("name"), "arguments": _loaded(function.get("arguments"))}
    return f"{OPEN}{_dump(said)}{CLOSE}"


def _loaded(arguments: Json) -> Json:
    """Arguments as an object; as they are when they are none."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():  # how some write none
        return {}
    try:
        found = json.loads(arguments)
        _dump(found).encode()  # refuses half a surrogate pair
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- out of the answer ------------------------------------------------------------------------------------------------


class Sieve:
    """Parts an answer's text, as it comes, into what is said and what is called.

    White space at the end of what is said waits: behind it an answer may call, and then it is left out.
    """

    __slots__ = ("_blank", "_called", "_held", "_names", "_seen", "_single")

    def __init__(self, offer: Offer | None) -> None:
        self._names = offer.names if offer is not None and offer.open else frozenset()
        self._single = offer is not None and offer.single
        self._held = ""  # may be (the start of) a call
        self._seen = 0  # characters of a held call in which its end was looked for
        self._blank = ""
        self._called = False

    def push(self, text: str) -> list[str | Call]:
        """What is certain now."""
        if not self._names:
            return [text] if text else []
        self._held += text
        return list(self._sift(last=False))

    def finish(self) -> list[str | Call]:
        """The rest, when no more text comes: a call may lack its closing tag."""
        found = list(self._sift(last=True))
        if self._blank and not self._called:
            found.append(self._blank)
        self._blank = ""
        return found

    def _sift(self, *, last: bool) -> Iterator[str | Call]:
        while (start := self._held.find(OPEN)) >= 0:
            yield from self._say(self._held[:start])
            self._held = self._held[start:]
            body = self._held[len(OPEN) :]
            end = self._end(body, last=last)
            if end is None:
                return
            self._seen = 0
            calls = self._read(body[:end]) if end >= 0 else []
            if not calls:  # text, in which another call may begin
                yield from self._say(OPEN)
                self._held = body
                continue
            for call in calls:
                if not (self._single and self._called):
                    yield call
                self._called = True
            self._held = body[end:].removeprefix(CLOSE)
        keep = 0 if last else overlap(self._held, OPEN)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._say(said)

    def _say(self, text: str) -> Iterator[str]:
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            yield said

    def _end(self, body: str, *, last: bool) -> int | None:
        """Where a call's JSON ends: before a closing tag that is not inside one of its strings. None: not yet known.

        -1: this is no call, whatever follows.
        """
        begun = body.lstrip()
        if begun and begun[0] not in "{[":
            return -1
        while (place := body.find(CLOSE, self._seen)) >= 0:
            if sum(mark[0] == '"' for mark in _MARKS.finditer(body, 0, place)) % 2 == 0:
                return place
            self._seen = place + len(CLOSE)
        if not last:
            self._seen = max(self._seen, len(body) - len(CLOSE) + 1)
            return None
        return len(body)

    def _read(self, body: str) -> list[Call]:
        """The calls that a tag holds, all of them or none."""
        body = body[: len(body) - overlap(body, CLOSE)]  # the answer's limit may have cut the tag
        try:
            # Not strict: models write line breaks into strings as they are.
            value = json.loads(body, strict=False)
            given = value if isinstance(value, list) else [value]
            found = [self._call(each) for each in given]
        except (ValueError, RecursionError):
            return []
        return found

    def _call(self, value: Json) -> Call:
        """ValueError when it is none that a client could carry out."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            raise ValueError("no tool of the request")
        arguments = _loaded(value.get("arguments"))
        if not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # refuses half a surrogate pair
        return Call(name, text)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, but is not all of it."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
