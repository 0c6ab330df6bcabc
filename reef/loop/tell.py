"""What the learner tells the journal: releases, rejections, holds, trouble. Each is told once, also after a crash.

Knows: where the truth of an act is (chain, audit rows), and so how to find what a crash left untold.
Does not know: who listens. All of it blocks for a moment, like the journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from reef.core.failpoint import failpoint
from reef.core.nouns import ActKind, Evaluation, Json, Release
from reef.loop.binding import Tools
from reef.loop.ledger import Look
from reef.scenario import serving

BACK: Final = 20
"""Releases and audit rows that are looked through for untold ones: more than a crash can leave."""
TROUBLE: Final = 3
"""Failures in a row before people are told."""
AGAIN: Final = 86400.0
"""Seconds after which the same trouble is told again."""
_T = TypeVar("_T")
_KINDS: Final[Mapping[str, ActKind]] = {"reject": "reject", "hold": "hold"}


def releases(tools: Tools, scenario: str) -> None:
    """Tell of the releases nobody told of yet, oldest first."""
    newest = tools.chain.history(scenario, BACK)
    told = [
        any(act.kind == serving.TOLD[release.operation] for act in tools.journal.about(release.id))
        for release in newest
    ]
    for release in _untold(newest, told):
        if release.operation == "publish":
            _release(tools, release)
        else:
            serving.tell(release, tools.board)


async def missed(tools: Tools, scenario: str) -> None:
    """Tell what a crash, or a store that could not be written, left untold."""
    await asyncio.to_thread(releases, tools, scenario)
    failpoint("loop.in_telling")
    looks = tools.ledger.looks(scenario, limit=BACK)  # the ledger belongs to this thread
    await asyncio.to_thread(rulings, tools, looks)


def rulings(tools: Tools, looks: Sequence[Look]) -> None:
    """Tell of the rejections and holds among these audit rows (newest first) that nobody told of yet, oldest first."""
    found = [look for look in looks if look.verdict in _KINDS]
    told = [any(act.kind == _KINDS[look.verdict] for act in tools.journal.about(_ref(look))) for look in found]
    for look in _untold(found, told):
        ruling(tools, look)


def ruling(tools: Tools, look: Look) -> None:
    """Tell of one audit row, if it is a rejection or a hold."""
    if (kind := _KINDS.get(look.verdict)) is None:
        return
    detail: dict[str, Json] = {"part": look.part, "line": look.line, "step": look.step, "look": look.look}
    detail |= _evidence(look.evaluation)
    tools.journal.tell(look.scenario, kind, _ref(look), actor=look.actor, reason=look.reason, detail=detail)


def trouble(tools: Tools, scenario: str, part: str, reason: str, failures: int) -> None:
    """Tell that updates of a part (or `learner`, `watch`: all of it) fail again and again; the same cause once a day,
    however often it comes."""
    if failures < TROUBLE:
        return
    for act in tools.journal.newest(BACK, scenario):
        same = act.kind == "trouble" and act.detail.get("part") == part and act.reason == reason
        if same and time.time() - act.at < AGAIN:
            return
    detail: dict[str, Json] = {"part": part, "failures": failures}
    tools.journal.tell(scenario, "trouble", part, actor="learner", reason=reason, detail=detail, once=False)


def _untold(newest: Sequence[_T], told: Sequence[bool]) -> list[_T]:
    """What is missing since the oldest that was told, oldest first. Where nothing was told, only the newest is news."""
    since = max((place for place, done in enumerate(told) if done), default=1)
    return [one for one, done in zip(newest[:since], told, strict=False) if not done][::-1]


def _release(tools: Tools, release: Release) -> None:
    units = {part: len(held.units) for part, held in release.consumed.items() if held.units}
    detail: dict[str, Json] = {
        "seq": release.seq, "base": release.base, "parent": release.parent, "step": release.step, "line": release.line,
        "units": sum(units.values()), "parts": sorted(units),
    }  # fmt: skip
    if release.evaluation is not None:
        detail |= {"candidate": release.evaluation.candidate_id} | _evidence(release.evaluation)
    tools.journal.tell(
        release.scenario, "release", release.id, actor=release.actor, reason=release.reason, detail=detail
    )


def _evidence(evaluation: Evaluation | None) -> dict[str, Json]:
    if evaluation is None:
        return {}
    return {"verdict": evaluation.verdict, "policy": evaluation.policy, "metrics": dict(evaluation.metrics)}


def _ref(look: Look) -> str:
    """The candidate; for a step that never became one, the step."""
    return look.candidate or f"{look.line}/{look.step}"
