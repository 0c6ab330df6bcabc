"""What goes and what stays: by age, by size, on request; beside live writers, and after a kill."""

import asyncio
import dataclasses
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import tracemalloc

import pytest

from reef.core.errors import ChainError, ConflictError, MissingError
from reef.core.nouns import Choice, Timing
from reef.records import Query, erase, keep
from reef.records.sqlite import SqliteStore
from tests.records.conftest import build_record, build_report

DAY = 86400.0
NOW = 1_700_000_000.0


def at(days, **fields):
    """A record that arrived so many days ago."""
    return build_record(timing=Timing(NOW - days * DAY), **fields)


def prune(store, **how):
    given = {"keep_days": None, "keep_bytes": None, "cited": (), "now": NOW, "pause": 0.0} | how
    return asyncio.to_thread(lambda: keep.prune(store._path, **given))


def count(path, table="records"):
    with sqlite3.connect(path) as db:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


async def known(store, *ids):
    found = []
    for name in ids:
        try:
            found += await store.get([name])
        except MissingError:
            continue
    return [entry.id for entry in found]


async def test_age_removes_the_old_and_keeps_what_is_cited_or_open(store):
    """case 24: what a release cites is never removed."""
    old, cited, young = at(40), at(40), at(3)
    waiting = dataclasses.replace(build_record("open"), timing=Timing(NOW - 50 * DAY), owner="gateway-9-other")
    both = build_report(old.id, young.id, per_receipt={old.id: 0.5, young.id: 1.0}, score=None)
    only = build_report(old.id)
    for entry in (old, cited, young, waiting, both, only):
        await store.append(entry)
    done = await prune(store, keep_days=30, cited=[cited.id])
    assert (done.records, done.reports) == (1, 1)
    assert await known(store, old.id, only.id) == []
    assert await store.get([cited.id, young.id]) == [cited, young]
    (left,) = await store.get([both.id])
    assert (left.references, left.per_receipt) == ((young.id,), {young.id: 1.0})
    assert {event.ref for event in await store.events("default", 0, 99)} == {cited.id, young.id, waiting.id, both.id}
    assert (await store.append(both)).duplicate  # a retry of the whole report is still the same report
    assert (await prune(store, keep_days=30, cited=[cited.id])).records == 0


async def test_a_report_robbed_of_references_is_known_as_it_was_and_as_it_is(store):
    """Also together with entries that bring one of the references back; a change is a conflict all the same."""
    old, gone, young = at(40), at(3), at(3)
    whole = build_report(old.id, gone.id, young.id, per_receipt={old.id: 0.5, gone.id: 0.25, young.id: 1.0})
    for entry in (old, gone, young, whole):
        await store.append(entry)
    await asyncio.to_thread(keep.forget, store._path, [gone.id])
    await prune(store, keep_days=30)
    (left,) = await store.get([whole.id])
    assert (left.references, left.per_receipt) == ((young.id,), {young.id: 1.0})
    half = dataclasses.replace(whole, references=(old.id, young.id), per_receipt={old.id: 0.5, young.id: 1.0})
    for report in (whole, left, half):
        assert [item.duplicate for item in await store.append_all([old, report])][1]
        assert (await store.append(report)).duplicate
    for other in (
        dataclasses.replace(half, score=0.0),
        dataclasses.replace(left, per_receipt={}),
        dataclasses.replace(left, references=(old.id,), per_receipt={}),
    ):
        with pytest.raises(ConflictError):
            await store.append(other)
    alone = build_report(young.id)  # nothing was erased from it: another reference is a change
    await store.append(alone)
    with pytest.raises(ConflictError):
        await store.append(dataclasses.replace(alone, references=(young.id, old.id)))
    assert await store.get([whole.id, alone.id]) == [left, alone]


async def test_rows_from_before_the_time_column_have_an_age_too(store):
    old, young = at(40), at(3)
    await store.append_all([old, young])
    with sqlite3.connect(store._path) as db:
        db.execute("UPDATE records SET received_at = NULL")
    await prune(store, keep_days=30)
    assert await known(store, old.id, young.id) == [young.id]


