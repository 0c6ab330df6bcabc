"""The studies of `gepa` and `harness_evolve`, driven whole without a server."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from recipes.gepa import study as gepa
from recipes.gepa import task
from recipes.harness_evolve import study as evolve
from reef.study import STUDIES
from reef.study.run import Answer


class Pupil:
    """A `Run` without a server: what is served comes to an end once a first batch of three complaints was learnt."""

    seed = 0

    def __init__(self, arm: Any, kept: dict[str, Any] | None = None, *, helps: bool = True, lives: int = 99) -> None:
        self.arm, self._kept, self.helps, self.lives = arm, dict(kept or {}), helps, lives
        self.releases = 1 + sum(one["released"] for one in self._kept.get("turns", []))
        self.reports: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.recorded = 0

    @property
    def kept(self) -> dict[str, Any]:
        return dict(self._kept)

    def keep(self, **values: Any) -> None:
        self._kept |= values

    def at(self, *place: object) -> random.Random:
        return random.Random("/".join(map(str, place)))

    @property
    def spent(self) -> dict[str, float]:
        return {"learning": 2.0 * len(self.points)}

    async def ask(self, text: str, *, seed: int, max_tokens: int, temperature: float, record: bool = True) -> Answer:
        assert (max_tokens, temperature) == (task.LIMIT, task.TEMPERATURE)
        assert (text in task.HELD) != record
        self.recorded += record
        short = self.releases > 1 and seed % 3
        said = "It is a thing." if short else "It is a thing that one can"
        return Answer(said, f"r{self.recorded}", f"{self.releases}", "stop" if short else "length", {}, 9)

    async def report(self, receipt: str, score: float, *, feedback: str) -> None:
        self.reports.append({"receipt": receipt, "score": score, "feedback": feedback})

    async def learnt(self) -> dict[str, Any]:
        self.lives -= 1
        if not self.lives:
            raise asyncio.CancelledError
        released = self.helps and self.releases == 1
        self.releases += released
        said = "Accepted: 0.50 against 0.00" if released else "no proposal: nothing (149 of 150 metric calls)"
        metrics = {"metric_calls": 88.0, "rounds": 7.0} if released else {}
        return {"last": {"verdict": "accept", "reason": said, "timings": {"gate": 1.0}}, "metrics": metrics}

    async def head(self) -> str:
        return f"release {self.releases}"

    def point(self, **figures: Any) -> None:
        self.points.append(figures)


def arm(study: Any, name: str) -> Any:
    return next(one for one in study.STUDY.arms if one.name == name)


async def test_a_search_that_helps_and_one_that_does_not() -> None:
    run = Pupil(arm(gepa, "reads"))
    found = await gepa.STUDY.drive(run)  # type: ignore[arg-type]
    assert (found["base"], found["released"], found["losses"], found["metric_calls"]) == (0.0, 1, 0, 88.0)
    assert found["end"] == found["wins"] / 48 > 0.5
    assert found["p"] < 1e-6
    assert [one["feedback"] for one in run.reports] == [task.CUT] * 3
    assert all(one["score"] == 0.0 for one in run.reports)
    idle = await gepa.STUDY.drive(Pupil(arm(gepa, "idle"), helps=False))  # type: ignore[arg-type]
    assert (idle["released"], idle["wins"], idle["p"], idle["metric_calls"]) == (0, 0, 1.0, 149.0)
    results = {"reads": dict.fromkeys(range(3), found), "idle": dict.fromkeys(range(3), idle)}
    assert [one.met for one in gepa.STUDY.demands(results)] == [True] * 4


async def test_batches_after_the_one_that_helps() -> None:
    found = await evolve.STUDY.drive(Pupil(arm(evolve, "script")))  # type: ignore[arg-type]
    assert (found["orders"], found["released"], found["released_first"], found["released_later"]) == (5, 1, 1, 0)
    assert [one.met for one in evolve.STUDY.demands({"script": {0: found}})] == [True, True, None]
    own = await evolve.STUDY.drive(Pupil(arm(evolve, "own"), helps=False))  # type: ignore[arg-type]
    assert (own["orders"], own["candidates"], own["no_edit_wanted"], own["released"]) == (4, 0, 4, 0)


async def test_a_study_that_was_cut_short_goes_on() -> None:
    first = Pupil(arm(evolve, "script"), lives=4)
    with pytest.raises(asyncio.CancelledError):
        await evolve.STUDY.drive(first)  # type: ignore[arg-type]
    assert len(first.kept["turns"]) == 3
    second = Pupil(arm(evolve, "script"), first.kept)
    found = await evolve.STUDY.drive(second)  # type: ignore[arg-type]
    assert (found["orders"], found["released"]) == (5, 1)


def test_both_are_found_by_their_names() -> None:
    assert STUDIES["gepa"] == "recipes.gepa.study:STUDY"
    assert STUDIES["harness_evolve"] == "recipes.harness_evolve.study:STUDY"
