"""Read which form an answer must have: `structured_outputs` and `response_format` of a chat request.

Knows: the fields' names and kinds, their limits, and which other fields cannot go with them.
Does not know: grammars. Whether one can be compiled is for `legal` to say.

The form is kept as canonical JSON text with one key, `{"grammar": …}`, `{"regex": …}`, `{"choice": […]}` or
`{"json": schema}`, in a record's `Sampling.legal`. Keys of a schema keep their order: an answer's keys follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from reef.core.errors import InputError
from reef.core.nouns import Json
from reef.engines.local.tools import Offer

KINDS = ("grammar", "regex", "choice", "json")
LARGEST = 1 << 16  # bytes of a form as JSON text
_FIELD, _OLDER = "structured_outputs", "response_format"


@dataclass(frozen=True, slots=True)
class Form:
    """A form as canonical JSON text, and the field of the request that it came in."""

    text: str
    field: str


def read_form(given: dict[str, Any], tools: Offer | None, stop: tuple[str, ...]) -> Form | None:
    """What the answer must look like; None when it is free. InputError names the field that is wrong."""
    form, field = _structured(given.get(_FIELD)), _FIELD
    other = _format(given.get(_OLDER))
    if form is not None and other is not None:
        raise InputError(f"{_FIELD} and {_OLDER} both limit the answer; send one of them", param=_FIELD)
    if form is None:
        form, field = other, _OLDER
    if form is None:
        return None
    try:
        text = orjson.dumps(form)
    except orjson.JSONEncodeError as error:
        raise InputError(f"{field} cannot be written as JSON: {error}", param=field) from None
    if len(text) > LARGEST:
        raise InputError(f"{field} is {len(text)} bytes; at most {LARGEST} are compiled", param=field)
    if tools is not None and tools.open:
        raise InputError(
            f"tools and {field} cannot go together: a call is not in the answer's form. Send tool_choice: none, or "
            f"leave out {field}",
            param=field,
        )
    if stop:
        raise InputError(
            f"stop and {field} cannot go together: a stop string would cut the answer where its form is not complete. "
            f"Leave out stop; the answer ends where the form does",
            param="stop",
        )
    return Form(text.decode(), field)


def _structured(value: Json) -> dict[str, Json] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InputError(f"{_FIELD} must be an object with one of {', '.join(KINDS)}", param=_FIELD)
    named = {key: each for key, each in value.items() if each is not None and each is not False}
    if named == {"json_object": True}:
        return {"json": {"type": "object"}}
    if len(named) != 1 or not named.keys() <= set(KINDS):
        raise InputError(f"{_FIELD} must have one of {', '.join(KINDS)}, not {sorted(named)}", param=_FIELD)
    ((kind, form),) = named.items()
    place = f"{_FIELD}.{kind}"
    if kind == "json":
        return {kind: _schema(form, place)}
    if kind == "choice":
        if not isinstance(form, list) or not form or not all(isinstance(each, str) and each for each in form):
            raise InputError(f"{place} must be a list of at least one string, none of them empty", param=place)
        return {kind: list(dict.fromkeys(form))}
    if not isinstance(form, str) or not form.strip():
        raise InputError(f"{place} must be a string that is not empty", param=place)
    return {kind: form}


def _format(value: Json) -> dict[str, Json] | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    if kind == "json_schema":
        place = f"{_OLDER}.json_schema"
        named = value.get("json_schema")
        if not isinstance(named, dict):
            raise InputError(f"{place} must be an object with a schema", param=place)
        return {"json": _schema(named.get("schema"), f"{place}.schema")}
    place = f"{_OLDER}.type" if isinstance(value, dict) else _OLDER
    raise InputError(f"{place} must be text, json_object or json_schema, not {kind!r}", param=place)


def _schema(value: Json, place: str) -> dict[str, Json]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InputError(f"{place} is not JSON: {error}", param=place) from None
    if not isinstance(value, dict):
        raise InputError(f"{place} must be a JSON schema, an object", param=place)
    return value
