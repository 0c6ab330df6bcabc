"""A person's decision is served by an engine that holds the release already, and no engine's trouble stops it but one:
that it cannot load what would be served.
"""

import asyncio

import httpx
import pytest

from reef.core.errors import DigestError, EngineError, WireError
from reef.gateway import warmth
from reef.loop.audit import Audit
from tests.gateway.life import Life

ROUTE = "/reef/scenarios/default"


@pytest.fixture
async def lived(run, tmp_path):
    async with run(tmp_path, audit=Audit(tmp_path / "learn.db")) as gateway:
        yield gateway, Life(tmp_path, gateway.chain, gateway.board)


async def decide(client, what, life):
    """(what the engine must hold, the answer)."""
    if what == "promote":
        held = life.hold()
        return held.id, lambda: client.post(f"{ROUTE}/candidates/{held.id}/promote", json={})
    base = life.head.id
    life.publish(text="Be brief.")
    return base, lambda: client.post(f"{ROUTE}/{what}", json={"release_id": base[:12]})


@pytest.mark.parametrize("what", ["rollback", "promote", "pin"])
async def test_the_engine_holds_it_before_it_is_served(lived, what):
    gateway, life = lived
    begun, release = asyncio.Event(), asyncio.Event()

    async def load(release_id):
        gateway.engine.loaded.append(release_id)
        begun.set()
        await release.wait()

    async with gateway.client() as client:
        wanted, ask = await decide(client, what, life)
        gateway.engine.load = load
        head, served = life.head.id, gateway.board.get("default").release_id
        asked = asyncio.create_task(ask())
        await begun.wait()
        assert gateway.engine.loaded == [wanted]
        assert (life.head.id, gateway.board.get("default").release_id) == (head, served)
        release.set()
        assert (await asked).status_code == 200
        assert life.head.id == gateway.board.get("default").release_id != head


@pytest.mark.parametrize("what", ["rollback", "promote", "pin"])
@pytest.mark.parametrize("error", [DigestError("/secret/place is missing"), EngineError("its shapes do not fit")])
async def test_what_the_engine_cannot_load_is_refused_before_anything_moves(lived, what, error):
    """Case 42."""
    gateway, life = lived

    async def load(release_id):
        raise error

    async with gateway.client() as client:
        wanted, ask = await decide(client, what, life)
        gateway.engine.load = load
        head = life.head.id
        refused = await ask()
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        assert message.startswith(f"the engine cannot load {wanted[:12]}")
        assert "nothing was changed" in message
        assert "/secret" not in message
        assert life.head.id == gateway.board.get("default").release_id == head
        assert (await client.get("/reef/status")).json()["scenarios"]["default"]["pin"] is None


@pytest.mark.parametrize("trouble", ["asleep", "dies", "unreachable", "slow"])
async def test_an_engine_that_is_not_there_stops_nobody(lived, monkeypatch, trouble):
    gateway, life = lived
    monkeypatch.setattr(warmth, "WAIT", 0.05)

    async def load(release_id):
        assert trouble != "asleep"
        if trouble == "slow":
            await asyncio.Event().wait()
        gateway.engine.is_ready = trouble == "unreachable"
        raise WireError("gone") if trouble == "unreachable" else EngineError("the engine is not reachable")

    async with gateway.client() as client:
        base = life.head.id
        life.publish(text="Be brief.")
        gateway.engine.load, gateway.engine.is_ready = load, trouble != "asleep"
        done = await client.post(f"{ROUTE}/rollback", json={"release_id": base})
        assert done.status_code == 200
        assert life.head.base == base


def test_the_wait_is_shorter_than_the_commands_own():
    from reef.cli.api import Api, Found

    found = Found("http://127.0.0.1:1", None, "default", None, False, False)
    with Api(found) as api:
        assert isinstance(api.client.timeout, httpx.Timeout)
        assert (api.client.timeout.read or 0) > warmth.WAIT
