"""Row parity: answers that clients hold, receipts that resolve and stored rows agree, whatever dies meanwhile."""

import asyncio
import contextlib
import json
import random
import signal
import sqlite3

import aiohttp
import pytest

from reef.core.nouns import Record
from reef.engines.upstream import UpstreamEngine
from reef.gateway.auth import Tokens
from reef.gateway.call import KEY, Line
from reef.gateway.spool import Spool
from reef.records import Query
from reef.records.sqlite import SqliteStore
from tests.flow.kit_load import JSON, PATHS, RECEIPT, Load, Process, Provider, ask, question, said
from tests.gateway.conftest import running
from tests.records.conftest import build_record

POINTS = ("gateway.opened", "gateway.before_close", "gateway.closed", "records.before_commit", "records.after_commit")
SEEDS = 5
KILLS = 50  # in all: for each seed one at each point, and as many at random moments


@pytest.fixture
async def provider():
    made = Provider()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def process(tmp_path, provider):
    made = Process(tmp_path, provider)
    yield made
    made.close()


@pytest.fixture
async def session():
    timeout, limit = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=limit) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(state):
    """The store as the next server finds it: what a dead process left open is closed."""
    store = SqliteStore(state / "records.db", owner="checker-0-0")
    await store.start()
    try:
        await store.recover(lambda owner: False)
        yield store
    finally:
        await store.close()


async def check(state, notes, checked, others=()):
    """Compare what clients saw with what is stored. `checked` are receipts whose records were read before.

    `others` are more notes, whose answers say more than the usual.
    """
    notes = [*notes, *others]
    with contextlib.closing(sqlite3.connect(state / "records.db")) as base:
        left = [name for (name,) in base.execute("SELECT id FROM records WHERE status = 'open'")]
    async with opened(state) as store:
        with contextlib.closing(sqlite3.connect(state / "records.db")) as base:
            rows = dict(base.execute("SELECT id, status FROM records").fetchall())
            assert base.execute("PRAGMA quick_check").fetchone() == ("ok",)
        assert "open" not in rows.values()
        assert {rows[name] for name in left} <= {"interrupted"}
        sent = {note.sent: note for note in notes}
        assert len(sent) == len(notes)
        seen = {note.receipt: note for note in notes if note.receipt is not None}
        assert seen.keys() <= rows.keys(), "a receipt that a client saw does not resolve"
        assert len(seen) == sum(note.receipt is not None for note in notes)
        new = [name for name in rows if name not in checked]
        requests = set()
        for name, record in zip(new, await store.get(new), strict=True):
            assert isinstance(record, Record)
            note = sent[record.request]  # the exact bytes
            assert record.request not in requests, "one request left two rows"
            requests.add(record.request)
            assert note.receipt in (None, name), "a row of a request whose client was given another receipt"
            assert note.receipt is not None or not note.whole
            if note.whole:
                assert record.status == "complete", f"{name} was answered and is {record.status}"
                assert record.choices[0].text == note.text
                assert note.text == said(note.name) or note in others
                assert record.usage.prompt_tokens + record.usage.completion_tokens == 8
                if record.reply is not None and not note.stream:  # where the choices do not say it all
                    assert json.loads(record.reply) == json.loads(note.body)
            elif record.status == "complete" and note not in others:
                assert record.choices[0].text == said(note.name)
            if name in seen and note.ended:
                checked.add(name)
    for note in notes:
        if note.ended and note.status is not None:
            assert (note.status, note.receipt is None) == (200, False), note.body
            assert note.whole or not note.clean, f"an answer ended cleanly without its end: {note.body[-200:]!r}"
    return seen


