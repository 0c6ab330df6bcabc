"""The gate's policies: one class each, one method. A verdict comes with a reason a person understands.

Knows: what to ask of a candidate and of the base, and how guards and suite results become a verdict.
Does not know: how the candidate was made, what follows from the verdict, how often it will be asked again.

- `Always` accepts. `Guarded` accepts what holds every guard. `Better` also wants proof on a suite.
- An engine that cannot answer now is an EngineError; a candidate the engine cannot load is rejected.
- Every policy is made with the same keyword arguments, so that one is exchanged for another by its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reef.core.errors import DigestError, EngineError
from reef.core.nouns import Candidate, Evaluation, Guard, Record, Release, Verdict
from reef.engines import Engine
from reef.evaluation import guards as guard
from reef.evaluation.ask import FAILURES, Asker, Question, Reply, Side, again
from reef.evaluation.guards import Limits
from reef.evaluation.suite import GENERAL, Task, load_suite, mcnemar

DRIFT_PROMPTS = 8
ALPHA = 0.05

Prompts = Callable[[], Awaitable[Sequence[Record]]]
"""Recent records of the scenario, newest first; held-out ones when there are any."""

Renders = Callable[[Release], str | None]
"""The rules a release puts before each request. May block."""


class Always:
    """Accepts every candidate unseen. For experiments, and for a person who decides elsewhere."""

    def __init__(self, **_: Any) -> None:
        pass

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        return Evaluation(
            "always", "accept", "Accepted unseen: the policy is `always`.", candidate.id, incumbent.id, looks=look
        )


class Guarded:
    """Accepts a candidate that holds every guard; see `guards`.

    `base_id` is the scenario's release with the untouched base weights (seq 0), `prompts` gives recent records,
    `renders` a release's rules text, `model` a model name for engines that need one, `options` fields of `Limits`.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        base_id: str,
        prompts: Prompts | None = None,
        renders: Renders | None = None,
        model: str | None = None,
        suite: Path | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = Limits.of(options or {})
        self._ask = Asker(engine, renders, model)
        self._prompts = prompts
        self._base = Side(base_id, None, f"base {base_id}")
        self._usual: float | None = None  # how well the base's own answers fit live prompts, once measured

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        began = time.monotonic()
        found = await self._guard(candidate, incumbent)
        verdict, reason = _judge(found)
        return _evaluation("guarded", verdict, reason, candidate, incumbent, found, look, began)

    async def _guard(self, candidate: Candidate, incumbent: Release) -> list[Guard]:
        """Every guard, in the order a person wants to read them; the first that fails is the reason."""
        ask, limits, base = self._ask, self.limits, self._base
        if (broken := await self._load(candidate)) is not None:
            return [broken]
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

    async def _load(self, candidate: Candidate) -> Guard | None:
        """None when the engine holds the candidate; a failed guard when it never will."""
        try:
            await again(lambda: self._ask.engine.load(candidate.id))
        except (EngineError, DigestError) as error:
            if not await self._ask.engine.ready():
                raise EngineError(f"the engine is not ready ({error.message}); the candidate waits") from error
            return Guard("loads", False, 0.0, 1.0, f"the engine cannot load the candidate: {error.message}")
        return None

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


class Better(Guarded):
    """Accepts a candidate that holds every guard and beats the incumbent on a suite, paired per task with equal seeds.

    Exact McNemar test, one-sided, p <= 0.05; anything less is undecided. What the engine failed to answer for either
    side (after two retries) is missing with its pair; more than a tenth missing is undecided.
    """

    def __init__(self, *, engine: Engine, base_id: str, suite: Path | str | None = None, **rest: Any) -> None:
        super().__init__(engine=engine, base_id=base_id, **rest)
        self._tasks = load_suite(suite)

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        began = time.monotonic()
        found = await self._guard(candidate, incumbent)
        verdict, reason = _judge(found)
        metrics: dict[str, float] = {}
        if verdict == "accept":
            verdict, reason, metrics = await self._compare(candidate, incumbent)
        return _evaluation("better", verdict, reason, candidate, incumbent, found, look, began, metrics)

    async def _compare(self, candidate: Candidate, incumbent: Release) -> tuple[Verdict, str, dict[str, float]]:
        ours, theirs = await asyncio.gather(self._ask.side(candidate), self._ask.side(incumbent))
        questions = [task.question for task in self._tasks]
        new, old = await asyncio.gather(self._ask.replies(ours, questions), self._ask.replies(theirs, questions))
        pairs = [
            (_score(task, a), _score(task, b))
            for task, a, b in zip(self._tasks, new, old, strict=True)
            if not a.missing and not b.missing
        ]
        total, lost = len(self._tasks), len(self._tasks) - len(pairs)
        wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
        p = mcnemar(wins, losses)
        metrics = {"tasks": total, "missing": lost, "wins": wins, "losses": losses, "p": p}
        if pairs:
            metrics |= {"candidate": sum(a for a, _ in pairs) / len(pairs)}
            metrics |= {"incumbent": sum(b for _, b in pairs) / len(pairs)}
        if lost > self.limits.missing * total:
            return "undecided", f"Undecided: {lost} of {total} pairs are missing; the engine failed on them.", metrics
        counted = f"{wins} tasks won, {losses} lost, {len(pairs) - wins - losses} equal (p {p:.3f}, limit {ALPHA})"
        if p <= ALPHA:
            return "accept", f"Accepted: better on the suite, {counted}.", metrics
        return "undecided", f"Undecided: not enough evidence on the suite, {counted}.", metrics


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


def _score(task: Task, reply: Reply) -> int:
    """1 or 0. A request this release made impossible is its worst score, not a missing one."""
    return 0 if reply.impossible else int(task.right(reply.text))


def _judge(guards: Sequence[Guard]) -> tuple[Verdict, str]:
    first = guards[0]
    if first.name == "answered" and first.passed and (first.value or 0.0) > (first.limit or 0.0):
        return "undecided", f"Undecided: {first.note}."
    failed = [one for one in guards if not one.passed]
    if failed:
        more = (
            f" ({len(failed) - 1} more guards failed: {', '.join(one.name for one in failed[1:])})"
            if failed[1:]
            else ""
        )
        value = f"{failed[0].value:.2f}" if failed[0].value is not None else "none"
        limit = f", limit {failed[0].limit:.2f}" if failed[0].limit is not None else ""
        return "reject", f"Rejected by guard {failed[0].name} ({value}{limit}): {failed[0].note}{more}."
    unmeasured = [one.name for one in guards if one.value is None]
    aside = f"; not measured: {', '.join(unmeasured)}" if unmeasured else ""
    return "accept", f"Accepted: all {len(guards) - len(unmeasured)} guards hold{aside}."


def _evaluation(
    policy: str,
    verdict: Verdict,
    reason: str,
    candidate: Candidate,
    incumbent: Release,
    guards: Sequence[Guard],
    look: int,
    began: float,
    metrics: Mapping[str, float] | None = None,
) -> Evaluation:
    measured = {one.name: one.value for one in guards if one.value is not None} | dict(metrics or {})
    seconds = time.monotonic() - began
    return Evaluation(policy, verdict, reason, candidate.id, incumbent.id, tuple(guards), measured, look, seconds)
