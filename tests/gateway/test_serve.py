"""Whole gateway processes: draining at SIGTERM, kill -9, two workers on one socket."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from reef.core.nouns import Record
from reef.engines.fake import FakeEngine
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases import NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import ensure

ROOT = Path(__file__).parents[2]
ASK = {"messages": [{"role": "user", "content": "one two three four five six seven eight"}], "stream": True}


class Workers:
    """Gateway processes on one listening socket over one state folder."""

    def __init__(self, state):
        self.state = state
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.all = []
        chain = GitChain(state / "releases.git")
        chain.open()
        board = Board(state / "records.db")
        meta = {"base": {"name": "fake", "digest": "0"}, "kind": "base", "rank": 0, "alpha": 0}
        ensure("default", chain, board, NewPart("base", {"weights.json": b"{}"}, meta), None)
        board.close()

    def start(self, delay=0.05, drain=20, **env):
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(self.state)]
        process = subprocess.Popen(
            [*command, str(self.sock.fileno()), str(delay), str(drain)],
            pass_fds=[self.sock.fileno()],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )
        self.all.append(process)
        return process

    async def store(self):
        store = SqliteStore(self.state / "records.db", owner="test-0-0")
        await store.start()
        return store

    def stop(self):
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
        self.sock.close()


@pytest.fixture
def workers(tmp_path):
    made = Workers(tmp_path)
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def streaming(client):
    """A stream whose first word has come."""
    async with client.stream("POST", "/v1/chat/completions", json=ASK) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        async for line in lines:
            if "heard" in line:
                break
        yield response, lines


async def status_of(store, receipt):
    (record,) = await store.get([receipt])
    assert isinstance(record, Record)
    return record.status


async def ended(process, within=10):
    code = await asyncio.wait_for(asyncio.to_thread(process.wait), within)
    return code, process.stdout.read()


async def test_sigterm_lets_streams_finish_and_stores_them(workers):
    process = workers.start()
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(streaming(client)) for _ in range(4)]
            process.send_signal(signal.SIGTERM)
            texts = await asyncio.gather(*(_rest(lines) for _, lines in streams))
        assert all(text.endswith("data: [DONE]") for text in texts)
        receipts = [response.headers["x-reef-agent-record-id"] for response, _ in streams]
    assert await ended(process) == (0, b"closed\n")
    store = await workers.store()
    assert {await status_of(store, receipt) for receipt in receipts} == {"complete"}
    await store.close()


async def _rest(lines):
    return "\n".join([line async for line in lines if line])


async def test_a_stream_longer_than_the_drain_is_broken_off_and_closed(workers):
    process = workers.start(delay=0.8, drain=1)
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client, streaming(client) as (response, lines):
        receipt = response.headers["x-reef-agent-record-id"]
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            await _rest(lines)
    assert (await ended(process))[0] == 0
    store = await workers.store()
    assert await status_of(store, receipt) == "interrupted"
    await store.close()


async def test_kill_loses_no_receipt(workers):
    process = workers.start(delay=0.05)
    seen = []
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:

        async def talk(number):
            with contextlib.suppress(httpx.HTTPError):
                while True:
                    async with client.stream(
                        "POST", "/v1/chat/completions", json={**ASK, "stream": number % 2 == 0}
                    ) as response:
                        if response.status_code == 200:
                            seen.append(response.headers["x-reef-agent-record-id"])
                        await response.aread()

        tasks = [asyncio.create_task(talk(number)) for number in range(8)]
        while len(seen) < 16:
            await asyncio.sleep(0.02)
        workers.sock.close()  # else who dials again waits in its backlog
        process.kill()
        await asyncio.gather(*tasks)
    store = await workers.store()
    await store.recover(lambda owner: False)
    statuses = [await status_of(store, receipt) for receipt in seen]
    assert len(statuses) == len(seen)
    assert set(statuses) <= {"complete", "interrupted"}
    await store.close()


@pytest.mark.parametrize("point", ["gateway.opened", "gateway.before_close", "gateway.closed", "gateway.report_stored"])
@pytest.mark.parametrize("stream", [True, False])
async def test_killed_beside_a_durable_step(workers, point, stream):
    """Whatever was handed out before the kill resolves, and what was acknowledged is there."""
    if point == "gateway.opened" and not stream:
        point = "gateway.closed:3"  # what is not streamed is never open
    process = workers.start(delay=0, REEF_FAILPOINT=point if ":" in point else f"{point}:2")
    receipts, reports = [], []
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:
        with contextlib.suppress(httpx.HTTPError):
            for number in range(20):
                async with client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": stream}) as response:
                    receipts.append(response.headers["x-reef-agent-record-id"])
                    await response.aread()
                body = {"score": number, "references": receipts[-1:]}
                reports.append((await client.post("/reef/report", json=body)).json()["agent_record_id"])
    assert (await ended(process))[0] == -signal.SIGKILL
    store = await workers.store()
    await store.recover(lambda owner: False)
    assert {await status_of(store, receipt) for receipt in receipts} <= {"complete", "interrupted"}
    assert len(await store.get(reports)) == len(reports)
    again = workers.start(delay=0)  # and the next process serves and takes reports on them
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:
        for receipt in receipts:
            answer = await client.post("/reef/report", json={"score": 1, "references": [receipt]})
            assert answer.status_code == 200
    assert again.poll() is None
    await store.close()


async def test_two_workers_share_a_socket(workers):
    first = workers.start(delay=0)
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200  # the first is up
    second = workers.start(delay=0)
    first.send_signal(signal.SIGTERM)
    assert (await ended(first))[0] == 0
    for _ in range(5):
        async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:  # a new connection each time
            assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
    assert second.poll() is None


async def test_a_client_that_goes_away_is_noticed_at_once(workers):
    workers.start(delay=0.1)
    async with httpx.AsyncClient(base_url=workers.url, timeout=30) as client:
        async with streaming(client) as (response, _):
            receipt = response.headers["x-reef-agent-record-id"]
        begun = time.monotonic()
        store = await workers.store()
        while await status_of(store, receipt) == "open":
            assert time.monotonic() - begun < 1.0
            await asyncio.sleep(0.02)
        assert await status_of(store, receipt) == "aborted"
        await store.close()


async def test_a_receipt_is_good_on_another_worker_at_once(run, tmp_path):
    engine = FakeEngine(delay=0.05)
    body = {**ASK, "stream": False}
    async with (
        run(tmp_path, engine) as one,
        run(tmp_path, engine) as two,
        one.client() as client,
        two.client() as other,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=ASK) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            reported = await other.post("/reef/report", json={"score": 1, "references": [receipt]})
            assert reported.status_code == 200
            await response.aread()
        whole = await client.post("/v1/chat/completions", json=body)
        receipt = whole.headers["x-reef-agent-record-id"]
        assert (await other.post("/reef/report", json={"score": 1, "references": [receipt]})).status_code == 200
        # A flip by one is what both serve within a tenth of a second.
        release = one.publish_rules("Be kind.")
        await asyncio.sleep(0.1)
        whole = await other.post("/v1/chat/completions", json=body)
        assert whole.headers["x-reef-release-id"] == release
