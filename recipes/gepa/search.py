"""Reflective mutation with a Pareto archive: the whole search, without a model, a clock or a file.

Knows: the order of things (GEPA, arXiv 2507.19457, algorithm 1), the budget, what is compared with what.
Does not know: how texts are measured or rewritten. A round is a generator that yields what it wants to know
(`Measure`, `Rewrite`) and is sent the answer, so that whoever drives it can wait, keep answers, or be a test.

- A round begins only when the budget pays for it whole: a minibatch of parent and child, and the child's validation. So
  no call is made beyond the budget, and none for a child that could not be validated.
- Parent and child get the same minibatch with the same seed; validation has one seed for all candidates.
- A task that could not be measured is in no comparison; a candidate that misses more than a tenth is not kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from . import merge, pareto
from .state import Candidate, State

PERFECT = 1.0
MISSING = 0.1  # of the validation tasks that a candidate may not be measured on


@dataclass(frozen=True, slots=True)
class Plan:
    """`components` are the names of the texts, `start` the texts that are served now."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    start: Mapping[str, str]
    minibatch: int = 3
    budget: int = 150
    merges: int = 5
    seed: int = 0

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.start)

    @property
    def size(self) -> int:
        """Of a minibatch."""
        return min(self.minibatch, len(self.train))

    @property
    def round(self) -> int:
        """Calls that a round may need."""
        return 2 * self.size + len(self.validation)

    @property
    def proposals(self) -> int:
        """Accepted candidates that the budget pays for, at least."""
        return max(0, (self.budget - len(self.validation)) // self.round)

    def chance(self, *place: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *place))))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one task gave. None: it could not be measured."""

    task: str
    score: float | None
    answer: str = ""
    feedback: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """Each of these tasks once, under these texts. The answer: a `Seen` for each, in order."""

    texts: Mapping[str, str]
    tasks: tuple[str, ...]
    seed: int
    stage: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A better text of one component. The answer: a `Text`."""

    texts: Mapping[str, str]
    component: str
    seen: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """What a reflector wrote; empty where that cannot be tried, and why."""

    text: str
    why: str = ""


Answer = Sequence[Seen] | Text
Round = Generator[Measure | Rewrite, Answer, None]


def over(state: State, plan: Plan) -> str | None:
    """Why there is no further round; None when there is one."""
    if state.over:
        return state.over
    left = plan.budget - state.calls
    if not state.candidates:
        return None if left >= len(plan.validation) else "the budget does not pay for one validation"
    if max(state.means) >= PERFECT:
        return "nothing can be better on the validation tasks"
    return None if left >= plan.round else "the budget is used up"


def advance(state: State, plan: Plan) -> Round:
    """One round. It changes `state` as it goes; drive it to its end."""
    state.rounds += 1
    if not state.candidates:
        yield from _begin(state, plan)
        return
    if state.due and state.merges < plan.merges:
        state.due = False
        if (found := _join(state, plan)) is not None:
            yield from _merge(state, plan, found)
            return
    yield from _mutate(state, plan)


