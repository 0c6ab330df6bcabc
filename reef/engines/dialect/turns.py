"""An Anthropic Messages request said as an OpenAI chat request.

Knows: Messages' fields and blocks, what each is called in chat, and what chat has no words for.
Does not know: answers (`blocks`), engines, or what an engine makes of the chat body.

- Text is never lost: an unknown block gives the text it holds. Marks that only steer the provider (cache_control,
  context_management, server tools, signatures) are left out.
- The text blocks of one user or system turn become one string, a blank line between them, since every chat server reads
  strings; an assistant's become the text it once said, without anything between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from reef.core.errors import InputError
from reef.core.nouns import Json
from reef.engines.dialect.blocks import objects, text_of
from reef.engines.dialect.value import load, write

Object = dict[str, Any]

_EFFORT = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICE = {"auto": "auto", "any": "required", "none": "none"}
_KEPT = ("model", "temperature", "top_p", "top_k")
_USER = 64  # characters: a longer `user` is refused by chat's own provider


def read(body: bytes) -> Object:
    """A Messages body as an object."""
    given = load(body)
    if not isinstance(given, dict):
        raise InputError("the body must be a JSON object with `messages` and `max_tokens`")
    return given


def chat_body(given: Object, *, stream: bool = False, limited: bool = True) -> Object:
    """The chat request. InputError names what is wrong or cannot be said. `limited`: max_tokens must be there."""
    body: Object = {name: given[name] for name in _KEPT if given.get(name) is not None}
    body["messages"] = [*_system(given.get("system")), *_messages(given.get("messages"))]
    limit = given.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InputError(f"max_tokens must be a whole number of at least 1, not {limit!r}", param="max_tokens")
    if limit is not None:
        body["max_tokens"] = limit
    elif limited:
        raise InputError("max_tokens is required: say how many tokens the answer may have", param="max_tokens")
    if (stops := given.get("stop_sequences")) is not None:
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise InputError("stop_sequences must be a list of strings", param="stop_sequences")
        if stops:
            body["stop"] = stops
    body |= _tools(given)
    body |= _thinking(given)
    if (form := _format(given)) is not None:
        body["response_format"] = form
    metadata = given.get("metadata")
    if isinstance(metadata, dict) and (user := text_of(metadata.get("user_id"))):
        body["user"] = user if len(user) <= _USER else hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _system(value: Json) -> list[Object]:
    if value is None or value == "" or value == []:
        return []
    if not isinstance(value, str | list):
        raise InputError("system must be a string or a list of text blocks", param="system")
    return [{"role": "system", "content": _joined(value)}]


def _messages(value: Json) -> Iterator[Object]:
    if not isinstance(value, list) or not value:
        raise InputError("messages must be a list with at least one message", param="messages")
    for number, message in enumerate(value):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InputError(f"{place} must be an object with role and content", param=place)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InputError(f"{place}.role must be user, assistant or system, not {role!r}", param=f"{place}.role")
        if not isinstance(content, str | list):
            raise InputError(f"{place}.content must be a string or a list of blocks", param=f"{place}.content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "system":
            yield {"role": role, "content": _joined(content)}
        elif role == "assistant":
            yield _assistant(content, f"{place}.content")
        else:
            yield from _user(content, f"{place}.content")


def _user(blocks: list[Json], place: str) -> Iterator[Object]:
    """Tool results first, as chat wants them right behind their calls; then the rest in its order."""
    parts: list[Object] = []
    results = False
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if not isinstance(block, dict):
            raise InputError(f"{where} must be an object with a type", param=where)
        if block.get("type") != "tool_result":
            parts += _parts(block, where)
            continue
        results = True
        call = block.get("tool_use_id")
        if not isinstance(call, str) or not call:
            raise InputError(f"{where}.tool_use_id must name the call it answers", param=f"{where}.tool_use_id")
        content, shown = _result(block, where)
        parts += shown
        yield {"role": "tool", "tool_call_id": call, "content": content}
    if all(part["type"] == "text" for part in parts):
        if parts or not results:
            yield {"role": "user", "content": "\n\n".join(part["text"] for part in parts)}
    else:
        yield {"role": "user", "content": parts}


def _result(block: Object, place: str) -> tuple[str, list[Object]]:
    """A tool result's text, and the images and files in it, which chat can only show in the user's turn."""
    content = block.get("content")
    parts: list[Object] = []
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = [part for each in objects(content) for part in _parts(each, f"{place}.content")]
    text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return text, [part for part in parts if part["type"] != "text"]


def _parts(block: Object, place: str) -> list[Object]:
    """A user's block as chat parts: text, image_url or file."""
    kind, source = block.get("type"), block.get("source")
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _address(source, place, "image/png")}}]
    if kind == "document" and isinstance(source, dict):
        title = text_of(block.get("title"))
        if source.get("type") == "base64":
            name = title or "document.pdf"
            data = _address(source, place, "application/pdf")
            return [{"type": "file", "file": {"filename": name, "file_data": data}}]
        if source.get("type") in ("text", "content"):
            inner = source.get("data") if source["type"] == "text" else source.get("content")
            found = [{"type": "text", "text": title}] if title else []
            if isinstance(inner, str):
                return [*found, {"type": "text", "text": inner}]
            return [*found, *(part for each in objects(inner) for part in _parts(each, place))]
        raise InputError(
            f"{place}: chat has no document from {source.get('type')!r}; send it as base64 or text",
            param=f"{place}.source",
        )
    text = words(block)
    return [{"type": "text", "text": text}] if text else []


