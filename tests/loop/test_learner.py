"""The learner: discovers scenarios, wakes, tells what it does, and keeps one scenario's trouble from the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ConfigError, EngineError, MissingError, WireError
from reef.core.nouns import Release
from reef.core.rpc import Client
from reef.core.wire import Done, Load, Look, Looked, Ping, Pong, Progress, Step, Stepped, Wake
from reef.evaluation.policies import Gain
from reef.loop.binding import Binding
from reef.loop.hook import Webhook
from reef.loop.learner import Learner
from reef.scenario.serving import ensure
from tests.loop.kit import BASE, NAME, Scripted, World, record, report


class House:
    """A learner behind its socket, and a client of it."""

    def __init__(self, world: World, folder: Path, poll: float = 0.05, hook: Webhook | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.world, self.path, self.poll, self.hook = world, folder / "learner.sock", poll, hook
        self.broken: set[str] = set()
        self.unmade: set[str] = set()
        self.bound: list[str] = []

    def binding(self, name: str) -> Binding:
        self.bound.append(name)
        if name in self.unmade:
            raise MissingError(f"{name} has no release yet")
        if name in self.broken:
            raise ConfigError(f"{name} is bound to a recipe that is not there")
        return replace(self.world.binding, scenario=name)

    async def __aenter__(self) -> House:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        self.learner = Learner(self.world.tools, self.binding, poll=self.poll, webhook=self.hook)
        self.task = asyncio.create_task(self.learner.run(listener))
        self.client = Client(self.path)
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.client.close()
        self.learner.stop()
        await self.task

    async def look(self, scenario: str | None = None) -> dict[str, dict[str, Any]]:
        found = await self.client.call(Look(scenario=scenario), timeout=5)
        assert isinstance(found, Looked)
        return found.scenarios


async def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    async with House(world, tmp_path) as made:
        yield made
    await world.close()


async def test_it_learns_by_itself_and_says_what_it_does(house: House) -> None:
    world = house.world
    await world.say(2)
    await until(lambda: world.head.seq == 1)
    await until(lambda: world.board.get(NAME).release_id == world.head.id)  # type: ignore[union-attr]
    await world.say(1)
    await until(lambda: house.learner.look()[NAME]["parts"]["weights"]["pending"] == 1)
    shown = (await house.look(NAME))[NAME]["parts"]["weights"]
    assert (shown["state"], shown["batch_size"], shown["trained"], shown["step"]) == ("waiting", 2, 2, 1)
    assert shown["line"] == f"{world.head.id[:12]}-1"
    assert shown["last"]["release_id"] == world.head.id
    assert set(shown["last"]["timings"]) == {"waiting", "training", "gate", "activation"}
    assert shown["metrics"]["samples"] == 2.0
    assert (await house.look("nobody")) == {}


async def test_pings_and_strange_messages_are_answered(house: House) -> None:
    await until(lambda: house.learner.look())
    pong = await house.client.call(Ping(), timeout=5)
    assert isinstance(pong, Pong)
    assert (pong.pid, pong.kind, pong.detail) == (os.getpid(), "learner", {"scenarios": 1})
    with pytest.raises(WireError, match="does not answer Load"):
        await house.client.call(Load(release_id="x"), timeout=5)


async def test_a_wake_is_quicker_than_the_poll(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    async with House(world, tmp_path, poll=30.0) as house:
        await until(lambda: house.bound)
        await asyncio.sleep(0.2)
        await world.say(2)
        assert await house.client.call(Wake(scenario=NAME), timeout=5) == Done()
        await until(lambda: world.head.seq == 1)
        ensure("fresh", world.chain, world.board, BASE, None)
        world.board.create_scenario("fresh", {})
        await house.client.call(Wake(scenario="fresh"), timeout=5)
        await until(lambda: "fresh" in house.bound)
    await world.close()


async def test_new_scenarios_appear_and_archived_ones_leave(house: House) -> None:
    world = house.world
    await until(lambda: NAME in house.learner.look())
    base = ensure("second", world.chain, world.board, BASE, None).release_id
    world.board.create_scenario("second", {})
    for number in (500, 501):
        made = record(number, base, scenario="second")
        await world.store.append(made)
        await world.store.append(report(number, made.id, score=1.0, scenario="second"))
    await until(lambda: world.chain.head("second").seq == 1)  # type: ignore[union-attr]
    assert world.head.seq == 0
    world.board.archive("second")
    await until(lambda: set(house.learner.look()) == {NAME})


async def test_one_scenarios_trouble_is_its_own(house: House, caplog: pytest.LogCaptureFixture) -> None:
    world = house.world
    house.broken.add("broken")
    ensure("broken", world.chain, world.board, BASE, None)
    world.board.create_scenario("broken", {})
    await until(lambda: house.learner.look().get("broken", {}).get("error"))
    assert "not there" in (await house.look())["broken"]["error"]
    await world.say(2)
    await until(lambda: world.head.seq == 1)
    tried = house.bound.count("broken")
    await asyncio.sleep(0.5)
    assert house.bound.count("broken") - tried <= 2  # it rests longer each time
    assert caplog.text.count("is bound to a recipe that is not there") == 1, "said once, however often it is tried"
    await until(lambda: [act for act in world.journal.after(0) if act.kind == "trouble"], 30.0)
    (told,) = [act for act in world.journal.after(0) if act.kind == "trouble"]
    assert (told.scenario, told.detail, told.reason) == (
        "broken", {"part": "learner", "failures": 3}, "broken is bound to a recipe that is not there",
    )  # fmt: skip
    house.broken.clear()
    await house.client.call(Wake(scenario="broken"), timeout=5)
    await until(lambda: "error" not in house.learner.look()["broken"])


async def test_a_scenario_that_is_just_being_made_is_no_trouble(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Its row comes before its release: the first look may fall between; what lasts is told by the second."""
    house.unmade |= {"soon", "never"}
    for name in ("soon", "never"):
        house.world.board.create_scenario(name, {})
    await until(lambda: {"soon", "never"} <= set(house.bound))
    house.unmade.discard("soon")
    ensure("soon", house.world.chain, house.world.board, BASE, None)
    await until(lambda: house.bound.count("soon") > 2 and house.learner.look()["never"].get("error"))
    assert "error" not in house.learner.look()["soon"]
    assert "soon has no release yet" not in caplog.text
    assert caplog.text.count("never has no release yet") == 1


