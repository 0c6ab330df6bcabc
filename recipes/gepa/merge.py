"""Two candidates joined at what each of them changed of an ancestor they share.

Knows: texts by component, who came from whom. Does not know: how a candidate is measured.

GEPA (arXiv 2507.19457), appendix on system-aware merge: of each component the changed text; where both changed it, the
better candidate's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

TRIED = 5
"""Validation tasks that a joined candidate is tried on first, and the least two candidates must have in common."""

Texts = Mapping[str, str]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Join:
    first: int
    second: int
    ancestor: int
    texts: Texts


def ancestors(parents: Sequence[Sequence[int]], place: int) -> set[int]:
    """All candidates that this one came from, without itself."""
    found: set[int] = set()
    open_ = list(parents[place])
    while open_:
        if (one := open_.pop()) not in found:
            found.add(one)
            open_ += parents[one]
    return found


def join(ancestor: Texts, first: Texts, second: Texts, better: Texts) -> dict[str, str]:
    """`better` is one of the two, and decides where both changed a component."""
    made = {}
    for name in dict.fromkeys((*ancestor, *first, *second)):
        before, one, other = (texts.get(name, "") for texts in (ancestor, first, second))
        made[name] = one if one == other or other == before else other if one == before else better.get(name, "")
    return made


def disjoint(ancestor: Texts, first: Texts, second: Texts) -> bool:
    """Whether some component was changed by exactly one of the two."""
    names = {*ancestor, *first, *second}
    return any((first.get(n, "") == ancestor.get(n, "")) != (second.get(n, "") == ancestor.get(n, "")) for n in names)


def choose(
    texts: Sequence[Texts],
    parents: Sequence[Sequence[int]],
    scores: Sequence[Mapping[str, float]],
    means: Sequence[float],
    front: Collection[int],
    tried: Collection[Pair],
    chance: random.Random,
) -> Join | None:
    """A join of two candidates of the front that was not tried and is not there yet; None when there is none."""
    pairs = [pair for pair in itertools.combinations(sorted(front), 2) if pair not in tried]
    chance.shuffle(pairs)
    for first, second in pairs:
        ours, theirs = ancestors(parents, first), ancestors(parents, second)
        if first in theirs or second in ours or len(scores[first].keys() & scores[second].keys()) < TRIED:
            continue
        low = min(means[first], means[second])
        for ancestor in sorted(ours & theirs, key=lambda place: (-means[place], place)):
            if means[ancestor] > low or not disjoint(texts[ancestor], texts[first], texts[second]):
                continue
            level = means[first] == means[second]
            better = chance.choice((first, second)) if level else max(first, second, key=lambda place: means[place])
            made = join(texts[ancestor], texts[first], texts[second], texts[better])
            if made not in [dict(one) for one in texts]:
                return Join(first, second, ancestor, made)
    return None


def sample(first: Mapping[str, float], second: Mapping[str, float], chance: random.Random) -> list[str]:
    """TRIED tasks that both were measured on: as many as can be where the first is better, where the second is, and
    where they are level; then whatever is left."""
    common = sorted(first.keys() & second.keys())
    groups = [
        [task for task in common if first[task] > second[task]],
        [task for task in common if first[task] < second[task]],
        [task for task in common if first[task] == second[task]],
    ]
    each, chosen = -(-TRIED // len(groups)), list[str]()
    for group in groups:
        chosen += chance.sample(group, min(len(group), each, TRIED - len(chosen)))
    rest = [task for task in common if task not in chosen]
    return chosen + chance.sample(rest, min(len(rest), TRIED - len(chosen)))
