"""Server-sent events out of bytes that arrive in any pieces.

Knows: the event-stream format (the WHATWG HTML standard's).
Does not know: sockets, timing, what the data means (`engines.dialect`). Pure: bytes in, values out.

- `raw` of all events plus `rest` is exactly the input, whatever the cuts: an event's bytes can be passed on untouched.
- Feeding one byte at a time gives the events that feeding everything at once gives.
"""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `raw` is its exact bytes with the blank line that ends it; `data` is None when it had no data line."""

    raw: bytes
    data: str | None
    name: str | None = None


class Events:
    """Cuts an event stream into events. Lines end with CR, LF or CRLF, in any mixture."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._line = 0  # where the line being read begins
        self._seen = 0  # bytes already searched for a line end
        self._data: list[str] = []
        self._name: str | None = None
        self._first = True

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended yet."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        self._buffer += data
        found: list[Event] = []
        while (end := self._line_end()) is not None:
            stop, begin = end
            line = bytes(self._buffer[self._line : stop])
            self._line = self._seen = begin
            if line:
                self._take(line)
            else:
                found.append(self._event(begin))
        return found

    def finish(self) -> Event | None:
        """At the end of the input: what an unfinished event would have been, or None when nothing is left.

        The standard drops it; a reader that must know whether the end marker came does not want to.
        """
        if not self._buffer:
            return None
        if line := bytes(self._buffer[self._line :]).rstrip(b"\r"):
            self._take(line)
        return self._event(len(self._buffer))

    def _line_end(self) -> tuple[int, int] | None:
        """Where the current line stops and the next begins. A CR at the very end waits: a LF may follow."""
        buffer = self._buffer
        lf = buffer.find(b"\n", self._seen)
        cr = buffer.find(b"\r", self._seen, lf if lf >= 0 else len(buffer))
        if cr >= 0:
            if cr + 1 == len(buffer):
                self._seen = cr
                return None
            return cr, cr + 2 if buffer[cr + 1] == 10 else cr + 1
        if lf >= 0:
            return lf, lf + 1
        self._seen = len(buffer)
        return None

    def _take(self, line: bytes) -> None:
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value.decode("utf-8", "replace"))
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")

    def _event(self, end: int) -> Event:
        event = Event(bytes(self._buffer[:end]), "\n".join(self._data) if self._data else None, self._name)
        del self._buffer[:end]
        self._line = self._seen = 0
        self._data, self._name, self._first = [], None, False
        return event
