"""Does test-time training learn? Circle packing, n = 32, by row layouts: the trained policy against the same search
with an untrained one, and against searches without a model, at equal numbers of distinct verifier calls.

Knows: the arms, their figures, what must hold. Does not know: servers, how a step goes (`search`), values (`circle`).

- trained: 9 steps of 4 groups of 8 rollouts.
- frozen: the same first states, prompts and seeds, nothing reported; until it made as many distinct calls as the
  trained one could at most.
- random: legal layouts drawn uniformly, 8 seeds inside the one run; climb: a hill climber, 4 seeds.

What is compared is the mean reward of a step. The best value ever found is a matter of luck as well, and what an
optimiser makes of it is none of the policy's doing.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from .circle import Rows
from .controls import Tally, climbed, drawn
from .search import Search, Settings

N, GROUPS, ROLLOUTS, STEPS = 32, 4, 8, 9
MOST = GROUPS + STEPS * GROUPS * ROLLOUTS
"""Distinct verifier calls a run of STEPS steps can make: its seeds and every rollout."""
LAST = 3
GAIN = 0.10

DISCOVER = {
    "reef": {"recipe": "recipes.tttd.recipe:DiscoverRecipe", "learning_rate": 1e-3},
    "gate": {"policy": "always", "evaluate_every": 1, "patience": 1},
    "releases": {"watch": {"action": "off"}},
}
ALONE = {"reef": {"engine": "fake", "recipe": "record"}}
"""For searches without a model: a server that is asked nothing."""


async def drive(run: Run) -> dict[str, Any]:
    kind = str(run.arm.options["policy"])
    if kind in ("random", "climb"):
        return await _without(run, drawn if kind == "random" else climbed, int(run.arm.options["seeds"]))
    problem = Rows(N)
    settings = Settings(groups=GROUPS, rollouts=ROLLOUTS, seed=run.seed, frozen=kind == "frozen")
    search = Search(run, problem, settings, lambda document: run.keep(search=document), run.kept.get("search"))
    history = search.state.history
    while len(history) < STEPS or (settings.frozen and len(search.state.known) < MOST):
        run.point(**await search.step())
    best = search.state.archive.best()
    chain = await run.releases()
    moved = chain[0]["release_id"] != chain[-1]["release_id"]
    means = [float(one["mean"]) for one in history]
    return {
        "base": means[0],
        "end": statistics.fmean(means[-LAST:]),
        "first_three": statistics.fmean(means[:LAST]),
        "steps": len(history),
        "best": best.value,
        "calls": len(search.state.known),
        "distinct_first": history[0]["distinct"],
        "distinct_last": history[-1]["distinct"],
        "polished": await asyncio.to_thread(problem.polish, best.state),
        "layout": best.state,
        "curve": [[one["step"], one["mean"]] for one in history],
        "means_by_calls": [[one["calls"], one["mean"]] for one in history],
        "bests": search.state.curve,
        "distinct": [one["distinct"] for one in history],
        "drift": await run.drift(chain[0]["release_id"], chain[-1]["release_id"]) if moved else {},
    }


async def _without(run: Run, search: Callable[[Rows, int, int], Tally], seeds: int) -> dict[str, Any]:
    """Several searches of MOST calls each. `base` and `end` are the mean value of what they looked at."""
    problem = Rows(N)
    found = [await asyncio.to_thread(search, problem, MOST, seed) for seed in range(seeds)]
    means = [statistics.fmean(one.value for one in tally.known.values()) for tally in found]
    for seed, (tally, mean) in enumerate(zip(found, means, strict=True)):
        run.point(search=seed, mean=mean, best=tally.curve[-1], layout=tally.best)
    bests = [tally.curve[-1] for tally in found]
    top = max(found, key=lambda tally: tally.curve[-1])
    curves = [sum(values) / seeds for values in zip(*(tally.curve for tally in found), strict=True)]
    return {
        "base": statistics.fmean(means),
        "end": statistics.fmean(means),
        "best": statistics.fmean(bests),
        "best_least": min(bests),
        "best_most": max(bests),
        "calls": MOST,
        "polished": await asyncio.to_thread(problem.polish, top.best),
        "layout": top.best,
        "curve": [[0, statistics.fmean(means)], [STEPS, statistics.fmean(means)]],
        "bests": curves,
        "searches": [[seed, mean, best] for seed, (mean, best) in enumerate(zip(means, bests, strict=True))],
    }


# --- demands ----------------------------------------------------------------------------------------------------------


def demands(results: Results) -> Sequence[Demand]:
    trained, frozen = results.get("trained", {}), results.get("frozen", {})
    pairs = [(seed, trained[seed], frozen[seed]) for seed in sorted(set(trained) & set(frozen))]
    needed = [f"{arm} {seed}" for arm, seed in missing(results)]
    known = not needed
    gains = [(seed, float(one["end"]) - equal(other, int(one["calls"]))) for seed, one, other in pairs]
    bests = [(seed, float(one["best"]), best_at(other, int(one["calls"]))) for seed, one, other in pairs]
    said = "; ".join(f"seed {seed}: {gain:+.3f}" for seed, gain in gains) or "no pair of runs"
    found = "; ".join(f"seed {seed}: {ours:.4f} and {theirs:.4f}" for seed, ours, theirs in bests) or "no pair of runs"
    met = None if not known else all(gain >= GAIN for _, gain in gains)
    no_lower = None if not known else all(ours >= theirs for _, ours, theirs in bests)
    return [
        Demand(
            f"mean reward of the last {LAST} steps, trained minus frozen at as many distinct verifier calls: at least "
            f"{GAIN:.2f} with every seed",
            met,
            said,
        ),
        Demand(
            "best so far at as many distinct calls: the trained one's is not below the frozen one's", no_lower, found
        ),
        *_beside(results, trained),
    ]


def _beside(results: Results, trained: Mapping[int, Mapping[str, Any]]) -> list[Demand]:
    """The searches without a model stand beside it: nothing is demanded of them but that they are there."""
    found = []
    for arm in ("random", "climb"):
        runs = list(results.get(arm, {}).values())
        calls = [int(one["calls"]) for one in trained.values()]
        words = "not run"
        if runs and calls:
            at = max(1, min(round(statistics.fmean(calls)), len(runs[0]["bests"])))
            words = f"mean best after {at} calls {runs[0]['bests'][at - 1]:.4f} (after {runs[0]['calls']}: "
            words += f"{runs[0]['best_least']:.4f} to {runs[0]['best_most']:.4f})"
        found.append(Demand(f"the search `{arm}`, without a model, is shown beside it", bool(runs) or None, words))
    return found


def missing(results: Results) -> list[tuple[str, int]]:
    """The runs of the trained and the frozen arm that are not there."""
    wanted = [(arm.name, seed) for arm in STUDY.arms if arm.name in ("trained", "frozen") for seed in arm.seeds]
    return [(arm, seed) for arm, seed in wanted if seed not in results.get(arm, {})]


def equal(run: Mapping[str, Any], calls: int) -> float:
    """The mean reward of a run's last steps at the time when it had made so many distinct calls."""
    steps = run["means_by_calls"]
    until = next((place for place, (made, _) in enumerate(steps, 1) if made >= calls), len(steps))
    until = max(until, min(LAST, len(steps)))
    return statistics.fmean(float(mean) for _, mean in steps[max(0, until - LAST) : until])


def best_at(run: Mapping[str, Any], calls: int) -> float:
    """A run's best value after so many distinct calls."""
    bests = run["bests"]
    return float(bests[min(calls, len(bests)) - 1])


STUDY = Study(
    name="tttd",
    title="TTT-Discover: circle packing by row layouts, n = 32",
    score="mean reward of a step",
    progress="steps",
    arms=(
        Arm("trained", DISCOVER, {"policy": "trained"}, (0, 1, 2), f"{STEPS} steps of {GROUPS} groups of {ROLLOUTS}"),
        Arm("frozen", DISCOVER, {"policy": "frozen"}, (0, 1, 2), "the same search, nothing reported"),
        Arm("random", ALONE, {"policy": "random", "seeds": 8}, (0,), "no model: layouts drawn uniformly, 8 searches"),
        Arm("climb", ALONE, {"policy": "climb", "seeds": 4}, (0,), "no model: hill climbing, 4 searches"),
    ),
    drive=drive,
    demands=demands,
    folder="recipes/tttd",
)
