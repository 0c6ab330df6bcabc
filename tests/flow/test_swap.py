"""Swaps: under load with the real engine no request fails or is cut, and each record names the release whose weights
answered; an engine that never gets a release loaded changes nothing of what is served. Cases 38, 39, 42.
"""

import asyncio

import httpx
import pytest

import reef.evaluation.ask
from bench.swap import measure, server
from reef.core.errors import EngineError
from reef.evaluation import Means, Sizes
from reef.evaluation.policies import Always, Guarded
from tests.loop.kit import NAME, World


def answered(client, receipt):
    """The release of a record, and those of its tokens."""
    record = client.get(f"/reef/scenarios/default/records/{receipt}").json()
    return record["release_id"], {span["release_id"] for span in record["choices"][0]["spans"]}


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_swaps_and_rollbacks_under_load_fail_no_request(tmp_path):
    """Case 38, case 39."""
    state = tmp_path / "state"
    with server(state) as (url, token):
        seen = await measure(state, url, token, swaps=16, rollbacks=8, pause=0.1)
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}) as client:
            for receipt, release in [pair for each in seen for pair in each.receipts.items()]:
                assert answered(client, receipt) == (release, {release})
    assert [each.failed for each in seen] == [[], [], []]
    assert min(each.answers for each in seen) >= 2
    assert len({release for each in seen for release in each.receipts.values()}) >= 4


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_full_weights_swap_under_load(tmp_path):
    """Four sets of weights and room for two: the least recently used one leaves, never one that answers."""
    state = tmp_path / "state"
    with server(state) as (url, token):
        seen = await measure(state, url, token, kind="full", swaps=5, rollbacks=2, pause=0.1)
    assert [each.failed for each in seen] == [[], [], []]
    assert len({release for each in seen for release in each.receipts.values()}) >= 3


@pytest.fixture
async def world(tmp_path):
    made = await World(tmp_path).open()
    yield made
    await made.close()


async def forever(release_id):
    await asyncio.Event().wait()


@pytest.mark.parametrize("policy", [Always, Guarded])
async def test_a_candidate_that_never_gets_loaded_has_failed(world, monkeypatch, policy):
    """Case 42: the engine says that it is ready and never answers a load. The candidate is rejected for that, whatever
    the gate asks of it, and nobody is served by it."""
    monkeypatch.setattr(reef.evaluation.ask, "PATIENCE", 0.02)
    monkeypatch.setattr(reef.evaluation.ask, "PAUSE", 0.0)
    base = world.head
    world.evaluator = policy(Means(NAME, world.engine, base.id), Sizes(), {})
    monkeypatch.setattr(world.engine, "load", forever)
    await world.say(2)
    await world.settle()
    assert world.head.id == base.id
    assert world.board.get(NAME).release_id == base.id
    [look] = world.ledger.looks(NAME, "weights", f"{base.id[:12]}-1")
    assert look.verdict == "reject"
    assert "the engine cannot load the candidate: no answer within" in look.reason
    assert world.works["weights"].shown()["last"]["reason"] == look.reason
    assert [act.reason for act in world.journal.about(look.candidate)] == [look.reason]
    assert world.chain.get(look.candidate).parts["weights"].kind == "lora"


async def test_a_release_that_never_gets_loaded_is_not_served(world, monkeypatch):
    """Case 42: the candidate was loaded, and the release that came of it cannot be: what was served goes on, and the
    status says why."""
    base = world.head
    load = world.engine.load

    async def fail(release_id):
        if world.chain.get(release_id).operation != "candidate":
            raise EngineError("no answer within 300 s to Load")

    monkeypatch.setattr(world.engine, "load", fail)
    await world.say(2)
    for _ in range(3):
        await world.update()
        assert world.board.get(NAME).release_id == base.id
        assert world.works["weights"].error == "no answer within 300 s to Load"
    monkeypatch.setattr(world.engine, "load", load)
    await world.settle()
    assert world.board.get(NAME).release_id == world.head.id != base.id


async def test_a_candidate_waits_for_an_engine_that_is_not_there(world, monkeypatch):
    """Case 42: an engine that is starting again says nothing about a candidate."""
    monkeypatch.setattr(reef.evaluation.ask, "PAUSE", 0.0)
    base = world.head
    world.evaluator = Always(Means(NAME, world.engine, base.id), Sizes(), {})
    load = world.engine.load
    world.engine.is_ready = False

    async def gone(release_id):
        raise EngineError("the engine is not reachable")

    monkeypatch.setattr(world.engine, "load", gone)
    await world.say(2)
    await world.update()
    assert "the engine is not ready (the engine is not reachable)" in world.works["weights"].error
    assert world.ledger.looks(NAME) == []
    world.engine.is_ready = True
    monkeypatch.setattr(world.engine, "load", load)
    await world.settle()
    assert world.board.get(NAME).release_id == world.head.id != base.id