def _address(source: Json, place: str, default: str) -> str:
    """Where the data is: a link, or a data link that holds it."""
    if isinstance(source, dict):
        url, data = text_of(source.get("url")), text_of(source.get("data"))
        if source.get("type") == "url" and url:
            return url
        if source.get("type") == "base64" and data is not None:
            return f"data:{text_of(source.get('media_type')) or default};base64,{data}"
    raise InputError(f"{place}.source must be base64 data or a url: chat has nothing else", param=f"{place}.source")


def _assistant(blocks: list[Json], place: str) -> Object:
    text: list[str] = []
    thought: list[str] = []
    calls: list[Object] = []
    for number, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise InputError(f"{place}[{number}] must be an object with a type", param=f"{place}[{number}]")
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, f"{place}[{number}]"))
        elif kind == "thinking":
            # Signed thinking is for the provider that signed it; ours is unsigned and goes back where it came from.
            if not block.get("signature"):
                thought.append(text_of(block.get("thinking")) or "")
        elif kind != "redacted_thinking" and (said := words(block)):
            text.append(said)
    message: Object = {"role": "assistant", "content": "".join(text)}
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _call(block: Object, place: str) -> Object:
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise InputError(f"{place}.{name} must be a string", param=f"{place}.{name}")
    given = block.get("input")
    arguments = "{}" if given is None else write(given, {f"{place}.input": given}).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def words(block: Object) -> str:
    """The text of any block: its own, or that of the blocks in it."""
    if (text := text_of(block.get("text"))) is not None:
        return text
    content = block.get("content")
    found = [text_of(block.get("title")) or ""] if content else []
    if isinstance(content, str):
        found.append(content)
    else:
        found += [words(each) for each in objects([content] if isinstance(content, dict) else content)]
    return "\n\n".join(filter(None, found))


def _joined(content: Json) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(filter(None, (words(block) for block in objects(content))))


def _tools(given: Object) -> Object:
    """tools, tool_choice and parallel_tool_calls; nothing when no tool of the client's own is left."""
    value = given.get("tools")
    if value is not None and not isinstance(value, list):
        raise InputError("tools must be a list of tools", param="tools")
    functions = []
    for number, tool in enumerate(value or ()):
        place = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise InputError(f"{place} must be an object with name and input_schema", param=place)
        if tool.get("type") not in (None, "custom") and "input_schema" not in tool:
            continue  # run by the provider, or known to its own models only
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise InputError(f"{place}.name must be a string", param=f"{place}.name")
        if not isinstance(schema, dict):
            raise InputError(f"{place}.input_schema must be a JSON schema object", param=f"{place}.input_schema")
        function: Object = {"name": name, "parameters": schema}
        if (description := text_of(tool.get("description"))) is not None:
            function["description"] = description
        if isinstance(tool.get("strict"), bool):
            function["strict"] = tool["strict"]
        functions.append(function)
    choice = given.get("tool_choice")
    body: Object = {"tools": [{"type": "function", "function": each} for each in functions]} if functions else {}
    if choice is None:
        return body
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        if choice.get("name") not in [each["name"] for each in functions]:
            raise InputError(f"tool_choice names no tool of `tools`: {choice.get('name')!r}", param="tool_choice.name")
        body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICE:
        if functions:
            body["tool_choice"] = _CHOICE[kind]
    else:
        raise InputError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    if functions and choice.get("disable_parallel_tool_use") is True:
        body["parallel_tool_calls"] = False
    return body


def _thinking(given: Object) -> Object:
    """How hard to think, only where the request says so: not every chat model takes the field."""
    thinking, output = given.get("thinking"), given.get("output_config")
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind == "disabled":
        return {}
    effort = text_of(output.get("effort")) if isinstance(output, dict) else None
    if effort is not None:
        if effort not in _EFFORT:
            raise InputError(
                f"output_config.effort must be one of {', '.join(_EFFORT)}, not {effort!r}",
                param="output_config.effort",
            )
        return {"reasoning_effort": _EFFORT[effort]}
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) and kind == "enabled" else None
    if not isinstance(budget, int) or isinstance(budget, bool):
        return {}
    return {"reasoning_effort": "low" if budget < 4096 else "medium" if budget < 16384 else "high"}


def _format(given: Object) -> Object | None:
    output = given.get("output_config")
    form = output.get("format") if isinstance(output, dict) else given.get("output_format")
    if not isinstance(form, dict):
        return None
    schema = form.get("schema")
    if form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise InputError("output_config.format must be {type: json_schema, schema: {…}}", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
