"""Read a chat-completions body: messages and how to sample, checked field by field.

Knows: the OpenAI chat request, what this engine makes of each field, and what it refuses.
Does not know: tokens, templates or the model. Unknown fields are ignored, as they mean nothing to a local model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import orjson

from reef.core.errors import InputError
from reef.core.nouns import Json, Sampling
from reef.engines.local.form import Form, read_form
from reef.engines.local.tools import Offer, read_offer

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_MESSAGES = 1 << 16
COLDEST = 1e-4  # a temperature below this is 0: logits divided by it would no longer be numbers
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked request. `messages` have string content; `max_tokens` in `sampling` is as asked (None: not asked)."""

    messages: tuple[dict[str, Json], ...]
    sampling: Sampling
    choices: int
    logprobs: bool
    top_logprobs: int
    tools: Offer | None
    form: Form | None = None


def parse(body: bytes) -> Chat:
    """A chat-completions body as a Chat. InputError names the field that is wrong."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise InputError("the body must be a JSON object with `messages`")
    logprobs = given.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        raise InputError("logprobs must be true or false", param="logprobs")
    top = _whole(given, "top_logprobs", 0, 20) or 0
    if top and not logprobs:
        raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
    check_stream(given)
    sampling, tools = read_sampling(given), read_offer(given)
    form = read_form(given, tools, sampling.stop)
    return Chat(
        messages=_messages(given.get("messages")),
        sampling=sampling if form is None else dataclasses.replace(sampling, legal=form.text),
        choices=read_choices(given),
        logprobs=bool(logprobs),
        top_logprobs=top,
        tools=tools,
        form=form,
    )


def read_sampling(given: dict[str, Any]) -> Sampling:
    """How a request wants its answer drawn."""
    heat = _number(given, "temperature", 0.0, 2.0, 1.0)
    return Sampling(
        temperature=heat if heat >= COLDEST else 0.0,
        top_p=_number(given, "top_p", 0.0, 1.0, 1.0),
        top_k=max(0, _whole(given, "top_k", -1, 1 << 31) or 0),
        max_tokens=_limit(given),
        seed=_whole(given, "seed", -(1 << 63), (1 << 63) - 1),
        stop=_stops(given.get("stop")),
    )


def read_choices(given: dict[str, Any]) -> int:
    """How many answers are asked for."""
    return _whole(given, "n", 1, MAX_CHOICES) or 1


def check_stream(given: dict[str, Any]) -> None:
    """That `stream_options`, if there are any, are what they must be."""
    options = given.get("stream_options")
    if options is None:
        return
    if not isinstance(options, dict):
        raise InputError("stream_options must be an object, such as {include_usage: true}", param="stream_options")
    usage = options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        place = "stream_options.include_usage"
        raise InputError(f"{place} must be true or false, not {usage!r}", param=place)


def _whole(given: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be a whole number, not {value!r}", param=name)
    if not low <= value <= high:
        raise InputError(f"{name} must be between {low} and {high}, not {value}", param=name)
    return value


def _number(given: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} must be a number, not {value!r}", param=name)
    if not low <= value <= high:
        raise InputError(f"{name} must be between {low} and {high}, not {value}", param=name)
    return float(value)


def _limit(given: dict[str, Any]) -> int | None:
    """The newer name wins, as the provider's own API has it."""
    for name in ("max_completion_tokens", "max_tokens"):
        found = _whole(given, name, 1, 1 << 31)
        if found is not None:
            return found
    return None


def _stops(value: Json) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InputError("stop must be a string or a list of strings", param="stop")
    if len(found) > MAX_STOPS:
        raise InputError(f"stop may hold at most {MAX_STOPS} strings, not {len(found)}", param="stop")
    return tuple(dict.fromkeys(each for each in found if each))


def _messages(value: Json) -> tuple[dict[str, Json], ...]:
    if not isinstance(value, list) or not value:
        raise InputError("messages must be a list with at least one message", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InputError(f"messages may hold at most {MAX_MESSAGES} messages, not {len(value)}", param="messages")
    found = []
    for number, message in enumerate(value):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InputError(f"{place} must be an object with role and content", param=place)
        role = message.get("role")
        if role not in ROLES:
            raise InputError(f"{place}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{place}.role")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(each, dict) for each in calls)):
            raise InputError(f"{place}.tool_calls must be a list of objects", param=f"{place}.tool_calls")
        found.append({**message, "role": role, "content": _content(message, place)})
    return tuple(found)


def _content(message: dict[str, Any], place: str) -> str:
    """Content as one string: text parts are joined; nothing (an assistant that only called tools) is empty."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{place}.content must be a string or a list of parts", param=f"{place}.content")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise InputError(
                f"{place}.content[{number}] is {kind or 'no part'}: the embedded model reads text parts only",
                param=f"{place}.content",
            )
        texts.append(text)
    return "".join(texts)
