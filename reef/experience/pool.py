"""The units of one scenario and part that may still train: reports and records joined along the event log.

Knows: how far the log was read, which reports wait for an open record, which units are ready.
Does not know: what is done with a unit; `settled` tells it what already was.

- The first report with a signal on a unit wins, by its place in the log; every later one is a duplicate.
- A report on a record that is still open waits until it closes, in order.
- `low` is the place up to which everything is settled. A new pool that starts there finds the same units again.
- What is held out (see `holdout`) is dropped before it is ready.
- What can never train stays in `dropped` until `acknowledge`, so that a failed write of it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from reef.core.errors import MissingError
from reef.core.nouns import Event, PartName, Record, Report, Unit
from reef.experience.holdout import Holdout
from reef.experience.units import Drop, Signal, join
from reef.records import RecordStore

PAGE: Final = 500

Settled = Callable[[str], str | None]
"""Unit id to the report id that settled it (used or dropped; empty when not known); None when nothing did."""


class Pool:
    def __init__(
        self,
        scenario: str,
        part: PartName,
        signals: Collection[Signal],
        settled: Settled,
        cursor: int = 0,
        holdout: Holdout | None = None,
    ) -> None:
        self.scenario = scenario
        self.part = part
        self.cursor = cursor
        self.ready: dict[str, Unit] = {}
        self._signals = signals
        self._settled = settled
        self._holdout = holdout
        self.dropped: list[Drop] = []
        self._lost: dict[str, str] = {}  # unit to report, of `dropped` without the duplicates
        self._waiting: dict[str, list[tuple[int, Report]]] = {}

    @property
    def waiting(self) -> int:
        """Reports that wait for a record to close."""
        return sum(map(len, self._waiting.values()))

    def low(self, without: Collection[str] = ()) -> int:
        """Every event up to this one is settled, once the units in `without` and the drops are."""
        seqs = [unit.seq for unit in self.ready.values() if unit.id not in without]
        seqs += [seq for reports in self._waiting.values() for seq, _ in reports]
        return min(seqs) - 1 if seqs else self.cursor

    async def read(self, store: RecordStore) -> None:
        """Read every new event. An error leaves the pool where the last page ended."""
        while events := await store.events(self.scenario, self.cursor, PAGE):
            reports = await _get(store, [event.ref for event in events if event.kind == "report"])
            receipts = [receipt for report in reports if isinstance(report, Report) for receipt in report.references]
            receipts += [event.ref for event in events if event.kind == "closed" and event.ref in self._waiting]
            records = await _get(store, list(dict.fromkeys(receipts)))
            self.feed(events, [*reports, *records])

    def feed(self, events: Iterable[Event], entries: Iterable[Record | Report]) -> None:
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
                    self._waiting.pop(receipt)  # forgotten on request: there is nothing left to learn from
                elif record.status != "open":
                    self._join(record)
            self.cursor = max(self.cursor, event.seq)

    def drop(self, drops: Iterable[Drop]) -> None:
        """These will never train."""
        for drop in drops:
            self.dropped.append(drop)
            if drop.reason != "duplicate":
                self.ready.pop(drop.unit, None)
                self._lost[drop.unit] = drop.report

    def acknowledge(self) -> None:
        """The drops are on record; `settled` knows them from now on."""
        self.dropped.clear()
        self._lost.clear()

    def take(self, names: Iterable[str]) -> None:
        """These units are settled now."""
        for name in names:
            self.ready.pop(name, None)

    def units(self) -> list[Unit]:
        """The ready units, in the order of their reports. What came to be held out since it was read is dropped."""
        if self._holdout is not None and self._holdout.also is not None:
            late = [unit for unit in self.ready.values() if self._holdout.holds(unit.record)]
            self.drop([Drop(unit.id, unit.report.id, "held out") for unit in late])
        return sorted(self.ready.values(), key=lambda unit: (unit.seq, unit.id))

    def _join(self, record: Record) -> None:
        held = self._holdout is not None and record.purpose == "live" and self._holdout.holds(record)
        for seq, report in self._waiting.pop(record.id, []):
            for made in join(seq, report, record, self.part, self._signals):
                name = made.unit if isinstance(made, Drop) else made.id
                winner = self._winner(name)
                if winner in ("", report.id):
                    continue  # read before a restart, and settled then
                if winner is not None:
                    self.drop([Drop(name, report.id, "duplicate")])
                elif held:
                    self.drop([Drop(name, report.id, "held out")])
                elif isinstance(made, Drop):
                    self.drop([made])
                else:
                    self.ready[name] = made

    def _winner(self, name: str) -> str | None:
        if (unit := self.ready.get(name)) is not None:
            return unit.report.id
        return self._lost.get(name) or self._settled(name)


async def _get(store: RecordStore, ids: list[str]) -> list[Record | Report]:
    """The entries with these ids; those that were forgotten are left out."""
    if not ids:
        return []
    try:
        return await store.get(ids)
    except MissingError:
        found: list[Record | Report] = []
        for name in ids:
            try:
                found += await store.get([name])
            except MissingError:
                continue
        return found
