"""Request bodies: size, type and encoding checked before anything reads them.

Knows: limits in bytes, gzip, deflate and zstd, content types, JSON and where in it the mistake is.
Does not know: what the JSON means.

A body over its limit is refused on its announced length, or at the first byte too many: never held whole. The limit
also holds for what a compressed body unpacks to.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import orjson
import zstandard

from reef.core.errors import InputError
from reef.gateway.call import Call, Gone
from reef.gateway.errors import Refusal

ENCODINGS = "gzip, deflate, zstd, identity"
SLOW = 60.0  # seconds a client may take to send the next part of a body
_THREAD = 1024 * 1024  # bytes from which unpacking leaves the event loop


async def read_json(call: Call, limit: int) -> tuple[bytes, dict[str, Any]]:
    """The body's exact (unpacked) bytes and the JSON object they hold."""
    check_type(call.headers.get("content-type"))
    data = await read(call, limit)
    return data, parse(data)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. InputError says where the mistake is."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InputError(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno} (byte {error.pos})"
        ) from None
    if not isinstance(value, dict):
        raise InputError("the body must be a JSON object")
    return value


async def read(call: Call, limit: int) -> bytes:
    """The whole body, unpacked."""
    announced = call.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    encoding = call.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate", "zstd"):
        raise Refusal(
            415,
            "unsupported_encoding",
            f"content-encoding {encoding[:40]!r} is not supported; send one of: {ENCODINGS}",
            param="content-encoding",
            headers={"accept-encoding": ENCODINGS},
        )
    data = await _collect(call, limit)
    if encoding in ("", "identity"):
        return data
    if len(data) > _THREAD:
        return await asyncio.to_thread(unpack, data, encoding, limit)
    return unpack(data, encoding, limit)


async def _collect(call: Call, limit: int) -> bytes:
    message = await call.receive()
    data: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body") and len(data) <= limit:
        return data
    parts, size = [data], len(data)
    while True:
        if message["type"] != "http.request":
            raise Gone
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)
        try:
            message = await asyncio.wait_for(call.receive(), SLOW)
        except TimeoutError:
            raise Refusal(
                408, "body_timeout", f"no more of the body came for {SLOW:.0f} s; send it again", headers=_CLOSE
            ) from None
        parts.append(message.get("body", b""))
        size += len(parts[-1])


def unpack(data: bytes, encoding: str, limit: int) -> bytes:
    """A gzip, deflate (zlib or raw) or zstd body; at most `limit` bytes come out."""
    try:
        if encoding == "zstd":
            with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(
                data, read_across_frames=True
            ) as reader:
                plain = reader.read(limit + 1)
        else:
            plain = _inflate(data, encoding, limit)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InputError(f"the body is not valid {encoding}: {error}", param="content-encoding") from None
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


def _inflate(data: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "deflate":  # zlib's format by the standard, raw deflate from some clients
        window = zlib.MAX_WBITS if data[:1] and data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0 else -15
    else:
        window = 16 + zlib.MAX_WBITS
    stream = zlib.decompressobj(window)
    plain = stream.decompress(data, limit + 1)
    if not stream.eof and len(plain) <= limit:
        raise zlib.error("it ends too early")
    return plain


_CLOSE = {"connection": "close"}


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is larger than {limit} bytes, the limit of this route; send less")


def check_type(kind: str | None) -> None:
    if kind is None:
        return
    plain = kind.partition(";")[0].strip().lower()
    if plain != "application/json" and not plain.endswith("+json"):
        raise Refusal(
            415,
            "unsupported_media_type",
            f"content-type {plain[:60]!r} is not supported; send content-type: application/json",
            param="content-type",
        )