async def test_prompts_that_began_with_a_removed_record_read_the_same(store):
    """Chains, branches, prefixes of many lengths; removed in random order, one and several at a time."""
    rng = random.Random(7)
    records, ids = [], tuple(range(1000, 1040))
    for turn in range(24):
        answer = tuple(rng.randrange(5000) for _ in range(6))
        base = rng.choice(records).prompt_ids if records and turn % 5 == 4 else ids
        prompt = base[: rng.randrange(20, len(base) + 1)] + tuple(rng.randrange(5000) for _ in range(5))
        ids = prompt + answer
        choice = Choice(0, "x", "stop", answer, (-0.5,) * 6)
        records.append(at(turn, session="s", prompt_ids=prompt, choices=(choice,)))
        await store.append(records[-1])
    with sqlite3.connect(store._path) as db:
        assert db.execute("SELECT count(*) FROM records WHERE parent IS NOT NULL").fetchone()[0] > 15
    left = list(records)
    while left:
        gone = rng.sample(left, min(len(left), rng.choice((1, 1, 3))))
        with erase.Store(store._path, pause=0) as removing:
            erase.remove(removing, [record.id for record in gone], forever=False)
        left = [record for record in left if record not in gone]
        assert await store.get([record.id for record in left]) == left


async def test_blobs_go_with_the_last_record_that_has_them(store):
    shared, alone = "You are helpful. " * 40, "Only once. " * 40
    first = at(40, request=f'{{"messages":["{shared}","{alone}"]}}'.encode(), rendered=alone.encode() * 2)
    second = at(1, request=f'{{"messages":["{shared}"]}}'.encode())
    await store.append_all([first, second])
    before = count(store._path, "blobs")
    done = await prune(store, keep_days=30)
    assert 0 < done.blobs == before - count(store._path, "blobs")
    assert await store.get([second.id]) == [second]
    assert (await prune(store, keep_days=0)).records == 1
    assert count(store._path, "blobs") == 0


async def test_a_writer_that_remembers_a_removed_blob_or_prompt_stores_it_again(store):
    words = '{"messages":["' + "The same long system prompt. " * 30 + '"]}'
    ids = tuple(range(64))
    first = at(40, request=words.encode(), prompt_ids=ids, session="s")
    await store.append(first)
    await prune(store, keep_days=30)
    again = at(1, request=words.encode(), prompt_ids=(*ids, 101, 7, 2, 9), session="s")
    await store.append(again)
    assert await store.get([again.id]) == [again]


async def test_size_removes_the_oldest_until_it_fits(store):
    rng = random.Random(1)
    records = [at(9 - n / 100, request=rng.randbytes(20_000)) for n in range(120)]
    await store.append_all(records)
    done = await prune(store, keep_bytes=1_000_000, cited=[records[0].id])
    left = await known(store, *(record.id for record in records))
    assert done.live <= 1_000_000
    assert left[0] == records[0].id
    assert left[1:] == [record.id for record in records][-len(left) + 1 :]
    assert 20 < len(left) < 60
    assert (await prune(store, keep_bytes=1_000, fresh=100 * DAY)).records == 0  # too fresh


async def test_what_is_erased_leaves_no_bytes_and_never_comes_back(store):
    rng = random.Random(3)
    secret = rng.randbytes(6000)
    opened = build_record("open", session="s", request=secret + b"open")
    closed = build_record(session="s", request=secret, tags={"user": "ann"})
    other = build_record(session="t", request=rng.randbytes(3000))
    note = build_report(closed.id)
    for entry in (opened, closed, other, note):
        await store.append(entry)
    with sqlite3.connect(store._path) as db:
        blobs = [row[0] for row in db.execute("SELECT data FROM blobs WHERE length(data) > 5000")]
    assert len(blobs) == 2
    ids = keep.select(store._path, Query("default", session="s"))
    assert set(ids) == {opened.id, closed.id}
    done, clean = await asyncio.to_thread(keep.forget, store._path, ids)
    assert (done.records, done.reports, done.blobs, clean) == (2, 1, 2, True)
    files = b"".join(path.read_bytes() for path in store._path.parent.iterdir() if path.is_file())
    assert not any(blob[1:4000] in files for blob in blobs)
    late = dataclasses.replace(opened, status="complete", choices=(Choice(0, "late", "stop"),))
    for entry in (late, closed, note):
        with pytest.raises(ConflictError, match="erased"):
            await store.append(entry)
    assert set(await store.erased([late.id, note.id, other.id])) == {late.id, note.id}
    assert await known(store, opened.id, closed.id, note.id, other.id) == [other.id]
    assert [record.id for _, record in await store.find(Query("default", tag=("user", "ann")))] == []
    with pytest.raises(MissingError):
        await store.append(build_report(closed.id))


