"""Groups through the whole update: complete ones train, those without signal are given up, none is mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.grpo.recipe import GRPORecipe
from tests.loop.kit import World


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    made = await World(tmp_path).open()
    made.recipes["weights"] = GRPORecipe(preset="dapo", group_size=2, groups=1)
    yield made
    await made.close()


async def group(world: World, name: str, *scores: float, **fields: Any) -> list[str]:
    return [receipt for score in scores for receipt in await world.say(score=score, metadata={"group": name}, **fields)]


async def test_a_group_without_signal_is_given_up_and_blocks_nothing(world: World) -> None:
    flat = await group(world, "flat", 1.0, 1.0)
    half = await group(world, "half", 1.0)
    await world.settle()
    work = world.works["weights"]
    assert (work.trained, dict(work.dropped)) == (0, {"zero signal": 2})
    assert [unit.record.id for unit in work.pool.units()] == half

    told = await group(world, "told", 0.0, 1.0)
    await world.settle()
    assert work.trained == 2
    assert work.metrics["discarded"] == 2
    settled = {world.ledger.settled("work", "weights", f"{receipt}:0") is not None for receipt in (*flat, *told)}
    assert settled == {True}

    await world.close()
    await world.open()
    await world.settle()
    assert world.works["weights"].trained == 2
    assert dict(world.works["weights"].dropped) == {"zero signal": 2}
    assert [unit.record.id for unit in world.works["weights"].pool.units()] == half


async def test_a_group_is_of_one_release(world: World) -> None:
    before = world.head.id
    await group(world, "half", 1.0)
    await group(world, "told", 0.0, 1.0)
    await world.settle()
    work = world.works["weights"]
    assert world.head.id != before
    await group(world, "half", 0.0)
    await world.settle()
    assert work.trained == 2, "the other half is another release's"
    await group(world, "half", 1.0)
    await world.settle()
    assert work.trained == 4


async def test_what_was_given_up_before_a_step_is_counted_once(world: World) -> None:
    await group(world, "flat", 0.0, 0.0)
    await group(world, "told", 0.0, 1.0)
    await world.settle()
    assert world.works["weights"].metrics["discarded"] == 2
    await group(world, "next", 0.0, 1.0)
    await world.settle()
    assert "discarded" not in world.works["weights"].metrics
