"""What a search knows, and its one JSON form.

Knows: candidates, their parents and scores, the cursor, what was spent. Does not know: how a search goes on.

All else follows from it and the plan: random numbers are drawn from the plan's seed and the round, so a search that is
read back goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import pareto

LOG = 200  # rounds that are kept in words


@dataclass(frozen=True, slots=True)
class Candidate:
    """`texts` by component; `scores` by validation task; `learnt` the training tasks whose feedback made it."""

    texts: Mapping[str, str]
    parents: tuple[int, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    learnt: tuple[str, ...] = ()


@dataclass(slots=True)
class State:
    candidates: list[Candidate] = field(default_factory=list)
    calls: int = 0  # metric calls: tasks that were run
    rounds: int = 0
    batches: int = 0  # minibatches drawn
    cursor: int = 0  # the component whose turn it is
    merges: int = 0
    due: bool = False  # a candidate was accepted since the last merge was looked for
    tried: list[tuple[int, int]] = field(default_factory=list)  # pairs that were joined
    rewrites: int = 0  # asked of the reflector
    usable: int = 0  # of them, texts that could be tried
    accepted: int = 0  # of those, better on their minibatch
    over: str = ""  # why the search cannot go on, where that is not the budget
    log: list[str] = field(default_factory=list)

    @property
    def means(self) -> list[float]:
        return [pareto.mean(one.scores) for one in self.candidates]

    @property
    def fronts(self) -> dict[str, set[int]]:
        return pareto.fronts([one.scores for one in self.candidates])

    @property
    def ranking(self) -> list[int]:
        """The candidates from the best mean to the worst; of equals the oldest first."""
        means = self.means
        return sorted(range(len(means)), key=lambda place: (-means[place], place))

    def say(self, text: str) -> None:
        self.log = [*self.log, f"round {self.rounds}: {text}"][-LOG:]


_PLAIN = ("calls", "rounds", "batches", "cursor", "merges", "due", "rewrites", "usable", "accepted", "over")


def dump(state: State) -> dict[str, Any]:
    """As JSON. `fronts` is there for readers; it follows from the scores."""
    return {
        "candidates": [
            {
                "texts": dict(one.texts),
                "parents": list(one.parents),
                "scores": dict(one.scores),
                "learnt": list(one.learnt),
            }
            for one in state.candidates
        ],
        "fronts": {task: sorted(places) for task, places in state.fronts.items()},
        **{name: getattr(state, name) for name in _PLAIN},
        "tried": [list(pair) for pair in state.tried],
        "log": list(state.log),
    }


def load(given: Mapping[str, Any]) -> State:
    """What `dump` made. KeyError, TypeError or ValueError for anything else."""
    candidates = [
        Candidate(dict(one["texts"]), tuple(one["parents"]), dict(one["scores"]), tuple(one["learnt"]))
        for one in given["candidates"]
    ]
    pairs = [(int(first), int(second)) for first, second in given["tried"]]
    return State(candidates, **{name: given[name] for name in _PLAIN}, tried=pairs, log=list(given["log"]))
