"""Does GEPA find the sentence that helps? A model that never comes to an end, twelve edits, and 150 tasks to try them.

Knows: the arms, what is measured, what must hold. Does not know: HTTP, servers; the questions are in `task`, the
scripted reflectors in `reflect`.

- reads: the reflector reads the remarks and proposes one of twelve edits: two help, two hurt, most do nothing.
- idle: the same, but every edit it proposes does nothing: what is served must stay.
- own: the embedded model reflects itself. It is far too small for that; the arm says how it fails.

Three complaints begin one search. Its result passes the gate (policy `better`) on sixty questions that the search never
saw, or does not; what is served then answers forty-eight questions that neither of them saw.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from . import task

COMPLAINTS = 3
MOST = 24  # questions that are asked to get them
BUDGET = 150


async def drive(run: Run) -> dict[str, Any]:
    if "base" not in run.kept:
        base = await measure(run)
        run.point(searches=0, score=base["score"], ended=base["ended"])
        run.keep(base=base, first=await run.head())
    if "learnt" not in run.kept:
        asked = await complain(run, 0, COMPLAINTS)
        words = await run.learnt()
        spent = run.spent.get("learning")
        last, metrics = words.get("last") or {}, words.get("metrics") or {}
        run.keep(learnt={"metrics": metrics, "last": last, "asked": asked, "seconds": spent})
    end = await measure(run)
    released = await run.head() != run.kept["first"]
    run.point(searches=1, score=end["score"], ended=end["ended"], released=released)
    return figures(run.kept, end, released=released)


async def complain(run: Run, turn: int, wanted: int) -> int:
    """Ask training questions one after the other until so many answers were complained about; how many were asked."""
    order = list(range(len(task.TRAINED)))
    run.at("complain", turn).shuffle(order)
    told = asked = 0
    for place in order[:MOST]:
        text = task.TRAINED[place]
        seed = run.at("complain", turn, place).randrange(2**31)
        answer = await run.ask(text, seed=seed, max_tokens=task.LIMIT, temperature=task.TEMPERATURE)
        asked += 1
        if said := task.remark(answer.text):
            await run.report(answer.receipt, 0.0, feedback=said)
            told += 1
        if told == wanted:
            break
    return asked


async def measure(run: Run) -> dict[str, Any]:
    """Held-out questions, always with the same seeds, from what is served; not recorded."""
    said = await asyncio.gather(
        *(
            run.ask(text, seed=7_000 + place, max_tokens=task.LIMIT, temperature=task.TEMPERATURE, record=False)
            for place, text in enumerate(task.HELD)
        )
    )
    good = [task.good(answer.text) for answer in said]
    return {
        "score": sum(good) / len(good),
        "good": good,
        "ended": sum(answer.finish_reason == "stop" for answer in said) / len(said),
        "words": sum(task.words(answer.text) for answer in said) / len(said),
        "distinct": len({answer.text for answer in said}) / len(said),
    }


def figures(kept: dict[str, Any], end: dict[str, Any], *, released: bool) -> dict[str, Any]:
    base, last, metrics = kept["base"], kept["learnt"]["last"], kept["learnt"]["metrics"]
    reason = str(last.get("reason") or "")
    spent = re.search(r"(\d+) of \d+ metric calls", f"{metrics.get('metric_calls', '')} {reason}")
    calls = metrics.get("metric_calls", float(spent[1]) if spent else None)
    named = ("rounds", "rewrites", "usable", "better_on_minibatch", "candidates", "merges")
    gate, learning = (last.get("timings") or {}).get("gate"), kept["learnt"]["seconds"]
    return {
        **compared(base, end),
        "released": int(released),
        "metric_calls": calls,
        **{name: metrics.get(name) for name in named},
        "validation_before": metrics.get("validation_before"),
        "validation_best": metrics.get("validation_best"),
        "search_seconds": None if learning is None else learning - (gate or 0.0),
        "gate_seconds": gate,
        "ended_base": base["ended"],
        "ended_end": end["ended"],
        "words_base": base["words"],
        "words_end": end["words"],
        "distinct_end": end["distinct"],
        "verdict": reason[:300],
        "curve": [[0, base["score"]], [1, end["score"]]],
    }


def compared(base: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """The figures of the same questions before and after."""
    wins, losses = pairs(base["good"], end["good"])
    return {"base": base["score"], "end": end["score"], "wins": wins, "losses": losses, "p": mcnemar(wins, losses)}


def pairs(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int]:
    """How many questions became good, and how many no longer are."""
    both = list(zip(before, after, strict=True))
    return sum(new and not old for old, new in both), sum(old and not new for old, new in both)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p of so many wins and losses where both are as likely (McNemar 1947)."""
    count, low = wins + losses, min(wins, losses)
    tail = sum(math.comb(count, k) for k in range(low + 1)) / 2**count
    return min(1.0, 2 * tail)


def demands(results: Results) -> Iterator[Demand]:
    main, idle = (list(results.get(name, {}).values()) for name in ("reads", "idle"))
    every = [run for runs in results.values() for run in runs.values()]
    met = max(run["base"] for run in every) <= 0.15 if every else None
    yield Demand("the base gives one whole sentence at most 0.15 of the time", met, said(every, "base"))
    met = all(run["released"] and run["wins"] > run["losses"] and run["p"] < 0.01 for run in main)
    yield Demand(
        "reads: what is served at the end beats the base on 48 held-out questions, exact McNemar p < 0.01, each of 3 "
        "seeds",
        met if len(main) >= 3 else None,
        ", ".join(f"{run['wins']} won, {run['losses']} lost, p {run['p']:.2g}" for run in main) or "not run",
    )
    met = all(not run["released"] for run in idle) if len(idle) >= 3 else None
    yield Demand("idle: what is served stays the base, each of 3 seeds", met, said(idle, "released"))
    known = [run for run in every if run["metric_calls"] is not None]
    met = all(run["metric_calls"] <= BUDGET for run in known) if known else None
    yield Demand(f"no search runs more than {BUDGET} tasks", met, said(known, "metric_calls"))


def said(runs: Sequence[Any], name: str) -> str:
    return ", ".join(f"{run[name]:.3g}" for run in runs) or "not run"


def arm(name: str, note: str, reflector: str | None, seeds: tuple[int, ...]) -> Arm:
    reef = {
        "recipe": "recipes.gepa.recipe:GEPARecipe",
        "tasks": "recipes.gepa.task:TRAIN",
        "validation": "recipes.gepa.task:VALIDATION",
        "max_metric_calls": BUDGET,
        "components": ["rules"],
        "reflector": reflector,
        "answer_tokens": 256,
        "seed": "{seed}",
    }
    gate = {"policy": "better", "suite": "recipes.gepa.task:GATE"}
    return Arm(name, {"reef": reef, "gate": gate, "harness": {"apply": True}}, {}, seeds, note)


STUDY = Study(
    name="gepa",
    title="GEPA: finding the sentence that makes a small model come to an end",
    score="held-out answers that are one whole sentence",
    progress="searches",
    arms=(
        arm("reads", "a scripted reflector that reads the remarks", "recipes.gepa.reflect:reads", (0, 1, 2)),
        arm("idle", "placebo: every edit does nothing", "recipes.gepa.reflect:idles", (0, 1, 2)),
        arm("own", "the embedded model reflects itself", None, (0,)),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/gepa",
)
