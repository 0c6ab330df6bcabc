"""A Responses request said as a chat request: its items as messages, its tools as functions.

Knows: the items, parts, tools and fields of a Responses request and what chat calls them.
Does not know: answers, events, records, or which engine is asked.

Clients send back whatever they were given, from any server: an item without a chat meaning is passed over. What the
client demands and chat cannot say is an InputError.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reef.core.errors import InputError
from reef.core.nouns import Json
from reef.engines.dialect.value import dump, write

LOGPROBS = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_OPEN = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 64  # characters that a function's name may have
_FREE = {  # the schema of a custom tool, whose input is free text
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# Said in another way, or without a meaning in chat. Every other field goes on as it is.
# fmt: off
_TAKEN = frozenset({
    "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text", "reasoning",
    "stream", "stream_options", "top_logprobs", "include", "n", "store", "previous_response_id", "conversation",
    "prompt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "client_metadata", "truncation",
    "background", "background_options", "max_tool_calls", "context_management", "access_programs", "image",
    "moderation",
})
# fmt: on


@dataclass(frozen=True, slots=True)
class Tool:
    """What a client calls one of its tools. `custom`: its input is free text, not JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Tools:
    """The functions that the chat model gets, and the client's tool behind each function's name."""

    def __init__(self, given: Iterable[Json]) -> None:
        self.functions: list[dict[str, Json]] = []
        self._tools: dict[str, Tool] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        spaces = []
        for tool in objects(given):
            if tool.get("type") == "namespace":
                spaces.append(tool)
            else:
                self._add(tool)
        # After the others, which keep their names.
        for space in spaces:
            for tool in objects(space.get("tools")):
                self._add(tool, text(space.get("name")), text(space.get("description")))

    def flat(self, name: str, namespace: str | None) -> str:
        """The function's name of a client's tool, also of one that the request does not offer."""
        return self._names.get((namespace, name)) or join(namespace, name)

    def named(self, flat: str) -> Tool:
        """The client's tool behind a function's name. A name that nobody offered is passed on as it is."""
        return self._tools.get(flat) or Tool(flat)

    def choose(self, choice: Json) -> Json:
        """`tool_choice` in chat's form. Where it allows a few tools only, the others are taken out."""
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return self._chosen(choice)
        if kind == "allowed_tools":
            given = [tool for tool in objects(choice.get("tools")) if tool.get("type") in ("function", "custom")]
            allowed = {self._chosen(tool)["function"]["name"] for tool in given}
            self.functions = [each for each in self.functions if each["function"]["name"] in allowed]
            return choice.get("mode")
        raise InputError(f"tool_choice {kind!r} asks for a tool that this model has not got", param="tool_choice")

    def _chosen(self, choice: dict[str, Any]) -> dict[str, Any]:
        nested = choice.get("function")
        name = text(choice.get("name")) or text(nested.get("name") if isinstance(nested, dict) else None)
        if name is None:
            raise InputError("tool_choice must name a tool", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.flat(name, text(choice.get("namespace")))}}

    def _add(self, tool: dict[str, Any], namespace: str | None = None, about: str | None = None) -> None:
        """Offer a function or custom tool; hosted ones have nobody to run them here."""
        kind, nested = tool.get("type"), tool.get("function")
        if kind == "function" and isinstance(nested, dict):
            tool = nested  # in chat's own form already
        name = text(tool.get("name"))
        if name is None or kind not in ("function", "custom") or (namespace, name) in self._names:
            return
        flat = join(namespace, name)
        if flat in self._tools:
            flat = _shorten(flat, f"{namespace}\0{name}")
        self._names[namespace, name] = flat
        self._tools[flat] = Tool(name, namespace, kind == "custom")
        function: dict[str, Json] = {"name": flat}
        if description := _describe(tool, kind) or about:
            function["description"] = description
        if kind == "custom":
            function["parameters"] = _FREE
        else:
            function |= {key: tool[key] for key in ("parameters", "strict") if tool.get(key) is not None}
        self.functions.append({"type": "function", "function": function})


def join(namespace: str | None, name: str) -> str:
    """One function name for a tool in a namespace, the same in every request."""
    if not namespace:
        return name
    whole = namespace + name if namespace.endswith("__") else f"{namespace}__{name}"
    clean = _OPEN.sub("_", whole)
    return whole if clean == whole and len(whole) <= _LONGEST else _shorten(clean, f"{namespace}\0{name}")


def _shorten(name: str, key: str) -> str:
    return f"{name[: _LONGEST - 9]}_{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()[:8]}"


def _describe(tool: dict[str, Any], kind: str) -> str | None:
    description, form = text(tool.get("description")), tool.get("format")
    if kind != "custom" or not isinstance(form, dict) or form.get("type") != "grammar":
        return description
    grammar = form.get("grammar")
    given = grammar if isinstance(grammar, dict) else form
    rule = f"The input must match this {given.get('syntax')} grammar:\n{given.get('definition')}"
    return f"{description}\n\n{rule}" if description else rule


