"""What a release tells the ledger that no audit row speaks of: who was trained, and that a look accepted it.

Knows: a release's line, units and evaluation. Does not know: which releases are unknown, or why (a crash, a lost file).
"""

from __future__ import annotations

from reef.core.nouns import PartName, Release
from reef.loop.binding import Tools
from reef.loop.ledger import Look
from reef.trainers import folder


def from_release(tools: Tools, scenario: str, part: PartName, release: Release) -> None:
    line, consumed = release.line or "", release.consumed[part]
    tools.ledger.restore(scenario, part, line, release.step, consumed.units, cursor=consumed.cursor)
    reason = release.evaluation.reason if release.evaluation else release.reason
    looks = release.evaluation.looks if release.evaluation else 1
    step = release.step if part == "weights" else max(folder.steps(tools.training, scenario, part, line), default=0)
    tools.ledger.audit(
        Look(
            scenario, part, line, step, looks, "accept", reason,
            release.evaluation.candidate_id if release.evaluation else None, release.id, release.evaluation,
            actor=release.actor, at=release.created_at,
        )
    )  # fmt: skip