async def test_a_changed_recipe_takes_over(house: House) -> None:
    world = house.world
    await world.say(1)
    await until(lambda: house.learner.look().get(NAME, {}).get("parts", {}).get("weights", {}).get("pending") == 1)
    world.recipes = {"weights": replace(world.recipes["weights"], batch_size=1)}
    await until(lambda: world.head.seq == 1)
    assert house.learner.look()[NAME]["parts"]["weights"]["batch_size"] == 1


async def test_a_scenario_that_never_learns_is_still_served_from_its_head(house: House) -> None:
    world = house.world
    world.recipes = {}
    await until(lambda: house.learner.look().get(NAME) == {"parts": {}})
    await world.say(2)
    await asyncio.sleep(0.3)
    assert world.head.seq == 0


async def test_sigterm_ends_it_in_the_middle_of_a_step(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    world.trainer._delay = 30.0
    house = House(world, tmp_path)
    async with house:
        await world.say(2)
        await until(lambda: world.trainer.orders)
        shown = (await house.look(NAME))[NAME]["parts"]["weights"]
        assert (shown["state"], shown["progress"]) == ("training", ["train", 0, 1])
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(house.task), 5)
        assert time.monotonic() - began < 5
    order = world.ledger.order(NAME, "weights")
    assert order is not None
    await world.close()
    await world.open()
    await world.settle()
    assert (world.head.seq, world.ledger.fates(NAME, "weights")) == (1, {"trained": 2})


async def test_the_watch_does_not_wait_for_a_step(house: House) -> None:
    """A step that takes for ever, and users who hate what is served: it is taken back all the same."""
    world = house.world
    before = world.head
    world.trainer._delay = 60.0
    await world.say(20, score=1.0)
    await until(lambda: world.trainer.orders)
    world.note("Be rude.")
    await world.say(12, score=0.0)
    await until(lambda: world.head.operation == "rollback", 5.0)
    assert (world.head.base, world.head.actor) == (before.id, "watch")
    shown = (await house.look(NAME))[NAME]
    assert shown["parts"]["weights"]["state"] == "training"
    await until(lambda: house.learner.look()[NAME]["watch"]["state"] == "idle")
    assert "only what is new is watched" in house.learner.look()[NAME]["watch"]["reason"]


async def test_the_watch_goes_on_without_a_trainer(house: House) -> None:
    world = house.world

    class Gone:
        async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
            raise WireError("the trainer is not there")
            yield

    world.trainer.step = Gone().step  # type: ignore[method-assign]
    await world.say(20, score=1.0)
    await until(lambda: house.learner.look()[NAME]["parts"]["weights"]["error"])
    world.note("Be rude.")
    await world.say(12, score=0.0)
    await until(lambda: world.head.operation == "rollback", 5.0)


class Measured(Scripted):
    """A policy that measures again: slowly, and the first time not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, str]] = []
        self.may = asyncio.Event()

    async def remeasure(self, release: Release, before: Release) -> Gain | None:
        self.pairs.append((release.id, before.id))
        if len(self.pairs) == 1:
            raise EngineError("the engine is busy")
        await self.may.wait()
        return Gain(0.12, 0.031, 0.209, 64, True)


async def test_a_release_is_measured_again_while_learning_goes_on(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    world.evaluator = policy = Measured()
    async with House(world, tmp_path):
        base = world.head
        await world.say(2)
        await until(lambda: world.head.seq == 1)
        first = world.head
        await until(lambda: len(policy.pairs) == 2)
        assert set(policy.pairs) == {(first.id, base.id)}
        await world.say(2)
        await until(lambda: world.head.seq == 2)  # the measurement is not over yet
        policy.may.set()
        await until(
            lambda: [act for act in world.journal.after(0) if act.ref == world.head.id and "gain" in act.detail]
        )
    measured = [act for act in world.journal.after(0) if act.kind == "measure"]
    assert [act.ref for act in measured] == [first.id, world.head.id]
    assert measured[0].reason == "measured again on 64 fresh tasks: +12.0 points (95%: +3.1 to +20.9)"
    assert measured[0].detail == {
        "seq": 1, "gain": 0.12, "lower": 0.031, "upper": 0.209, "tasks": 64, "fresh": True,
    }  # fmt: skip
    async with House(world, tmp_path / "again"):
        await asyncio.sleep(0.4)
    assert len(policy.pairs) == 3
    await world.close()
