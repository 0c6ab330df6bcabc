"""A request's body with another model's name, and every other byte as it was.

Knows: where `model` stands in a JSON object. Does not know: what else the body says.

Only the value's own slice is replaced. A slice is found by its text and proved by reading the result, so that a
`"model"` deeper inside, or in a string, is never taken for it.
"""

from __future__ import annotations

import re

import msgspec

from reef.core.errors import InputError

_KEY = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*')
_SPACE = b" \t\r\n"
_TRIES = 64  # places looked at before the body is put together anew


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"")


_named = msgspec.json.Decoder(_Named)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rename(body: bytes, model: str) -> bytes:
    """The body asking for `model`. InputError when it is not a JSON object."""
    value = msgspec.json.encode(model)
    old = _model(body)
    if old == value:
        return body
    if not old:
        at = body.index(b"{") + 1
        comma = b"" if body[at:].lstrip(_SPACE).startswith(b"}") else b","
        return body[:at] + b'"model":' + value + comma + body[at:]
    at = 0
    for _ in range(_TRIES):
        if (found := _KEY.search(body, at)) is None:
            break
        at = found.end()
        if body.startswith(old, at):
            made = body[:at] + value + body[at + len(old) :]
            if _model(made) == value:
                return made
    # The key is written with escapes, or hidden among many like it: values keep their bytes, blanks between them go.
    return msgspec.json.encode(_fields.decode(body) | {"model": msgspec.Raw(value)})


def _model(body: bytes) -> bytes:
    """The value's text; empty when there is none."""
    try:
        return bytes(_named.decode(body).model)
    except msgspec.DecodeError:
        raise InputError("the body is not a JSON object") from None