@dataclass(slots=True)
class _Said:
    """An assistant message being put together. `text` None: no message item was given."""

    text: str | None = None
    thought: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: list[dict[str, Json]] = field(default_factory=list)


class Transcript:
    """Items put together into chat messages.

    What the assistant said in one go is one message: text and reasoning before its calls, and anything between calls
    that still wait for their results. A tool message holds text only, so a tool's images follow in a user message.
    """

    def __init__(self, tools: Tools) -> None:
        self.messages: list[dict[str, Json]] = []
        self._tools = tools
        self._said: _Said | None = None
        self._shown: list[dict[str, Json]] = []
        self._ids: set[str] = set()

    def add(self, item: Json, place: str) -> None:
        if not isinstance(item, dict):
            raise InputError(f"{place} must be an object", param=place)
        kind, role, known = item.get("type"), item.get("role"), text(item.get("id"))
        if kind == "item_reference" or (kind is None and role is None and known):
            if known not in self._ids:
                raise InputError(
                    f"{place} refers to item {known!r}, which is not part of this conversation; send the item itself",
                    param=place,
                )
            return
        if known:
            self._ids.add(known)
        if kind in ("function_call", "custom_tool_call"):
            self._call(item, place)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._result(item, place)
        elif kind == "reasoning":
            self._reason(item, place)
        elif kind in ("message", None) or (str(role) in _ROLES and isinstance(item.get("content"), str | list)):
            self._message(item, place)

    def finish(self) -> list[dict[str, Json]]:
        """All messages. System messages at the very beginning become one: many chat templates allow no second."""
        self._settle()
        first: list[str] = []
        for message in self.messages:
            if message["role"] != "system":
                break
            first.append(_joined(message["content"], "\n\n"))
        if len(first) > 1:
            self.messages[: len(first)] = [{"role": "system", "content": "\n\n".join(first)}]
        return self.messages

    def _message(self, item: dict[str, Any], place: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InputError(
                f"{place}.role must be one of {', '.join(_ROLES)}, not {item.get('role')!r}", param=f"{place}.role"
            )
        parts = _parts(item.get("content"), f"{place}.content")
        if role != "assistant":
            self._settle()
            self.messages.append({"role": role, "content": _content(parts)})
            return
        said = self._said
        if said is None or (said.text is not None and not said.calls):
            said = self._begin()
        said.text = (said.text or "") + "".join(part["text"] for part in parts if part["type"] == "text")
        said.refusal += [part["refusal"] for part in parts if part["type"] == "refusal"]

    def _reason(self, item: dict[str, Any], place: str) -> None:
        parts = _parts(item.get("summary"), f"{place}.summary") or _parts(item.get("content"), f"{place}.content")
        thought = _joined(parts, "\n\n")
        if not thought:
            return  # encrypted: only the server that made it can read it
        said = self._said
        if said is None or (said.text is not None and not said.calls):
            said = self._begin()
        said.thought.append(thought)

    def _call(self, item: dict[str, Any], place: str) -> None:
        name, call_id = text(item.get("name")), text(item.get("call_id"))
        if name is None or call_id is None:
            raise InputError(f"{place} must have a name and a call_id", param=place)
        if item["type"] == "custom_tool_call":
            arguments = free(text(item.get("input")) or "")
        else:
            given = item.get("arguments")
            arguments = given if isinstance(given, str) else write(given or {}, {f"{place}.arguments": given}).decode()
        function = {"name": self._tools.flat(name, text(item.get("namespace"))), "arguments": arguments}
        said = self._said or self._begin()
        said.calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, item: dict[str, Any], place: str) -> None:
        call_id, output = text(item.get("call_id")), item.get("output")
        if call_id is None:
            raise InputError(f"{place} must have the call_id of the call that it answers", param=f"{place}.call_id")
        if isinstance(output, dict):
            output = output.get("content")
        parts = _parts(output, f"{place}.output")
        shown = [part for part in parts if part["type"] not in ("text", "refusal")]
        words = [part for part in parts if part["type"] == "text"]
        if self._said is not None:
            self._settle()
        content = _content(words) if words or not shown else "(shown in the next message)"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self._shown += shown

    def _begin(self) -> _Said:
        self._settle()
        self._said = _Said()
        return self._said

    def _settle(self) -> None:
        """Write down what waits: the assistant's message, or what its tools showed."""
        if self._shown:
            self.messages.append({"role": "user", "content": self._shown})
            self._shown = []
        said, self._said = self._said, None
        if said is None or (said.text is None and not said.calls):
            return
        message: dict[str, Json] = {"role": "assistant", "content": said.text or None}
        if not (said.calls or said.refusal):
            message["content"] = said.text
        if said.thought:
            message["reasoning_content"] = "\n\n".join(said.thought)
        if said.refusal:
            message["refusal"] = "".join(said.refusal)
        if said.calls:
            message["tool_calls"] = said.calls
        self.messages.append(message)


