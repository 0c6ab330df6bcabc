"""Ask an engine for what the guards look at: the fixed questions, recent live prompts, and log-probs of both.

`load` comes before any policy looks: what cannot be loaded cannot be served, whatever the policy asks.

Knows: which questions go to the candidate and which to the untouched base, and what a failed ask means.
Does not know: what a broken model looks like (`guards`), suites, or what follows from a guard that does not hold.

An engine that cannot answer now is an EngineError; one that cannot load the candidate is a guard that does not hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reef.core.errors import DigestError, EngineError
from reef.core.nouns import Candidate, Guard, Release
from reef.engines import Engine
from reef.evaluation import Means
from reef.evaluation import guards as guard
from reef.evaluation.ask import FAILURES, Asker, Question, Reply, Side, again
from reef.evaluation.guards import Limits
from reef.evaluation.suite import GENERAL
from reef.harness.apply import NOTHING

DRIFT_PROMPTS = 8


async def load(engine: Engine, candidate_id: str) -> Guard | None:
    """None when the engine holds the candidate; a failed guard when it never will. EngineError while it is not
    ready."""
    try:
        await again(lambda: engine.load(candidate_id))
    except (EngineError, DigestError) as error:
        if not await engine.ready():
            raise EngineError(f"the engine is not ready ({error.message}); the candidate waits") from error
        return Guard("loads", False, 0.0, 1.0, f"the engine cannot load the candidate: {error.message}")
    return None


class Check:
    """The guards of one scenario. The base's answers are asked for once; `asker` keeps them."""

    def __init__(self, means: Means, asker: Asker, limits: Limits) -> None:
        self.limits = limits
        self._ask = asker
        self._prompts = means.prompts
        self._base = Side(means.base_id, NOTHING, f"base {means.base_id}")
        self._usual: float | None = None  # how well the base's own answers fit live prompts, once measured

    async def all(self, candidate: Candidate, incumbent: Release) -> list[Guard]:
        """Every guard, in the order a person wants to read them; the first that fails is the reason."""
        ask, limits, base = self._ask, self.limits, self._base
        same_weights = _weights(candidate) == _weights(incumbent)
        side = await ask.side(candidate)
        live = guard.sampled(await self._prompts() if self._prompts else (), limits.live)
        general = [task.question for task in GENERAL]
        drifting = [
            replace(question, temperature=1.0, seed=seed) for seed, question in enumerate(general[:DRIFT_PROMPTS])
        ]
        ours, before, said, lived = await asyncio.gather(
            ask.replies(side, general),
            ask.replies(base, general),
            ask.replies(base, drifting),
            ask.replies(side, [question for question, _ in live]),
        )
        guards = [await self._answered(before, [*ours, *lived])]
        if (guards[0].value or 0.0) > limits.missing:
            return guards
        rated, shifts = await self._shift(side, said, lived, [question for question, _ in live], same_weights)
        guards.append(guard.finite([*(reply.logprobs or () for reply in [*ours, *lived]), *rated]))
        kept = [(a, b) for a, b in zip(ours, before, strict=True) if not a.missing and not b.missing]
        guards += guard.shape([a.text for a, _ in kept], [b.text for _, b in kept], limits, live=False)
        heard = [(reply.text, answer) for reply, (_, answer) in zip(lived, live, strict=True) if not reply.missing]
        if len(heard) >= limits.least:
            guards += guard.shape([text for text, _ in heard], [answer for _, answer in heard], limits, live=True)
        else:
            guards.append(guard.missing("live_shape", None, f"only {len(heard)} recent live prompts to ask"))
        known = [row for row in zip(GENERAL, ours, before, strict=True) if not row[1].missing and not row[2].missing]
        guards.append(guard.suite([t for t, _, _ in known], [a for _, a, _ in known], [b for _, _, b in known], limits))
        return guards + shifts

    async def _answered(self, before: Sequence[Reply], ours: Sequence[Reply]) -> Guard:
        """The share of the candidate's asks that failed. When every one did, the base is asked once more, to know whose
        failure it is. EngineError when the engine does not answer for the base either.
        """
        limit = self.limits.missing
        lost = [reply.missing for reply in ours if reply.missing]
        base_lost = [reply.missing for reply in before if reply.missing]
        note = f"{len(lost)} of {len(ours)} answers are missing" + (f" ({lost[0]})" if lost else "")
        if len(lost) == len(ours) and not base_lost:  # the base's answers may be old ones: ask anew
            fresh = replace(GENERAL[0].question, seed=time.monotonic_ns() % 2**31)
            [control] = await self._ask.replies(self._base, [fresh])
            base_lost = [control.missing] if control.missing else []
            if not base_lost:
                return Guard(
                    "answered", False, 1.0, limit, f"the engine answers the base but never the candidate: {note}"
                )
        if len(base_lost) > limit * len(before) or (base_lost and len(lost) == len(ours)):
            raise EngineError(f"the engine cannot answer now ({base_lost[0]}); the candidate waits")
        return Guard("answered", True, len(lost) / len(ours), limit, note)

    async def _shift(
        self,
        side: Side,
        said: Sequence[Reply],
        lived: Sequence[Reply],
        live: Sequence[Question],
        same_weights: bool,
    ) -> tuple[list[list[float]], list[Guard]]:
        """How far the weights moved, and the log-probs that say so; missing when no rating can be had or would be idle.

        `said` are the base's answers to fixed prompts, `lived` the candidate's to the `live` ones.
        """
        limits, rate = self.limits, self._ask.rate
        said = [reply for reply in said if _has_tokens(reply)]
        lived = [reply for reply in lived if _has_tokens(reply)]
        why = "the weights are the incumbent's" if same_weights else None if said else "the engine gives no tokens"
        if why is None:
            try:
                ours, theirs, own, others = await asyncio.gather(
                    rate(side, *_sequences(said)),
                    rate(self._base, *_sequences(said)),
                    rate(self._base, *_sequences(lived)),
                    rate(self._base, *_sequences(_turned(lived))),
                )
                usual = await self._fit(live) if len(lived) >= limits.least else None
            except FAILURES as error:
                why = f"the engine cannot rate tokens ({error.message})"
        if why is not None:
            named = {"drift": limits.drift, "surprise": limits.surprise, "relevance": limits.relevance}
            return [], [guard.missing(name, limit, why) for name, limit in named.items()]
        mine = [list(reply.logprobs or ()) for reply in lived]
        return ours, [
            guard.drift(ours, theirs, limits),
            guard.surprise(mine, own, limits),
            guard.relevance([reply.text for reply in lived], own, others, usual, limits),
        ]

    async def _fit(self, live: Sequence[Question]) -> float | None:
        """How well the base's own answers fit the scenario's prompts. Measured once: it is the yardstick."""
        if self._usual is None:
            answers = [reply for reply in await self._ask.replies(self._base, live) if _has_tokens(reply)]
            if len(answers) >= self.limits.least:
                own, others = await asyncio.gather(
                    self._ask.rate(self._base, *_sequences(answers)),
                    self._ask.rate(self._base, *_sequences(_turned(answers))),
                )
                self._usual = guard.fit(own, others)
        return self._usual


def _weights(release: Release) -> Any:
    part = release.parts.get("weights")
    return None if part is None else (part.kind, dict(part.files))


def _turned(replies: Sequence[Reply]) -> list[Reply]:
    """Each answer after the prompt of the next one."""
    after = [*replies[1:], *replies[:1]]
    return [replace(reply, prompt_ids=other.prompt_ids) for reply, other in zip(replies, after, strict=True)]


def _has_tokens(reply: Reply) -> bool:
    ids, logprobs = reply.output_ids or (), reply.logprobs or ()
    return bool(reply.prompt_ids) and len(ids) > 0 and len(ids) == len(logprobs)


def _sequences(replies: Sequence[Reply]) -> tuple[list[list[int]], list[int]]:
    """Prompt and output tokens, and where each output starts."""
    whole = [[*(reply.prompt_ids or ()), *(reply.output_ids or ())] for reply in replies]
    return whole, [len(reply.prompt_ids or ()) for reply in replies]
