"""Staleness: how many optimizer steps lie between the release that answered and the weights that learn now.

Knows: the ancestry of weights along `Release.base` (for a rollback, the release whose parts came back).
Does not know: what a recipe does with an old sample; correction lives in the loss.

A release that is not an ancestor of the working weights makes its samples foreign: there is no path to count along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reef.core.errors import MissingError
from reef.core.nouns import Release, Unit
from reef.experience.units import Reason, origins

Get = Callable[[str], Release]
"""A release by id; MissingError when there is none. Called often: give a cached one."""


def lag(get: Get, head: Release, step: int, answered: str) -> int | None:
    """Optimizer steps from release `answered` to a line at `step` whose weights descend from `head`; None: foreign.

    Steps never decrease along the ancestry, so the walk ends at the first release older than the one looked for.
    """
    try:
        target = get(answered).step
    except MissingError:
        return None
    node = head
    while node.id != answered:
        if node.base is None or node.step < target:
            return None
        node = get(node.base)
    return step - node.step


def judge(get: Get, head: Release, step: int, units: Iterable[Unit], bound: int) -> dict[str, int | Reason]:
    """For each unit its lag, or why it may not train: `stale` (more than `bound` steps old) or `foreign`."""
    known: dict[str, int | Reason] = {}
    judged: dict[str, int | Reason] = {}
    for unit in units:
        worst: int | Reason = 0
        for release in origins(unit):
            if release not in known:
                known[release] = _verdict(get, head, step, release, bound)
            found = known[release]
            if isinstance(found, str):
                worst = found
                break
            assert isinstance(worst, int)
            worst = max(worst, found)
        judged[unit.id] = worst
    return judged


def _verdict(get: Get, head: Release, step: int, release: str, bound: int) -> int | Reason:
    try:
        if step - get(release).step > bound:
            return "stale"  # whatever its ancestry; and an old release is not worth the walk
    except MissingError:
        return "foreign"
    found = lag(get, head, step, release)
    return "foreign" if found is None else found
