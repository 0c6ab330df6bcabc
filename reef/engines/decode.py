"""Content encodings of a provider's answers, undone piece by piece: gzip, deflate (zlib or raw), br, zstd.

Knows: the encodings and their magic bytes, and a bound on what comes out.
Does not know: HTTP, or what the bytes say.

- A body that is gzip or zstd without saying so is unpacked; one that says so and is not passes as it is. Both happen
  behind proxies that unpack a body or its headers, but not both.
- Output is bounded while unpacking: a small body that unpacks to a huge one is given up at the bound, and comes in
  pieces until then, so that whoever unpacks it can do other work in between.
- Any number of gzip members or zstd frames may follow one another. `finish` tells a body that was cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli
import zstandard

from reef.core.errors import UpstreamError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
STEP = 64 * 1024  # bytes that a piece has at the most
_SIP = 256  # bytes of zstd in one go: that library has no bound of its own, and they unpack to 8 MiB at the most
_BROKEN = (zlib.error, brotli.error, zstandard.ZstdError)


class Stage(Protocol):
    """One encoding being undone."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What these bytes unpack to, piece by piece; each is made when it is asked for."""

    @property
    def whole(self) -> bool:
        """Whether the input so far ends where the encoding does."""


class Decoder:
    """A body's encodings undone. `encoding` is the header's value; UpstreamError when it is none of ours.

    UpstreamError also once more than `limit` bytes came out in all, encoded or not.
    """

    def __init__(self, encoding: str | None, limit: int) -> None:
        names = [name.strip().lower() for name in (encoding or "").split(",")]
        self._names = [name for name in names if name not in ("", "identity")]
        for name in self._names:
            if name not in _STAGES:
                raise UpstreamError(f"the provider packed its answer as {name[:40]!r}, which was not asked for")
        self._limit = limit
        self._left: list[int] = []  # bytes that may still go into each stage, and come out of the last
        self._begun = b""  # until there is enough to tell the encoding by
        self._stages: list[Stage] | None = None

    def feed(self, data: bytes) -> bytes:
        """The plain bytes that these complete."""
        return b"".join(self.pieces(data))

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The same in pieces of STEP bytes at the most. All must be taken before the next bytes are given."""
        if self._stages is None:
            if self._begun:
                data, self._begun = self._begun + data, b""
            if len(data) < 4 and (self._names or GZIP.startswith(data[:2]) or ZSTD.startswith(data)):
                self._begun = data
                return
            self._stages = self._begin(data)
        try:
            yield from self._through(data, 0)
        except _BROKEN as error:
            raise UpstreamError(f"the provider's packed answer is damaged ({type(error).__name__})") from None

    def finish(self) -> bytes:
        """The last bytes, at the end of the input. UpstreamError when it was cut."""
        if self._stages is None and self._begun:
            data, self._begun = self._begun, b""
            self._stages = self._begin(data)
            rest = self.feed(data)
        else:
            rest = b""
        if not all(stage.whole for stage in self._stages or ()):
            raise UpstreamError("the provider's packed answer was cut")
        return rest

    def _through(self, data: bytes, depth: int) -> Iterator[bytes]:
        """Bytes through the stages from this one on, a little at a time, each stage within the limit."""
        self._left[depth] -= len(data)
        if self._left[depth] < 0:
            raise UpstreamError(f"the provider's answer is larger than {self._limit} bytes")
        for at in range(0, len(data), STEP):
            some = data[at : at + STEP]
            if depth == len(self._stages or ()):
                yield some
                continue
            for piece in (self._stages or ())[depth].feed(some):
                yield from self._through(piece, depth + 1)
            yield b""  # also where nothing comes out, whoever asks can do something else

    def _begin(self, data: bytes) -> list[Stage]:
        """Stages, outermost first, for a body that begins like this."""
        names = self._names[::-1]
        magic = "gzip" if data.startswith(GZIP) else "zstd" if data.startswith(ZSTD) else None
        if magic is not None and not names:
            names = [magic]
        elif magic is None and names and names[0] in ("gzip", "x-gzip", "zstd"):
            names = names[1:]
        self._left = [self._limit] * (len(names) + 1)
        return [_STAGES[name]() for name in names]


class _Zlib:
    """gzip members one after another, or one deflate stream (zlib's wrapping by the standard, raw from some)."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._stream: zlib._Decompress | None = None
        self._ended = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                if self._ended and (not self._gzip or not data.strip(b"\0")):
                    break  # what follows the end is padding
                self._stream = zlib.decompressobj(self._bits(data))
            piece = self._stream.decompress(data, STEP)
            # A full piece may leave bytes inside that no input is left to call for.
            data, more = self._stream.unconsumed_tail, len(piece) == STEP
            yield piece
            while more and not data and not self._stream.eof:
                piece = self._stream.decompress(b"", STEP)
                more = len(piece) == STEP
                yield piece
            if self._stream.eof:
                data, self._stream, self._ended = self._stream.unused_data, None, True

    @property
    def whole(self) -> bool:
        return self._stream is None

    def _bits(self, data: bytes) -> int:
        if self._gzip:
            return 16 + zlib.MAX_WBITS
        wrapped = data[0] & 0x0F == 8 and (len(data) < 2 or int.from_bytes(data[:2]) % 31 == 0)
        return zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        piece = self._stream.process(data, output_buffer_limit=STEP) if data else b""
        # What it took in may still have more to give.
        while piece or not (self._stream.is_finished() or self._stream.can_accept_more_data()):
            yield piece
            piece = b"" if self._stream.is_finished() else self._stream.process(b"", output_buffer_limit=STEP)

    @property
    def whole(self) -> bool:
        return bool(self._stream.is_finished())


class _Zstd:
    def __init__(self) -> None:
        self._library = zstandard.ZstdDecompressor(max_window_size=2**27)
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        view, parts, size, at = memoryview(data), list[bytes](), 0, 0
        while at < len(data):
            if self._frame is None:
                self._frame = self._library.decompressobj()
            packed = view[at : at + _SIP]
            parts.append(self._frame.decompress(packed))
            size += len(parts[-1])
            at += len(packed)
            if self._frame.eof:
                at -= len(self._frame.unused_data)
                self._frame = None
            if size >= STEP or at >= len(data):
                yield b"".join(parts)
                parts, size = [], 0

    @property
    def whole(self) -> bool:
        return self._frame is None


_STAGES: dict[str, Callable[[], Stage]] = {
    "gzip": lambda: _Zlib(gzip=True),
    "x-gzip": lambda: _Zlib(gzip=True),
    "deflate": lambda: _Zlib(gzip=False),
    "br": _Brotli,
    "zstd": _Zstd,
}
