"""What every record store keeps to: durable, ordered, idempotent, closed once, exact. A new store is one line."""

import asyncio
import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef import records
from reef.core.errors import ConflictError, InputError, MissingError
from reef.core.ids import new_receipt, new_report
from reef.core.nouns import Choice, Record, Report, Sampling, Span, Timing, Usage
from reef.records import Query
from reef.records.sqlite import SqliteStore

STORES = {"sqlite": lambda folder, owner: SqliteStore(folder / "records.db", owner=owner)}
ROOT = Path(__file__).parents[2]


def record(status="complete", **fields):
    whole = Record(
        id=new_receipt(),
        scenario="a",
        release_id="c" * 40,
        purpose="live",
        dialect="chat",
        status=status,
        request=b'{"messages":[{"role":"user","content":"What is 2+2?"}]}',
        timing=Timing(1.5, 0.1, 0.2, 0.3),
    )
    if status != "open":
        answer = Choice(0, "It is 4.", "stop", (7, 8), (-0.5, -0.25), (Span("c" * 40, 0, 2),))
        whole = dataclasses.replace(
            whole, choices=(answer,), usage=Usage(3, 2), prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=9)
        )
    return dataclasses.replace(whole, **fields)


def report(*references, **fields):
    return Report(**({"id": new_report(), "scenario": "a", "references": references, "created_at": 2.0} | fields))


def closed(opened, **fields):
    """The end of an open record."""
    return dataclasses.replace(record(id=opened.id, request=opened.request, owner=opened.owner), **fields)


