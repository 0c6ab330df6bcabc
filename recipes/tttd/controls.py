"""Searches without a model, which a trained one is compared with: random states, and a hill climber.

Knows: how many verifier calls they may make. Does not know: servers, archives.
"""

from __future__ import annotations

import random

from .problems import Judged, Problem

LOOKS = 10_000  # tries for a state that is new, before a problem counts as exhausted
STUCK = 60  # neighbours in a row that are no better, after which a climber begins anew


class Tally:
    """Counts distinct verifier calls and keeps the best value after each."""

    def __init__(self, problem: Problem, calls: int) -> None:
        self.problem, self.calls = problem, calls
        self.known: dict[str, Judged] = {}
        self.curve: list[float] = []
        self.best = ""

    @property
    def over(self) -> bool:
        return len(self.known) >= self.calls

    def value(self, state: str) -> float:
        if state not in self.known:
            judged = self.problem.verify(state)
            self.known[state] = judged
            before = self.curve[-1] if self.curve else 0.0
            if judged.valid and (judged.value > before or not self.best):
                self.best = state
            self.curve.append(max(before, judged.value))
        return self.known[state].value


def drawn(problem: Problem, calls: int, seed: int) -> Tally:
    """Legal states drawn at random, each once."""
    tally, numbers = Tally(problem, calls), random.Random(f"{seed}/random")
    for _ in range(LOOKS + calls):
        if tally.over:
            break
        tally.value(problem.start(numbers))
    return tally


def climbed(problem: Problem, calls: int, seed: int) -> Tally:
    """From a random state always to a better neighbour; from the top of a hill to another random state."""
    move = getattr(problem, "move", None)
    if move is None:
        raise ValueError(f"{problem.name} has no neighbours; it cannot be climbed")
    tally, numbers = Tally(problem, calls), random.Random(f"{seed}/climb")
    state, failures = problem.start(numbers), 0
    value = tally.value(state)
    for _ in range(LOOKS + calls):
        if tally.over:
            break
        other = move(state, numbers)
        if (found := tally.value(other)) > value:
            state, value, failures = other, found, 0
        else:
            failures += 1
        if failures >= STUCK:
            state, failures = problem.start(numbers), 0
            value = tally.value(state)
    return tally
