"""Requests read as transcripts, so that one which goes on from an earlier one costs what is new in it.

Knows: where messages are in a body, and the bodies it read last: what begins with the very same bytes is taken over.
Does not know: what a message means (`transcript`), or sessions. Memory is bounded; losing it only costs time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from reef.core.nouns import Json, Record
from reef.engines.dialect.value import load
from reef.experience.transcript import (
    ARRAYS,
    OF,
    START,
    Said,
    Step,
    Transcript,
    digest,
    digest_of,
    ids_of,
    parts_of,
    roll,
    text_of,
)
from reef.records.alike import Alike, Mark, marks_of, shared

MEMORY = 32 * 1024 * 1024  # bytes of bodies remembered in all
BLOCKS = [256 * 4**n for n in range(8)]  # bodies that begin with the same so many bytes are compared
ALIKE = 16  # of those that have no longer block in common
_RESUMED = b'{"":[0'  # what stands for everything before: as if the array began here
_FIELDS = ("system", "instructions", "tools", "functions", "previous_response_id")
_BETWEEN = b" \t\r\n,"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class Stop(NamedTuple):
    """A place in a body where a step begins."""

    offset: int
    steps: int  # how many come before


class Known(NamedTuple):
    body: bytes
    before: dict[str, bytes]  # the fields that come before the messages
    system: bytes
    steps: list[Step]
    stops: list[Stop]


class Reader:
    """Reads requests. What it remembers of earlier ones changes what reading costs, and nothing else."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._known = Alike[Known](lambda known: len(known.body), ALIKE)

    def read(self, record: Record) -> Transcript | None:
        """None: the request has no messages that can be read."""
        if record.dialect not in ARRAYS:
            return None
        try:
            return self._resume(record) or self._read(record)
        except RecursionError:
            return None

    def _read(self, record: Record) -> Transcript | None:
        body = record.request
        try:
            fields = {name: bytes(raw) for name, raw in _object.decode(body).items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if not isinstance(given := load(body), dict):
                return None
            return _made(record.dialect, given, given.get(ARRAYS[record.dialect]))
        array = fields.get(ARRAYS[record.dialect], b"")
        if array[:1] != b"[":
            return _made(record.dialect, _loaded(fields), load(array) if array else None)
        at = _place(body, fields, ARRAYS[record.dialect])
        steps = _Steps(record.dialect)
        steps.take(array, at)
        return self._done(record, fields, steps, _before(fields, ARRAYS[record.dialect]))

    def _resume(self, record: Record) -> Transcript | None:
        """Read only what comes behind the body that shares most with this one; None when there is none, or it will not
        do."""
        body, best, most, number = record.request, None, 0, 0
        for each, known in self._known.near(_marks(record)):
            count = _shared(known, body)
            if count and (best is None or known.stops[count - 1].offset > best.stops[most - 1].offset):
                best, most, number = known, count, each
            if count == len(known.stops):
                break  # mostly the turn before
        if best is None:
            return None
        stop = best.stops[most - 1]
        try:
            rest = {name: bytes(raw) for name, raw in _object.decode(_RESUMED + body[stop.offset :]).items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        array = rest.pop("")
        if rest.keys() & {*best.before, ARRAYS[record.dialect]}:
            return None  # a field that is there twice
        steps = _Steps(record.dialect, best, most)
        if most == len(best.stops):
            self._known.drop(number)  # this one will do for all that it did
        if not steps.take(array, stop.offset - len(_RESUMED) + len(b'{"":'), skip=1):
            return None
        return self._done(record, {**best.before, **rest}, steps, best.before)

    def _done(
        self, record: Record, fields: Mapping[str, bytes], steps: _Steps, before: dict[str, bytes]
    ) -> Transcript | None:
        made = _made(record.dialect, _loaded(fields), steps)
        if made is not None and steps.stops and len(record.request) <= self._memory // 2:
            known = Known(record.request, before, steps.system, steps.made, steps.stops)
            self._known.keep(known, _marks(record), self._memory)
        return made


class _Steps:
    """Messages put together into steps. `made` has no system prompt at its beginning: that is `system`."""

    def __init__(self, dialect: str, known: Known | None = None, stops: int = 0) -> None:
        self.made: list[Step] = []
        self.stops: list[Stop] = []
        self.system = START
        self._dialect = dialect
        self._group: list[Said] = []
        self._order: dict[str, int] = {}  # the calls of the last step, by id
        if known is not None:
            self.stops = known.stops[:stops]
            self.made, self.system = known.steps[: self.stops[-1].steps], known.system
        self._resumed = known is not None

    def take(self, array: bytes, offset: int, *, skip: int = 0) -> bool:
        """Take the elements of an array that begins at this offset of the body. False: what was resumed goes on with
        something that belongs to the step before, so it must be read from the beginning."""
        end = 1
        for number, raw in enumerate(_array.decode(array)):
            element, start = bytes(raw), end
            while array[start] in _BETWEEN:
                start += 1
            if number >= skip and not self.add(load(element), offset + end if number else None):
                return False
            end = start + len(element)
        self.finish()
        return True

    def add(self, message: Json, offset: int | None = None) -> bool:
        """Take one message, which begins behind this offset of the body."""
        for place, said in enumerate(OF[self._dialect](message)):
            if self._group and self._together(said.role, self._group[0].role):
                self._group.append(said)
                continue
            first, self._resumed = self._resumed, False
            if first and (said.role == "tool" or self._together(said.role, self.made[-1].role)):
                return False
            self.finish()
            if not first and place == 0 and offset is not None and said.role != "tool" and self.made:
                self.stops.append(Stop(offset, len(self.made)))
            self._group = [said]
        return True

    def finish(self) -> None:
        group, self._group = self._group, []
        if not group:
            return
        made, role = digest_of(group, self._order), group[0].role
        ids = [known for said in group for known, _, _ in said.calls]
        self._order = {known: place for place, known in enumerate(ids) if known}
        if role == "system" and not self.made:
            self.system = roll(self.system, made)
            return
        before = self.made[-1].rolled if self.made else START
        self.made.append(Step(role, made, roll(before, made), ids_of(group)))

    def _together(self, role: str, before: str) -> bool:
        return role == before and (role == "tool" or (role == "assistant" and self._dialect == "responses"))


def _made(dialect: str, fields: Mapping[str, Json], given: Json | _Steps) -> Transcript | None:
    """The transcript of a request; `given` are its messages, or the steps they came to."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list):
        steps = _Steps(dialect)
        for message in given:
            steps.add(message)
        steps.finish()
        given = steps
    if not isinstance(given, _Steps):
        return None
    apart = parts_of(fields.get("system")) or parts_of(fields.get("instructions"))
    system = roll(given.system, digest(apart)) if apart else given.system
    tools = fields.get("tools") or fields.get("functions")
    earlier = text_of(fields.get("previous_response_id"))
    if not given.made and system == START:
        return None
    return Transcript(system, _offered(tools), given.made, earlier)


def _offered(tools: Json) -> bytes | None:
    """The names of the tools: a client may word a description anew."""
    if not isinstance(tools, list) or not tools:
        return None
    names = []
    for tool in tools:
        inner = tool.get("function") if isinstance(tool, dict) else None
        found = inner.get("name") if isinstance(inner, dict) else tool.get("name") if isinstance(tool, dict) else None
        names.append(str(found or (tool.get("type") if isinstance(tool, dict) else tool)))
    return digest(sorted(names))


def _loaded(fields: Mapping[str, bytes]) -> dict[str, Json]:
    return {name: load(fields[name]) for name in _FIELDS if name in fields}


def _before(fields: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """The fields before this one; of those without a meaning here the names."""
    found: dict[str, bytes] = {}
    for key, raw in fields.items():
        if key == name:
            break
        found[key] = raw if key in _FIELDS else b""
    return found


def _place(body: bytes, fields: Mapping[str, bytes], name: str) -> int:
    """Where a field's value begins."""
    cursor = 0
    for key, raw in fields.items():
        cursor = body.find(raw, cursor)
        if key == name:
            break
        cursor += len(raw)
    return cursor


def _marks(record: Record) -> list[Mark]:
    return marks_of(record.dialect, memoryview(record.request), BLOCKS)


def _shared(known: Known, body: bytes) -> int:
    """How many of its stops lie where both bodies are still the same."""
    return shared(known.body, lambda place: known.stops[place].offset, len(known.stops), body)
