"""What a learner does with units beside training them: turns that share a fate, clients that share batches, counts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reef.core.nouns import Batch, Choice, Span, Timing, Unit
from reef.experience.sessions import Sessions
from reef.experience.units import Signal
from reef.loop.binding import Work
from reef.recipe import batches
from reef.scenario.learnt import consumed
from reef.trainers import folder
from tests.loop.kit import NAME, Score, World, record, report


@dataclass(frozen=True, slots=True)
class Merging(Score):
    merge: ClassVar[bool] = True
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Listening(Score):
    signals: ClassVar[frozenset[Signal]] = frozenset({"next"})
    batch_size: int = 1


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    made = await opened(World(tmp_path))
    yield made
    made.tools.sessions.close()
    await made.close()


async def opened(world: World) -> World:
    await world.open()
    world.tools = replace(world.tools, sessions=Sessions(world.folder / "sessions.db"))
    return world


async def talk(world: World, turns: int, **fields: Any) -> list[str]:
    """A conversation of so many turns, each prompt going on from the answer before; returns the receipts."""
    messages: list[dict[str, str]] = []
    tokens: tuple[int, ...] = ()
    receipts = []
    for _ in range(turns):
        number = world.made
        world.made += 1
        messages.append({"role": "user", "content": f"question {number}"})
        tokens += (number,)
        release = world.head.id
        choice = Choice(
            0, f"answer {number}", "stop", output_ids=(7, number), logprobs=(-0.5, -0.25), spans=(Span(release, 0, 2),)
        )
        made = record(
            number, release, request=json.dumps({"messages": messages}).encode(), choices=(choice,), prompt_ids=tokens,
            **fields,
        )  # fmt: skip
        await world.store.append(made)
        messages.append({"role": "assistant", "content": choice.text})
        tokens += (7, number)
        receipts.append(made.id)
    return receipts


# --- several turns ----------------------------------------------------------------------------------------------------


async def test_turns_share_their_fate_and_every_record_is_cited(world: World) -> None:
    world.recipes = {"weights": Merging()}
    receipts = await talk(world, 3)
    told = report(1, *receipts, score=1.0)
    await world.store.append(told)
    assert await world.update()
    line = world.works["weights"].line or world.head.line
    for receipt in receipts:
        assert world.ledger.fate(NAME, f"{receipt}:0") == [("weights", told.id, "trained", line, 1)]
    await world.settle()
    assert sorted(consumed(world.head)) == sorted(receipts)
    (place,) = (world.training / NAME / "weights").glob("*/1")
    state = folder.read(place)
    assert state is not None
    assert list(state.unit_ids) == [f"{receipt}:0" for receipt in receipts]
    metrics = world.ledger.metrics(NAME, "weights")[0][2]
    assert (metrics["units"], metrics["separate"], metrics["realigned_tokens"], metrics["forked"]) == (1, 0, 0, 0)
    assert world.works["weights"].trained == 3
    assert world.works["weights"].shown()["merged"] == {"units": 1, "turns": 3, "realigned_tokens": 0}
    assert world.works["weights"].pool.ready == {}


async def test_a_merged_unit_survives_a_crash_after_its_order_was_written(world: World) -> None:
    world.recipes = {"weights": Merging()}
    receipts = await talk(world, 2)
    await world.store.append(report(1, *receipts, score=1.0))

    class Dead:
        def step(self, message: Any) -> Any:
            raise OSError("the trainer's disk is gone")

    trainer, world.tools = world.tools.trainer, replace(world.tools, trainer=Dead())  # type: ignore[arg-type]
    await world.update()
    order = world.ledger.order(NAME, "weights")
    assert order is not None
    assert order.message.unit_ids == [f"{receipt}:0" for receipt in receipts]
    assert order.reports == (f"rep_{1:032x}",) * 2
    assert len(order.message.data) == 1
    world.tools.sessions.close()  # type: ignore[union-attr]
    await world.close()
    await opened(world)
    assert trainer is not world.trainer
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    await world.store.append(report(2, receipts[0], score=0.0))
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2, "duplicate": 1}


async def test_a_unit_whose_earlier_turn_was_forgotten_never_trains(world: World) -> None:
    world.recipes = {"weights": Merging(batch_size=1)}
    receipts = await talk(world, 2)
    await world.store.append(report(1, *receipts, score=1.0))
    forgotten = receipts[0]

    class Erased:
        """The store after the request to forget came, but before its pages did."""

        def __getattr__(self, name: str) -> Any:
            return getattr(world.store, name)

        async def known(self, ids: Sequence[str]) -> list[str]:
            return [name for name in ids if name != forgotten]

    world.tools = replace(world.tools, store=Erased())  # type: ignore[arg-type]
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {}
    assert world.works["weights"].pool.ready == {}


# --- the next message -------------------------------------------------------------------------------------------------


async def test_answers_train_once_the_conversation_went_on(world: World) -> None:
    world.recipes = {"weights": Listening()}
    receipts = await talk(world, 3)
    await world.settle()
    trained = world.ledger.trained(NAME, "weights", world.head.line or "", world.head.step)
    assert set(trained) <= {f"{receipt}:0" for receipt in receipts[:2]}
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    assert world.ledger.fate(NAME, f"{receipts[2]}:0") == [], "the last turn has no next message"
    assert world.ledger.fate(NAME, f"{receipts[0]}:0")[0][1] == receipts[1]


async def test_a_learner_that_starts_again_goes_on_where_it_was(world: World) -> None:
    world.recipes = {"weights": Listening(batch_size=2)}
    receipts = await talk(world, 2)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {}
    world.tools.sessions.close()  # type: ignore[union-attr]
    await world.close()
    await opened(world)
    await world.settle()
    assert list(world.works["weights"].pool.ready) == [f"{receipts[0]}:0"]
    await talk(world, 2)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}


async def test_the_time_that_a_message_may_take_is_the_bindings(world: World) -> None:
    world.recipes, world.options = {"weights": Listening()}, {"next_seconds": 5.0}
    now = time.time()
    first, second = record(1, world.head.id), record(2, world.head.id)
    asked = json.loads(first.request)["messages"]
    more = [*asked, {"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "thanks"}]
    later = Timing(now + 7.0)
    await world.store.append(replace(first, timing=Timing(now, last=1.0)))
    await world.store.append(replace(second, timing=later, request=json.dumps({"messages": more}).encode()))
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"late": 1}


# --- fairness and counts ----------------------------------------------------------------------------------------------


async def test_a_noisy_client_leaves_room_in_every_batch(world: World) -> None:
    seen: list[Counter[str | None]] = []

    @dataclass(frozen=True, slots=True)
    class Looking(Score):
        batch_size: int = 4

        def batch(self, units: Sequence[Unit]) -> Batch | None:
            made = Score.batch(self, units)
            if made is not None:
                seen.append(Counter(unit.record.client for unit in made.units))
            return made

    for number in range(8):
        made = record(number, world.head.id, client="noisy" if number < 6 else "calm")
        await world.store.append(made)
        await world.store.append(report(number, made.id, score=1.0))
    world.recipes, world.options = {"weights": Looking()}, {"client_share": 0.5}
    await world.settle()
    assert seen == [{"noisy": 2, "calm": 2}, {"noisy": 4}]


@pytest.mark.parametrize(("scores", "zero"), [((1.0, 1.0), 1.0), ((0.0, 1.0), 0.0)])
async def test_a_batch_without_a_difference_is_counted(world: World, scores: tuple[float, ...], zero: float) -> None:
    for score in scores:
        await world.say(score=score)
    await world.settle()
    assert world.ledger.metrics(NAME, "weights")[0][2]["zero_signal"] == zero
    assert 0 <= world.ledger.metrics(NAME, "weights")[0][2]["queue_age"] < 60


def test_the_spread_of_scores() -> None:
    assert [batches.spread(scores) for scores in ([], [3.0], [1.0, 1.0], [0.0, 1.0, -1.0])] == [0, 0, 0, 2]


async def test_a_recipe_whose_samples_do_not_age_drops_none(world: World) -> None:
    @dataclass(frozen=True, slots=True)
    class Ageless(Score):
        ages: ClassVar[bool] = False

    world.recipes, world.options = {"weights": Score()}, {"evaluate_every": 1, "patience": 1}
    base = world.head.id
    await world.say(6, release=base)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 4, "stale": 2}
    world.recipes = {"weights": Ageless()}
    world.works.clear()
    await world.say(2, release=base)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 6, "stale": 2}


async def test_what_goes_stale_is_the_oldest(world: World) -> None:
    """Where more reports come than steps can take, the trainer does not live on the oldest that it may still take."""
    world.recipes, world.options = {"weights": Score()}, {"evaluate_every": 1, "patience": 1}
    receipts = await world.say(7, release=world.head.id)
    await world.settle()
    fates = [world.ledger.fate(NAME, f"{receipt}:0") for receipt in receipts]
    assert [[fate for _, _, fate, _, _ in each] for each in fates] == [["stale"]] * 3 + [["trained"]] * 4
    assert {fate[4] for each in fates[5:] for fate in each} == {1}


async def test_the_ages_of_what_waits_are_shown(world: World) -> None:
    world.recipes = {"weights": Score(batch_size=10)}
    for age in (10, 120, 130, 1000, 10_000, 200_000):
        await world.say(created_at=time.time() - age)
    await world.update()
    shown = world.works["weights"].shown()
    assert shown["ages"] == {"<1m": 1, "<10m": 2, "<1h": 1, "<1d": 1, "older": 1}
    assert shown["lags"] == {"0": 6}
    assert json.dumps(shown)
    assert Work.open(world.tools, world.binding, "weights").shown()["ages"] == dict.fromkeys(shown["ages"], 0)
