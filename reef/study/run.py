"""One run of a study: a driver's view of its own server.

Knows: how to ask, report, wait for the learner, pin a release, keep the driver's place.
Does not know: what is asked, or what an answer is worth.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef.study import Arm


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    receipt: str  # empty when it was not recorded
    release_id: str
    finish_reason: str
    message: Mapping[str, Any]  # the assistant's message as it came
    tokens: int  # of the answer


class Run:
    """`arm` and `seed` say which run it is; `draw` is the seed's own random numbers, the same after a resumption only
    if the driver draws from `at(place)`."""

    arm: Arm
    seed: int
    scenario: str

    def at(self, *place: object) -> random.Random:
        """Random numbers that depend on the seed and this place alone."""
        raise NotImplementedError

    async def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        seed: int,
        max_tokens: int,
        release: str | None = None,
        record: bool = True,
        session: str | None = None,
        **body: Any,
    ) -> Answer:
        """One chat request; a text is a single user message. `release`: pinned. `body`: further fields."""
        raise NotImplementedError

    async def report(self, receipt: str | Sequence[str], score: float | None = None, **fields: Any) -> None:
        """Feedback on one receipt or several."""
        raise NotImplementedError

    async def learnt(self) -> dict[str, Any]:
        """Wait until everything reported so far was used or turned down and the learner rests; its own words
        (`trained`, `dropped`, `metrics`, `last` …)."""
        raise NotImplementedError

    async def releases(self) -> list[dict[str, Any]]:
        """The whole chain, oldest first."""
        raise NotImplementedError

    async def head(self) -> str:
        """The release that is served."""
        raise NotImplementedError

    def point(self, **figures: Any) -> None:
        """Add a line to the run's log (points.jsonl) and show it."""
        raise NotImplementedError

    @property
    def kept(self) -> dict[str, Any]:
        """What the driver keeps between two lives; `keep` writes it."""
        raise NotImplementedError

    def keep(self, **values: Any) -> None:
        raise NotImplementedError

    async def drift(self, before: str, after: str) -> dict[str, float]:
        """Forgetting: KL of `after` to `before` per token on general prompts, perplexity of both on a general text, and
        both scores on a small guard suite that has nothing to do with the study."""
        raise NotImplementedError
