"""The units of one scenario and part that may still train: reports and records joined along the event log.

Knows: how far the log was read, which reports wait for an open record, which units are ready, what a merge lost.
Does not know: what is done with a unit; `settled` tells it what already was.

- The first report with a signal on a unit wins, by its place in the log; every later one is a duplicate.
- A report on a record that is still open waits until it closes, in order.
- For a recipe that merges, one score on several turns of a session is one unit; see `turns`.
- For a recipe that learns from the next message, the closing of a request that goes on from an answer is the report on
  that answer (see `next`), and takes its place in the log.
- `low` is the place up to which everything is settled. A new pool that starts there finds the same units again.
- What is held out (see `holdout`) is dropped before it is ready.
- What can never train stays in `dropped` until `acknowledge`, so that a failed write of it is made again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from reef.core.nouns import Event, Json, PartName, Record, Report, Unit
from reef.experience import turns
from reef.experience.holdout import Holdout
from reef.experience.next import report_of
from reef.experience.sessions import UNREAD, Pair, Sessions
from reef.experience.turns import Lot
from reef.experience.units import Drop, Signal, join, make
from reef.records import RecordStore
from reef.records.present import present

PAGE: Final = 500

Settled = Callable[[str], str | None]
"""Unit id to the report id that settled it (used or dropped; empty when not known); None when nothing did."""
Next = Mapping[str, Pair | None]
"""Receipt of a request to what it says of the answer before it; None: it is a side call. Others are left out."""


class Pool:
    """`sessions` is needed by what merges or learns from the next message; `patience` is in seconds: a next message
    that comes later says nothing."""

    def __init__(
        self,
        scenario: str,
        part: PartName,
        signals: Collection[Signal],
        settled: Settled,
        cursor: int = 0,
        holdout: Holdout | None = None,
        *,
        sessions: Sessions | None = None,
        merges: bool = False,
        patience: float = 900.0,
    ) -> None:
        self.scenario = scenario
        self.part = part
        self.cursor = cursor
        self.ready: dict[str, Unit] = {}
        self.merged = Counter[str]()  # of what was read since the start; see `turns.count`
        self._signals = signals
        self._settled = settled
        self._holdout = holdout
        self._sessions = sessions
        self._merges = merges and part == "weights"
        self._patience = patience
        self.dropped: list[Drop] = []
        self._lost: dict[str, str] = {}  # unit to report, of `dropped` without the duplicates
        self._waiting: dict[str, list[tuple[int, Report]]] = {}  # by receipt, in log order
        self._closed: dict[str, Record | None] = {}  # of those receipts; None: forgotten on request
        self._within: dict[str, str] = {}  # a turn's unit to the ready unit that holds it
        self._lots: dict[str, Lot] = {}  # how ready units that may be merged fared

    @property
    def signals(self) -> list[Signal]:
        """What makes a report a unit here."""
        return sorted(self._signals)

    @property
    def waiting(self) -> int:
        """Reports that wait for a record to close."""
        return len({report.id for queue in self._waiting.values() for _, report in queue})

    def waits(self, receipt: str) -> bool:
        """Whether a report on this record waits."""
        return receipt in self._waiting

    def low(self, without: Collection[str] = ()) -> int:
        """Every event up to this one is settled, once the units in `without` and the drops are."""
        seqs = [unit.seq for unit in self.ready.values() if unit.id not in without]
        seqs += [seq for reports in self._waiting.values() for seq, _ in reports]
        return min(seqs) - 1 if seqs else self.cursor

    async def read(self, store: RecordStore) -> None:
        """Read every new event. An error leaves the pool where the last page ended."""
        while events := await store.events(self.scenario, self.cursor, PAGE):
            reports = await present(store.get, [event.ref for event in events if event.kind == "report"])
            receipts = [receipt for report in reports if isinstance(report, Report) for receipt in report.references]
            receipts += [event.ref for event in events if event.kind == "closed" and event.ref in self._waiting]
            records = await present(store.get, list(dict.fromkeys(receipts)))
            following = await self._follow(store, events)  # after the records: all that are closed have their place
            wanted = [name for ref, pair in following.items() for name in (ref, *((pair.answer,) if pair else ()))]
            answers = await present(store.get, list(dict.fromkeys(wanted)))
            self.feed(events, [*reports, *records, *answers], following)

    async def _follow(self, store: RecordStore, events: Sequence[Event]) -> Next:
        """What each newly closed request says of the answer before it, where this part wants to know."""
        if self._sessions is None or not (self._merges or {"next", "answer"} & set(self._signals)):
            return {}
        await self._sessions.read(self.scenario, store)
        found: dict[str, Pair | None] = {}
        for event in events if {"next", "answer"} & set(self._signals) else ():
            if event.kind != "closed":
                continue
            if "answer" in self._signals:
                place = self._sessions.place(event.ref)
                if place is not None:  # the same request again, answered again, is another sample
                    side = place.kind == "side" and place.note != UNREAD
                    found[event.ref] = None if side else Pair(event.ref, event.ref, "user", "", 0.0)
            elif (pair := await self._sessions.pair(event.ref, store)) is not None:
                found[event.ref] = pair
            elif (place := self._sessions.place(event.ref)) is not None and place.kind == "side":
                found |= {} if place.note == UNREAD else {event.ref: None}
        return found

    def feed(self, events: Iterable[Event], entries: Iterable[Record | Report], following: Next | None = None) -> None:
        """Take events in log order, with the entries they speak of as they are now (a record may have closed since)."""
        found = {entry.id: entry for entry in entries}
        for event in events:
            touched: Collection[str] = ()
            if event.kind == "report" and isinstance(report := found.get(event.ref), Report):
                touched = dict.fromkeys(report.references)
                for receipt in touched:
                    self._waiting.setdefault(receipt, []).append((event.seq, report))
            elif event.kind == "closed" and event.ref in self._waiting:
                touched = (event.ref,)
            for receipt in touched:
                record = found.get(receipt)
                if not isinstance(record, Record):
                    self._closed[receipt] = None  # there is nothing left to learn from
                elif record.status != "open":
                    self._closed[receipt] = record
            self._advance(touched)
            if event.kind == "closed" and following and event.ref in following:
                self._hear(event, following[event.ref], found)
            self.cursor = max(self.cursor, event.seq)

    def drop(self, drops: Iterable[Drop]) -> None:
        """These will never train, nor will the turns that they hold."""
        for drop in drops:
            self.dropped.append(drop)
            if drop.reason == "duplicate":
                continue
            unit = self.ready.get(drop.unit)
            for name in unit.turns if unit is not None else ():
                self.dropped.append(Drop(name, drop.report, drop.reason))
                self._lost[name] = drop.report
            self._lost[drop.unit] = drop.report
            self.take([drop.unit])

    def acknowledge(self) -> None:
        """The drops are on record; `settled` knows them from now on."""
        self.dropped.clear()
        self._lost.clear()

    def take(self, names: Iterable[str]) -> None:
        """These units are settled now."""
        for name in names:
            unit = self.ready.pop(name, None)
            self._lots.pop(name, None)
            for turn in unit.turns if unit is not None else ():
                self._within.pop(turn, None)

    def judged(self, name: str, assessment: Json) -> None:
        """A ready unit's assessment is known."""
        if name in self.ready:
            self.ready[name] = replace(self.ready[name], assessment=assessment)

    def lost(self, units: Iterable[Unit]) -> dict[str, float]:
        """What merging did to these units, for a batch's metrics; empty where nothing is merged."""
        if not self._merges:
            return {}
        lots = [self._lots[unit.id] for unit in units if unit.id in self._lots]
        return {
            "realigned_tokens": float(sum(lot.realigned for lot in lots)),
            "forked": float(sum(lot.apart == "fork" for lot in lots)),
            "separate": float(sum(lot.apart is not None for lot in lots)),
        }

    def units(self) -> list[Unit]:
        """The ready units, in the order of their reports. What came to be held out since it was read is dropped."""
        if self._holdout is not None and self._holdout.also is not None:
            late = [unit for unit in self.ready.values() if self._holdout.holds(unit.record)]
            self.drop([Drop(unit.id, unit.report.id, "held out") for unit in late])
        return sorted(self.ready.values(), key=lambda unit: (unit.seq, unit.id))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _advance(self, receipts: Iterable[str]) -> None:
        """Take the reports on these records whose turn it is: those before them are taken, and their records closed."""
        todo = deque(receipts)
        while todo:
            name = todo.popleft()
            if not (queue := self._waiting.get(name)):
                continue
            seq, report = queue[0]
            names = tuple(dict.fromkeys(report.references)) if self._merges and turns.whole(report) else (name,)
            if all(one in self._closed and self._first(one) == report.id for one in names):
                records = [self._closed[one] for one in names]
                for one in names:
                    self._next(one)
                self._join(seq, report, [record for record in records if record is not None])
                todo += names

    def _first(self, receipt: str) -> str | None:
        queue = self._waiting.get(receipt)
        return queue[0][1].id if queue else None

    def _next(self, receipt: str) -> None:
        """The first report on a record is taken."""
        self._waiting[receipt].pop(0)
        if not self._waiting[receipt]:
            del self._waiting[receipt], self._closed[receipt]

    def _join(self, seq: int, report: Report, records: Sequence[Record]) -> None:
        """The units of one report on records that are closed: one of all, where that can be, else one for each."""
        made = [one for record in records for one in join(seq, report, record, self.part, self._signals)]
        apart: turns.Why | None = None
        if self._merges and turns.whole(report) and len(made) > 1:
            apart = "counted"
            if all(self._winner(one.unit if isinstance(one, Drop) else one.id) is None for one in made):
                missing = len(records) < len(dict.fromkeys(report.references))
                held = any(self._held(record) for record in records)
                found = "gone" if missing else "held" if held else turns.join(made, self._sessions)
                if not isinstance(found, str):
                    unit, realigned = found
                    self.ready[unit.id] = unit
                    self._within |= dict.fromkeys(unit.turns, unit.id)
                    self._lots[unit.id] = Lot(realigned)
                    turns.count(self.merged, unit, realigned)
                    return
                apart = found
        known = {record.id: record for record in records}
        for one in made:
            name = one.unit if isinstance(one, Drop) else one.id
            if self._add(one, known[name.partition(":")[0]]) and apart is not None:
                self._lots[name] = Lot(0, apart)
                self.merged[f"separate: {apart}"] += 1

    def _add(self, made: Unit | Drop, record: Record) -> bool:
        """Take one unit, or the reason why there is none. True when it is ready now."""
        name, report = (made.unit, made.report) if isinstance(made, Drop) else (made.id, made.report.id)
        winner = self._winner(name)
        if winner in ("", report):
            return False  # read before a restart, and settled then
        if winner is not None:
            self.drop([Drop(name, report, "duplicate")])
        elif self._held(record):
            self.drop([Drop(name, report, "held out")])
        elif isinstance(made, Drop):
            self.drop([made])
        else:
            self.ready[name] = made
            return True
        return False

    def _held(self, record: Record) -> bool:
        return self._holdout is not None and record.purpose == "live" and self._holdout.holds(record)

    def _winner(self, name: str) -> str | None:
        if (unit := self.ready.get(self._within.get(name, name))) is not None:
            return unit.report.id
        return self._lost.get(name) or self._settled(name)

    # --- next messages ------------------------------------------------------------------------------------------------

    def _hear(self, event: Event, pair: Pair | None, found: Mapping[str, Record | Report]) -> None:
        """A request has closed: it is a side call, which never trains, or its message is about the answer before it."""
        request, answer = found.get(event.ref), found.get(pair.answer) if pair is not None else None
        if not isinstance(request, Record) or request.purpose != "live":
            return
        if pair is None:
            self._add(Drop(f"{request.id}:0", request.id, "side"), request)
        elif isinstance(answer, Record) and answer.purpose == "live":
            late, report = pair.seconds > self._patience, report_of(pair, self.scenario, request.timing.received_at)
            for one in make(event.seq, report, answer, self.part):
                name = one.unit if isinstance(one, Drop) else one.id
                self._add(Drop(name, report.id, "late") if late else one, answer)
