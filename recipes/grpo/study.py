"""Does GRPO learn? One-digit addition by groups: the right sum and then silence, on pairs that were never trained on.

Knows: the arms, how groups are asked and reported, what must hold. Does not know: HTTP, servers; the sums, their split
and their check are those of the study `sao`.

- main: 12 steps of 8 groups, each of 4 answers to one prompt: 384 rollouts.
- shuffled: the same with the scores of a step shuffled, also between groups: nothing to learn, the same training.

SKILL, the second study of this folder, is in `skill`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from ..sao import study as sums
from .skill import SKILL

GROUPS, SIZE, STEPS = 8, 4, 12
ROLLOUTS = GROUPS * SIZE


async def drive(run: Run) -> dict[str, Any]:
    """STEPS steps; measured before, in the middle and after, always with the same held-out prompts and seeds."""
    if "base" not in run.kept:
        base = await sums.measure(run, sums.SAMPLES)
        run.point(rollouts=0, **base)
        run.keep(base=base, first=await run.head(), steps=[], curve=[[0, base["score"]]])
    while len(run.kept["steps"]) < STEPS:
        steps, curve = list(run.kept["steps"]), list(run.kept["curve"])
        steps.append(await step(run, len(steps)))
        rollouts = len(steps) * ROLLOUTS
        if len(steps) == STEPS // 2:
            middle = await sums.measure(run, 2)
            run.point(rollouts=rollouts, **middle)
            curve.append([rollouts, middle["score"]])
        run.keep(steps=steps, curve=curve)
    end = await sums.measure(run, sums.SAMPLES)
    run.point(rollouts=STEPS * ROLLOUTS, **end)
    base, steps = run.kept["base"], run.kept["steps"]
    found: dict[str, Any] = {"base": base["score"], "end": end["score"]}
    for name in ("given", "ended", "tokens", "distinct"):
        found |= {f"{name}_base": base[name], f"{name}_end": end[name]}
    verdicts = [one["verdict"] for one in steps]
    return found | {
        "zero_signal_groups": sum(one["flat"] for one in steps),
        "groups": GROUPS * STEPS,
        "accepted": verdicts.count("accept"),
        "rejected": verdicts.count("reject"),
        "curve": [*run.kept["curve"], [STEPS * ROLLOUTS, end["score"]]],
        "training": [[(number + 0.5) * ROLLOUTS, one["reward"]] for number, one in enumerate(steps)],
        "steps": steps,
        "drift": await run.drift(run.kept["first"], await run.head()),
    }


async def step(run: Run, number: int) -> dict[str, Any]:
    """GROUPS prompts, SIZE answers to each, their scores, and what was made of them. Nothing names the groups: they are
    known by their prompts."""
    numbers = run.at("step", number)
    asked = [(one, numbers.randrange(2**31)) for one in numbers.sample(sums.TRAIN, GROUPS) for _ in range(SIZE)]
    said = await asyncio.gather(*(run.ask(one.prompt, seed=seed, max_tokens=sums.TOKENS) for one, seed in asked))
    scores = [sums.reward(one, answer) for (one, _), answer in zip(asked, said, strict=True)]
    reward = sum(scores) / len(scores)
    if run.arm.options["shuffled"]:
        run.at("shuffle", number).shuffle(scores)
    flat = sum(len(set(scores[first : first + SIZE])) == 1 for first in range(0, ROLLOUTS, SIZE))
    await asyncio.gather(*(run.report(answer.receipt, score) for answer, score in zip(said, scores, strict=True)))
    words = await run.learnt()
    last = words.get("last") or {}
    run.point(rollouts=(number + 1) * ROLLOUTS, reward=reward, flat=flat, verdict=last.get("verdict"))
    return {"reward": reward, "flat": flat, "verdict": last.get("verdict"), "reason": last.get("reason")}


def demands(results: Results) -> Iterator[Demand]:
    main, shuffled = (list(results.get(name, {}).values()) for name in ("main", "shuffled"))

    def told(runs: list[Any]) -> str:
        return ", ".join(f"{one['base']:.3f} to {one['end']:.3f}" for one in runs) or "not run"

    met = all(one["base"] <= 0.12 for one in main) if main else None
    yield Demand("the base is at most 0.12", met, told(main))
    met = all(one["end"] >= 0.5 for one in main) if main else None
    yield Demand(f"main: at least 0.5 after {STEPS * ROLLOUTS} rollouts", met, told(main))
    met = all(one["end"] <= one["base"] + 0.10 for one in shuffled) if shuffled else None
    yield Demand("shuffled scores: at most 0.10 above the base", met, told(shuffled))


SERVER = {
    "reef": {"recipe": "grpo", "groups": GROUPS, "group_size": SIZE, "learning_rate": 1e-3},
    "gate": {"policy": "guarded", "evaluate_every": 1},
}

STUDY = Study(
    name="grpo",
    title="GRPO: one-digit addition in groups of four",
    score="held-out answers that are right and ended",
    progress="rollouts",
    arms=(
        Arm("main", SERVER, {"shuffled": False}, (0,), "each step is 8 groups of 4"),
        Arm("shuffled", SERVER, {"shuffled": True}, (0,), "placebo: scores shuffled inside each step"),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/grpo",
)

__all__ = ["SKILL", "STUDY"]
