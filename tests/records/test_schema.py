"""The file: many processes at once on nothing, files that are not ours, folders that cannot be written."""

import asyncio
import dataclasses
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reef.core.errors import ConflictError, StoreError
from reef.core.nouns import Choice, Sampling, Span
from reef.records import Query, schema
from reef.records.board import Board
from reef.records.sqlite import SqliteStore


def child(work):
    """Run in a forked process; its exit status (1 when it raised)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_eight_processes_start_on_an_empty_file(tmp_path):
    """case 27: no folder yet, either."""
    path = tmp_path / "deep" / "records.db"
    code = f"from pathlib import Path; from reef.records.schema import migrate; migrate(Path({str(path)!r}))"
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(8)]
    assert [process.communicate()[1] for process in running] == [b""] * 8
    assert [process.returncode for process in running] == [0] * 8
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


WRITER = """
import asyncio, sys
from pathlib import Path
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from tests.records.conftest import build_record, build_report

async def main(path, number):
    board = Board(path)
    board.create_scenario(f"scenario-{number}", {})
    store = SqliteStore(path, owner=f"gateway-{number}-test")
    await store.start()
    for _ in range(20):
        record = build_record()
        await asyncio.gather(store.append(record), store.append(build_record("open")))
        await store.append(build_report(record.id))
    await store.close()
    board.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_eight_processes_start_on_an_empty_file_and_write(tmp_path):
    """case 27: one migrates, the others wait; every write of all eight is there, and nobody was told `locked`."""
    path = tmp_path / "records.db"
    path.touch()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)], stderr=subprocess.PIPE, env=environment)
        for n in range(8)
    ]
    said = [process.communicate(timeout=60)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0] * 8, said
    assert not any("locked" in text for text in said)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (8 * 40,)
        assert connection.execute("SELECT count(*) FROM reports").fetchone() == (8 * 20,)
        seqs = connection.execute("SELECT count(*), count(DISTINCT seq), max(seq) FROM events").fetchone()
        assert seqs == (8 * 60,) * 3
        assert len(connection.execute("SELECT name FROM scenarios").fetchall()) == 8


def test_every_commit_is_synced(tmp_path):
    schema.migrate(tmp_path / "records.db")
    assert schema.connect(tmp_path / "records.db").execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_half_made_migration_is_made_whole(tmp_path, monkeypatch):
    path = tmp_path / "records.db"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE more (a); CREATE TABLE events (a);"))
    with pytest.raises(StoreError, match="already exists"):
        schema.migrate(path)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], "CREATE TABLE more (a);"))
    schema.migrate(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)


async def test_a_file_of_the_first_schema_is_read_searched_and_continued(tmp_path, monkeypatch):
    path = tmp_path / "records.db"
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        schema.migrate(path)
    with sqlite3.connect(path) as connection:
        connection.executescript(Path(__file__).with_name("version1.sql").read_text())
    store = SqliteStore(path, owner="gateway-2-new")
    await store.start()
    names = [f"{number:032x}" for number in range(1, 6)]
    found = await store.get([*names, "rep_" + f"{1:032x}"])
    for number, one in enumerate(found[:5]):
        turns = [
            {"role": "user", "content": f"Question {n} of a session that goes on for a while, in ordinary words."}
            for n in range(number + 1)
        ]
        assert one.request == json.dumps({"model": "m", "messages": turns}).encode()
        assert (one.tags, one.session, one.timing.received_at) == ({"n": str(number)}, "s", 1_700_000_000.5 + number)
        assert (one.reply, one.answer_id, one.purpose, one.dialect) == (None, None, "live", "chat")
    whole = found[2]
    assert whole.prompt_ids == tuple(range(50, 90))
    assert whole.choices == (
        Choice(0, "Answer 2.", "stop", (101, 7, 2), (-0.5, -1.25, -0.0625), (Span(whole.release_id, 0, 3),)),
    )
    assert whole.sampling == Sampling(max_tokens=12, seed=3)
    assert [one.status for one in found[:5]] == ["complete"] * 3 + ["open", "complete"]
    assert (found[4].rendered, found[5].feedback) == (b'{"messages":[]}', {"why": "wrong"})

    async def numbers(**filters):
        return [names.index(one.id) for _, one in await store.find(Query("default", **filters))]

    assert await numbers(since=1_700_000_001.5, until=1_700_000_003.5) == [2, 1]
    assert await numbers(tag=("n", "3")) == [3]
    assert await numbers(low=0.0) == [0]
    assert await numbers(high=0.0) == [1]
    assert len(await store.find(Query("default", kind="report", low=0.5, since=1.0))) == 1
    for entry in (found[0], found[4], found[5]):  # a retry across the upgrade
        assert (await store.append(entry)).duplicate
        with pytest.raises(ConflictError):
            other = {"feedback": "other"} if entry is found[5] else {"error": "other"}
            await store.append(dataclasses.replace(entry, **other))
    assert await store.recover(lambda owner: False) == 1
    assert (await store.get([names[3]]))[0].status == "interrupted"
    fresh = dataclasses.replace(whole, id="f" * 32, prompt_ids=(*whole.prompt_ids, 101, 7, 2, 9), request=b"{}")
    assert (await store.append(fresh)).seq == 9
    assert await store.get([fresh.id, names[2]]) == [fresh, whole]
    await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT parent FROM records WHERE id = ?", (fresh.id,)).fetchone() == (5,)


async def test_a_file_that_is_not_a_database(tmp_path):
    path = tmp_path / "records.db"
    path.write_bytes(b"this is a text file, not a database" * 50)
    with pytest.raises(StoreError, match=r"not a record store.*move it away"):
        await SqliteStore(path, owner="a").start()
    with pytest.raises(StoreError, match="not a record store"):
        Board(path)
    assert path.read_bytes().startswith(b"this is a text file")


def test_another_programs_database_and_a_newer_one(tmp_path):
    path = tmp_path / "records.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    with pytest.raises(StoreError, match="another program's"):
        schema.migrate(path)
    path.unlink()
    schema.migrate(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match="newer Reef"):
        schema.migrate(path)


def test_a_folder_or_file_without_write_access():
    folder = Path(tempfile.mkdtemp())
    path = folder / "records.db"
    schema.migrate(path)
    path.chmod(0o444)
    folder.chmod(0o777)
    path.with_name("records.db-lock").chmod(0o666)

    def ordinary():
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    def read_only_file():
        ordinary()
        with pytest.raises(StoreError, match=r"read-only|cannot open"):
            Board(path).create_scenario("a", {})

    def read_only_folder():
        folder.chmod(0o555)
        ordinary()
        with pytest.raises(StoreError, match="cannot write in"):
            schema.migrate(folder / "new.db")

    try:
        assert child(read_only_file) == 0
        assert child(read_only_folder) == 0
    finally:
        folder.chmod(0o777)
        shutil.rmtree(folder)


def test_a_disk_that_refuses_writes_for_a_while(tmp_path, record):
    path = tmp_path / "records.db"

    async def main():
        store = SqliteStore(path, owner="a")
        await store.start()
        await store.append(record())
        size = path.with_name("records.db-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9000, resource.RLIM_INFINITY))
        big = record(request=os.urandom(60_000))
        with pytest.raises(StoreError, match="nothing was half stored"):
            await store.append(big)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert len(await store.events("default", 0, 9)) == 1
        await store.append(big)
        assert await store.get([big.id]) == [big]
        await store.close()

    assert child(lambda: asyncio.run(main())) == 0