def minibatch(plan: Plan, number: int) -> tuple[str, ...]:
    """The training tasks of the n-th minibatch: each task once an epoch, in an order of the epoch's own; what is
    missing of the last one is filled with the epoch's first."""
    each = -(-len(plan.train) // plan.size)
    epoch, place = divmod(number, each)
    order = list(plan.train)
    plan.chance("epoch", epoch).shuffle(order)
    order += order[: each * plan.size - len(order)]
    return tuple(order[place * plan.size : (place + 1) * plan.size])


def better(before: Sequence[Seen], after: Sequence[Seen]) -> tuple[float, float]:
    """The sums of two measurements of the same tasks, over those that both could be measured on."""
    pairs = [
        (one.score, other.score)
        for one, other in zip(before, after, strict=True)
        if one.score is not None and other.score is not None
    ]
    return math.fsum(one for one, _ in pairs), math.fsum(other for _, other in pairs)


# --- rounds -----------------------------------------------------------------------------------------------------------


def _begin(state: State, plan: Plan) -> Round:
    """The seed: what is served now."""
    kept = yield from _validate(state, plan, Candidate(dict(plan.start)), {})
    if not kept:
        state.over = f"the validation tasks cannot be measured with what is served now; {state.log[-1]}"


def _mutate(state: State, plan: Plan) -> Round:
    parent = pareto.draw(state.fronts, state.means, plan.chance("parent", state.rounds))
    texts, tasks = state.candidates[parent].texts, minibatch(plan, state.batches)
    state.batches += 1
    seed = plan.chance("seed", state.rounds).randrange(2**31)
    seen = yield from _measured(state, Measure(texts, tasks, seed, "minibatch"))
    if all(one.score is not None and one.score >= PERFECT for one in seen):
        state.say(f"candidate {parent} is perfect on {_names(tasks)}: skipped")
        return
    if all(one.score is None for one in seen):
        state.over = f"nothing can be measured now ({seen[0].feedback or 'no reason was given'})"
        state.say(f"{_names(tasks)}: {state.over}")
        return
    component = plan.components[state.cursor % len(plan.components)]
    state.cursor += 1
    state.rewrites += 1
    written = yield Rewrite(texts, component, tuple(seen))
    assert isinstance(written, Text)
    child = dict(texts) | {component: written.text}
    if not written.text or child in [dict(one.texts) for one in state.candidates]:
        state.say(f"no new text of {component}: {written.why or 'it is one of the candidates already'}")
        return
    state.usable += 1
    again = yield from _measured(state, Measure(child, tasks, seed, "minibatch"))
    before, after = better(seen, again)
    if not after > before:
        state.say(f"{component} of candidate {parent}: {after:g} against {before:g} on {_names(tasks)}, dropped")
        return
    state.accepted += 1
    state.say(f"{component} of candidate {parent}: {after:g} against {before:g} on {_names(tasks)}")
    learnt = tuple(dict.fromkeys((*state.candidates[parent].learnt, *tasks)))
    yield from _validate(state, plan, Candidate(child, (parent,), {}, learnt), {})


def _join(state: State, plan: Plan) -> merge.Join | None:
    means = state.means
    front = pareto.survivors(state.fronts, means)
    texts = [one.texts for one in state.candidates]
    parents, scores = [one.parents for one in state.candidates], [one.scores for one in state.candidates]
    return merge.choose(texts, parents, scores, means, front, state.tried, plan.chance("merge", state.rounds))


def _merge(state: State, plan: Plan, found: merge.Join) -> Round:
    """A joined candidate is tried on a few validation tasks first, with the seed of all validation: what it gives there
    need not be asked again."""
    state.merges += 1
    state.tried.append((found.first, found.second))
    first, second = state.candidates[found.first], state.candidates[found.second]
    tasks = tuple(merge.sample(first.scores, second.scores, plan.chance("tried", state.rounds)))
    seen = yield from _measured(state, Measure(found.texts, tasks, plan.seed, "merge"))
    scores = {one.task: one.score for one in seen if one.score is not None}
    least = max(math.fsum(one.scores[task] for task in tasks) for one in (first, second))
    whose = f"{found.first} and {found.second}"
    if len(scores) < len(tasks) or math.fsum(scores.values()) < least:
        state.say(f"{whose} joined: {math.fsum(scores.values()):g} against {least:g}, dropped")
        return
    state.say(f"{whose} joined: {math.fsum(scores.values()):g} against {least:g}")
    learnt = tuple(dict.fromkeys((*first.learnt, *second.learnt)))
    yield from _validate(state, plan, Candidate(found.texts, (found.first, found.second), {}, learnt), scores)


def _validate(
    state: State, plan: Plan, made: Candidate, known: Mapping[str, float]
) -> Generator[Measure | Rewrite, Answer, bool]:
    """Measure a candidate on every validation task and keep it. False: too much of it could not be measured."""
    open_ = tuple(task for task in plan.validation if task not in known)
    seen: Sequence[Seen] = ()
    if open_:
        seen = yield from _measured(state, Measure(made.texts, open_, plan.seed, "validation"))
    scores = dict(known) | {one.task: one.score for one in seen if one.score is not None}
    if len(scores) < (1 - MISSING) * len(plan.validation):
        why = next((one.feedback for one in seen if one.score is None and one.feedback), "no reason was given")
        state.say(f"only {len(scores)} of {len(plan.validation)} validation tasks could be measured ({why}): not kept")
        return False
    state.candidates.append(Candidate(made.texts, made.parents, scores, made.learnt))
    state.due = len(state.candidates) > 1
    state.say(f"candidate {len(state.candidates) - 1}: {pareto.mean(scores):.3f} on {len(scores)} validation tasks")
    return True


def _measured(state: State, wanted: Measure) -> Generator[Measure | Rewrite, Answer, Sequence[Seen]]:
    seen = yield wanted
    assert not isinstance(seen, Text)
    assert [one.task for one in seen] == list(wanted.tasks)
    state.calls += len(wanted.tasks)
    return seen


def _names(tasks: Sequence[str]) -> str:
    return ", ".join(tasks)
