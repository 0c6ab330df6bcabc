"""The store's contract: exact, ordered, durable, idempotent; bounded; honest about trouble."""

import asyncio
import dataclasses
import json
import random
import sqlite3

import pytest

from reef.core.errors import ConflictError, InputError, MissingError, StoreError
from reef.core.nouns import Choice, Sampling, Span, Timing, Usage
from reef.records import Query, Stored, rows
from reef.records.sqlite import SqliteStore


def read(store, sql):
    with sqlite3.connect(store._path) as connection:
        return connection.execute(sql).fetchall()


def file_size(store):
    read(store, "PRAGMA wal_checkpoint(TRUNCATE)")
    return store._path.stat().st_size


async def test_every_field_round_trips(store, record, report):
    full = record(
        purpose="evaluation",
        rendered=b'{"messages":[]}',
        choices=(
            Choice(
                0, "a", "stop", (1, 70000), (-0.1, -0.2), (Span("r1", 0, 1), Span("r2", 1, 2)), {"role": "assistant"}
            ),
            Choice(1, "", None, (), ()),
            Choice(2, "no tokens", "length"),
        ),
        usage=Usage(1, 2),
        sampling=Sampling(0.7, 0.9, 40, 12, 7, ("\n", "###")),
        session="s-1",
        client="curl/8",
        upstream_id="chatcmpl-x",
        answer_id="chatcmpl-y",
        reply=b'{"id": "resp_1", "output": [{"type": "message"}]}',
        error="broken pipe",
        untrainable="truncated",
        owner="gateway-1-a",
        tags={"x": "ü", "y": ""},
        timing=Timing(5.0),
    )
    plain = record(choices=(), usage=None, prompt_ids=None, sampling=None, request=b"\x00\xff", tags={})
    none = record(prompt_ids=(), choices=(Choice(0, "x"),), reply=b"", answer_id="lone \ud800")
    feedback = report(
        full.id,
        plain.id,
        score=None,
        metrics={"a": 0.5},
        per_receipt={full.id: -1.0},
        feedback={"why": ["wrong", 1]},
        choice=1,
        demonstration={"role": "assistant", "content": "4"},
        metadata=[None],
    )
    for entry in (full, plain, none, feedback):
        await store.append(entry)
    assert await store.get([feedback.id, none.id, plain.id, full.id]) == [feedback, none, plain, full]
    assert await store.reports_on(full.id) == [feedback]
    assert await store.reports_on(none.id) == []


async def test_open_close_report_make_events_in_order(store, record, report):
    opened = record("open")
    closed = dataclasses.replace(record(id=opened.id), request=opened.request, owner="gateway-1-test")
    entries = [opened, report(opened.id, score=0.0), closed, record(), report(closed.id)]
    seqs = [(await store.append(entry)).seq for entry in entries]
    assert seqs == sorted(set(seqs))
    events = await store.events("default", 0, 10)
    assert [(event.seq, event.ref) for event in events] == list(zip(seqs, [entry.id for entry in entries], strict=True))
    assert [event.kind for event in events] == ["opened", "report", "closed", "closed", "report"]
    assert [event.seq for event in await store.events("default", seqs[1], 2)] == seqs[2:4]
    assert await store.events("other", 0, 10) == []
    assert await store.get([opened.id]) == [closed]


async def test_a_message_that_could_not_be_read_again_is_not_stored(store, record):
    """Else one such record would spoil every page that it is on."""
    for said in ("x", "\ud800"):
        for levels in range(880, 1000, 10):
            message = said
            for _ in range(levels):
                message = {"a": message}
            entry = record(choices=(Choice(0, said, "stop", message=message),), prompt_ids=None)
            if levels <= 900:
                await store.append(entry)
                assert await store.get([entry.id]) == [entry]
                continue
            with pytest.raises(InputError, match="nested deeper than 900"):
                await store.append(entry)
    assert len(await store.find(Query("default"))) == 6


async def test_opening_remembers_who_opened(store, record):
    opened = record("open")
    await store.append(opened)
    assert await store.get([opened.id]) == [dataclasses.replace(opened, owner="gateway-1-test")]


async def test_same_content_is_a_duplicate(store, record, report):
    opened = record("open")
    closed = dataclasses.replace(record(id=opened.id), request=opened.request)
    feedback = report(opened.id)
    for entry in (opened, closed, feedback):
        first = await store.append(entry)
        assert not first.duplicate
        again = dataclasses.replace(entry, created_at=7.0) if entry is feedback else entry
        assert await store.append(again) == Stored(first.seq, duplicate=True)
    assert (await store.append(opened)).duplicate  # the opening again, after the close
    assert len(await store.events("default", 0, 10)) == 3


