"""Measure a candidate against the incumbent and decide. The gate is one method, `evaluate`.

Knows: how to ask an engine for answers of two releases (`ask.py`), what a broken model looks like (`guards.py`), tasks
with checkable answers (`suite.py`), and how the measurements become a verdict (`policies.py`).
Does not know: how the candidate was made, or what happens after the verdict.

Policies: `always` (no check), `guarded` (guards only; default), `better` (guards and a suite file, paired per task).
Undecided means "not enough evidence yet", a value like the others.
"""

from __future__ import annotations

from typing import Protocol

from reef.core.nouns import Candidate, Evaluation, Release

POLICIES = {
    "always": "reef.evaluation.policies:Always",
    "guarded": "reef.evaluation.policies:Guarded",
    "better": "reef.evaluation.policies:Better",
}


class Evaluator(Protocol):
    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        """One look at a candidate. `look` counts from 1. EngineError when the engine cannot answer now."""