@pytest.fixture(params=STORES)
async def open_store(request, tmp_path):
    """Opens a store on one and the same place, as each process of a server does."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(owner="gateway-1-test"):
            made = STORES[request.param](tmp_path, owner)
            await made.start()
            stack.push_async_callback(made.close)
            return made

        yield open_one


@pytest.fixture
async def store(open_store):
    return await open_store()


def test_every_store_is_here():
    assert STORES.keys() == records.STORES.keys()


async def test_an_entry_comes_back_exactly(store, open_store):
    draw = random.Random(5)
    text = "".join(map(chr, [*range(1, 200), 0x4E2D, 0x1F600]))
    entries = []
    for number in range(30):
        ids = tuple(draw.randrange(50_000) for _ in range(draw.randrange(5)))
        said = Choice(0, "".join(draw.choices(text, k=20)), draw.choice([None, "stop"]), ids, tuple(-0.5 for _ in ids))
        body = draw.randbytes(draw.randrange(300)) if number % 2 else b'{"messages":[{"content":"%d"}]}' % number
        entries.append(record(choices=(said,), request=body, tags={"n": str(number)}, error=draw.choice([None, "x"])))
        fields = {"score": draw.choice([None, 0.0, -1.5]), "feedback": draw.choice([None, text, {"a": [1, None]}])}
        entries.append(report(entries[-1].id, metrics={"m": draw.random()}, **fields))
        for entry in entries[-2:]:
            await store.append(entry)
    names = [entry.id for entry in entries]
    other = await open_store("learner-2-test")
    assert await store.get(names) == entries
    assert await other.get(names[::-1]) == entries[::-1]
    with pytest.raises(MissingError, match="0" * 32):
        await store.get([names[0], "0" * 32, "1" * 32])


async def test_order_is_the_sequence_of_events(store):
    """case 30: ids and times have no say in it."""
    opened = record("open")
    entries = [opened, report(opened.id, score=1.0), record(), closed(opened), report(opened.id, score=0.0)]
    seqs = [(await store.append(entry)).seq for entry in entries]
    assert seqs == sorted(set(seqs))
    events = await store.events("a", 0, 100)
    assert [(event.seq, event.ref) for event in events] == list(zip(seqs, [entry.id for entry in entries], strict=True))
    assert [event.kind for event in events] == ["opened", "report", "closed", "closed", "report"]
    assert await store.events("a", seqs[1], 2) == events[2:4]
    assert await store.events("a", seqs[-1], 5) == []


async def test_a_reader_that_follows_the_log_misses_nothing_of_two_writers(open_store):
    """case 30: numbers become visible in their order."""
    stores = [await open_store(f"gateway-{number}-test") for number in range(2)]
    reader = await open_store("learner-1-test")
    written = []

    async def write(store):
        for _ in range(25):
            made = record()
            written.append(made.id)
            await store.append(made)

    work = asyncio.gather(*(write(store) for store in stores for _ in range(2)))
    seen, cursor, last = [], 0, False
    while not last:
        last = work.done()
        while events := await reader.events("a", cursor, 7):
            seen += [event.ref for event in events]
            cursor = events[-1].seq
        await asyncio.sleep(0.001)
    await work
    assert sorted(seen) == sorted(written)


async def test_the_same_again_is_a_duplicate_and_other_content_a_conflict(store):
    """case 28: of every store."""
    made = record()
    said = report(made.id, score=1.0)
    for entry, other in ((made, dataclasses.replace(made, error="no")), (said, dataclasses.replace(said, score=0.0))):
        first = await store.append(entry)
        again = await store.append(entry)
        assert (first.duplicate, again.duplicate, again.seq) == (False, True, first.seq)
        with pytest.raises(ConflictError):
            await store.append(other)
        assert await store.get([entry.id]) == [entry]
    assert len(await store.events("a", 0, 100)) == 2


async def test_a_record_closes_once(store):
    opened = record("open", owner="gateway-1-test")
    await store.append(opened)
    (found,) = await store.get([opened.id])
    assert found.status == "open"
    end = closed(opened)
    assert not (await store.append(end)).duplicate
    assert (await store.append(end)).duplicate
    with pytest.raises(ConflictError):
        await store.append(closed(opened, status="failed", error="late"))
    assert await store.get([opened.id]) == [end]
    assert [event.kind for event in await store.events("a", 0, 9)] == ["opened", "closed"]


async def test_what_a_dead_process_left_open_ends_as_interrupted(open_store):
    dead, live = await open_store("gateway-1-dead"), await open_store("gateway-2-live")
    left, kept, ended = record("open"), record("open"), record("open")
    await dead.append(left)
    await live.append(kept)
    await dead.append(ended)
    await dead.append(closed(ended))
    helper = await open_store("recover-3-x")
    assert await helper.recover(lambda owner: owner == "gateway-2-live") == 1
    assert await helper.recover(lambda owner: owner == "gateway-2-live") == 0
    found = await live.get([left.id, kept.id, ended.id])
    assert [entry.status for entry in found] == ["interrupted", "open", "complete"]
    assert found[0].untrainable


async def test_a_report_needs_its_records(store):
    mine, foreign = record(), record(scenario="b")
    await store.append(mine)
    await store.append(foreign)
    said = report(mine.id, score=1.0)
    await store.append(said)
    for wrong in ("0" * 32, foreign.id, said.id):
        with pytest.raises(MissingError, match=wrong):
            await store.append(report(mine.id, wrong, score=1.0))
    assert [event.kind for event in await store.events("a", 0, 9)] == ["closed", "report"]


async def test_a_report_counts_while_its_record_is_open_also_from_another_process(open_store):
    """case 25: on any worker."""
    one, other = await open_store("gateway-1-test"), await open_store("gateway-2-test")
    opened = record("open")
    await one.append(opened)
    assert not (await other.append(report(opened.id, feedback="good"))).duplicate


async def test_pages_are_newest_first_and_filters_hold(store):
    made = [record(session=f"s{n % 2}", status="failed" if n == 4 else "complete") for n in range(9)]
    made.append(record(purpose="evaluation", release_id="d" * 40))
    for entry in made:
        await store.append(entry)
    await store.append(record(scenario="b"))
    said = report(made[0].id, score=1.0)
    await store.append(said)
    names = [entry.id for entry in made]
    seen, before = [], None
    while page := await store.find(Query("a", before=before, limit=4)):
        assert len(page) <= 4
        seen += [entry.id for _, entry in page]
        before = page[-1][0]
    assert seen == names[::-1]

    async def named(**fields):
        return [entry.id for _, entry in await store.find(Query("a", **fields))]

    assert await named(session="s1") == [names[n] for n in (7, 5, 3, 1)]
    assert await named(status="failed") == [names[4]]
    assert await named(purpose="evaluation") == await named(release_id="d" * 40) == [names[9]]
    assert await named(kind="report") == [said.id]
    assert await store.events("none", 0, 9) == await store.find(Query("none")) == []


async def paged(store, query):
    """Every id of a query, newest first, in pages of two."""
    seen, before = [], None
    while page := await store.find(dataclasses.replace(query, before=before, limit=2)):
        assert len(page) <= 2
        seen += [entry.id for _, entry in page]
        before = page[-1][0]
    return seen


async def test_records_are_found_by_time_tag_score_and_answer(store):
    made = [
        record(
            timing=Timing(100.0 + n),
            tags={"team": "ab"[n % 2], "n": str(n)},
            answer_id="chatcmpl-7" if n == 3 else None,
        )
        for n in range(7)
    ]
    for entry in [*made, record(scenario="b", tags={"team": "a"}, answer_id="chatcmpl-7", timing=Timing(103.0))]:
        await store.append(entry)
    await store.append(report(made[1].id, made[2].id, score=0.5, per_receipt={made[2].id: -2.0}))
    await store.append(report(made[1].id, score=0.5, feedback="again"))
    await store.append(report(made[4].id, score=None, feedback="good"))
    names = [entry.id for entry in made]

    async def found(**filters):
        return [names.index(name) for name in await paged(store, Query("a", **filters))]

    assert await found(since=102.0) == [6, 5, 4, 3, 2]
    assert await found(since=102.0, until=105.0) == [4, 3, 2]
    assert await found(until=101.5) == [1, 0]
    assert await found(tag=("team", "a")) == [6, 4, 2, 0]
    assert await found(tag=("team", "a"), since=103.0, status="complete") == [6, 4]
    assert await found(tag=("n", "3")) == await found(answer_id="chatcmpl-7") == [3]
    assert await found(tag=("team", "c")) == await found(answer_id="chatcmpl-8") == []
    assert await found(low=0.5) == await found(low=0.5, high=0.5) == [1]
    assert await found(high=0.5) == [2, 1]
    assert await found(high=-2.0) == await found(low=-3.0, high=-1.0, tag=("n", "2")) == [2]
    assert await found(low=0.6) == []


async def test_reports_are_found_by_time_and_score(store):
    one = record()
    await store.append(one)
    scores = [None, 0.0, 0.5, 1.0, -1.0]
    made = [report(one.id, created_at=10.0 + n, score=score, feedback="x") for n, score in enumerate(scores)]
    for entry in made:
        await store.append(entry)
    names = [entry.id for entry in made]

    async def found(**filters):
        return [names.index(name) for name in await paged(store, Query("a", kind="report", **filters))]

    assert await found() == [4, 3, 2, 1, 0]
    assert await found(since=11.0, until=14.0) == [3, 2, 1]
    assert await found(low=0.0) == [3, 2, 1]
    assert await found(low=-1.0, high=0.5, since=12.0) == [4, 2]
    with pytest.raises(InputError) as caught:
        await store.find(Query("a", kind="report", tag=("team", "a")))
    assert caught.value.param == "tag"


async def test_an_open_record_is_found_by_its_tags_and_a_closed_one_by_its_last(store):
    opened = record("open", tags={"team": "a", "kept": "1"})
    await store.append(opened)
    assert await paged(store, Query("a", tag=("team", "a"))) == [opened.id]
    await store.append(closed(opened, tags={"team": "b", "kept": "1"}, answer_id="resp_1"))
    assert await paged(store, Query("a", tag=("team", "a"))) == []
    for filters in ({"tag": ("team", "b")}, {"tag": ("kept", "1")}, {"answer_id": "resp_1"}):
        assert await paged(store, Query("a", **filters)) == [opened.id]


async def test_many_are_stored_together_in_order_and_answered_as_duplicates_again(store):
    known, first, second = record(), record(tags={"n": "1"}), record(reply=b'{"id":"x"}')
    await store.append(known)
    said = report(first.id, known.id, score=1.0)
    batch = [first, known, said, second]
    stored = await store.append_all(batch)
    assert [one.duplicate for one in stored] == [False, True, False, False]
    assert [one.seq for one in stored] == [2, 1, 3, 4]
    assert await store.get([entry.id for entry in batch]) == batch
    again = await store.append_all(batch)
    assert [(one.seq, one.duplicate) for one in again] == [(one.seq, True) for one in stored]
    assert await store.append_all([]) == []


async def test_one_wrong_entry_of_many_stores_none_and_is_named(store):
    known, running = record(), record("open")
    await store.append(known)
    await store.append(running)
    fresh = record(tags={"n": "1"})
    body = b'{"messages":[{"role":"user","content":"%s"}]}' % (b"a long question of its own " * 20)
    wrong = [
        (ConflictError, "[2]", dataclasses.replace(known, error="other")),
        (MissingError, "[2].references", report(fresh.id, "0" * 32, score=1.0)),
        (InputError, "[2]", record(session="lone \ud800")),
        (InputError, "[2]", record(prompt_ids=(-1,))),
        (InputError, "[2]", record("open")),
        (ConflictError, "[2]", closed(running)),  # what is under way is ended by its own answer alone
    ]
    for kind, param, entry in wrong:
        with pytest.raises(kind, match="entry 2: ") as caught:
            await store.append_all([fresh, record(request=body), entry, record()])
        assert caught.value.param == param
    assert len(await store.events("a", 0, 9)) == 2
    assert await paged(store, Query("a", tag=("n", "1"))) == []
    assert not (await store.append(closed(running))).duplicate
    alike = record(request=body)  # what the failed batches had in common with it must not be taken as stored
    await store.append_all([fresh, alike])
    assert await store.get([fresh.id, alike.id]) == [fresh, alike]


async def test_many_together_and_single_ones_do_not_hurt_each_other(store):
    batches = [[record() for _ in range(3)] for _ in range(6)]
    batches[2].append(report("0" * 32))
    batches[4].append(report("0" * 32))
    singles = [record() for _ in range(6)]
    work = [store.append_all(batch) for batch in batches] + [store.append(entry) for entry in singles]
    results = await asyncio.gather(*work, return_exceptions=True)
    assert [isinstance(result, MissingError) for result in results] == [n in (2, 4) for n in range(12)]
    assert len(await store.events("a", 0, 99)) == 4 * 3 + 6


async def test_close_finishes_what_was_accepted(store, open_store):
    made = [record() for _ in range(40)]
    work = [asyncio.create_task(store.append(entry)) for entry in made]
    await asyncio.sleep(0)
    await store.close()
    stored = await asyncio.gather(*work)
    other = await open_store()
    assert await other.get([entry.id for entry in made]) == made
    assert not any(one.duplicate for one in stored)


KILLED = """
import asyncio, os, pathlib, signal, sys
from tests.contracts.test_stores import STORES, record, report

async def main():
    store = STORES[sys.argv[1]](pathlib.Path(sys.argv[2]), "gateway-1-dead")
    await store.start()
    opened = record("open")
    for entry in (made := record(), opened, report(made.id, score=1.0)):
        await store.append(entry)
        print(entry.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", STORES)
async def test_what_was_appended_survives_kill_9(tmp_path, name):
    program = [sys.executable, "-c", KILLED, name, str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = STORES[name](tmp_path, "gateway-2-live")
    await store.start()
    try:
        assert await store.recover(lambda owner: False) == 1
        complete, left, said = await store.get(done.stdout.split())
        assert (complete.status, left.status, said.score) == ("complete", "interrupted", 1.0)
    finally:
        await store.close()
