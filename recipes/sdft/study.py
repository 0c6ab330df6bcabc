"""Does a model teach itself what it is shown? One short sentence, distilled from the model that has read one.

Knows: the arms and what must hold. Does not know: the questions (`recipes.sft.facts`), HTTP, servers.

- shown: each answer gets a demonstration, which only the teacher reads. The policy learns on its own tokens. What the
  teacher says itself to held-out questions is measured too: it is the limit.
- other: the teacher reads a demonstration that is no short sentence: a long one about something else, cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from ..sft import facts
from ..sft.facts import Question
from ..sft.study import measure, outcome, said
from .recipe import PLACE

BATCH, STEPS, EVERY = 16, 15, 5
TEMPLATE = "{demonstration}\nSay it in one very short sentence."
"""The embedded model does that 0.6 of the time; with the recipe's own template 0.2 (40 answers each), and a first run
with that one reached no more than 0.18: what the teacher cannot do it cannot teach."""


async def drive(run: Run) -> dict[str, Any]:
    asked, held = facts.split()
    if "base" not in run.kept:
        base = await measure(run, held)
        run.point(answers=0, **base)
        told = [replace(one, text=f"{one.text}\n\n{TEMPLATE.replace(PLACE, one.shown)}") for one in held]
        teacher = await measure(run, told)
        run.point(teacher=teacher["score"])
        run.keep(base=base, teacher=teacher, first=await run.head(), done=0, curve=[[0, base["score"]]])
    for number in range(run.kept["done"], STEPS):
        await show(run, number, asked)
        words = await run.learnt()
        count, verdict = (number + 1) * BATCH, (words.get("last") or {}).get("verdict")
        figures: dict[str, Any] = {"divergence": (words.get("metrics") or {}).get("divergence"), "verdict": verdict}
        kept = run.kept
        if (number + 1) % EVERY == 0:
            kept["end"] = await measure(run, held)
            kept["curve"] = [*kept["curve"], [count, kept["end"]["score"]]]
            figures |= kept["end"]
        run.point(answers=count, **figures)
        run.keep(**{**kept, "done": number + 1})
    drift = await run.drift(run.kept["first"], await run.head())
    return outcome(run.kept, drift) | {"teacher": run.kept["teacher"]["score"]}


async def show(run: Run, number: int, asked: Sequence[Question]) -> None:
    numbers = run.at("batch", number)
    chosen = [(one, numbers.randrange(2**31)) for one in numbers.sample(list(asked), BATCH)]
    answers = await asyncio.gather(*(run.ask(one.text, seed=seed, max_tokens=facts.LIMIT) for one, seed in chosen))
    pairs = [
        (answer.receipt, one.shown if run.arm.options["right"] else facts.OTHER)
        for (one, _), answer in zip(chosen, answers, strict=True)
    ]
    await asyncio.gather(*(run.report(receipt, demonstration=shown) for receipt, shown in pairs))


def demands(results: Results) -> Iterator[Demand]:
    main, placebo = (list(results.get(name, {}).values()) for name in ("shown", "other"))
    met = min(run["end"] for run in main) >= 0.4 if main else None
    yield Demand(f"{BATCH * STEPS} answers: at least 0.4 of held-out answers are one short sentence", met, said(main))
    met = all(run["subject_end"] >= 0.7 * run["subject_base"] for run in main) if main else None
    told = ", ".join(f"{run['subject_base']:.2f} -> {run['subject_end']:.2f}" for run in main)
    yield Demand("what was asked about is still named, at 70% of the base's rate", met, told or "not run")
    met = all(run["end"] <= run["base"] + 0.15 for run in placebo) if placebo else None
    yield Demand("a teacher that read something else: at most 0.15 above the base", met, said(placebo))


def arm(name: str, note: str, template: str, **options: Any) -> Arm:
    recipe = {"recipe": "recipes.sdft.recipe:SDFTRecipe", "template": template}
    reef = {**recipe, "batch_size": BATCH, "learning_rate": 1e-3}
    # Half-way between two ways of speaking answers are less about what was asked: with a look at every step, or the
    # usual limit of relevance (half of the base's own), honest steps were refused at 0.3 to 0.5 of it.
    gate = {"policy": "guarded", "evaluate_every": EVERY, "options": {"relevance": 0.25}}
    return Arm(name, {"reef": reef, "gate": gate}, options, (0,), note)


STUDY = Study(
    name="sdft",
    title="SDFT: distilled from the model that has read a demonstration",
    score="held-out answers that are one short sentence",
    progress="answers",
    arms=(
        arm("shown", "the teacher reads a short sentence about what was asked", TEMPLATE, right=True),
        arm("other", "the teacher reads something long about nothing", PLACE, right=False),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/sdft",
)