def to_chat(body: dict[str, Any], earlier: Sequence[Json], *, stream: bool) -> tuple[dict[str, Json], Tools]:
    """The chat body that says the same, and the tools by their names in it. InputError names what chat cannot say."""
    _refuse(body)
    items = _items(body.get("input"))
    added = [tool for item in [*earlier, *items] for tool in _carried(item)]
    tools = Tools([*objects(body.get("tools")), *added])
    transcript = Transcript(tools)
    if instructions := text(body.get("instructions")):
        transcript.messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(earlier):
        transcript.add(item, f"previous_response_id: item {number}")
    for number, item in enumerate(items):
        transcript.add(item, f"input[{number}]")
    chat: dict[str, Json] = {key: value for key, value in body.items() if key not in _TAKEN}
    chat["messages"] = transcript.finish()
    if not chat["messages"]:
        raise InputError("input must hold at least one message", param="input")
    choice = tools.choose(body.get("tool_choice"))
    if tools.functions:
        chat["tools"] = tools.functions
        given = {"tool_choice": choice, "parallel_tool_calls": body.get("parallel_tool_calls")}
        chat |= {key: value for key, value in given.items() if value is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    chat |= _said_as(body)
    if stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat, tools


def _refuse(body: dict[str, Any]) -> None:
    if body.get("background"):
        raise InputError("background: true is not supported; ask with stream: true instead", param="background")
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise InputError(f"{name} is kept by its provider and unknown here; send its items as input", param=name)
    count = body.get("n")
    if count is not None and count != 1:
        raise InputError(f"n must be 1: a response has one answer, not {count!r}", param="n")


def _items(given: Json) -> list[Json]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InputError("input must be a string or a list of items", param="input")
    return given


def _carried(item: Json) -> list[dict[str, Any]]:
    """Tools that came in the conversation itself: named later by the client, or found by a search."""
    if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
        return objects(item.get("tools"))
    return []


def _said_as(body: dict[str, Any]) -> dict[str, Json]:
    """`text`, `reasoning` and log-probs as chat's own fields."""
    chat: dict[str, Json] = {}
    form = body.get("text")
    form = form if isinstance(form, dict) else {}
    if isinstance(shape := form.get("format"), dict) and shape.get("type") != "text":
        chat["response_format"] = shape
        if shape.get("type") == "json_schema" and "json_schema" not in shape:
            schema = {key: value for key, value in shape.items() if key != "type" and value is not None}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if form.get("verbosity") is not None:
        chat["verbosity"] = form["verbosity"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    top, include = body.get("top_logprobs"), body.get("include")
    if top or (isinstance(include, list) and LOGPROBS in include):
        chat["logprobs"] = True
        if top:
            chat["top_logprobs"] = top
    return chat


def _parts(content: Json, place: str) -> list[dict[str, Any]]:
    """Content as chat parts, and `refusal` parts, which only an assistant has."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InputError(f"{place} must be a string or a list of parts", param=place)
    found = []
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise InputError(f"{place}[{number}] must be an object with a type", param=f"{place}[{number}]")
        if (made := _part(part, f"{place}[{number}]")) is not None:
            found.append(made)
    return found


def _part(part: dict[str, Any], place: str) -> dict[str, Any] | None:
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "refusal", "refusal": text(part.get("refusal")) or ""}
    if kind == "input_image":
        url = part.get("image_url")
        if not isinstance(url, str):
            raise InputError(f"{place} must have an image_url: a file_id means nothing to this model", param=place)
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    if kind == "input_file":
        given = {key: part[key] for key in ("file_data", "file_id", "filename") if part.get(key) is not None}
        if "file_data" not in given and "file_id" not in given:
            raise InputError(f"{place} must have file_data: this model cannot fetch a file_url", param=place)
        return {"type": "file", "file": given}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    words = part.get("text")
    if isinstance(words, str):
        return {"type": "text", "text": words}
    if kind in _TEXTS:
        raise InputError(f"{place}.text must be a string", param=f"{place}.text")
    return None


def _content(parts: list[dict[str, Any]]) -> Json:
    """One text as a string, which every chat server reads; anything else as parts."""
    given = [part for part in parts if part["type"] != "refusal"]
    if not given:
        return ""
    return given[0]["text"] if len(given) == 1 and given[0]["type"] == "text" else given


def _joined(content: Json, between: str) -> str:
    return content if isinstance(content, str) else between.join(part.get("text", "") for part in content)


def free(words: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return dump({"input": words}).decode()


def text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def objects(value: Json) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
