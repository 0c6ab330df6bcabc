"""One true sentence for every record: over a real store, a real ledger, and beside or after a learner."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reef.core.nouns import Json, Record, Timing, Unit
from reef.experience.holdout import Holdout
from reef.experience.sessions import UNREAD, Sessions
from reef.experience.units import Signal
from reef.loop.ledger import Ledger
from reef.loop.untrained import Ground, Untrained
from reef.recipe import Asking
from reef.scenario.story import Told
from tests.loop.kit import NAME, Rules, Score, Scripted, World, record, report
from tests.loop.test_shares import Listening, Merging, opened, talk


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    made = await opened(World(tmp_path))
    made.recipes = {"weights": Score()}
    yield made
    made.tools.sessions.close()
    await made.close()


@asynccontextmanager
async def asking(world: World, **more: Any) -> AsyncIterator[Untrained]:
    """As a command asks: a ledger of its own, only read, and sessions as they are known."""
    ledger = Ledger(world.folder / "learn.db", reading=True)
    sessions = Sessions(world.folder / "asked.db")
    try:
        ground = Ground(
            NAME, world.store, world.chain, ledger, world.training, world.recipes,
            world.binding.evaluate_every * world.binding.patience,
            sessions=sessions, **more,
        )  # fmt: skip
        yield await Untrained.open(ground)
    finally:
        ledger.close()
        sessions.close()


async def why(world: World, receipt: str, **more: Any) -> Told:
    async with asking(world, **more) as asked:
        (found,) = await world.store.get([receipt])
        assert isinstance(found, Record)
        return await asked.why(found)


async def told(world: World, receipt: str, **more: Any) -> tuple[str, str]:
    found = await why(world, receipt, **more)
    return found.reason, found.sentence


async def answer(world: World, **fields: Any) -> str:
    """An answer that nobody reported on."""
    made = record(world.made, fields.pop("release", world.head.id), **fields)
    world.made += 1
    await world.store.append(made)
    return made.id


async def test_what_trained_says_where(world: World) -> None:
    first, _ = await world.say(2)
    await world.settle()
    line = world.head.line
    assert await told(world, first) == ("trained", f"it trained the weights: step 1 of line {line}, release 1")


async def test_what_trained_and_was_turned_down_says_so(world: World) -> None:
    world.evaluator = Scripted(["reject"])
    first, _ = await world.say(2)
    await world.settle()
    (look,) = world.ledger.looks(NAME)
    reason, said = await told(world, first)
    assert (reason, said.startswith("it trained the weights: step 1 of line ")) == ("turned down", True)
    assert said.endswith(f", which was turned down: {look.reason}")


async def test_what_trained_and_is_held_says_so(world: World) -> None:
    world.options = {"mode": "review"}
    first, _ = await world.say(2)
    await world.settle()
    reason, said = await told(world, first)
    assert (reason, "which is held for a person" in said) == ("trained", True)


async def test_what_waits_says_for_what(world: World) -> None:
    world.recipes = {"weights": Score(batch_size=3)}
    silent = await answer(world)
    (scored,) = await world.say(1)
    assert await told(world, silent) == ("waits for a report", "no report has come on it")
    waits = ("waits for a batch", "it waits for a batch of the weights: 1 of 3 units are ready")
    assert await told(world, scored) == waits, "before a learner ever looked"
    await world.settle()
    assert await told(world, scored) == waits
    open_one = await answer(world, status="open", choices=(), prompt_ids=None, sampling=None)
    assert (await told(world, open_one))[0] == "open"
    await world.store.append(report(77, open_one, score=1.0))
    assert (await told(world, open_one))[0] == "open"


async def test_a_held_candidate_is_named(world: World) -> None:
    world.options = {"mode": "review"}
    await world.say(2)
    await world.settle()
    (next_one,) = await world.say(1)
    assert (await told(world, next_one))[0] == "waits for a person"


async def test_a_step_that_is_being_made_is_named(world: World) -> None:
    class Dead:
        def step(self, message: Any) -> Any:
            raise OSError("gone")

    world.tools = replace(world.tools, trainer=Dead())  # type: ignore[arg-type]
    first, _ = await world.say(2)
    await world.update()
    reason, said = await told(world, first)
    assert (reason, said.startswith("it is in step 1 of line ")) == ("in training", True)


async def test_what_never_trains_says_why(world: World) -> None:
    tool = await answer(world, untrainable="a tool was called")
    await world.store.append(report(50, tool, score=1.0))
    bare = await answer(world, untrainable="a tool was called")
    checked = await answer(world, purpose="evaluation")
    probed = await answer(world, purpose="probe")
    wordy = await answer(world)
    await world.store.append(report(51, wordy, feedback="nice"))
    for looked in (False, True):
        if looked:
            await world.settle()
        said = await told(world, tool)
        assert (said[0], said[1].startswith("a tool was called" if looked else "the answer has no exact")) == (
            "untrainable", True,
        )  # fmt: skip
        assert await told(world, bare) == ("untrainable", "a tool was called")
        assert (await told(world, checked))[0] == "evaluation traffic"
        assert (await told(world, probed))[0] == "a probe"
        assert await told(world, wordy) == (
            "other signals", "the recipe for the weights learns from score, and no report on it has that",
        )  # fmt: skip


async def test_stale_and_foreign_are_told_before_and_after_the_learner_saw(world: World) -> None:
    world.options = {"patience": 1}
    base = world.head.id
    await world.say(4, release=base)
    await world.settle()
    (old,) = await world.say(1, release=base)
    (strange,) = await world.say(1, release="f" * 40)
    for _ in range(2):
        assert (await told(world, old))[0] == "stale"
        assert (await told(world, strange))[0] == "foreign"
        await world.settle()


async def test_held_out_and_a_second_report(world: World) -> None:
    held, twice = await world.say(2)
    await world.store.append(report(90, twice, score=0.0))
    (entry,) = await world.store.get([held])
    mine = json.loads(entry.request)["messages"][0]["content"]  # type: ignore[union-attr]

    class Only(Holdout):
        def holds(self, record: Record) -> bool:
            return mine in record.request.decode()

    assert (await told(world, held, holdout=Only()))[0] == "held out"
    assert (await told(world, twice))[0] == "waits for a batch"


async def test_a_scenario_that_only_records(world: World) -> None:
    (first,) = await world.say(1)
    world.recipes = {}
    assert (await told(world, first))[0] == "records only"
    assert world.ledger.fates(NAME, "weights") == {}


async def test_of_two_parts_the_one_that_trained_or_waits_is_told(world: World) -> None:
    world.recipes = {"weights": Score(batch_size=5), "harness": Rules()}
    (both,) = await world.say(1, feedback="Be brief.")
    (tool,) = await world.say(1)
    await world.settle()
    reason, said = await told(world, both)
    trained, waits = said.split("; ")
    assert (reason, trained.startswith("it trained the harness: step 1")) == ("trained", True)
    assert waits == "it waits for a batch of the weights: 2 of 5 units are ready"
    reason, said = await told(world, tool)
    assert reason == "waits for a batch"
    assert said == (
        "it waits for a batch of the weights: 2 of 5 units are ready; the recipe for the harness learns from feedback,"
        " and no report on it has that"
    )
    assert (await told(world, await answer(world)))[1] == "no report has come on it", "said once"


async def test_a_judge_and_what_it_makes_nothing_of(world: World) -> None:
    @dataclass(frozen=True, slots=True)
    class Judged(Score):
        async def assess(self, unit: Unit, ask: Asking) -> Json:
            return None

    world.recipes, world.options = {"weights": Judged()}, {"ask": lambda *_: None}
    (first,) = await world.say(1)
    assert (await told(world, first))[0] == "to be judged"
    await world.settle()
    assert await told(world, first) == (
        "unjudged", f"the recipe's judge made nothing of it (report rep_{first})",
    )  # fmt: skip


async def test_an_answer_that_went_on_twice_is_what_the_first_message_made_of_it(world: World) -> None:
    @dataclass(frozen=True, slots=True)
    class Deaf(Listening):
        signals: ClassVar[frozenset[Signal]] = frozenset({"next"})

        async def assess(self, unit: Unit, ask: Asking) -> Json:
            return 1.0 if unit.report.feedback == "keep" else None

    async def goes_on(number: int, words: str, at: float) -> None:
        asked = {"role": "user", "content": f"question {number}"}
        said = {"role": "assistant", "content": f"answer {number}"}
        body = json.dumps({"messages": [asked, said, {"role": "user", "content": words}]}).encode()
        await answer(world, request=body, timing=Timing(at))

    world.recipes, world.options = {"weights": Deaf(batch_size=9)}, {"ask": lambda *_: None}
    waits, first = [await answer(world, timing=Timing(100.0, last=1.0)) for _ in range(2)]
    await goes_on(0, "keep", 105.0)  # so that the log is read from here again
    for words, at in (("thanks", 110.0), ("no", 120.0)):
        await goes_on(1, words, at)
        await world.settle()
        assert (await told(world, first))[0] == "unjudged"
    assert (await told(world, waits))[0] == "waits for a batch"
    assert world.ledger.fates(NAME, "weights")["duplicate"] == 1


async def test_turns_of_one_report(world: World) -> None:
    world.recipes = {"weights": Merging(batch_size=2)}
    receipts = await talk(world, 2)
    await world.store.append(report(1, *receipts, score=1.0))
    for receipt in receipts:
        assert (await told(world, receipt))[0] == "waits for a batch"


async def test_next_messages(world: World) -> None:
    world.recipes = {"weights": Listening(batch_size=9)}
    now = time.time()
    first, second, last = await talk(world, 3, timing=Timing(now - 10.0, last=0.5))
    asks: Any = {"messages": [{"role": "user", "content": "what else?"}]}
    other = await answer(world, request=json.dumps(asks).encode(), timing=Timing(now - 5000.0, last=1.0))
    assert (await told(world, first))[0] == "waits for a batch"
    assert (await told(world, last))[0] == "waits for the next message"
    assert await told(world, other) == (
        "last turn", "it is the last turn of its session: no message followed within 900 s",
    )  # fmt: skip
    assert (await told(world, last, patience=0.0))[0] == "last turn"
    assert await told(world, second) != await told(world, last)
    tool = await answer(world, untrainable="a tool was called")
    assert await told(world, tool) == ("untrainable", "a tool was called")


async def test_an_answer_that_could_not_be_read_stops_nothing(world: World) -> None:
    world.recipes = {"weights": Listening(batch_size=9)}
    bad = await answer(world, answer_id="\ud800")
    first, _, _ = await talk(world, 3)
    for _ in range(2):
        assert await told(world, bad) == ("no session", UNREAD)
        assert (await told(world, first))[0] == "waits for a batch"
        await world.settle()
    assert world.works["weights"].error is None


async def test_a_message_that_came_late(world: World) -> None:
    @dataclass(frozen=True, slots=True)
    class Slow(Listening):
        signals: ClassVar[frozenset[Signal]] = frozenset({"next"})

    world.recipes = {"weights": Slow(batch_size=9)}
    asked = {"role": "user", "content": "question 0"}
    said = {"role": "assistant", "content": "answer 0"}
    thanks = {"role": "user", "content": "thanks"}
    first = await answer(world, timing=Timing(100.0, last=1.0))
    body = json.dumps({"messages": [asked, said, thanks]}).encode()
    await answer(world, request=body, timing=Timing(5000.0))
    for _ in range(2):
        assert (await told(world, first))[0] == "late"
        await world.settle()


async def test_every_record_of_a_busy_scenario_has_a_sentence(world: World) -> None:
    world.recipes = {"weights": Score(batch_size=3), "harness": Rules()}
    await world.say(7)
    await world.say(2, feedback="Be brief.", score=None)
    await answer(world)
    await answer(world, status="failed", choices=())
    await world.settle()
    async with asking(world) as asked:
        for entry in await world.store.get([f"{number:032x}" for number in range(world.made)]):
            assert isinstance(entry, Record)
            found = await asked.why(entry)
            assert found.reason
            assert len(found.sentence) > 10
