"""Store trouble under load: nothing hangs or grows, what was promised holds, and it is over with the trouble."""

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path

import aiohttp
import pytest

from reef.records import schema
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases.chain import GitChain
from reef.scenario.serving import ensure
from tests.flow import kit_faults
from tests.flow.kit_load import Load, Process, Provider
from tests.gateway.conftest import BASE
from tests.records.conftest import build_record

BUSY, STORE = 0.5, 1.0  # seconds: the store's patience with a lock, the gateway's with the store
SOFT = {"x-reef-scenario": "soft"}
LIMIT = 20 * 1024 * 1024  # bytes that a process may grow by


@contextlib.asynccontextmanager
async def served(state, **more):
    """A gateway with a strict scenario, default, and a lenient one, soft; and a session."""
    provider = Provider()
    await provider.start()
    process = Process(state, provider, **{"busy": BUSY, "store_seconds": STORE, "lenient": ["soft"], **more})
    board = Board(state / "records.db")
    board.create_scenario("soft", {})
    ensure("soft", GitChain(state / "releases.git"), board, BASE, None)
    board.close()
    timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    with contextlib.closing(process):
        process.start()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield process, session
    await provider.stop()


def rows(state):
    """Status by receipt."""
    with contextlib.closing(sqlite3.connect(state / "records.db")) as base:
        return dict(base.execute("SELECT id, status FROM records").fetchall())


def stored(state, scenario):
    with contextlib.closing(sqlite3.connect(state / "records.db")) as base:
        asked = "SELECT count(*) FROM records WHERE scenario = ? AND status = 'complete'"
        return base.execute(asked, (scenario,)).fetchone()[0]


async def until(met, within=20.0):
    async with asyncio.timeout(within):
        while not met():
            await asyncio.sleep(0.02)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


async def suffer(process, session, fault, asked=12, fits=False):
    """Load on both scenarios before, during and after a fault; what clients saw of what they asked during it."""
    async with (
        Load(session, process.url, "strict", clients=6) as strict,
        Load(session, process.url, "soft", clients=6, **SOFT) as soft,
    ):
        await strict.answered(20)
        await soft.answered(20)
        async with fault(process):
            await until(lambda: any(note.status == 503 for note in strict.notes))
            await until(lambda: any(note.recorded for note in soft.notes))
            begun = len(strict.notes), len(soft.notes)
            await until(lambda: sum(note.ended for note in strict.notes[begun[0] :]) >= asked)
            await until(lambda: sum(note.ended for note in soft.notes[begun[1] :]) >= asked)
            during = [note for note in [*strict.notes[begun[0] :], *soft.notes[begun[1] :]] if note.ended]
        ended = len(strict.notes), len(soft.notes)
        await until(lambda: kept(strict.notes[ended[0] :]) > 20)
        await until(lambda: kept(soft.notes[ended[1] :]) > 20)
        await strict.end()
        await soft.end()
    limit = process.more["store_seconds"] + 2
    for note in [*strict.notes, *soft.notes]:
        assert note.seconds < limit, f"{note.name} (stream: {note.stream}) took {note.seconds:.2f} s"
    for note in strict.notes:
        if note.status == 503:
            assert note.retry == "1"
        else:
            assert note.status == 200
            assert note.receipt is not None
            assert note.whole or not note.clean
    for note in soft.notes:
        assert note.whole, f"a lenient answer broke off: {note.status} {note.body[-100:]!r}"
        assert (note.receipt is None) == (note.recorded == "false")
    await check_stored(process, strict, soft)
    refused = {note.status for note in during if not note.headers}
    unrecorded = {note.recorded for note in during if note.headers}
    if fits:  # a log that begins again from its start has room in its own file now and then
        assert 503 in refused <= {200, 503}
        assert "false" in unrecorded
    else:
        assert refused == {503}
        assert unrecorded == {"false"}


