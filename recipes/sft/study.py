"""Do demonstrations teach? Thirty-two of them, one short sentence each, and then questions about other things.

Knows: the prompts, the arms, what must hold. Does not know: HTTP, servers, or how a run is shown.

- shown: 32 demonstrations in two batches, three epochs each.
- other: the same prompts and the same amount of training, but what is shown is long and about nothing. (The model's own
  answers are no placebo: they are cut off, and whoever learns them learns to end there. That reached 0.58.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from . import facts
from .facts import Question

SHOWN, BATCH, EPOCHS = 32, 16, 3
SAMPLES = 2  # of each held-out question


async def drive(run: Run) -> dict[str, Any]:
    asked, held = facts.split()
    if "base" not in run.kept:
        base = await measure(run, held)
        run.point(demonstrations=0, **base)
        run.keep(base=base, first=await run.head(), done=0, curve=[[0, base["score"]]])
    for number in range(run.kept["done"], SHOWN // BATCH):
        await show(run, number, asked)
        words = await run.learnt()
        figures = await measure(run, held)
        count = (number + 1) * BATCH
        verdict = (words.get("last") or {}).get("verdict")
        run.point(demonstrations=count, loss=(words.get("metrics") or {}).get("loss"), verdict=verdict, **figures)
        run.keep(done=number + 1, end=figures, curve=[*run.kept["curve"], [count, figures["score"]]])
    drift = await run.drift(run.kept["first"], await run.head())
    return outcome(run.kept, drift)


async def show(run: Run, number: int, asked: Sequence[Question]) -> None:
    """A batch of questions, answered and then corrected."""
    numbers = run.at("batch", number)
    chosen = [(one, numbers.randrange(2**31)) for one in numbers.sample(list(asked), BATCH)]
    said = await asyncio.gather(*(run.ask(one.text, seed=seed, max_tokens=facts.LIMIT) for one, seed in chosen))

    def shown(one: Question) -> str:
        return one.shown if run.arm.options["right"] else facts.OTHER

    pairs = zip(chosen, said, strict=True)
    await asyncio.gather(*(run.report(answer.receipt, demonstration=shown(one)) for (one, _), answer in pairs))


async def measure(run: Run, held: Sequence[Question], release: str | None = None) -> dict[str, Any]:
    """Held-out questions, always with the same seeds, from what is served (or one release); not recorded."""
    places = [(one, 1_000_003 * (place + 1) + n) for place, one in enumerate(held) for n in range(SAMPLES)]
    said = await asyncio.gather(
        *(run.ask(one.text, seed=seed, max_tokens=facts.LIMIT, record=False, release=release) for one, seed in places)
    )
    count = len(said)
    return {
        "score": sum(facts.good(one.text, one.finish_reason) for one in said) / count,
        "ended": sum(one.finish_reason == "stop" for one in said) / count,
        "subject": sum(facts.names(asked, one.text) for (asked, _), one in zip(places, said, strict=True)) / count,
        "words": sum(facts.words(one.text) for one in said) / count,
        "distinct": len({one.text for one in said}) / count,
        "asked": count,
    }


def outcome(kept: dict[str, Any], drift: dict[str, float]) -> dict[str, Any]:
    """The figures of a run: those before and after, and how far general answers moved."""
    base, end = kept["base"], kept["end"]
    found: dict[str, Any] = {"base": base["score"], "end": end["score"], "curve": kept["curve"], "drift": drift}
    for name in ("ended", "subject", "words", "distinct"):
        found |= {f"{name}_base": base[name], f"{name}_end": end[name]}
    return found | {"asked": end["asked"]}


def demands(results: Results) -> Iterator[Demand]:
    main, placebo = (list(results.get(name, {}).values()) for name in ("shown", "other"))
    ends = [run["end"] for run in main]
    met = min(ends) >= 0.7 if ends else None
    yield Demand(
        "32 demonstrations, 3 epochs: at least 0.7 of held-out answers are one short sentence", met, said(main)
    )
    met = all(run["subject_end"] >= 0.8 * run["subject_base"] for run in main) if main else None
    told = ", ".join(f"{run['subject_base']:.2f} -> {run['subject_end']:.2f}" for run in main)
    yield Demand("what was asked about is still named, at 80% of the base's rate", met, told or "not run")
    met = all(run["end"] <= run["base"] + 0.15 for run in placebo) if placebo else None
    yield Demand("shown something long about nothing: at most 0.15 above the base", met, said(placebo))


def said(runs: Sequence[Any]) -> str:
    return ", ".join(f"{run['base']:.3f} -> {run['end']:.3f}" for run in runs) or "not run"


def arm(name: str, note: str, **options: Any) -> Arm:
    reef = {"recipe": "recipes.sft.recipe:SFTRecipe", "batch_size": BATCH, "epochs": EPOCHS, "learning_rate": 1e-3}
    reef["kl"] = 0.0
    return Arm(name, {"reef": reef, "gate": {"policy": "guarded"}}, options, (0,), note)


STUDY = Study(
    name="sft",
    title="SFT: 32 demonstrations of one short sentence",
    score="held-out answers that are one short sentence",
    progress="demonstrations",
    arms=(
        arm("shown", "a short sentence is shown for each answer", right=True),
        arm("other", "something long about nothing is shown", right=False),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/sft",
)