async def test_live_writers_lose_nothing_while_others_are_removed(store):
    """Old records and new ones share blobs and prompts; every new one reads back exactly."""
    store, other = (SqliteStore(store._path, owner=f"gateway-{n}-test", busy=20) for n in (2, 3))
    await store.start()
    await other.start()
    texts = [f'{{"role":"user","content":"{n} {"words " * 200}"}}' for n in range(30)]
    rng = random.Random(5)

    def fresh(days):
        body = f'{{"messages":[{",".join(rng.sample(texts, 4))}]}}'
        return at(
            days, request=body.encode(), session=f"s{rng.randrange(3)}", prompt_ids=tuple(range(40 + len(body) % 7))
        )

    await store.append_all([fresh(40) for _ in range(400)])
    kept = []

    async def write(to):
        for _ in range(60):
            entry = fresh(1)
            await to.append(entry)
            kept.append(entry)

    try:
        writing = asyncio.gather(write(store), write(other))
        while not writing.done():
            await prune(store, keep_days=30)
            await store.append(fresh(40))
        await writing
        await prune(store, keep_days=30)
        assert await store.get([entry.id for entry in kept]) == kept
        assert count(store._path) == len(kept)
    finally:
        await store.close()
        await other.close()


KILLED = """
import sys
from pathlib import Path
from reef.core import failpoint
from reef.records import keep
failpoint.arm(sys.argv[2])
keep.prune(Path(sys.argv[1]), keep_days=30, keep_bytes=None, cited=(), now=1.7e9, pause=0)
"""


@pytest.mark.parametrize("point", ["keep.before_commit", "keep.after_commit:2", "keep.half_swept"])
async def test_a_kill_leaves_a_whole_store_and_the_next_run_goes_on(store, point):
    """case 24: batched, and killed anywhere it goes on."""
    words = "x" * 3000
    old = [
        at(40, request=f'["{words}{n}"]'.encode(), prompt_ids=tuple(range(n, n + 30)), session="s") for n in range(250)
    ]
    young = [at(1, request=old[n].request, prompt_ids=(*old[n].prompt_ids, 5), session="s") for n in (3, 150, 249)]
    await store.append_all([*old, *young])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, str(store._path), point], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert await store.get([record.id for record in young]) == young
    await prune(store, keep_days=30)
    assert await store.get([record.id for record in young]) == young
    assert count(store._path) == 3
    assert count(store._path, "blobs") <= 3


async def test_memory_does_not_grow_with_the_store(store):
    """case 24: 20,000 rows go in a few MB, with 50,000 cited receipts; nothing is held but a page and a bit a blob."""
    for start in range(0, 20_000, 2000):
        await store.append_all(
            [at(40, request=b'{"n": %d}' % n, choices=(), prompt_ids=None) for n in range(start, start + 2000)]
        )
    cited = [f"{n:032x}" for n in range(50_000)]
    tracemalloc.start()
    try:
        done = await prune(store, keep_days=30, cited=cited)
        assert done.records == 20_000
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


async def test_it_is_tended_now_and_then_until_it_is_cancelled(store, caplog):
    old = build_record(timing=Timing(1.0))
    asked = []

    def cited():
        asked.append(len(asked))
        if asked == [0]:
            raise ChainError("the chain is damaged")
        return []

    await store.append(old)
    task = asyncio.create_task(keep.tend(store._path, keep_days=1.0, keep_bytes=None, cited=cited, every=0.01))
    while await known(store, old.id):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "old records were not removed: the chain is damaged" in caplog.text
    await keep.tend(store._path, keep_days=None, keep_bytes=None, cited=cited)  # nothing to do: it ends


async def test_a_halt_ends_it_between_two_steps(store):
    await store.append_all([at(40) for _ in range(3)])
    halt = threading.Event()
    halt.set()
    assert (await prune(store, keep_days=30, halt=halt)).records == 0
    assert count(store._path) == 3