async def test_other_content_is_a_conflict_and_changes_nothing(store, record, report):
    opened, whole = record("open"), record()
    closed = dataclasses.replace(record(id=opened.id), request=opened.request)
    feedback = report(whole.id)
    await store.append(opened)
    with pytest.raises(ConflictError, match="another request"):
        await store.append(dataclasses.replace(closed, request=b"{}"))
    with pytest.raises(ConflictError):
        await store.append(dataclasses.replace(closed, scenario="other"))
    for entry in (closed, whole, feedback):
        await store.append(entry)
    events = await store.events("default", 0, 10)
    for entry in (
        dataclasses.replace(opened, session="other"),
        dataclasses.replace(whole, status="open"),
        dataclasses.replace(closed, status="aborted"),
        dataclasses.replace(whole, choices=()),
        dataclasses.replace(feedback, score=0.5),
        dataclasses.replace(feedback, references=(closed.id,)),
    ):
        with pytest.raises(ConflictError, match=entry.id):
            await store.append(entry)
    assert await store.events("default", 0, 10) == events
    assert await store.get([whole.id, feedback.id]) == [whole, feedback]


async def test_reports_quote_known_records_of_their_scenario(store, record, report):
    here, there = record(), record(scenario="other")
    feedback = report(here.id)
    for entry in (here, there, feedback):
        await store.append(entry)
    for bad in ("f" * 32, there.id, feedback.id):
        with pytest.raises(MissingError, match=bad) as caught:
            await store.append(report(here.id, bad, "0" * 32))
        assert caught.value.param == "references"
    with pytest.raises(MissingError, match="e" * 32):
        await store.get([here.id, "e" * 32])


async def test_one_refused_entry_does_not_hurt_its_neighbours(store, record, report):
    known = record()
    await store.append(known)
    entries = [
        record(),
        dataclasses.replace(known, status="aborted"),
        report("f" * 32),
        record(prompt_ids=(-1,)),
        record(session="lone \ud800"),
        record("open", session="lone \ud800"),
        report(known.id),
        record(),
    ]
    results = await asyncio.gather(*(store.append(entry) for entry in entries), return_exceptions=True)
    kinds = [Stored, ConflictError, MissingError, InputError, InputError, InputError, Stored, Stored]
    assert [type(result) for result in results] == kinds
    assert len(await store.events("default", 0, 10)) == 4
    assert read(store, "SELECT count(*) FROM records") == [(3,)]


async def test_concurrent_appends_share_commits(store, record):
    entries = [record() for _ in range(200)]
    before = store._writer.commits
    results = await asyncio.gather(*(store.append(entry) for entry in entries))
    assert len({result.seq for result in results}) == 200
    assert store._writer.commits - before < 20
    assert await store.get([entry.id for entry in entries]) == entries


async def test_find_pages_newest_first_and_filters(store, record, report):
    entries = [record(session="a" if i % 2 else None, purpose="live" if i < 4 else "probe") for i in range(6)]
    seqs = [(await store.append(entry)).seq for entry in entries]
    feedback = report(entries[0].id)
    await store.append(feedback)
    page = await store.find(Query("default", limit=2))
    assert page == [(seqs[5], entries[5]), (seqs[4], entries[4])]
    page = await store.find(Query("default", before=seqs[4], limit=50))
    assert [entry for _, entry in page] == entries[3::-1]
    assert [entry for _, entry in await store.find(Query("default", session="a", purpose="live"))] == [
        entries[3],
        entries[1],
    ]
    assert await store.find(Query("default", status="aborted")) == []
    assert await store.find(Query("nobody")) == []
    assert [entry for _, entry in await store.find(Query("default", kind="report"))] == [feedback]
    with pytest.raises(InputError):
        await store.find(Query("default", kind="report", status="open"))
    with pytest.raises(InputError):
        await store.find(Query("default", kind="batch"))


async def test_recover_closes_what_dead_processes_left_open(store, record, tmp_path):
    mine, dead, alive, unknown = (record("open", owner=owner) for owner in (None, "gateway-7-x", "gateway-8-y", None))
    for entry in (mine, dead, alive):
        await store.append(entry)
    await store.append(dataclasses.replace(unknown, owner=""))
    assert await store.recover(lambda owner: owner.startswith("gateway-8")) == 2
    assert await store.recover(lambda owner: owner.startswith("gateway-8")) == 0
    statuses = [entry.status for entry in await store.get([mine.id, dead.id, alive.id, unknown.id])]
    assert statuses == ["open", "interrupted", "open", "interrupted"]
    (closed,) = await store.get([dead.id])
    assert closed.request == dead.request
    assert "stopped" in closed.error
    assert closed.untrainable
    assert [event.ref for event in await store.events("default", 0, 99) if event.kind == "closed"] == [
        dead.id,
        unknown.id,
    ]


