"""Which candidates are the best at something: the front of each task, who is dominated, who is drawn as a parent.

Knows: scores by candidate and task. Does not know: what a candidate or a task is.

GEPA (arXiv 2507.19457), algorithm 2: a candidate is kept for what it alone is best at, so a search does not circle
around the one with the best mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

Fronts = Mapping[str, Collection[int]]
"""By task: the candidates with the best score on it."""


def fronts(scores: Sequence[Mapping[str, float]]) -> dict[str, set[int]]:
    """`scores[candidate][task]`; a task that a candidate was not measured on is not in its mapping."""
    found: dict[str, set[int]] = {}
    best: dict[str, float] = {}
    for place, given in enumerate(scores):
        for task, score in given.items():
            if task not in best or score > best[task]:
                best[task], found[task] = score, {place}
            elif score == best[task]:
                found[task].add(place)
    return found


def mean(scores: Mapping[str, float]) -> float:
    """Of one candidate; minus infinity for one that was measured on nothing."""
    return math.fsum(scores.values()) / len(scores) if scores else -math.inf


def survivors(on: Fronts, means: Sequence[float]) -> dict[int, int]:
    """Candidates that are not dominated, each with the number of fronts it is on.

    They are visited from the lowest mean (of equals the newest first): one is dominated when every front that it is on
    has another one that still stands.
    """
    standing = {place for members in on.values() for place in members}
    for place in sorted(standing, key=lambda place: (means[place], -place)):
        own = [members for members in on.values() if place in members]
        if all(any(other in standing and other != place for other in members) for members in own):
            standing.discard(place)
    return {place: sum(place in members for members in on.values()) for place in sorted(standing)}


def draw(on: Fronts, means: Sequence[float], chance: random.Random) -> int:
    """A survivor, with a probability proportional to the number of fronts it is on."""
    counts = survivors(on, means)
    return chance.choices(list(counts), weights=list(counts.values()))[0]
