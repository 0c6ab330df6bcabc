"""Request bodies: size, type and encoding checked before anything reads them.

Knows: limits in bytes, gzip, deflate, br and zstd, content types, JSON and where in it the mistake is.
Does not know: what the JSON means.

A body over its limit is refused on its announced length, or at the first byte too many: never held whole. The limit
also holds for what a compressed body unpacks to.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import brotli
import orjson
import zstandard

from reef.core.errors import InputError
from reef.gateway.call import Call, Gone
from reef.gateway.errors import Refusal

ENCODINGS = "gzip, deflate, br, zstd, identity"
SLOW = 60.0  # seconds a client may take to send the next part of a body
WHOLE = 300.0  # seconds it may take for all of it
MEMBERS = 10_000  # most gzip streams or zstd frames, one after another, in a body
_SLICE = 64 * 1024  # bytes of gzip looked at in one go: what is left of a slice is copied at each stream's end
_SIP = 1024  # bytes of zstd in one go: they unpack to some 32 MiB at the very most
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
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate", "br", "zstd"):
        raise Refusal(
            415,
            "unsupported_encoding",
            f"content-encoding {encoding[:40]!r} is not supported; send one of: {ENCODINGS}",
            param="content-encoding",
            headers={"accept-encoding": ENCODINGS},
        )
    call.leave()  # a client that does not send what it announced takes nobody's place
    data = await _collect(call, limit)
    call.enter()
    if encoding in ("", "identity"):
        return data
    if len(data) > _THREAD:
        plain = await asyncio.to_thread(unpack, data, encoding, limit)
    else:
        plain = unpack(data, encoding, limit)
    call.hold(len(plain))
    return plain


async def _collect(call: Call, limit: int) -> bytes:
    line = call.line
    if line is not None and line.whole:  # nothing to wait for, so no clock is wound
        message = await call.receive()
        if message["type"] != "http.request":
            raise Gone
        data: bytes = message.get("body", b"")
        if len(data) > limit:
            raise _too_large(limit)
        call.hold(len(data))
        return data
    parts: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + WHOLE
    while True:
        until = min(loop.time() + SLOW, end)
        try:
            async with asyncio.timeout_at(until):
                message = await call.receive()
        except TimeoutError:
            why = f"it was not whole after {WHOLE:.0f} s" if until == end else f"no more of it came for {SLOW:.0f} s"
            raise Refusal(
                408, "body_timeout", f"waited for the body, but {why}; send it again", headers=_CLOSE
            ) from None
        if message["type"] != "http.request":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        call.hold(len(parts[-1]))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def unpack(data: bytes, encoding: str, limit: int) -> bytes:
    """A gzip, deflate (zlib or raw), br or zstd body; little more than `limit` bytes is ever unpacked."""
    try:
        if encoding == "zstd":
            plain = _unzstd(data, limit)
        elif encoding == "br":
            plain = _unbrotli(data, limit)
        elif encoding == "deflate":
            plain = _inflate(data, limit)
        else:
            plain = _gunzip(data, limit)
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise InputError(f"the body is not valid {encoding}: {error}", param="content-encoding") from None
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


def _inflate(data: bytes, limit: int) -> bytes:
    """zlib's format by the standard, raw deflate from some clients."""
    wrapped = len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0
    stream = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    plain = stream.decompress(data, limit + 1)
    if not stream.eof and len(plain) <= limit:
        raise zlib.error(_CUT.format("deflate"))
    return plain


def _gunzip(data: bytes, limit: int) -> bytes:
    """Any number of gzip streams, one after another (RFC 1952 has them so), and zeros as padding after the last."""
    view, parts, size, at = memoryview(data), [], 0, 0
    for _ in range(MEMBERS):
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not stream.eof and size <= limit:
            piece = view[at : at + _SLICE]
            if not piece:
                raise zlib.error(_CUT.format("gzip"))
            parts.append(stream.decompress(piece, limit + 1 - size))
            size += len(parts[-1])
            at += len(piece) - len(stream.unused_data)
        if size > limit or at == len(data) or (data[at] == 0 and not data[at:].strip(b"\0")):
            return b"".join(parts)
    raise zlib.error(f"it is more than {MEMBERS} streams; send one")


def _unbrotli(data: bytes, limit: int) -> bytes:
    stream = brotli.Decompressor()
    parts = [stream.process(data, output_buffer_limit=limit + 1)]
    size = len(parts[0])
    while size <= limit and not stream.is_finished():
        if not (part := stream.process(b"", output_buffer_limit=limit + 1 - size)):
            raise brotli.error(_CUT.format("br"))
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _unzstd(data: bytes, limit: int) -> bytes:
    """Any number of zstd frames. The library takes one that is cut for whole, so its end is asked for."""
    view, parts, size, at = memoryview(data), [], 0, 0
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**27)
    for _ in range(MEMBERS):
        frame = unpacker.decompressobj()
        while not frame.eof:
            piece = view[at : at + _SIP]
            if not piece:
                raise zstandard.ZstdError(_CUT.format("zstd"))
            parts.append(frame.decompress(piece))
            size += len(parts[-1])
            if size > limit:
                return b"".join(parts)
            at += len(piece) - len(frame.unused_data)
        if at == len(data):
            return b"".join(parts)
    raise zstandard.ZstdError(f"it is more than {MEMBERS} frames; send one")


_CLOSE = {"connection": "close"}
_CUT = "it is a truncated {} stream; send all of it"


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
