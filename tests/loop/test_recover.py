"""A ledger that lost rows, or everything, learns them again from training folders and the chain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef.core.nouns import Release
from reef.loop.recover import recover
from tests.loop.kit import NAME, Rules, Score, World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()


async def reopened(world: World, *, forget: bool) -> None:
    await world.close()
    if forget:
        for file in world.folder.glob("learn.db*"):
            file.unlink()
    await world.open()


@pytest.mark.parametrize("forget", [False, True])
async def test_nothing_trains_again_after_a_restart(world: World, forget: bool) -> None:
    world.recipes = {"weights": Score(), "harness": Rules()}
    for _ in range(6):  # more releases than keep their step folders
        await world.say(2, feedback="Be kind.")
        await world.settle()
    before, cursors = world.head, [world.ledger.cursor(NAME, part) for part in ("weights", "harness")]
    fates = [world.ledger.fates(NAME, part) for part in ("weights", "harness")]
    await reopened(world, forget=forget)
    assert await world.settle() == 0
    assert world.head == before
    assert world.trainer.orders == []
    assert [world.ledger.fates(NAME, part) for part in ("weights", "harness")] == fates
    assert [world.ledger.cursor(NAME, part) for part in ("weights", "harness")] == cursors
    accepted = {look.release for look in world.ledger.looks(NAME) if look.verdict == "accept"}
    assert accepted == {release.id for release in world.chain.history(NAME) if release.operation == "publish"}
    await world.say(2)
    assert await world.settle() == 1
    assert world.head.step == before.step + 1


async def test_a_lost_ledger_goes_on_with_an_undecided_line(world: World) -> None:
    world.evaluator.verdicts = ["undecided"]
    await world.say(2)
    await world.settle()
    await reopened(world, forget=True)
    world.evaluator.verdicts = ["undecided"]
    await world.settle()  # the look is not on record: it is taken again
    assert [look for _, _, look in world.evaluator.looked] == [1, 1]
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    await world.say(2)
    await world.settle()
    assert (world.head.step, len(world.head.consumed["weights"].units)) == (2, 4)


async def test_an_order_that_was_carried_out_is_settled_from_its_folder(world: World) -> None:
    settle = world.ledger.settle

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    world.ledger.settle = crash  # type: ignore[method-assign, assignment]
    receipts = await world.say(2)
    with pytest.raises(KeyboardInterrupt):
        await world.update()
    world.ledger.settle = settle  # type: ignore[method-assign]
    await reopened(world, forget=False)
    assert world.ledger.order(NAME, "weights") is not None
    await recover(world.tools, NAME, "weights")
    assert world.ledger.order(NAME, "weights") is None
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    assert world.ledger.settled(NAME, "weights", f"{receipts[0]}:0") == "rep_" + receipts[0]
    await world.settle()
    assert (world.head.step, world.trainer.orders) == (1, [])


async def test_drafts_of_harness_steps_are_removed_and_the_trainers_are_not(world: World) -> None:
    drafts = [world.training / NAME / part / "line-1" / ".1-abc" for part in ("harness", "weights")]
    for draft in drafts:
        draft.mkdir(parents=True)
        (draft / "half").write_text("x")
    await recover(world.tools, NAME, "harness")
    await recover(world.tools, NAME, "weights")
    assert [draft.exists() for draft in drafts] == [False, True]


async def test_a_publish_whose_audit_row_is_missing_is_found(world: World) -> None:
    """Killed between publish and audit: the release is the head, the board is behind, no row speaks of it."""
    made: list[Release] = []
    audit = world.ledger.audit

    def crash(*args: object) -> None:
        made.append(world.head)
        raise KeyboardInterrupt

    world.ledger.audit = crash  # type: ignore[method-assign, assignment]
    await world.say(2)
    with pytest.raises(KeyboardInterrupt):
        await world.update()
    world.ledger.audit = audit  # type: ignore[method-assign]
    serving = world.board.get(NAME)
    assert serving is not None
    assert serving.release_id != made[0].id
    await reopened(world, forget=False)
    await world.settle()
    (look,) = world.ledger.looks(NAME)
    assert (look.verdict, look.release, look.line, look.step) == ("accept", made[0].id, made[0].line, 1)
    assert look.evaluation == made[0].evaluation
    serving = world.board.get(NAME)
    assert serving is not None
    assert serving.release_id == made[0].id == world.engine.loaded[-1]