async def report(session, url, receipts):
    """A report on each is accepted."""

    async def one(receipt):
        async with session.post(url + "/reef/report", json={"score": 1, "references": [receipt]}) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["agent_record_id"]

    return await asyncio.gather(*map(one, receipts))


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_kills_under_load_lose_nothing(process, provider, session, seed):
    """kill -9 beside each durable step and at seeded moments, restarted on the same state each time."""
    draw = random.Random(seed)
    provider.pause = 0.002 * (seed % 3)
    checked, reported, reports, kills = set(), set(), [], 0
    async with Load(session, process.url, f"s{seed}") as load:
        for point in draw.sample(POINTS, len(POINTS)):
            process.start(f"{point}:{draw.randint(3, 30)}")
            assert await process.ended() == -signal.SIGKILL
            load.alive()
            seen = await check(process.state, load.notes, checked)
            process.start()
            new = seen.keys() - reported
            reports += await report(session, process.url, new)
            reported |= new
            await load.answered(draw.randint(1, 40))
            await asyncio.sleep(draw.random() * 0.01)
            await process.kill()
            await check(process.state, load.notes, checked)
            async with opened(process.state) as store:
                assert len(await store.known(reports)) == len(reports), "a report that was acknowledged is lost"
            kills += 2
        process.start()
        notes = await load.end()
    process.running.terminate()
    assert await process.ended() == 0
    seen = await check(process.state, notes, checked)
    whole = sum(note.whole for note in notes)
    print(f"{kills} kills, {len(notes)} requests, {len(seen)} receipts, {whole} answers, {len(reports)} reports")
    assert kills * SEEDS == KILLS
    assert whole > 5 * kills


async def test_rows_are_answers_are_receipts(process, session):
    """case 23: Without any trouble, 2,000 requests are 2,000 complete rows and no other."""
    process.start()
    async with Load(session, process.url, "n", most=2000) as load:
        notes = await load.done()
    assert all(note.whole for note in notes)
    process.running.terminate()
    assert await process.ended() == 0
    seen = await check(process.state, notes, set())
    with contextlib.closing(sqlite3.connect(process.state / "records.db")) as base:
        assert base.execute("SELECT status, count(*) FROM records GROUP BY 1").fetchall() == [("complete", 2000)]
        assert {name for (name,) in base.execute("SELECT id FROM records")} == set(seen)


@pytest.mark.parametrize("drain", [1, 20], ids=["broken off", "drained"])
async def test_a_stop_under_load_loses_nothing(tmp_path, provider, session, drain):
    """case 20: SIGTERM after 200 requests, with more under way and a long stream."""
    process = Process(tmp_path, provider, drain=drain)
    with contextlib.closing(process):
        process.start()
        async with Load(session, process.url, "a") as load:
            await load.answered(200)
            long = [question(f"long-{number}", number) for number in range(3)]  # a stream in each dialect
            streams = [asyncio.create_task(ask(session, process.url, note)) for note in long]
            while not all(note.body for note in long):
                await asyncio.sleep(0.005)
            process.running.terminate()
            assert await process.ended() == 0
            process.start()
            await asyncio.gather(*streams)
            await load.answered(20)
            notes = await load.end()
        process.running.terminate()
        assert await process.ended() == 0
    assert {note.whole for note in long} == {drain == 20}
    seen = await check(process.state, notes, set(), long)
    async with opened(process.state) as store:
        statuses = {record.status for record in await store.get([note.receipt for note in long])}
    assert statuses == {"complete" if drain == 20 else "interrupted"}
    assert len(seen) > 200


@pytest.mark.parametrize("number", range(3), ids=PATHS)
async def test_a_stream_that_is_left_is_recorded_so_far(process, session, number):
    """case 15: the client goes after some pieces of many."""
    process.start()
    note = question("long-stream", number)
    async with session.post(process.url + PATHS[note.dialect], data=note.sent, headers=JSON) as answer:
        receipt = answer.headers[RECEIPT]
        while note.body.count(b"\n\n") < 12:
            note.body += await answer.content.readany()
        answer.close()
    record = await closed(process.state, receipt)
    assert record.status == "aborted"
    assert record.choices[0].text.startswith(said(note.name)[:20])
    assert not record.choices[0].text.endswith(" 99")
    assert record.untrainable
    await report(session, process.url, [receipt])


