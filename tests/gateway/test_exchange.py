"""What an exchange does when the store, the client or the engine is slow, full or gone."""

import asyncio
import json
from typing import ClassVar

import pytest

from reef.core.errors import InputError, StoreError
from reef.engines.fake import FakeEngine, Fault
from reef.gateway.context import Limits
from reef.gateway.spool import Spool
from reef.records import Query
from tests.records.conftest import build_record

ASK = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}
STREAM = ASK | {"stream": True}


def lenient(scenario):
    return True


class Broken:
    """Makes a gateway's store fail, or hang, until it is mended."""

    def __init__(self, gateway, monkeypatch, *, after=0, hang=False):
        self.whole, self.left, self.hang, self.mended = gateway.store.append, after, hang, False
        monkeypatch.setattr(gateway.store, "append", self.append)

    async def append(self, entry):
        if self.mended or self.left > 0:
            self.left -= 1
            return await self.whole(entry)
        if self.hang:
            await asyncio.sleep(3600)
        raise StoreError("the disk of the record store is full")


async def stored(gateway, within=5.0):
    """The records there are, once there is one."""
    end = asyncio.get_running_loop().time() + within
    while not (found := await gateway.store.find(Query("default"))):
        assert asyncio.get_running_loop().time() < end, "nothing was stored"
        await asyncio.sleep(0.02)
    return [record for _, record in found]


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_lenient_scenario_is_answered_unrecorded_and_catches_up(run, tmp_path, monkeypatch, body):
    async with run(tmp_path, lenient=lenient) as gateway, gateway.client() as client:
        store = Broken(gateway, monkeypatch)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-reef-recorded"] == "false"
        assert "x-reef-agent-record-id" not in response.headers
        assert "three" in response.text
        store.mended = True
        (record,) = await stored(gateway)
        assert record.status == "complete"
        assert record.choices[0].text.endswith("one two three")


async def test_a_strict_scenario_is_refused_at_once(run, tmp_path, monkeypatch):
    async with run(tmp_path) as gateway, gateway.client() as client:
        Broken(gateway, monkeypatch)
        for body in (ASK, STREAM):
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert "x-reef-agent-record-id" not in response.headers


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_store_that_hangs_does_not_hang_the_gateway(run, tmp_path, monkeypatch, body):
    limits = Limits(drain_seconds=5, store_seconds=0.2)
    async with run(tmp_path, limits=limits) as gateway, gateway.client() as client:
        Broken(gateway, monkeypatch, hang=True)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 503


async def test_a_stream_whose_record_cannot_be_closed_is_closed_later(run, tmp_path, monkeypatch):
    """case 15: also when the store is away at that moment."""
    async with run(tmp_path) as gateway, gateway.client() as client:
        store = Broken(gateway, monkeypatch, after=1)
        with pytest.raises(Exception, match=r"peer closed|incomplete"):
            await client.post("/v1/chat/completions", json=STREAM)
        (record,) = await stored(gateway)
        assert record.status == "open"
        store.mended = True
        record = await gateway.closed(record.id, within=5)
        assert record.status == "interrupted"
        assert record.untrainable


async def test_the_spool_drops_the_oldest_and_says_so(caplog):
    class Full:
        async def append(self, entry):
            raise StoreError("full")

    spool = Spool(Full(), most=4000)
    for number in range(5):
        spool.put(build_record(id=f"{number:032x}"))
    assert len(spool) < 5
    assert spool.dropped == 5 - len(spool)
    await spool.close()
    assert "could not be recorded" in caplog.text


async def test_the_spool_delivers_each_once():
    """case 23: what was stored is out of the queue: a second round, and a third, bring only what is new."""

    class Store:
        delivered: ClassVar[list] = []
        away = True

        async def append(self, entry):
            if self.away:
                raise StoreError("away")
            self.delivered.append(entry.id)
            await asyncio.sleep(0)

    store = Store()
    spool = Spool(store)
    names = [f"{number:032x}" for number in range(30)]
    for start in (0, 10):
        for name in names[start : start + 10]:
            spool.put(build_record(id=name))
        await asyncio.sleep(0.01)
    assert len(spool) == 20
    store.away = False
    await spool.close()
    assert store.delivered == names[:20]
    for name in names[20:]:
        spool.put(build_record(id=name))
    while len(spool):
        await asyncio.sleep(0.001)
    await spool.close()
    assert store.delivered == names


async def test_a_quiet_stream_is_kept_awake_by_comments(run, tmp_path):
    engine = FakeEngine()
    engine.faults.append(Fault("slow", seconds=0.15))
    limits = Limits(drain_seconds=5, quiet_seconds=0.05)
    async with run(tmp_path, engine, limits=limits) as gateway, gateway.client() as client:
        text = (await client.post("/v1/chat/completions", json=STREAM)).text
    assert ": keep-alive\n\n" in text
    events = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    said = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(item["choices"][0]["delta"].get("content", "") for item in said).endswith("one two three")


async def test_a_busy_stream_gets_no_comments(run, tmp_path):
    limits = Limits(drain_seconds=5, quiet_seconds=0.5)
    async with run(tmp_path, FakeEngine(delay=0.01), limits=limits) as gateway, gateway.client() as client:
        assert ": keep-alive" not in (await client.post("/v1/chat/completions", json=STREAM)).text


async def test_an_answer_has_an_end(run, tmp_path):
    engine = FakeEngine(reply=lambda release, body: "word " * 2000)
    limits = Limits(drain_seconds=5, stream_bytes=50_000)
    async with run(tmp_path, engine, limits=limits) as gateway, gateway.client() as client:
        with pytest.raises(Exception, match=r"peer closed|incomplete"):
            await client.post("/v1/chat/completions", json=STREAM)
        (record,) = await stored(gateway)
        record = await gateway.closed(record.id)
    assert record.status == "interrupted"
    assert "stream_bytes" in record.error


async def test_bodies_in_memory_are_bounded_together(run, tmp_path):
    engine = FakeEngine()
    engine.faults.append(Fault("hang", seconds=0.5))
    big = {"messages": [{"role": "user", "content": "x" * 60_000}]}
    limits = Limits(drain_seconds=5, held_bytes=100_000)
    async with run(tmp_path, engine, limits=limits) as gateway, gateway.client() as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=big))
        while not engine.asked:
            await asyncio.sleep(0.01)
        second = await client.post("/v1/chat/completions", json=big)
        assert (second.status_code, second.headers["retry-after"]) == (503, "1")
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=big)).status_code == 200


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_an_answer_that_has_no_row_is_answered_and_the_rest_is_kept(gateway, client, monkeypatch, body):
    whole = gateway.store.append

    async def picky(entry):
        if entry.choices:
            raise InputError("too deep")
        return await whole(entry)

    monkeypatch.setattr(gateway.store, "append", picky)
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    record = await gateway.record(response.headers["x-reef-agent-record-id"])
    assert (record.status, record.choices, record.untrainable) == ("complete", (), "its answer could not be stored")
