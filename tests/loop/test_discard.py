"""What a recipe says can be in no batch is settled with its own reason, once, and holds nothing up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.tttd.recipe import DiscoverRecipe
from reef.core.nouns import Unit
from tests.loop.kit import NAME, Score, World


@dataclass(frozen=True, slots=True)
class Choosy(Score):
    """Wants no score below 0."""

    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        return [(unit, "below zero") for unit in units if (unit.score or 0) < 0]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    made.options = {"patience": 1}
    yield made
    await made.close()


def cell(step: int, group: int, rollout: int) -> dict[str, Any]:
    return {
        "metadata": {
            "step": step, "group": group, "rollout": rollout, "groups_per_step": 2, "rollouts_per_group": 2,
        },
        "score": float(10 * group + rollout),
    }  # fmt: skip


async def test_discarded_units_are_settled_and_do_not_block(world: World) -> None:
    world.recipes = {"weights": Choosy()}
    await world.say(1, score=-1.0)
    await world.say(1)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"below zero": 1}
    shown = world.works["weights"].shown()
    assert (shown["pending"], shown["dropped"]) == (1, {"below zero": 1})
    await world.say(1)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"below zero": 1, "trained": 2}
    assert world.ledger.cursor(NAME, "weights") == world.works["weights"].pool.cursor  # nothing is read again
    assert all(name.startswith("0") for name in world.head.consumed["weights"].units)


@dataclass(frozen=True, slots=True)
class Once(Score):
    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        return [(unit, "duplicate") for unit in units if (unit.score or 0) < 0]


async def test_a_recipes_word_never_is_the_pools_own(world: World) -> None:
    world.recipes = {"weights": Once()}
    await world.say(1, score=-1.0)
    await world.settle()
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"recipe: duplicate": 1}
    shown = world.works["weights"].shown()
    assert (shown["pending"], shown["dropped"]) == (0, {"recipe: duplicate": 1})


async def test_a_discarded_unit_stays_discarded_after_a_restart(world: World) -> None:
    world.recipes = {"weights": Choosy()}
    await world.say(1, score=-1.0)
    await world.settle()
    await world.close()
    await world.open()
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"below zero": 1}
    assert world.works["weights"].shown()["dropped"] == {"below zero": 1}


async def test_a_grid_trains_when_it_is_complete_and_goes_live(world: World) -> None:
    world.recipes = {"weights": DiscoverRecipe()}
    for place in ((0, 0), (0, 1), (1, 0)):
        await world.say(1, **cell(1, *place))
    await world.settle()
    assert world.head.seq == 0
    await world.say(1, **cell(1, 0, 0))  # a cell again: the first report of it counts
    await world.say(1, **cell(1, 1, 1))
    await world.settle()
    assert world.head.seq == 1
    assert world.ledger.fates(NAME, "weights") == {"trained": 4, "repeated": 1}
    (order,) = world.trainer.orders
    assert [datum.group for datum in order.data] == ["0", "0", "1", "1"]
    assert world.works["weights"].shown()["pending"] == 0


async def test_a_step_with_a_cell_of_another_release_is_discarded_whole(world: World) -> None:
    world.recipes = {"weights": DiscoverRecipe()}
    base = world.head.id
    for group, rollout in ((0, 0), (0, 1), (1, 0), (1, 1)):
        await world.say(1, **cell(1, group, rollout))
    await world.settle()
    assert world.head.seq == 1
    for group, rollout in ((0, 0), (0, 1), (1, 0)):
        await world.say(1, **cell(2, group, rollout))
    await world.say(1, release=base, **cell(2, 1, 1))
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 4, "mixed releases": 4}
    for group, rollout in ((0, 0), (0, 1), (1, 0), (1, 1)):
        await world.say(1, **cell(3, group, rollout))
    await world.settle()
    assert world.head.seq == 2
    assert world.works["weights"].shown()["pending"] == 0


async def test_constant_groups_are_settled_without_a_sample(world: World) -> None:
    world.recipes = {"weights": DiscoverRecipe()}
    for group, rollout in ((0, 0), (0, 1), (1, 0), (1, 1)):
        await world.say(1, **{**cell(1, group, rollout), "score": 1.0 if group == 0 else float(rollout)})
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 4}
    assert [datum.group for datum in world.trainer.orders[0].data] == ["1", "1"]
    assert len(world.trainer.orders[0].unit_ids) == 4
