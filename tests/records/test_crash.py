"""kill -9 at each durable step, over and over, on one file: what was acknowledged is there, nothing by half."""

import asyncio
import dataclasses
import os
import signal
import sqlite3

import pytest

from reef.core import failpoint
from reef.core.nouns import Record
from reef.records.board import Board
from reef.records.sqlite import SqliteStore

KILLS = 20


def killed_child(spec, work):
    """Fork, arm the failpoint, run until it kills; the acknowledgements the child wrote before."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            failpoint.arm(spec)
            work(lambda line: os.write(writing, line.encode() + b"\n"))
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        acknowledged = pipe.read().split()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "the failpoint was never passed"
    return acknowledged


@pytest.mark.parametrize("step", ["records.half_stored", "records.before_commit", "records.after_commit"])
def test_acknowledged_entries_survive_and_nothing_is_half(tmp_path, record, report, step):
    path = tmp_path / "records.db"
    promised = {}

    def work(entries, round_):
        async def main(acknowledge):
            store = SqliteStore(path, owner=f"gateway-{round_}-x")
            await store.start()

            async def exchange(opened, closed, feedback):
                for entry in (opened, feedback, closed):
                    await store.append(entry)
                    acknowledge(f"{entry.id}:{getattr(entry, 'status', 'report')}")

            await asyncio.gather(*(exchange(*entry) for entry in entries))

        return lambda acknowledge: asyncio.run(main(acknowledge))

    for round_ in range(KILLS):
        entries = []
        for number in range(6):
            opened = record("open", owner=f"gateway-{round_}-x", session=f"s{number}")
            whole = record(id=opened.id, session=f"s{number}", prompt_ids=tuple(range(40 + round_)))
            entries.append((opened, whole, report(opened.id)))
        many = 1 + round_ % (15 if step == "records.half_stored" else 3)
        acknowledged = killed_child(f"{step}:{many}", work(entries, round_))
        for opened, whole, feedback in entries:
            promised |= {f"{opened.id}:open": opened, f"{whole.id}:complete": whole, f"{feedback.id}:report": feedback}
        asyncio.run(check(path, promised, acknowledged))


async def check(path, promised, acknowledged):
    store = SqliteStore(path, owner="checker")
    await store.start()
    with sqlite3.connect(path) as connection:
        stored = {row[0]: row[1] for row in connection.execute("SELECT id, status FROM records")}
        stored |= {row[0]: "report" for row in connection.execute("SELECT id FROM reports")}
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for name in acknowledged:
        ref, status = name.split(":")
        assert stored.get(ref) in ({"open", "complete"} if status == "open" else {status}), name
    expected = set()
    for ref, entry in zip(stored, await store.get(list(stored)), strict=True):
        status = entry.status if isinstance(entry, Record) else "report"
        if status == "interrupted":
            continue
        assert entry == promised[f"{ref}:{status}"]
        expected |= {("report", ref)} if status == "report" else {("opened", ref)}
        expected |= {("closed", ref)} if status == "complete" else set()
    events = await store.events("default", 0, 100_000)
    assert expected <= {(event.kind, event.ref) for event in events}
    assert {event.ref for event in events} == set(stored)
    assert len({(event.kind, event.ref) for event in events}) == len(events)
    for entry in promised.values():  # a client that saw no answer tries again
        if entry.id in stored and stored[entry.id] == getattr(entry, "status", "report"):
            assert (await store.append(entry)).duplicate
    still_open = sum(status == "open" for status in stored.values())
    assert await store.recover(lambda owner: False) == still_open
    assert await store.recover(lambda owner: False) == 0
    await store.close()


@pytest.mark.parametrize("step", ["board.before_flip", "board.after_flip"])
def test_a_flip_happens_or_does_not(tmp_path, step):
    path = tmp_path / "records.db"
    board = Board(path)
    board.flip("a", "r0")
    board.close()
    for round_ in range(1, 9):
        before = Board(path)
        serving = before.get("a")
        before.close()
        killed_child(step, lambda _, round_=round_: Board(path).flip("a", f"r{round_}"))
        after = Board(path)
        assert after.get("a") == (
            dataclasses.replace(serving, release_id=f"r{round_}", epoch=serving.epoch + 1)
            if step == "board.after_flip"
            else serving
        )
        assert after.flip("a", f"r{round_}").epoch == serving.epoch + 1
        after.close()
