"""Does SAO learn? One-digit addition: the right sum and then silence, on pairs of addends that were never trained on.

Knows: the prompts, the check, three arms, what must hold. Does not know: HTTP, servers, or how a run is shown.

- main: 384 single answers in batches of 32, each batch reported as soon as it is answered.
- shuffled: the same, with the scores shuffled inside each batch: nothing to learn, the same amount of training.
- lag3: each batch is reported when three further batches were asked, so that it trains three updates late.

The base answers right and stops now and then, so there is a signal. Most of its answers ramble on, and a policy that
only learnt to stop would gain: hence accuracy is also shown among the answers that ended.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Answer, Run

BATCH, UPDATES, TOKENS = 32, 12, 12
SAMPLES = 3  # of each held-out prompt, at the start and at the end; two in the middle


@dataclass(frozen=True, slots=True)
class Sum:
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a}+{self.b}? Reply with only the number."

    def right(self, text: str) -> bool:
        """The last whole number in the answer is the sum."""
        numbers = re.findall(r"\d+", text)
        return bool(numbers) and int(numbers[-1][:6]) == self.a + self.b


def split() -> tuple[list[Sum], list[Sum]]:
    """(54 to train on, 27 held out): 3 + 3 and the like count once, 3 + 5 and 5 + 3 are on the same side."""
    draw = random.Random(15)
    doubles = {(n, n) for n in draw.sample(range(1, 10), 3)}
    pairs = draw.sample([(a, b) for a in range(1, 10) for b in range(a + 1, 10)], 12)
    unseen = doubles | set(pairs)
    every = [Sum(a, b) for a in range(1, 10) for b in range(1, 10)]
    held = [one for one in every if (min(one.a, one.b), max(one.a, one.b)) in unseen]
    return [one for one in every if one not in held], held


TRAIN, HELD_OUT = split()


# --- one run ----------------------------------------------------------------------------------------------------------


async def drive(run: Run) -> dict[str, Any]:
    """UPDATES batches. What a batch waits for, and what was measured, is kept after each."""
    late: int = run.arm.options["late"]
    kept = run.kept
    if "base" not in kept:
        base = await measure(run, SAMPLES)
        run.point(rollouts=0, **base)
        run.keep(base=base, first=await run.head(), turn=0, waiting=[], curve=[[0, base["score"]]], steps=[])
    for turn in range(run.kept["turn"], UPDATES + late):
        kept = run.kept
        waiting = list(kept["waiting"])
        if turn < UPDATES:
            waiting.append(await batch(run, turn))
        if len(waiting) > late or turn >= UPDATES:
            await report(run, turn - late, waiting.pop(0))
            steps = [*kept["steps"], await learn(run, turn - late)]
            curve = kept["curve"]
            if len(steps) == UPDATES // 2:
                middle = await measure(run, 2)
                run.point(rollouts=len(steps) * BATCH, **middle)
                curve = [*curve, [len(steps) * BATCH, middle["score"]]]
            run.keep(turn=turn + 1, waiting=waiting, steps=steps, curve=curve)
        else:
            run.keep(turn=turn + 1, waiting=waiting)
    end = await measure(run, SAMPLES)
    run.point(rollouts=UPDATES * BATCH, **end)
    drift = await run.drift(run.kept["first"], await run.head())
    return figures(run.kept, end, drift)


async def batch(run: Run, number: int) -> list[list[Any]]:
    """One answer each to prompts that are trained on: [receipt, score] of every one."""
    numbers = run.at("batch", number)
    asked = [(one, numbers.randrange(2**31)) for one in numbers.sample(TRAIN, BATCH)]
    said = await asyncio.gather(*(run.ask(one.prompt, seed=seed, max_tokens=TOKENS) for one, seed in asked))
    return [[answer.receipt, reward(one, answer)] for (one, _), answer in zip(asked, said, strict=True)]


def reward(one: Sum, answer: Answer) -> float:
    return float(one.right(answer.text) and answer.finish_reason == "stop")


async def report(run: Run, number: int, waiting: Sequence[Sequence[Any]]) -> None:
    scores = [score for _, score in waiting]
    if run.arm.options.get("shuffled"):
        run.at("shuffle", number).shuffle(scores)
    sent = zip((receipt for receipt, _ in waiting), scores, strict=True)
    await asyncio.gather(*(run.report(receipt, score) for receipt, score in sent))


async def learn(run: Run, number: int) -> dict[str, Any]:
    """Wait for the update and what the gate says of it."""
    words = await run.learnt()
    last, metrics = words.get("last") or {}, words.get("metrics") or {}
    step = {
        "reward": metrics.get("reward"),
        "masked": metrics.get("pg_clipfrac"),
        "lag": metrics.get("lag_max"),
        "verdict": last.get("verdict"),
        "reason": last.get("reason"),
        "trained": words.get("trained"),
        "dropped": sum((words.get("dropped") or {}).values()),
        "timings": last.get("timings"),
    }
    shown = {name: step[name] for name in ("reward", "masked", "lag", "verdict")}
    run.point(rollouts=(number + 1) * BATCH, **shown)
    return step


async def measure(run: Run, samples: int) -> dict[str, Any]:
    """Held-out prompts, always with the same seeds, from what is served; not recorded."""
    asked = [(one, 1_000 * place + n) for place, one in enumerate(HELD_OUT) for n in range(samples)]
    said = await asyncio.gather(
        *(run.ask(one.prompt, seed=seed, max_tokens=TOKENS, record=False) for one, seed in asked)
    )
    ended = [(one, answer) for (one, _), answer in zip(asked, said, strict=True) if answer.finish_reason == "stop"]
    right = sum(one.right(answer.text) for one, answer in ended)
    return {
        "score": right / len(said),
        "ended": len(ended) / len(said),
        "given": right / len(ended) if ended else None,  # right, given that it ended
        "tokens": statistics.fmean(answer.tokens for answer in said),
        "distinct": len({answer.text for answer in said}),
        "answers": len(said),
    }


def figures(kept: dict[str, Any], end: dict[str, Any], drift: dict[str, float]) -> dict[str, Any]:
    base, steps = kept["base"], kept["steps"]
    found = {"base": base["score"], "end": end["score"]}
    for name in ("given", "ended", "tokens", "distinct"):
        found |= {f"{name}_base": base[name], f"{name}_end": end[name]}
    lags = sorted({step["lag"] for step in steps if step["lag"] is not None})
    masked = {
        lag: [step["masked"] for step in steps if step["lag"] == lag and step["masked"] is not None] for lag in lags
    }
    verdicts = [step["verdict"] for step in steps]
    return found | {
        **{f"masked_at_lag_{lag:.0f}": statistics.fmean(shares) for lag, shares in masked.items() if shares},
        "accepted": verdicts.count("accept"),
        "rejected": verdicts.count("reject"),
        "trained": steps[-1]["trained"],
        "dropped": steps[-1]["dropped"],
        "answers": end["answers"],
        "curve": [*kept["curve"], [UPDATES * BATCH, end["score"]]],
        "training": [[(n + 0.5) * BATCH, step["reward"]] for n, step in enumerate(steps) if step["reward"] is not None],
        "steps": steps,
        "drift": drift,
    }


# --- what must hold ---------------------------------------------------------------------------------------------------


def demands(results: Results) -> Iterator[Demand]:
    main, shuffled, late = (list(results.get(name, {}).values()) for name in ("main", "shuffled", "lag3"))
    ends = [run["end"] for run in main]
    whole = len(main) >= 3
    bases = [run["base"] for run in main]
    yield Demand("the base is at most 0.12", max(bases) <= 0.12 if main else None, _said("bases", bases))
    met = statistics.median(ends) >= 0.7 and min(ends) >= 0.5 if whole else None
    yield Demand(f"main: median 0.7, minimum 0.5 after {UPDATES * BATCH} rollouts, 3 seeds", met, _said("ends", ends))
    gains = [(run["given_base"], run["given_end"]) for run in main]
    known = [after > before for before, after in gains if before is not None and after is not None]
    met = all(known) and len(known) == len(main) if whole else None
    told = ", ".join(f"{_n(before)} -> {_n(after)}" for before, after in gains)
    yield Demand("main: among answers that ended, more are right than at the base, each seed", met, told or "no run")
    met = all(run["end"] <= run["base"] + 0.10 for run in shuffled) if shuffled else None
    told = ", ".join(f"{run['base']:.3f} -> {run['end']:.3f}" for run in shuffled)
    yield Demand("shuffled scores: at most 0.10 above the base", met, told or "no run")
    met = min(run["end"] for run in late) >= statistics.median(ends) - 0.15 if late and whole else None
    told = f"{_said('lag 3', [run['end'] for run in late])}, {_said('lag 0', ends)}"
    yield Demand("lag 3: not more than 0.15 below lag 0's median", met, told)


def _said(name: str, values: Sequence[float]) -> str:
    return f"{name} {', '.join(f'{value:.3f}' for value in values) or 'not run'}"


def _n(value: float | None) -> str:
    return "none ended" if value is None else f"{value:.3f}"


# --- the study --------------------------------------------------------------------------------------------------------

# The gate looks after every step, so that what is served is one step old at most and a batch of `main` never lags.
# The policy is the default, `guarded`: it asks whether the candidate is still a usable model, not whether it adds
# better, so honest progress passes and no score decides anything here. Measured, one seed an arm: main and lag3
# passed all of their 12 looks; shuffled passed 11 and failed one, by `relevance` (its answers fitted other sums
# almost as well as their own: 0.17 nats a token, 0.18 needed), and the line went on from the release before. A look
# took about a quarter of an update's time.
SERVER = {
    "reef": {"recipe": "sao", "batch_size": BATCH, "learning_rate": 5e-4, "seed": "{seed}"},
    "gate": {"policy": "guarded", "evaluate_every": 1},
}
LATE = {**SERVER, "reef": {**SERVER["reef"], "max_staleness": 3}}

STUDY = Study(
    name="sao",
    title="SAO: one-digit addition, the right sum and then silence",
    score="held-out answers that are right and ended",
    progress="rollouts",
    arms=(
        Arm("main", SERVER, {"late": 0}, (0, 1, 2), "each batch trains at once"),
        Arm("shuffled", SERVER, {"late": 0, "shuffled": True}, (0,), "placebo: scores shuffled inside each batch"),
        Arm("lag3", LATE, {"late": 3}, (0,), "each batch trains three updates late"),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/sao",
)
