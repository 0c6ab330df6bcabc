"""What an answer promises is on the disk, not only with the kernel: a kill leaves the page cache, a power cut does not.

A gateway under load runs under strace. The trace says which bytes a sync had covered when an answer went into its
socket; from those bytes alone the store must know every receipt given out by then, and every ended answer as complete.
"""

import asyncio
import base64
import contextlib
import copy
import os
import random
import shutil
import signal
import sqlite3
import subprocess

import aiohttp
import pytest

from reef.records.sqlite import SqliteStore
from tests.flow import kit_trace
from tests.flow.kit_load import ENDS, RECEIPT, Load, Process, Provider

FILES = ("records.db", "records.db-wal")
REQUESTS = 80


def traceable(folder):
    """Whether strace is here and may attach to a child."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run([*kit_trace.command(folder), "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A gateway's trace under load, what its clients saw, and the disk as it was when it began."""
    folder = tmp_path_factory.mktemp("trace")
    if not traceable(folder):
        pytest.skip("needs strace, allowed to trace a child")
    return asyncio.run(trace(folder, tmp_path_factory.mktemp("state")))


async def trace(folder, state):
    draw, provider = random.Random(5), Provider()
    await provider.start()
    with contextlib.closing(Process(state, provider)) as process:
        disk = kit_trace.Disk(state, FILES)
        started = process.start(under=kit_trace.command(folder))

        def filler():  # large, so that the log is also copied into the database
            return base64.b85encode(draw.randbytes(draw.randint(10_000, 140_000))).decode()

        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            Load(session, process.url, "t", most=REQUESTS, filler=filler) as load,
        ):
            notes = await load.done()
            async with session.get(process.url + "/healthz"):  # so that the last answer's call is in the trace
                pass
        os.kill(kit_trace.tracee(started.pid), signal.SIGKILL)
        await process.ended()
    await provider.stop()
    assert all(note.whole for note in notes)
    return kit_trace.read(folder), {note.receipt: note for note in notes}, disk


class Promises:
    """What went out: `given` receipts by the write that carried their header, `ended` by that of the answer's end."""

    def __init__(self, notes):
        self.notes, self.given, self.ended, self._places = notes, {}, {}, {}

    def note(self, event):
        """Whether this write promises something new."""
        before = len(self.given) + len(self.ended)
        if event.data.startswith(b"HTTP/1.1 200") and RECEIPT.encode() in event.data:
            receipt = event.data.split(RECEIPT.encode() + b": ", 1)[1][:32].decode()
            self.given[receipt] = event
            self._places[event.path] = (receipt, b"")
            if not self.notes[receipt].stream:
                self.ended[receipt] = event
        receipt, sent = self._places.get(event.path, ("", b""))
        if receipt and receipt not in self.ended:
            self._places[event.path] = (receipt, sent := sent + event.data)
            if ENDS[self.notes[receipt].dialect] in sent:
                self.ended[receipt] = event
        return len(self.given) + len(self.ended) > before


def synced(log, receipt, since, until):
    """Whether a write to the log that holds this receipt, and then a sync of the log, lie between these times."""
    for place, event in enumerate(log):
        if event.data and event.begun >= since and receipt.encode() in event.data:
            for later in log[place:]:
                if later.name in ("fsync", "fdatasync") and later.begun >= event.ended and later.ended <= until:
                    return True
    return False


async def test_nothing_is_promised_before_its_sync(traced):
    events, notes, _ = traced
    log = [event for event in events if event.path.endswith("records.db-wal")]
    promises = Promises(notes)
    for event in events:
        if event.sent:
            promises.note(event)
    assert promises.given.keys() == promises.ended.keys() == notes.keys()
    for receipt, event in promises.given.items():
        assert synced(log, receipt, 0.0, event.begun), "a receipt went out before it was synced"
    for receipt, event in promises.ended.items():
        if notes[receipt].stream:
            opened = promises.given[receipt].begun
            assert synced(log, receipt, opened, event.begun), "a stream ended before its record's end was synced"


async def test_a_power_cut_keeps_every_promise(traced, tmp_path):
    """The store from synced bytes only, at each promise; and now and then with some of the unsynced writes too."""
    events, notes, disk = traced
    disk, draw = copy.deepcopy(disk), random.Random(7)
    promises, cuts, due = Promises(notes), 0, False
    for event in events:
        if due and disk.changes(event):  # later promises on the same disk ask for more than earlier ones
            due, cuts = False, cuts + 1
            await check(tmp_path / f"cut-{cuts}", disk.after(), promises)
            if cuts % 4 == 0:
                await check(tmp_path / f"lucky-{cuts}", disk.after(lambda event: draw.random() < 0.5), promises)
        disk.take(event)
        due = (event.sent and promises.note(event)) or due
    await check(tmp_path / "last", disk.after(), promises)
    copied = sum(event.path.endswith("records.db") and event.name == "pwrite64" for event in events)
    print(f"{cuts} power cuts, {copied} pages copied into the database, {len(promises.given)} receipts")
    assert cuts > 10
    assert copied > 0


async def check(folder, files, promises):
    """The store opened from these files keeps what was promised."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    store = SqliteStore(folder / "records.db", owner="checker-0-0")
    await store.start()
    with contextlib.closing(sqlite3.connect(folder / "records.db")) as base:
        rows = dict(base.execute("SELECT id, status FROM records").fetchall())
        assert base.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert promises.given.keys() <= rows.keys()
    assert {rows[receipt] for receipt in promises.ended} <= {"complete"}
    last = list(promises.ended)[-3:]
    for receipt, record in zip(last, await store.get(last), strict=True):
        assert record.request == promises.notes[receipt].sent
        assert record.choices[0].text == promises.notes[receipt].text
    await store.close()
    shutil.rmtree(folder)