def _session(turns, seed):
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(4000)]
    say = lambda n: " ".join(draw.choices(words, k=n))  # noqa: E731
    tools = [{"type": "function", "function": {"name": n, "description": say(60), "parameters": {}}} for n in words[:8]]
    messages, ids = [{"role": "system", "content": say(250)}], [draw.randrange(49152) for _ in range(700)]
    for turn in range(turns):
        messages.append({"role": "user", "content": say(30)})
        ids += [draw.randrange(49152) for _ in range(60)]
        body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
        answer = say(20)
        output = tuple(draw.randrange(49152) for _ in range(40))
        yield turn, body, tuple(ids), answer, output
        messages.append({"role": "assistant", "content": answer})
        ids += output


@pytest.mark.parametrize("session", ["s-1", None])
async def test_a_long_session_costs_its_new_text(store, record, session):
    entries, empty = [], file_size(store)
    for _, body, ids, answer, output in _session(50, 1):
        choice = Choice(0, answer, "stop", output, tuple(-i / 8 for i in range(40)))
        entries.append(record(request=body, rendered=body, prompt_ids=ids, choices=(choice,), session=session))
        await store.append(entries[-1])
    assert await store.get([entry.id for entry in entries]) == entries
    grown = file_size(store) - empty
    assert grown < sum(len(entry.request) for entry in entries) / 8


async def test_a_session_goes_on_in_another_process(tmp_path, record):
    path, entries = tmp_path / "records.db", []
    for number, (_, body, ids, answer, output) in enumerate(_session(12, 2)):
        store = SqliteStore(path, owner=f"gateway-{number}-x")
        await store.start()
        choice = Choice(0, answer, "stop", output, tuple(-i / 8 for i in range(40)))
        entries.append(record(request=body, prompt_ids=ids, choices=(choice,), session="s"))
        await store.append(entries[-1])
        assert await store.get([entry.id for entry in entries]) == entries
        await store.close()
    with sqlite3.connect(path) as connection:
        sizes = [row[0] for row in connection.execute("SELECT length(tokens) FROM records ORDER BY seq")]
        (parents,) = connection.execute("SELECT count(parent) FROM records").fetchone()
    assert parents == 11
    assert max(sizes[1:]) < sizes[0] / 2


async def test_prompt_chains_stay_short(store, record):
    ids = tuple(range(100, 200))
    for turn in range(80):
        await store.append(record(prompt_ids=ids, session="deep", request=b"{}"))
        ids += (5, 6, turn)
    depth = "WITH RECURSIVE walk(seq, parent, n) AS (SELECT seq, parent, 0 FROM records UNION ALL "
    depth += "SELECT walk.seq, r.parent, n + 1 FROM walk JOIN records r ON r.seq = walk.parent) SELECT max(n) FROM walk"
    assert 8 < read(store, depth)[0][0] <= 33
    page = await store.find(Query("default", limit=80))
    assert page[0][1].prompt_ids == ids[:-3]


async def test_a_cancelled_append_is_stored_once(store, record):
    """case 21, case 23: who waits may go; the entry is written once."""
    entries = [record() for _ in range(20)]
    tasks = [asyncio.create_task(store.append(entry)) for entry in entries]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 10
    for entry in entries:
        assert (await store.append(entry)).duplicate
    assert await store.get([entry.id for entry in entries]) == entries


async def test_closing_finishes_what_was_accepted(tmp_path, record):
    """case 20: a stop writes what was accepted."""
    path = tmp_path / "records.db"
    store = SqliteStore(path, owner="a")
    await store.start()
    entries = [record() for _ in range(300)]
    tasks = [asyncio.create_task(store.append(entry)) for entry in entries]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*tasks)
    with pytest.raises(StoreError, match="closed"):
        await store.append(record())
    with pytest.raises(StoreError, match="closed"):
        await store.get([entries[0].id])
    again = SqliteStore(path, owner="b")
    await again.start()
    assert await again.get([entry.id for entry in entries]) == entries
    await again.close()
    assert not path.with_name("records.db-wal").exists()


async def test_before_the_start_nothing_is_taken(tmp_path, record):
    store = SqliteStore(tmp_path / "records.db", owner="a")
    with pytest.raises(StoreError, match="start"):
        await store.append(record())
    await store.close()


