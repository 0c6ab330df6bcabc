"""The store read from end to end: in order, in pages, beside writers, with little memory."""

import dataclasses
import random
import tracemalloc

import pytest

from reef.core.errors import StoreError
from reef.core.nouns import Record, Report, Timing
from reef.records import Query, export
from reef.records.export import Reader, Tally
from tests.records.conftest import build_record, build_report


def read(store, query=None, *, reports=True):
    tally = Tally()
    with Reader(store._path) as reader:
        return list(reader.entries(query or Query("default"), tally, reports=reports)), tally


async def test_everything_in_the_order_of_the_log(store, monkeypatch):
    monkeypatch.setattr(export, "PAGE", 7)
    rng, made = random.Random(2), []
    for n in range(60):
        quoted = [entry.id for entry in made if isinstance(entry, Record)]
        entry = build_report(*rng.sample(quoted, min(2, len(quoted)))) if n % 3 == 2 else build_record()
        made.append(entry)
        await store.append(entry)
    await store.append(build_record(scenario="other"))
    found, tally = read(store)
    assert found == made
    assert (tally.read, tally.skipped) == (40, {})


async def test_open_records_and_reports_on_what_is_left_out(store):
    opened = dataclasses.replace(build_record("open"), owner="gateway-9-other")
    kept, other = build_record(session="s"), build_record(session="t")
    reports = [build_report(opened.id), build_report(kept.id), build_report(kept.id, other.id)]
    for entry in (opened, kept, other, *reports):
        await store.append(entry)
    found, tally = read(store)
    assert found == [kept, other, *reports[1:]]
    assert tally.skipped == {
        "the answer is still under way": 1,
        "a report that quotes records which are left out": 1,
    }
    found, tally = read(store, Query("default", session="s"))
    assert found == [kept, reports[1]]
    assert read(store, Query("default", session="s"), reports=False)[0] == [kept]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"tag": ("team", "red")}, (1, 3, 5)),
        ({"since": 2.0, "until": 5.0}, (2, 3, 4)),
        ({"low": 0.35}, (4, 5)),
        ({"status": "aborted"}, (5,)),
        ({"tag": ("team", "red"), "high": 0.2}, (1,)),
    ],
)
async def test_filters_hold_for_records_and_the_reports_on_them(store, filters, wanted, monkeypatch):
    monkeypatch.setattr(export, "PAGE", 2)
    records = [
        build_record(
            "aborted" if n == 5 else "complete",
            tags={"team": "red" if n % 2 else "blue"},
            timing=Timing(float(n)),
        )
        for n in range(6)
    ]
    reports = [build_report(record.id, score=n / 10) for n, record in enumerate(records)]
    await store.append_all([*records, *reports])
    found, _ = read(store, Query("default", **filters))
    assert [entry for entry in found if isinstance(entry, Record)] == [records[n] for n in wanted]
    assert [entry for entry in found if isinstance(entry, Report)] == [reports[n] for n in wanted]


async def test_a_session_that_starts_again_while_it_is_read(store, monkeypatch):
    """case 36: records are known by their ids; the same session name used anew changes nothing of what was there."""
    monkeypatch.setattr(export, "PAGE", 3)
    first = [build_record(session="s") for _ in range(10)]
    await store.append_all(first)
    found = []
    with Reader(store._path) as reader:
        for entry in reader.entries(Query("default", session="s"), Tally(), reports=False):
            if not found:
                await store.append(again := build_record(session="s", model_asked="another"))
            found.append(entry)
    assert found == [*first, again]


async def test_writers_go_on_while_it_is_read(store, monkeypatch):
    monkeypatch.setattr(export, "PAGE", 5)
    first = [build_record() for _ in range(20)]
    await store.append_all(first)
    found = []
    with Reader(store._path) as reader:
        for entry in reader.entries(Query("default"), Tally(), reports=True):
            found.append(entry)
            if len(found) <= 30:
                await store.append(build_record())
    assert found[:20] == first
    assert len(found) == 50


async def test_memory_is_a_page_not_the_store(store, monkeypatch):
    monkeypatch.setattr(export, "SIZE", 1_000_000)
    rng = random.Random(4)
    for _ in range(6):
        await store.append_all([build_record(request=rng.randbytes(500_000)) for _ in range(10)])
    tracemalloc.start()
    try:
        with Reader(store._path) as reader:
            assert sum(1 for _ in reader.entries(Query("default"), Tally(), reports=True)) == 60
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


def test_no_store_says_so(tmp_path):
    with pytest.raises(StoreError, match="there is no record store"):
        Reader(tmp_path / "records.db")