@pytest.mark.parametrize("number", range(6))
async def test_a_client_that_leaves_stops_the_provider(process, provider, session, number):
    """case 14: within a second, streamed or not, in each dialect."""
    process.start()
    note = question("slow-answer", number)
    task = asyncio.create_task(ask(session, process.url, note))
    while not (note.body if note.stream else provider.asked):
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait_for(provider.left.wait(), 1.0)
    while not (found := rows_of(process.state)) or found[0][1] == "open":
        await asyncio.sleep(0.01)
    assert [status for _, status in found] == ["aborted"]


def rows_of(state):
    with contextlib.closing(sqlite3.connect(state / "records.db")) as base:
        return base.execute("SELECT id, status FROM records ORDER BY seq").fetchall()


async def closed(state, receipt):
    """The record once it is closed."""
    while dict(rows_of(state))[receipt] == "open":
        await asyncio.sleep(0.01)
    store = SqliteStore(state / "records.db", owner="checker-0-0")
    await store.start()
    (record,) = await store.get([receipt])
    await store.close()
    return record


class Cancelled:
    """Runs a coroutine in the current task and cancels the task at the n-th await; `met`: there were so many."""

    def __init__(self, work, number):
        self.work, self.number, self.met = work, number, False

    def __await__(self):
        step, value = self.work.send, None
        while True:
            try:
                awaited = step(value)
            except StopIteration as end:
                return end.value
            self.number -= 1
            if self.number == 0:
                self.met = True
                asyncio.current_task().cancel()
            try:
                step, value = self.work.send, (yield awaited)
            except BaseException as error:
                step, value = self.work.throw, error


async def call(app, note, number):
    """One request straight into the app, cancelled at its n-th await: what was sent, and whether it got so far."""
    sent, bodies = [], [{"type": "http.request", "body": note.sent, "more_body": False}]

    async def receive():
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message):
        await asyncio.sleep(0)
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATHS[note.dialect], "query_string": b"", "client": None}
    scope |= {"headers": [(b"content-type", b"application/json")], "extensions": {KEY: Line()}}
    work = Cancelled(app(scope, receive, send), number)

    async def main():
        await work

    task = asyncio.create_task(main())
    await asyncio.wait([task])
    return sent, work.met


@pytest.mark.parametrize("kind", range(6))
async def test_cancelled_at_each_await(tmp_path, provider, kind):
    """case 21: whatever a client was given by then resolves, and no row stays open."""
    async with running(tmp_path, UpstreamEngine(provider.url), tokens=Tokens(free=True)) as gateway:
        app, met, notes = gateway.server.config.app, True, {}
        while met:
            note = question(f"c{len(notes)}", kind)
            sent, met = await call(app, note, len(notes) + 1)
            notes[note.sent] = (note, sent)
            if sent:
                note.receipt = dict(sent[0]["headers"])[RECEIPT.encode()].decode()
                status = (await gateway.closed(note.receipt)).status
                assert status == "complete" if len(sent) > 1 and not sent[-1]["more_body"] else status != "open"
            assert app.work.running == 0
        assert len(notes) > 5
        assert sent[-1]["more_body"] is False
        found = [record for _, record in await gateway.store.find(Query("default", limit=1000))]
        assert len({record.request for record in found}) == len(found)
        for record in found:
            assert notes[record.request][0].receipt in (None, record.id)
            assert record.status in ("complete", "interrupted")


async def test_the_spool_is_cancelled_at_each_await(tmp_path):
    """case 21: an entry leaves memory only after its commit."""
    store = SqliteStore(tmp_path / "records.db", owner="gateway-1-test")
    await store.start()
    expected = []
    for number in range(40):
        spool = Spool(store)
        records = [build_record() for _ in range(3)]
        for record in records:
            spool.put(record)
        for _ in range(number):
            await asyncio.sleep(0.0002)
        await spool.close()
        expected += [record.id for record in records]
        assert len(spool) == 0
    found = [record.id for _, record in await store.find(Query("default", limit=1000))]
    assert sorted(found) == sorted(expected)
    await store.close()
