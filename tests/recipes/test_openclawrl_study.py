"""The study of OpenClaw-RL: its user, its demands, and a whole run without a server."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recipes.openclawrl import judge, task
from recipes.openclawrl.recipe import OpenClawRecipe
from recipes.openclawrl.study import STUDY
from reef.study.run import Answer


def test_subjects_are_chatted_about_or_measured() -> None:
    chats, held = task.split()
    assert (len(chats), len(held)) == (120, 40)
    assert not {one.subject for one in chats} & {one.subject for one in held}
    assert len({one.subject for one in held}) == task.HELD
    assert len({one.text for one in (*chats, *held)}) == 160


@pytest.mark.parametrize(
    ("text", "finish", "wish", "easy", "verdict", "hint"),
    [
        ("A lake is a body of water.", "stop", "short", False, 1, ""),
        ("A lake is a body of water that", "length", "short", False, -1, "Answer in one short sentence."),
        ("", "stop", "short", False, -1, "Answer in one sentence."),
        ("Water.", "stop", "short", False, -1, "Answer in one sentence."),
        ("", "stop", "short", True, 1, ""),
        ("A lake is", "length", "weather", False, -1, "Mention the weather please."),
        ("", "stop", "weather", False, -1, "Mention the weather please."),
    ],
)
def test_the_user_says_what_the_rules_understand(
    text: str, finish: str, wish: str, easy: bool, verdict: int, hint: str
) -> None:
    said = task.reaction(text, finish, wish, easy=easy)
    assert judge.rules("user", said) == judge.Said(verdict, hint)
    assert task.good(text, finish) is (verdict == 1 and text != "")


def figures(end: float, **others: float) -> dict[str, float]:
    usual = {"base": 0.02, "subject": 0.8, "base_subject": 0.9, "words": 12.0, "empty": 0.0, "rejects": 0.0}
    return {**usual, "end": end, **others}


def test_the_demands() -> None:
    results: dict[str, dict[int, dict[str, float]]] = {"hint": {0: figures(0.7), 1: figures(0.55), 2: figures(0.65)}}
    assert [one.met for one in STUDY.demands(results)] == [True] * 5 + [None] * 4
    results |= {"irrelevant": {0: figures(0.1)}, "no-hint": {0: figures(0.2)}}
    results |= {"binary": {0: figures(0.0, rejects=3.0, empty=0.1)}}
    results |= {"binary-ungated": {0: figures(0.0, empty=1.0)}}
    assert [one.met for one in STUDY.demands(results)] == [True] * 6 + [False, True, True]
    results["binary-ungated"][0] = figures(0.9, subject=0.1)  # ends, and speaks of something else
    assert STUDY.demands(results)[-1].met
    results["binary"][0] = figures(0.9, rejects=3.0, subject=0.1)
    assert STUDY.demands(results)[-1].met is False
    results["hint"][1] = figures(0.45, base=0.1, subject=0.5, words=2.0)
    assert [one.met for one in STUDY.demands(results)][:5] == [False, True, False, False, False]


def test_every_arm_s_settings_are_the_recipe_s() -> None:
    for arm in STUDY.arms:
        fields = {key: value for key, value in arm.config["reef"].items() if key != "recipe"}
        assert OpenClawRecipe(**fields).batch_size == 16
    assert {arm.name: arm.seeds for arm in STUDY.arms}["hint"] == (0, 1, 2)


class Pupil:
    """A `Run` without a server: its answers end from the third release on. Stops when `lives` waves were learnt."""

    seed = 0

    def __init__(self, kept: dict[str, Any] | None = None, lives: int = 99) -> None:
        self.arm = next(arm for arm in STUDY.arms if arm.name == "hint")
        self.kept, self.lives = dict(kept or {}), lives
        self.chats: dict[str, list[Any]] = {}
        self.points: list[dict[str, Any]] = []

    def at(self, *place: object) -> random.Random:
        return random.Random(repr(place))

    async def ask(self, messages: Any, *, seed: int, max_tokens: int, **how: Any) -> Answer:
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if how.get("record", True):
            self.chats.setdefault(how["session"], []).append(said)
        release = how.get("release") or await self.head()
        short = int(release[1:]) >= 3
        text = f"About {said[0]['content']} {seed}" + ("" if short else " I could go on, and")
        return Answer(text, "r", release, "stop" if short else "length", {}, 5)

    async def learnt(self) -> dict[str, Any]:
        if self.lives == 0:
            raise KeyboardInterrupt
        self.lives -= 1
        return {"last": {"verdict": "accept", "reason": "Accepted.", "step": self.kept.get("waves", 0) + 1}}

    async def head(self) -> str:
        return f"r{self.kept.get('waves', 0)}"

    async def releases(self) -> list[dict[str, Any]]:
        return [{"release_id": "r0"}]

    async def drift(self, before: str, after: str) -> dict[str, float]:
        return {"kl": 0.1}

    def point(self, **figures: Any) -> None:
        self.points.append(figures)

    def keep(self, **values: Any) -> None:
        self.kept |= values


async def test_a_user_only_chats() -> None:
    run = Pupil()
    found = await STUDY.drive(run)  # type: ignore[arg-type]
    assert (found["base"], found["end"], found["accepts"], found["rejects"]) == (0.0, 1.0, 10, 0)
    assert [x for x, _ in found["curve"]] == [0, 80, 160]
    assert found["subject"] == found["base_subject"] == 1.0
    assert found["drift"] == {"kl": 0.1}
    assert len(run.chats) == 160
    for first, second in run.chats.values():
        assert second[:1] == first
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
    asked = [first[0]["content"] for first, _ in run.chats.values()]
    chats, _ = task.split()
    assert {asked.count(one.text) for one in chats} == {1, 2}  # every question, before any came again
    said = {second[2]["content"] for _, second in run.chats.values()}
    assert said == {task.THANKS, task.WISHES["short"]}
    assert run.points[0] == {"turns": 16, "accepted": 0.0, "verdict": "accept"}


async def test_a_study_that_was_cut_short_goes_on() -> None:
    whole = await STUDY.drive(Pupil())  # type: ignore[arg-type]
    first = Pupil(lives=7)
    with pytest.raises(KeyboardInterrupt):
        await STUDY.drive(first)  # type: ignore[arg-type]
    second = Pupil(first.kept)
    assert await STUDY.drive(second) == whole  # type: ignore[arg-type]
    assert len(second.chats) == 3 * 16