def kept(notes):
    """How many of them got a receipt and a whole answer."""
    return sum(note.whole and note.receipt is not None for note in notes)


async def check_stored(process, strict, soft):
    """Receipts resolve, answers held are complete, and what was served unrecorded was caught up with."""
    await until(lambda: stored(process.state, "soft") == len(soft.notes))
    await until(lambda: "open" not in rows(process.state).values())
    found = rows(process.state)
    for note in [*strict.notes, *soft.notes]:
        if note.receipt is not None:
            assert found[note.receipt] == "complete" if note.whole else note.receipt in found
    assert process.running.poll() is None


async def test_a_lock_that_others_hold_for_a_while(state):
    """case 27: two seconds, and the store is patient for longer: everybody waits, nobody is refused."""
    async with (
        served(state, busy=5.0, store_seconds=8.0) as (process, session),
        Load(session, process.url, "strict", clients=6) as strict,
        Load(session, process.url, "soft", clients=6, **SOFT) as soft,
    ):
        await strict.answered(20)
        async with kit_faults.locked(process):
            await asyncio.sleep(2.0)
        await strict.answered(20)
        await strict.end()
        await soft.end()
        await check_stored(process, strict, soft)
    assert all(note.whole and note.receipt for note in [*strict.notes, *soft.notes])
    assert max(note.seconds for note in strict.notes) > 1.5, "nobody met the lock"


FAULTS = [kit_faults.locked, kit_faults.limited, kit_faults.readonly, kit_faults.gone]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_trouble_comes_and_goes(state, fault):
    async with served(state, powerless=fault is kit_faults.readonly) as (process, session):
        await suffer(process, session, fault, fits=fault is kit_faults.limited)


async def test_a_store_that_hangs(state):
    """The store waits for a lock far longer than an answer may wait for the store."""
    async with served(state, busy=60.0, store_seconds=2.2) as (process, session):
        await suffer(process, session, kit_faults.locked, asked=6)


async def test_a_folder_that_comes_back_keeps_its_records(tmp_path):
    """An empty database made in its absence would, once the folder is back, have SQLite discard the real one's log."""
    state, away = tmp_path / "state", tmp_path / "away"
    store = SqliteStore(state / "records.db", owner="gateway-1-test")
    await store.start()
    await store.append(record := build_record())
    state.rename(away)
    state.mkdir()  # as a mount point stays when its disk goes
    late = None
    with contextlib.suppress(sqlite3.Error):
        late = schema.connect(state / "records.db")
    state_left = list(state.iterdir())
    shutil.rmtree(state)
    away.rename(state)
    if late is not None:
        late.execute("SELECT count(*) FROM sqlite_master").fetchone()
        late.close()
    shutil.copytree(state, tmp_path / "copy")  # as it would be found after a kill
    found = SqliteStore(tmp_path / "copy/records.db", owner="gateway-2-test")
    await found.start()
    assert await found.known([record.id]) == [record.id]
    assert state_left == []
    await found.close()
    await store.close()


async def test_a_full_disk(tmp_path):
    with kit_faults.small(tmp_path / "disk") as allowed:
        if not allowed:
            pytest.skip("needs the right to mount a small file system")
        async with served(tmp_path / "disk/state") as (process, session):
            await suffer(process, session, kit_faults.filled, fits=True)


def grown(pid):
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_refusals_leave_no_memory_behind(state):
    async with served(state) as (process, session), Load(session, process.url, "m") as load:
        await load.answered(100)
        async with kit_faults.limited(process):
            await until(lambda: sum(note.status == 503 for note in load.notes) > 300)
            before = grown(process.running.pid)
            await until(lambda: sum(note.status == 503 for note in load.notes) > 2300, 60)
            after = grown(process.running.pid)
        await load.end()
    print(f"{before / 1e6:.1f} MB after 300 refusals, {after / 1e6:.1f} MB after 2300")
    assert after - before < LIMIT
