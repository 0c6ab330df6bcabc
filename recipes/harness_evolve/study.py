"""Is what a proposer gets wrong kept from users? One edit that helps, then idle ones; and a model that is too small.

Knows: the arms, what is measured, what must hold. Does not know: HTTP, servers; the questions and remarks are those of
`gepa`.

- script: the first complaints bring the rule that helps; all later ones bring rules that are meant to do nothing, one
  at a time, measured against what is right about a third of the time. The gate (policy `better`) should let the first
  through and none of the others. (Beside the rule that helps they do harm: so small a model loses sight of it.)
- own: the embedded model proposes, with one repair turn. It is far too small for that; the arm says how it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from ..gepa.study import compared, complain, measure

COMPLAINTS = 3


async def drive(run: Run) -> dict[str, Any]:
    if "base" not in run.kept:
        base = await measure(run)
        run.point(batches=0, score=base["score"], ended=base["ended"])
        run.keep(base=base, head=await run.head(), turns=[], curve=[[0, base["score"]]])
    for turn in range(len(run.kept["turns"]), int(run.arm.options["turns"])):
        asked, before = await complain(run, turn, COMPLAINTS), run.spent.get("learning", 0.0)
        words = await run.learnt()
        last, head = words.get("last") or {}, await run.head()
        made = {
            "asked": asked,
            "verdict": last.get("verdict"),
            "reason": str(last.get("reason") or ""),
            "released": head != run.kept["head"],
            "seconds": run.spent.get("learning", 0.0) - before,
            "gate": (last.get("timings") or {}).get("gate"),
        }
        run.point(batches=turn + 1, verdict=made["verdict"], released=made["released"])
        run.keep(turns=[*run.kept["turns"], made], head=head)
        if made["released"]:
            after = await measure(run)
            run.keep(after=after, curve=[*run.kept["curve"], [turn + 1, after["score"]]])
    end = await measure(run)
    return figures(run.kept, end)


def figures(kept: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    base, turns = kept["base"], kept["turns"]
    unread = sum("cannot be used" in one["reason"] for one in turns)
    unwritten = sum("refused" in one["reason"] or "is empty" in one["reason"] for one in turns)
    declined = sum(one["reason"].startswith("no proposal") for one in turns) - unread - unwritten
    released = [one["released"] for one in turns]
    return {
        **compared(base, end),
        "orders": len(turns),
        "not_usable": unread,  # after a repair turn: no JSON in the form, or refused by cordis
        "no_answer": unwritten,
        "no_edit_wanted": max(0, declined),
        "candidates": len(turns) - sum(one["reason"].startswith("no proposal") for one in turns),
        "released": sum(released),
        "released_first": int(bool(released and released[0])),
        "released_later": sum(released[1:]),
        "seconds_an_order": _mean(turns, "seconds"),
        "gate_seconds": _mean(turns, "gate"),
        "ended_base": base["ended"],
        "ended_end": end["ended"],
        "curve": [*kept["curve"], [len(turns), end["score"]]],
        "turns": turns,
    }


def _mean(turns: Sequence[Any], name: str) -> float | None:
    known = [one[name] for one in turns if one[name] is not None]
    return sum(known) / len(known) if known else None


def demands(results: Results) -> Iterator[Demand]:
    script = list(results.get("script", {}).values())
    met = all(run["released_first"] and run["p"] < 0.01 and run["wins"] > run["losses"] for run in script)
    yield Demand(
        "script: the rule that helps is released, and held-out answers are better (exact McNemar p < 0.01)",
        met if script else None,
        ", ".join(f"{run['wins']} won, {run['losses']} lost, p {run['p']:.2g}" for run in script) or "not run",
    )
    met = all(run["released_later"] == 0 for run in script) if script else None
    told = ", ".join(f"{run['released_later']} of {run['orders'] - 1}" for run in script)
    yield Demand("script: no rule that does nothing is released", met, told or "not run")
    own = list(results.get("own", {}).values())
    met = all(run["end"] >= run["base"] - 0.1 for run in own) if own else None
    told = ", ".join(f"{run['candidates']} candidates of {run['orders']} orders" for run in own)
    yield Demand("own: whatever the small model proposes, what is served is no worse", met, told or "not run")


def arm(name: str, note: str, proposer: str | None, turns: int) -> Arm:
    reef = {"recipe": "recipes.harness_evolve.recipe:HarnessEvolve", "batch_size": COMPLAINTS, "proposer": proposer}
    reef |= {"kinds": ["rules"], "answer_tokens": 384}
    gate = {"policy": "better", "suite": "recipes.gepa.task:GATE"}
    return Arm(name, {"reef": reef, "gate": gate, "harness": {"apply": True}}, {"turns": turns}, (0,), note)


STUDY = Study(
    name="harness_evolve",
    title="Harness evolution: one rule that helps, and many that do nothing",
    score="held-out answers that are one whole sentence",
    progress="batches of three complaints",
    arms=(
        arm("script", "a rule that helps, then rules that do nothing", "recipes.harness_evolve.propose:reads", 5),
        arm("own", "the embedded model proposes", None, 4),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/harness_evolve",
)
