"""Assessing units before they can be in a batch: once each, kept over a crash, never in the way of others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reef.core import failpoint
from reef.core.errors import EngineError, UpstreamError, WireError
from reef.core.nouns import Batch, Json, Unit
from reef.experience.units import Drop
from reef.loop import assess
from reef.loop.ledger import Ledger
from reef.recipe import Asking
from tests.loop.kit import NAME, Rules, Score, World


@dataclass(frozen=True, slots=True)
class Judged(Score):
    """Asks about each unit; `says` is told the question and answers, or raises."""

    says: Any = None
    seen: list[Json] = field(default_factory=list)

    async def assess(self, unit: Unit, ask: Asking) -> Json:
        return {"said": await ask("judge", {"messages": [unit.id]})}

    def batch(self, units: Any) -> Batch | None:
        made = Score.batch(self, units)
        if made is not None:
            self.seen.append([unit.assessment for unit in made.units])
        return made


class Judge:
    """Stands in for the asked engine."""

    def __init__(self, *, known: Mapping[str, Any] | None = None) -> None:
        self.known = dict(known or {})
        self.asked = Counter[str]()
        self.now, self.most = 0, 0
        self.away: Exception | None = None

    async def __call__(self, engine: str | None, body: Mapping[str, Json]) -> str:
        (name,) = body["messages"]
        self.asked[name] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.away is not None:
            raise self.away
        found = self.known.get(name, "good")
        if isinstance(found, Exception):
            raise found
        return str(found)


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    made = await World(tmp_path).open()
    made.judge = Judge()  # type: ignore[attr-defined]
    made.recipes = {"weights": Judged()}
    made.options = {"ask": made.judge}  # type: ignore[attr-defined]
    yield made
    await made.close()


class Death(BaseException):
    """The end of a life at a failpoint: nothing that handles errors may hold it up."""


class Doom(dict[str, int]):
    """Stands in for the armed failpoints: the life ends at `point`."""

    point = ""

    def __contains__(self, name: object) -> bool:
        if name == self.point:
            raise Death(name)
        return False


@pytest.fixture
def doom(monkeypatch: pytest.MonkeyPatch) -> Doom:
    made = Doom()
    monkeypatch.setattr(failpoint, "_armed", made)
    return made


async def again(world: Any) -> None:
    """A new life on the same folder."""
    await world.close()
    await world.open()


def dropped(world: Any, part: Any = "weights") -> dict[str, int]:
    return {name: count for name, count in world.ledger.fates(NAME, part).items() if name != "trained"}


async def test_units_are_assessed_once_and_train_with_what_was_made_of_them(world: Any) -> None:
    receipts = await world.say(4)
    await world.settle()
    assert world.judge.asked == {f"{name}:0": 1 for name in receipts}
    assert world.recipes["weights"].seen == [[{"said": "good"}] * 2] * 2
    assert world.ledger.fates(NAME, "weights") == {"trained": 4}
    assert world.ledger.assessments(NAME, "weights") == {}, "what is settled is forgotten"


async def test_at_most_so_many_at_once_and_in_one_update(world: Any) -> None:
    world.recipes = {"weights": Judged(batch_size=100)}
    await world.say(assess.MOST + 5)
    assert await world.update()
    assert (world.judge.asked.total(), world.judge.most) == (assess.MOST, assess.AT_ONCE)
    assert await world.update()
    assert world.judge.asked.total() == assess.MOST + 5
    assert not await world.update()


async def test_nothing_that_was_written_is_asked_again_after_a_crash(world: Any) -> None:
    world.recipes = {"weights": Judged(batch_size=3)}
    first = await world.say(2)
    await world.update()
    await again(world)
    last = await world.say(1)
    await world.settle()
    assert world.judge.asked == {f"{name}:0": 1 for name in (*first, *last)}
    assert world.ledger.fates(NAME, "weights") == {"trained": 3}


@pytest.mark.parametrize(("point", "times"), [("loop.in_assess", 2), ("loop.after_assess", 1)])
async def test_a_crash_at_each_step_of_writing_it_down(world: Any, doom: Doom, point: str, times: int) -> None:
    """Within the transaction nothing is kept, so it is asked again; after it, never."""
    world.recipes = {"weights": Judged(batch_size=1)}
    (name,) = await world.say(1)
    doom.point = point
    with pytest.raises(Death):
        await world.update()
    doom.point = ""
    await again(world)
    await world.settle()
    assert world.judge.asked == {f"{name}:0": times}
    assert world.ledger.fates(NAME, "weights") == {"trained": 1}


async def test_none_is_an_answer_and_the_unit_never_trains(world: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Strict(Judged):
        async def assess(self, unit: Unit, ask: Asking) -> Json:
            said = await ask(None, {"messages": [unit.id]})
            return None if said == "nothing" else said

    first, *_ = await world.say(3)
    world.recipes, world.judge.known = {"weights": Strict()}, {f"{first}:0": "nothing"}
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"unjudged": 1, "trained": 2}
    assert world.works["weights"].dropped == {"unjudged": 1}
    await again(world)
    await world.settle()
    assert world.judge.asked.total() == 3
    assert world.ledger.assessments(NAME, "weights") == {}


async def test_a_none_that_a_crash_left_is_a_drop_after_the_restart(world: Any) -> None:
    (name,) = await world.say(1)
    world.ledger.assess(NAME, "weights", f"{name}:0", None)
    await world.settle()
    assert (world.judge.asked.total(), dropped(world)) == (0, {"unjudged": 1})


@pytest.mark.parametrize("error", [EngineError("not ready"), WireError("gone"), UpstreamError("busy", status=503)])
async def test_who_is_away_is_waited_for_and_said(world: Any, error: Exception) -> None:
    world.recipes = {"weights": Judged(), "harness": Rules()}
    await world.say(2, feedback="Be brief.")
    world.judge.away = error
    await world.update()
    work = world.works["weights"]
    assert (work.state, work.error, len(work.pool.ready), work.failures) == ("failed", str(error), 2, 1)
    assert work.shown()["error"] == str(error)
    assert work.rest_until > 0
    assert world.ledger.fates(NAME, "harness") == {"trained": 1}, "the other part goes on"
    world.judge.away = None
    await world.settle()
    assert (world.ledger.fates(NAME, "weights"), work.error) == ({"trained": 2}, None)


async def test_what_was_assessed_trains_while_somebody_is_away(world: Any) -> None:
    world.recipes = {"weights": Judged(batch_size=1)}
    first, *_ = await world.say(2)
    world.ledger.assess(NAME, "weights", f"{first}:0", {"said": "before"})
    world.judge.away = WireError("gone")
    await world.update()
    assert world.ledger.fate(NAME, f"{first}:0")[0][2] == "trained"
    await world.update()
    assert world.works["weights"].state == "failed"


@pytest.mark.parametrize("error", [ValueError("what?"), UpstreamError("too long", status=400)])
async def test_a_unit_that_cannot_be_assessed_is_given_up_and_the_others_train(world: Any, error: Exception) -> None:
    first, *others = await world.say(3)
    world.judge.known = {f"{first}:0": error}
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"unjudged": 1, "trained": 2}
    assert world.judge.asked[f"{first}:0"] <= assess.ATTEMPTS
    assert {world.judge.asked[f"{name}:0"] for name in others} == {1}


async def test_a_unit_that_takes_too_long_is_given_up(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, slots=True)
    class Slow(Judged):
        async def assess(self, unit: Unit, ask: Asking) -> Json:
            await asyncio.sleep(60)

    monkeypatch.setattr(assess, "LONGEST", 0.01)
    world.recipes = {"weights": Slow()}
    await world.say(1)
    await world.settle()
    assert dropped(world) == {"unjudged": 1}


async def test_nobody_to_ask_is_an_error_that_says_so(world: Any) -> None:
    world.options = {}
    await world.say(1)
    await world.update()
    assert "nothing here can ask one" in world.works["weights"].error


async def test_an_assessment_of_a_forgotten_record_goes(world: Any) -> None:
    world.recipes = {"weights": Judged(batch_size=5)}
    await world.say(1)
    await world.update()
    world.ledger.assess(NAME, "weights", "gone:0", {"said": "of what is no more"})
    assert len(world.ledger.assessments(NAME, "weights")) == 2
    await again(world)
    await world.update()
    assert list(world.ledger.assessments(NAME, "weights")) != ["gone:0"]
    assert len(world.ledger.assessments(NAME, "weights")) == 1


async def test_an_edit_that_is_carried_out_after_a_crash_has_its_assessments(world: Any, doom: Doom) -> None:
    proposed: list[Json] = []

    @dataclass(frozen=True, slots=True)
    class Edits(Rules):
        async def assess(self, unit: Unit, ask: Asking) -> Json:
            return {"said": await ask(None, {"messages": [unit.id]})}

        def propose(self, batch: Batch, tree: Any) -> Any:
            proposed.extend(unit.assessment for unit in batch.units)
            return Rules.propose(self, batch, tree)

    world.recipes = {"harness": Edits()}
    (name,) = await world.say(1, feedback="Be brief.")
    doom.point = "loop.after_reserve"
    with pytest.raises(Death):
        await world.update()
    doom.point = ""
    await again(world)
    await world.settle()
    assert proposed == [{"said": "good"}]
    assert world.judge.asked == {f"{name}:0": 1}


def test_the_table_keeps_the_first_answer_until_the_unit_is_settled(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "learn.db")
    ledger.assess("s", "weights", "u:0", {"a": [1, None]})
    ledger.assess("s", "weights", "u:0", "another")
    ledger.assess("s", "harness", "u:0", None)
    ledger.close()
    again = Ledger(tmp_path / "learn.db")
    assert again.assessments("s", "weights") == {"u:0": {"a": [1, None]}}
    assert again.assessments("s", "harness") == {"u:0": None}
    again.drop("s", "weights", [Drop("u:0", "rep", "duplicate")], 0)
    assert again.assessments("s", "weights") != {}
    again.drop("s", "weights", [Drop("u:0", "rep", "stale")], 0)
    assert (again.assessments("s", "weights"), again.assessments("s", "harness")) == ({}, {"u:0": None})
    again.restore("s", "harness", "line", 1, ["u:0"])
    assert again.assessments("s", "harness") == {}
    again.close()
