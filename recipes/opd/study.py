"""Does a pupil reach its teacher? One short sentence, distilled token by token from a release that learnt it.

Knows: how the teacher is made, the arms, what must hold. Does not know: the questions (`recipes.sft.facts`), HTTP.

The teacher is a release of another scenario on the same server, taught by 32 demonstrations (`sft`). The pupil begins
at the base; it answers, nobody reports anything, and each batch of answers is a step.

- taught: the teacher is that release.
- itself: the teacher is the base, which the pupil is: nothing may change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from ..sft import facts
from ..sft.facts import Question
from ..sft.study import BATCH as SHOWN_AT_ONCE
from ..sft.study import EPOCHS, SHOWN, measure, outcome, said, show

BATCH, STEPS, EVERY = 16, 15, 5
TEACHER, PUPIL = "teacher", "pupil"


async def drive(run: Run) -> dict[str, Any]:
    asked, held = facts.split()
    if "teacher" not in run.kept:
        run.keep(**await teach(run, asked, held))
    run.scenario = PUPIL
    if "base" not in run.kept:
        await run.create(PUPIL, recipe="opd", batch_size=BATCH, teacher=run.kept["teacher"],
                         learning_rate=1e-3)  # fmt: skip
        base = await measure(run, held)
        run.point(answers=0, **base)
        run.keep(base=base, first=await run.head(), done=0, curve=[[0, base["score"]]])
    for number in range(run.kept["done"], STEPS):
        numbers = run.at("pupil", number)
        chosen = [(one, numbers.randrange(2**31)) for one in numbers.sample(list(asked), BATCH)]
        await asyncio.gather(*(run.ask(one.text, seed=seed, max_tokens=facts.LIMIT) for one, seed in chosen))
        words = await run.learnt()
        metrics, kept = words.get("metrics") or {}, run.kept
        figures: dict[str, Any] = {"reverse_kl": metrics.get("reverse_kl"), "grad_norm": metrics.get("grad_norm")}
        if (number + 1) % EVERY == 0:
            kept["end"] = await measure(run, held)
            kept["curve"] = [*kept["curve"], [(number + 1) * BATCH, kept["end"]["score"]]]
            figures |= kept["end"]
        run.point(answers=(number + 1) * BATCH, verdict=(words.get("last") or {}).get("verdict"), **figures)
        kept["norms"] = [*kept.get("norms", ()), metrics.get("grad_norm")]
        run.keep(**{**kept, "done": number + 1})
    found = outcome(run.kept, await run.drift(run.kept["first"], await run.head()))
    changed = len(await run.releases()) - 1
    return found | {"teacher": run.kept["taught"]["score"], "releases": changed, "norms": run.kept["norms"]}


async def teach(run: Run, asked: Sequence[Question], held: Sequence[Question]) -> dict[str, Any]:
    """The release that teaches, and what it scores."""
    run.scenario = TEACHER
    if run.arm.options["itself"]:
        return {"teacher": await run.head(), "taught": await measure(run, held)}
    for number in range(SHOWN // SHOWN_AT_ONCE):
        await show(run, number, asked)
        await run.learnt()
    found = await measure(run, held)
    run.point(teacher=found["score"])
    return {"teacher": await run.head(), "taught": found}


def demands(results: Results) -> Iterator[Demand]:
    main, placebo = (list(results.get(name, {}).values()) for name in ("taught", "itself"))
    lifts = [(run["end"] - run["base"], run["teacher"] - run["base"]) for run in main]
    met = all(pupil >= 0.8 * teacher for pupil, teacher in lifts) if lifts else None
    told = ", ".join(f"{pupil:+.3f} of the teacher's {teacher:+.3f}" for pupil, teacher in lifts)
    yield Demand(f"the pupil has 80% of its teacher's lift in {STEPS} steps", met, told or "not run")
    met = all(run["releases"] == 0 for run in placebo) if placebo else None
    yield Demand("a teacher that is the pupil changes nothing: no release", met, said(placebo))


def arm(name: str, note: str, **options: Any) -> Arm:
    recipe = {"recipe": "recipes.sft.recipe:SFTRecipe", "batch_size": SHOWN_AT_ONCE, "epochs": EPOCHS, "kl": 0.0}
    reef = {"default_scenario": TEACHER, **recipe, "learning_rate": 1e-3}
    return Arm(name, {"reef": reef, "gate": {"policy": "guarded"}}, {"right": True, **options}, (0,), note)


STUDY = Study(
    name="opd",
    title="OPD: a pupil and its frozen teacher",
    score="held-out answers that are one short sentence",
    progress="answers",
    arms=(
        arm("taught", "the teacher is a release that learnt it from demonstrations", itself=False),
        arm("itself", "the teacher is the base", itself=True),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/opd",
)