async def test_two_processes_worth_of_stores_share_one_file(store, record, report, tmp_path):
    other = SqliteStore(tmp_path / "records.db", owner="gateway-2-test")
    await other.start()
    entries = [record() for _ in range(60)]
    stored = await asyncio.gather(*((store, other)[i % 2].append(entry) for i, entry in enumerate(entries)))
    assert len({each.seq for each in stored}) == 60
    feedback = report(entries[0].id)
    await other.append(feedback)
    assert await store.get([feedback.id, entries[1].id]) == [feedback, entries[1]]
    assert (await store.append(entries[1])).duplicate
    await other.close()


async def test_writers_of_one_file_take_turns(store, tmp_path, record):
    """case 27: one that always has more to write must not keep another waiting for its whole work."""
    other = SqliteStore(tmp_path / "records.db", owner="gateway-2-test")
    await other.start()
    stop = asyncio.Event()

    async def flood():
        while not stop.is_set():
            await store.append(record())

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    await asyncio.sleep(0.1)
    behind = []
    for _ in range(10):
        before = store._writer.commits
        await other.append(record())
        behind.append(store._writer.commits - before)
    stop.set()
    await asyncio.gather(*floods)
    await other.close()
    assert max(behind) <= 6, behind


async def test_the_log_beside_the_file_stays_short_and_is_gone_after_the_end(tmp_path, record):
    path = tmp_path / "records.db"
    store = SqliteStore(path, owner="a")
    await store.start()
    longest = 0
    for number in range(60):
        entries = [record(request=random.Random(20 * number + i).randbytes(60_000)) for i in range(20)]
        await asyncio.gather(*(store.append(entry) for entry in entries))
        longest = max(longest, path.with_name("records.db-wal").stat().st_size)
    await store.close()
    assert path.stat().st_size > 60 * 20 * 60_000
    assert longest < 40 * 1024 * 1024
    assert not path.with_name("records.db-wal").exists()


async def test_streams_in_any_order_with_others(store, record, report):
    """Openings, closings, whole records and reports of one batch, closings that change what the opening said."""
    opened = [record("open", session="s", tags={"n": str(n)}) for n in range(90)]
    await asyncio.gather(*(store.append(entry) for entry in opened))
    changes = [{}, {"session": "t"}, {"release_id": "d" * 40}, {"tags": {"n": "x"}}, {"purpose": "probe"}]
    changes += [{"timing": Timing(9.0)}, {"answer_id": "resp_1", "reply": b"{}"}, {"rendered": b"r" * 3000}]
    closed = [
        dataclasses.replace(record(id=entry.id, session="s", tags=entry.tags), **changes[n % 8])
        for n, entry in enumerate(opened)
    ]
    others = [record() for _ in range(40)]
    said = [report(entry.id) for entry in opened[:40]]
    mixed = [*closed, *others, *said]
    random.Random(3).shuffle(mixed)
    results = await asyncio.gather(*(store.append(entry) for entry in mixed))
    assert not any(result.duplicate for result in results)
    assert await store.get([entry.id for entry in mixed]) == mixed
    events = await store.events("default", 90, 999)
    assert [event.seq for event in events] == list(range(91, 91 + len(mixed)))
    assert {(event.seq, event.ref) for event in events} == {
        (result.seq, entry.id) for result, entry in zip(results, mixed, strict=True)
    }
    again = await asyncio.gather(*(store.append(entry) for entry in mixed))
    assert [(one.seq, one.duplicate) for one in again] == [(result.seq, True) for result in results]


async def test_what_is_kept_of_open_streams_is_bounded(store, record, monkeypatch):
    monkeypatch.setattr(rows, "REQUESTS", 250_000)
    opened = [record("open", request=bytes([n]) * 60_000) for n in range(9)]
    for entry in opened:
        await store.append(entry)
    kept = store._writer._rows
    assert 0 < kept._held == sum(len(each.record.request) for each in kept._open.values()) <= 250_000
    for entry in opened:
        closed = dataclasses.replace(record(id=entry.id), request=entry.request)
        assert not (await store.append(closed)).duplicate
        assert await store.get([entry.id]) == [closed]
    assert (kept._held, len(kept._open)) == (0, 0)


async def test_a_stream_that_another_process_closed_is_not_closed_again(store, record, tmp_path):
    other = SqliteStore(tmp_path / "records.db", owner="recover")
    await other.start()
    opened = record("open", owner="gateway-1-test")
    await store.append(opened)
    assert await other.recover(lambda owner: False) == 1
    with pytest.raises(ConflictError, match="already closed"):
        await store.append(dataclasses.replace(record(id=opened.id), request=opened.request))
    assert (await store.get([opened.id]))[0].status == "interrupted"
    await other.close()


