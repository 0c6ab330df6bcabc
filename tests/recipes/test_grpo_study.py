"""The two studies of `grpo`: their splits, and their drives against a server that is played."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from tokenizers import Tokenizer

from recipes.grpo import skill, study
from reef.engines.local.folder import prepare
from reef.recipe import RECIPES
from reef.study import STUDIES, Arm, Study
from reef.study.run import Answer

TRAIN = skill.draw(random.Random(1), 2400, words=False, sentences=False)
HELD = skill.draw(random.Random(99), skill.HELD_OUT, words=True, sentences=True)


class Played:
    """A server whose answers are right with a chance that rises with each step; it does what `Run` promises."""

    def __init__(self, arm: Arm, right: Any, base: float = 0.3) -> None:
        self.arm, self.seed = arm, 0
        self.kept: dict[str, Any] = {}
        self.right, self.base, self.steps = right, base, 0
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.reported: list[tuple[str, float]] = []
        self.points: list[dict[str, Any]] = []

    def at(self, *place: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *place))))

    async def ask(self, prompt: str, **fields: Any) -> Answer:
        self.asked.append((prompt, fields))
        text = self.right(prompt, random.Random(f"{fields['seed']}").random() < self.base + 0.05 * self.steps, fields)
        return Answer(text, f"r{len(self.asked)}" if fields.get("record", True) else "", "r0", "stop", {}, 1)

    async def report(self, receipt: str, score: float) -> None:
        self.reported.append((receipt, score))

    async def learnt(self) -> dict[str, Any]:
        self.steps += 1
        return {"last": {"verdict": "accept", "reason": "played"}}

    async def head(self) -> str:
        return f"release {self.steps}"

    async def drift(self, before: str, after: str) -> dict[str, float]:
        return {"kl": 0.1}

    def point(self, **figures: Any) -> None:
        self.points.append(figures)

    def keep(self, **values: Any) -> None:
        self.kept = {**self.kept, **values}


def add(prompt: str, right: bool, fields: dict[str, Any]) -> str:
    a, b = (int(digit) for digit in prompt if digit.isdigit())
    return str(a + b) if right else "0"


def choose(prompt: str, right: bool, fields: dict[str, Any]) -> str:
    answers: list[str] = fields["structured_outputs"]["choice"]
    request = prompt.partition("Request: ")[2].partition("\n")[0]
    fits = [one for one in answers if any(_fits(request, said) for said in skill.TOOLS[json.loads(one)["tool"]][1])]
    assert len(fits) == 1, f"{request} is for one of the tools that are shown"
    return fits[0] if right else next(one for one in answers if one not in fits)


def _fits(request: str, sentence: str) -> bool:
    begin, _, end = sentence.partition("{}")
    return request.startswith(begin) and request.endswith(end)


@pytest.mark.parametrize(
    ("made", "right", "base"), [(study.STUDY, add, 0.03), (study.SKILL, choose, 0.35)], ids=["grpo", "skill"]
)
async def test_a_drive_goes_to_its_end_and_meets_its_demands(made: Study, right: Any, base: float) -> None:
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in made.arms:
        for seed in arm.seeds:
            run = Played(arm, right, base)
            if arm.options["shuffled"]:
                run.learnt = _idle(run)  # type: ignore[method-assign]
            found = results.setdefault(arm.name, {})[seed] = await made.drive(run)  # type: ignore[arg-type]
            assert found["curve"][0][1] == found["base"]
            assert found["curve"][-1][1] == found["end"]
            recorded = [prompt for prompt, fields in run.asked if fields.get("record", True)]
            others = [prompt for prompt, fields in run.asked if not fields.get("record", True)]
            assert len(recorded) == len(run.reported) == (384 if made is study.STUDY else 320)
            assert not set(recorded) & set(others), "what is measured is never trained on"
    known = {one.text: one for one in made.demands(results)}
    assert [one.text for one in known.values() if not one.met] == []
    assert all(one.met is None for one in made.demands({}))
    wrong = {name: {seed: {**run, "end": run["base"]} for seed, run in runs.items()} for name, runs in results.items()}
    assert any(one.met is False for one in made.demands(wrong)), "a run that learns nothing fails"


def _idle(run: Played) -> Any:
    async def learnt() -> dict[str, Any]:
        return {"last": {"verdict": "reject", "reason": "played"}}

    return learnt


async def test_shuffled_scores_are_the_same_ones() -> None:
    main, placebo = (Played(arm, choose) for arm in study.SKILL.arms)
    await skill.step(main, 3)  # type: ignore[arg-type]
    await skill.step(placebo, 3)  # type: ignore[arg-type]
    assert [prompt for prompt, _ in main.asked] == [prompt for prompt, _ in placebo.asked]
    assert Counter(score for _, score in main.reported) == Counter(score for _, score in placebo.reported)
    assert main.reported != placebo.reported


def test_the_studies_are_known_by_name() -> None:
    for name, made in (("grpo", study.STUDY), ("skill", study.SKILL)):
        assert STUDIES[name].partition(":")[0] == study.__name__
        assert made.name == name
        assert {arm.config["reef"]["recipe"] for arm in made.arms} <= RECIPES.keys()


def test_held_out_requests_share_neither_word_nor_sentence_with_trained_ones() -> None:
    known = skill.draw(random.Random(98), skill.KNOWN, words=True, sentences=False)
    asked = [one.request for one in TRAIN]
    for name, (listed, said) in skill.TOOLS.items():
        words = listed.split()
        assert len(words) == len(set(words)) == 16
        assert len(said) == len(set(said)) == 6
        unseen = set(words[: skill.WORDS])
        assert not any(said_word.strip("?.,") in unseen for one in asked for said_word in one.split()), name
        assert not any(_fits(one, sentence) for one in asked for sentence in said[-skill.SENTENCES :]), name
    assert all(any(_fits(one.request, said) for said in skill.TOOLS[one.shown[one.place]][1]) for one in known)
    assert not {one.request for one in known} & set(asked)


def test_every_tool_is_right_equally_often_and_in_every_place() -> None:
    for drawn in (HELD, TRAIN):
        assert len(set(Counter((one.shown[one.place], one.place) for one in drawn).values())) == 1
        assert all(len(set(one.shown)) == skill.SHOWN for one in drawn)


def test_only_the_whole_right_answer_is_right() -> None:
    one = skill.Choice("Play some jazz.", ("email", "music", "bank", "photo"), 1)
    said = (*one.answers, "music", "", '{"tool": "mus')
    assert [text for text in said if one.right(text)] == ['{"tool": "music"}']
    assert max(len(answer) for made in TRAIN for answer in made.answers) <= skill.TOKENS, "no answer is cut off"
    assert "email, music, bank, photo" in one.prompt


@pytest.mark.model
def test_each_name_is_one_token_of_the_embedded_model() -> None:
    tokenizer = Tokenizer.from_file(str(prepare("smollm2-135m").path / "tokenizer.json"))
    assert {len(tokenizer.encode(answer).ids) for one in TRAIN for answer in one.answers} == {6}
