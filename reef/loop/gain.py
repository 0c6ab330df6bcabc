"""What a release brought, measured again after it was accepted, on tasks that played no part in that where there are.

Knows: which release is due, that it is measured once, and where the result is told.
Does not know: how it is measured (the policy's `remeasure`). What was accepted was lucky more often than not, so the
gain that accepted it is too high on average; this one is not.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from reef.core.failpoint import failpoint
from reef.core.nouns import Release
from reef.loop.binding import Binding, Tools


class Found(Protocol):
    """What a policy's `remeasure(release, before)` gives: score points from -1 to 1, with a 95% interval. `fresh`: on
    tasks that the decision did not see."""

    @property
    def mean(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...
    @property
    def tasks(self) -> int: ...
    @property
    def fresh(self) -> bool: ...


class Scales:
    """Measures a scenario's newest release, once. `look` is called again and again, beside learning."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._done: str | None = None  # the release that nothing is left to do for

    async def look(self, binding: Binding) -> bool:
        """Measure what is served now, if that is due. False always: there is never more than one to measure."""
        remeasure = getattr(binding.evaluator, "remeasure", None)
        serving = await asyncio.to_thread(self._tools.board.get, binding.scenario)
        if remeasure is None or serving is None or serving.release_id == self._done:
            return False
        release = await asyncio.to_thread(self._tools.chain.get, serving.release_id)
        told = await asyncio.to_thread(self._tools.journal.about, release.id)
        due = release.operation in ("publish", "promote") and not any(act.kind == "measure" for act in told)
        if due and release.parent is not None:
            before = await asyncio.to_thread(self._tools.chain.get, release.parent)
            found: Found | None = await remeasure(release, before)
            failpoint("loop.before_measure")
            if found is not None:
                await asyncio.to_thread(self._tell, release, found)
            failpoint("loop.after_measure")
        self._done = release.id
        return False

    def _tell(self, release: Release, found: Found) -> None:
        detail = {"seq": release.seq, "gain": found.mean, "lower": found.lower, "upper": found.upper}
        what = "fresh tasks" if found.fresh else "tasks that the decision saw, with other seeds"
        reason = (
            f"measured again on {found.tasks} {what}: {100 * found.mean:+.1f} points "
            f"(95%: {100 * found.lower:+.1f} to {100 * found.upper:+.1f})"
        )
        self._tools.journal.tell(
            release.scenario, "measure", release.id, actor="learner", reason=reason,
            detail=detail | {"tasks": found.tasks, "fresh": found.fresh},
        )  # fmt: skip