async def test_what_was_erased_does_not_come_back_and_its_blobs_are_written_again(store, record, report, tmp_path):
    body = b'{"messages":[%s]}' % b",".join(b'{"content":"%s"}' % (bytes([97 + n]) * 700) for n in range(6))
    gone, opened, said = record(request=body), record("open", request=body), report("f" * 32)
    for entry in (gone, opened):
        await store.append(entry)
    with sqlite3.connect(tmp_path / "records.db") as connection:
        connection.executemany("INSERT INTO erased VALUES (?, 1.0)", [(gone.id,), (opened.id,), (said.id,)])
        for table in ("records", "blobs"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("UPDATE keeping SET generation = generation + 1")
    for entry in (gone, dataclasses.replace(record(id=opened.id), request=body), said, record("open", id=gone.id)):
        with pytest.raises(ConflictError, match="erased"):
            await store.append(entry)
    fresh = record(request=body, rendered=body)
    await store.append(fresh)
    assert await store.get([fresh.id]) == [fresh]


# --- trouble ----------------------------------------------------------------------------------------------------------


async def test_locked_by_another_program(store, record):
    await store.append(record())
    other = sqlite3.connect(store._path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(*(store.append(record()) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "locked" in str(result) for result in results)
    other.execute("ROLLBACK")
    other.close()
    await store.append(record())
    assert len(await store.events("default", 0, 99)) == 2


async def test_full_disk_stores_nothing_half_and_works_again(store, record):
    await store.append(record())
    (pages,) = store._writer._connection.execute("PRAGMA page_count").fetchone()
    store._writer._connection.execute(f"PRAGMA max_page_count = {pages + 8}")
    big = [record(request=random.Random(i).randbytes(20_000)) for i in range(4)]
    results = await asyncio.gather(*(store.append(entry) for entry in big), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "full" in str(result) for result in results)
    assert read(store, "SELECT count(*) FROM events") == read(store, "SELECT count(*) FROM records") == [(1,)]
    await asyncio.gather(*(store.append(entry) for entry in big))
    assert await store.get([entry.id for entry in big]) == big


async def test_a_full_queue_refuses_and_holds_no_more(tmp_path, record):
    store = SqliteStore(tmp_path / "records.db", owner="a", busy=5.0, entries=10)
    await store.start()
    await store.append(record())
    other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    tasks = [asyncio.create_task(store.append(record())) for _ in range(60)]
    await asyncio.sleep(0.1)
    refused = [task for task in tasks if task.done()]
    assert 40 <= len(refused) <= 50
    assert all(isinstance(task.exception(), StoreError) and "retry" in str(task.exception()) for task in refused)
    assert len(store._writer._queue) <= 10
    other.execute("ROLLBACK")
    other.close()
    await asyncio.gather(*(task for task in tasks if task not in refused))
    assert len(await store.events("default", 0, 99)) == 61 - len(refused)
    await store.close()


async def test_a_queue_is_bounded_in_bytes_too(tmp_path, record):
    store = SqliteStore(tmp_path / "records.db", owner="a", size=100_000)
    await store.start()
    huge = record(request=b"x" * 500_000)
    await store.append(huge)  # alone in the queue, it may pass
    tasks = [asyncio.create_task(store.append(record(request=bytes([i]) * 60_000))) for i in range(20)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, StoreError) for result in results)
    assert store._writer._bytes == 0
    await store.close()


async def test_damage_is_an_error_of_its_reader_only(store, record):
    first, second = record(request=b"a" * 5000), record(request=b"b" * 5000)
    await store.append(first)
    await store.append(second)
    with sqlite3.connect(store._path) as connection:
        connection.execute("DELETE FROM blobs WHERE key = 1")
    with pytest.raises(StoreError, match="restore a backup"):
        await store.get([first.id])
    assert await store.get([second.id]) == [second]
    await store.append(record())


async def test_how_many_wait_to_be_written(tmp_path, record):
    store = SqliteStore(tmp_path / "records.db", owner="gateway-1-test", busy=30.0)
    await store.start()
    other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    tasks = [asyncio.create_task(store.append(record(id=f"{0:032x}")))]
    await asyncio.sleep(0.1)  # the writer took it, and waits for the lock
    assert store.waiting == 0
    tasks += [asyncio.create_task(store.append(record(id=f"{number:032x}"))) for number in range(1, 5)]
    await asyncio.sleep(0.05)
    assert store.waiting == 4
    other.execute("ROLLBACK")
    other.close()
    await asyncio.gather(*tasks)
    assert store.waiting == 0
    await store.close()
