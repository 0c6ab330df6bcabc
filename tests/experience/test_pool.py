"""The join along the log: however events arrive and are read, the units are those of the sorted truth."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Choice, Event, Record, Report, Sampling, Timing
from reef.experience.pool import Pool
from reef.experience.sessions import Place
from reef.experience.units import SIGNALS, Drop
from reef.records.sqlite import SqliteStore


def record(number: int, choices: int = 1, **fields: object) -> Record:
    made = tuple(Choice(k, "a", "stop", output_ids=(k,), logprobs=(-1.0,)) for k in range(choices))
    whole = Record(
        f"{number:032x}", "s", "r", "live", "chat", "complete", b"{}", Timing(0.0),
        choices=made, prompt_ids=(1,), sampling=Sampling(),
    )  # fmt: skip
    return replace(whole, **fields)  # type: ignore[arg-type]


def opened(whole: Record) -> Record:
    return replace(whole, status="open", choices=(), prompt_ids=None, sampling=None)


def report(number: int, *receipts: int, score: float | None = 1.0, choice: int | None = None) -> Report:
    return Report(f"rep_{number:032x}", "s", tuple(f"{r:032x}" for r in receipts), 0.0, score=score, choice=choice)


def pool(settled: dict[str, str] | None = None, cursor: int = 0) -> Pool:
    return Pool("s", "weights", SIGNALS["weights"], (settled or {}).get, cursor)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, Record | Report]], list[int], random.Random]:
    """A log in a lawful order (opened, then closed; a report after what it quotes was opened) and how it is read."""
    records = [record(n, draw(st.integers(1, 3)), status=draw(st.sampled_from(["complete", "complete", "aborted"])))
               for n in range(draw(st.integers(1, 5)))]  # fmt: skip
    numbers = st.integers(0, len(records) - 1)
    reports = [
        report(
            n,
            *draw(st.lists(numbers, min_size=1, max_size=3, unique=True)),
            score=draw(st.sampled_from([None, 0.0, 1.0])),
            choice=draw(st.sampled_from([None, None, 0, 2])),
        )
        for n in range(draw(st.integers(0, 8)))
    ]
    shuffle = draw(st.randoms(use_true_random=False))
    entries: list[tuple[str, Record | Report]] = [("opened", r) for r in records] + [("closed", r) for r in records]
    entries += [("report", r) for r in reports]
    shuffle.shuffle(entries)
    log: list[tuple[str, Record | Report]] = []
    for kind, entry in entries:  # repair the order: whatever comes too early first gets what it needs
        needs = [entry.id] if isinstance(entry, Record) else list(entry.references)
        for receipt in needs:
            whole = next(r for r in records if r.id == receipt)
            if ("opened", whole) not in log:
                log.append(("opened", whole))
        if (kind, entry) not in log:
            log.append((kind, entry))
    cuts = draw(st.lists(st.integers(0, len(log)), max_size=5))
    return log, sorted(cuts), shuffle


def truth(log: list[tuple[str, Record | Report]]) -> tuple[dict[str, str], set[Drop]]:
    """Which report each ready unit belongs to, and the drops: every report in log order on the final records."""
    ready: dict[str, str] = {}
    drops: set[Drop] = set()
    lost: set[str] = set()
    records = {entry.id: entry for _, entry in log if isinstance(entry, Record)}
    for _, entry in log:
        if not isinstance(entry, Report) or entry.score is None:
            continue
        for receipt in entry.references:
            whole = records[receipt]
            indexes = range(len(whole.choices)) if entry.choice is None else [entry.choice]
            for index in indexes:
                name = f"{receipt}:{index}"
                if name in ready or name in lost:
                    drops.add(Drop(name, entry.id, "duplicate"))
                elif index >= len(whole.choices):
                    drops.add(Drop(name, entry.id, "choice"))
                    lost.add(name)
                elif whole.status != "complete":
                    drops.add(Drop(name, entry.id, "untrainable"))
                    lost.add(name)
                else:
                    ready[name] = entry.id
    return ready, drops


@settings(max_examples=300, deadline=None)
@given(histories())
def test_any_interleaving_gives_the_units_of_the_sorted_truth(
    history: tuple[list[tuple[str, Record | Report]], list[int], random.Random],
) -> None:
    log, cuts, chance = history
    events = [Event(seq, kind, entry.id, "s") for seq, (kind, entry) in enumerate(log, 1)]  # type: ignore[arg-type]
    seen = pool()
    edges = [0, *cuts, len(log)]
    for start, end in itertools.pairwise(edges):
        now = chance.randint(end, len(log))  # entries are fetched a little later than the events that name them
        closed = {entry.id for kind, entry in log[:now] if kind == "closed"}
        entries = [
            opened(entry) if isinstance(entry, Record) and entry.id not in closed else entry for _, entry in log[:now]
        ]
        seen.feed(events[start:end], entries)
    ready, drops = truth(log)
    assert {name: unit.report.id for name, unit in seen.ready.items()} == ready
    assert len(seen.dropped) == len(drops)
    assert set(seen.dropped) == drops
    assert seen.waiting == 0
    again = pool(cursor=seen.low())  # a new pool from the low mark finds the ready units again
    again.feed(events[seen.low() :], [entry for _, entry in log])
    assert {name: unit.report.id for name, unit in again.ready.items()} == ready


def test_a_report_waits_for_its_open_record_and_the_mark_waits_with_it() -> None:
    whole = record(1)
    seen = pool()
    first, second = report(1, 1, score=0.5), report(2, 1, score=0.9)
    events = [Event(1, "opened", whole.id, "s"), Event(2, "report", first.id, "s")]
    seen.feed(events, [opened(whole), first])
    assert (seen.waiting, seen.ready, seen.cursor, seen.low()) == (1, {}, 2, 1)
    # Read later: the record is closed by now, though the log says so only after the second report.
    seen.feed([Event(3, "report", second.id, "s")], [whole, second])
    assert [unit.score for unit in seen.units()] == [0.5]
    assert [(drop.report, drop.reason) for drop in seen.dropped] == [(second.id, "duplicate")]
    seen.feed([Event(4, "closed", whole.id, "s")], [whole])
    assert (len(seen.ready), seen.low(), seen.low(without=[f"{whole.id}:0"])) == (1, 1, 4)


def test_what_was_settled_stays_settled() -> None:
    whole, mine, late = record(1), report(1, 1), report(2, 1)
    events = [Event(1, "closed", whole.id, "s"), Event(2, "report", mine.id, "s"), Event(3, "report", late.id, "s")]
    seen = pool({f"{whole.id}:0": mine.id})
    seen.feed(events, [whole, mine, late])
    assert seen.ready == {}
    assert seen.dropped == [Drop(f"{whole.id}:0", late.id, "duplicate")]
    restored = pool({f"{whole.id}:0": ""})  # known from a training folder: by which report is not known
    restored.feed(events, [whole, mine, late])
    assert (restored.ready, restored.dropped) == ({}, [])


def test_a_forgotten_record_leaves_nothing() -> None:
    seen = pool()
    mine = report(1, 1, 2)
    seen.feed([Event(1, "report", mine.id, "s")], [mine, record(2)])
    assert list(seen.ready) == [f"{2:032x}:0"]
    assert (seen.waiting, seen.dropped) == (0, [])


async def test_reading_a_real_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef.experience.pool.PAGE", 3)
    store = SqliteStore(tmp_path / "records.db", owner="test-1")
    await store.start()
    seen = pool()
    await seen.read(store)
    assert (seen.cursor, seen.low()) == (0, 0)
    whole, live = record(1), record(2)
    await store.append(opened(whole))
    await store.append(live)
    await store.append(report(1, 1, 2))
    await store.append(report(2, 2))
    await seen.read(store)
    assert (list(seen.ready), seen.waiting) == ([f"{2:032x}:0"], 1)
    await store.append(whole)
    await seen.read(store)
    assert sorted(seen.ready) == [f"{1:032x}:0", f"{2:032x}:0"]
    assert [(drop.report, drop.reason) for drop in seen.dropped] == [(f"rep_{2:032x}", "duplicate")]
    seen.acknowledge()
    seen.take(list(seen.ready))
    assert seen.low() == seen.cursor
    await store.close()


class Joined:
    """Sessions in which all records follow one another, in the order of their numbers."""

    def place(self, receipt: str) -> Place:
        return Place(receipt, "one", None, "main", 0, "", int(receipt, 16))

    def path(self, receipts: list[str]) -> bool:
        return True


@settings(max_examples=300, deadline=None)
@given(histories())
def test_any_interleaving_merges_the_same_turns(
    history: tuple[list[tuple[str, Record | Report]], list[int], random.Random],
) -> None:
    log, cuts, chance = history
    events = [Event(seq, kind, entry.id, "s") for seq, (kind, entry) in enumerate(log, 1)]  # type: ignore[arg-type]
    grown = {n: tuple(range(1, n + 2)) for n in range(9)}  # each prompt goes on from the answer before
    entries = [
        replace(
            entry,
            prompt_ids=grown[int(entry.id, 16)],
            choices=tuple(replace(one, output_ids=(int(entry.id, 16) + 2,)) for one in entry.choices),
        )
        if isinstance(entry, Record)
        else entry
        for _, entry in log
    ]

    def opening() -> Pool:
        return Pool("s", "weights", SIGNALS["weights"], lambda _: None, sessions=Joined(), merges=True)  # type: ignore[arg-type]

    whole, seen = opening(), opening()
    whole.feed(events, entries)
    for start, end in itertools.pairwise([0, *cuts, len(log)]):
        now = chance.randint(end, len(log))
        closed = {entry.id for kind, entry in log[:now] if kind == "closed"}
        known = [
            opened(entry) if isinstance(entry, Record) and entry.id not in closed else entry for entry in entries[:now]
        ]
        seen.feed(events[start:end], known)
    assert seen.units() == whole.units()
    assert sorted(map(repr, seen.dropped)) == sorted(map(repr, whole.dropped))
    assert (seen.merged, seen.waiting, seen.low()) == (whole.merged, 0, whole.low())
    parts = [name for unit in seen.units() for name in (unit.id, *unit.turns)]
    assert len(parts) == len(set(parts)), "a turn is in two units"
    again = opening()
    again.feed(events[seen.low() :], entries)
    assert {unit.id for unit in again.units()} >= {unit.id for unit in seen.units()}
