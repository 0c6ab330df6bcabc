"""Records and reports as lines of JSON that say everything: what `reef export --shape raw` writes and an import takes.

Knows: the fields, and how bytes, lone surrogates and numbers that JSON does not have are written and read exactly.
Does not know: files, HTTP, or whether what a line says fits this server.

- A line is one object. `request_type` is `inference` or `report`; `agent_record_id` its id.
- Bytes (`request`, `rendered`, `reply`) are text when they are valid UTF-8, else `{"base64": …}`: the same bytes again.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from reef.core.errors import InputError
from reef.core.nouns import Json, Record, Report

INFERENCE = "inference"
REPORT = "report"
_BYTES = ("request", "rendered", "reply")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_RECORD = frozenset(field.name for field in dataclasses.fields(Record)) - {"id", "owner"}
_NEEDED = ("request", "dialect", "status", "timing")


def line(entry: Record | Report) -> bytes:
    """The entry as one line of JSON, with its line break."""
    return dump(report(entry) if isinstance(entry, Report) else record(entry))


def dump(value: Mapping[str, Json]) -> bytes:
    """One line of JSON, whatever is in it: text that UTF-8 cannot hold is escaped."""
    try:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate, or an integer over 64 bits
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def load(data: bytes) -> Any:
    """JSON as `dump` writes it. ValueError says what is wrong."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data, parse_constant=_constant)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def record(entry: Record) -> dict[str, Json]:
    bare = dataclasses.replace(entry, request=b"", rendered=None, reply=None)
    fields = msgspec.to_builtins(bare)
    fields |= {name: _text(getattr(entry, name)) for name in _BYTES}
    for choice in fields["choices"]:
        if choice["logprobs"] is not None and not all(map(math.isfinite, choice["logprobs"])):
            choice["logprobs"] = [value if math.isfinite(value) else str(value) for value in choice["logprobs"]]
    whole: dict[str, Json] = {"agent_record_id": entry.id, "request_type": INFERENCE}
    return whole | {name: value for name, value in fields.items() if value is not None and name not in ("id", "owner")}


def report(entry: Report) -> dict[str, Json]:
    whole: dict[str, Json] = {"agent_record_id": entry.id, "request_type": REPORT}
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry) if field.name != "id"}
    whole |= {name: dict(value) if name in ("metrics", "per_receipt") else value for name, value in fields.items()}
    return {name: value for name, value in whole.items() if value is not None}


def read_record(body: Mapping[str, Json], *, receipt: str, scenario: str, release_id: str) -> Record:
    """The record a line holds, with this id, scenario and release. InputError names the field that is wrong."""
    whole: dict[str, Any] = {k: v for k, v in body.items() if k not in ("agent_record_id", "request_type")}
    if unknown := sorted(set(whole) - _RECORD):
        raise InputError(f"unknown field {unknown[0]!r} of a record", param=unknown[0])
    for name in _NEEDED:
        if name not in whole:
            raise InputError(f"{name} is missing", param=name)
    for name in _BYTES:
        if whole.get(name) is not None:
            whole[name] = _bytes(whole[name], name)
    whole["choices"] = [_finite(choice) for choice in _list(whole.get("choices"))]
    whole |= {"id": receipt, "scenario": scenario, "release_id": release_id, "owner": None}
    whole.setdefault("purpose", "live")
    try:
        made = msgspec.convert(whole, Record)
    except msgspec.ValidationError as error:
        said = str(error)
        place = found.group(1) if (found := _PLACE.search(said)) else ""
        raise InputError(_PLACE.sub("", said), param=place) from None
    if made.status == "open":
        raise InputError("status open cannot be imported: only finished exchanges can", param="status")
    if not math.isfinite(made.timing.received_at):
        raise InputError("timing.received_at must be a time in unix seconds", param="timing.received_at")
    for place, choice in enumerate(made.choices):
        if choice.logprobs is not None and len(choice.logprobs) != len(choice.output_ids or ()):
            raise InputError("as many logprobs as output_ids are needed", param=f"choices[{place}].logprobs")
    return made


def _list(value: Json) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError("choices must be a list", param="choices")
    return value


def _finite(choice: Json) -> Json:
    """A choice with the log-probs that JSON has no numbers for."""
    logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
    if not isinstance(logprobs, list) or not any(isinstance(value, str) for value in logprobs):
        return choice
    named = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
    return choice | {"logprobs": [named.get(value, value) if isinstance(value, str) else value for value in logprobs]}


def _text(value: bytes | None) -> Json:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _bytes(value: Json, name: str) -> bytes:
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError):
            raise InputError(f"{name}.base64 is not base64", param=name) from None
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, or {{'base64': …}}", param=name)
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid text; send it as {{'base64': …}}", param=name) from None
