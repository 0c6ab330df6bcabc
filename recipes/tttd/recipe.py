"""TTT-Discover: a grid of rollouts on one problem, trained whole or not at all.

Knows: its settings, what a cell of the grid is, when a grid is complete, which units spoil or repeat it.
Does not know: torch, problems, parents, prompts. A driver (`search`) issues the rollouts and reports their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from reef.core.nouns import Batch, PartName, Unit
from reef.experience.units import origins
from reef.recipe import Entry, Mutation, Objective, batches, fields

RATES = {"lora": 1e-3, "full": 1e-5}
"""Few steps are made, and the policy is thrown away: a LoRA learns faster here than elsewhere (`batches.RATES`)."""
MOST = 4096
"""Cells of a step, groups times rollouts: more than that is a mistake in a report."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a unit stands: `step` of `search`, and in it rollout `rollout` of group `group`, of so many."""

    search: str
    step: int
    group: int
    rollout: int
    groups: int
    rollouts: int

    @property
    def grid(self) -> tuple[str, int]:
        return self.search, self.step

    @classmethod
    def of(cls, unit: Unit) -> Cell | None:
        """From the report's metadata; None when that names no cell of a grid."""
        given = unit.report.metadata if isinstance(unit.report.metadata, dict) else {}
        names = ("step", "group", "rollout", "groups_per_step", "rollouts_per_group")
        numbers = [given.get(name) for name in names]
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            return None
        cell = cls(str(given.get("search", "")), *(int(number) for number in numbers if number is not None))
        inside = cell.group < cell.groups and cell.rollout < cell.rollouts and cell.groups * cell.rollouts <= MOST
        return cell if inside else None


@dataclass(frozen=True, slots=True)
class DiscoverRecipe:
    """The YAML keys of `recipe: tttd`. The paper's values for gpt-oss-120b: rate 4e-5, rank 32, alpha 32, no clipping.

    The defaults suit the embedded model. `gate.patience` should be 1: a policy goes live with its step, or not at all.
    """

    train: str = "lora"
    learning_rate: float | None = None  # None: RATES
    gamma: float = 0.6931471805599453  # nats between a group's weights and equal ones: it sets beta for each group
    advantage_max: float = 20.0  # the most one rollout of a group may be worth
    kl: float = 0.1  # of the shaping that holds the policy near the base; sums to zero over a batch
    clip: float = 1.0  # largest norm of the gradient
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"
    max_staleness: ClassVar[int | None] = None  # the loop's bound; a grid's own is 0, see `discard`

    def __post_init__(self) -> None:
        fields.policy(self)
        fields.number(self, "gamma", 0, above=True)
        fields.number(self, "advantage_max", 0, above=True)
        fields.number(self, "kl", 0)
        fields.number(self, "clip", 0, above=True)

    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        """What can be in no grid, and why: no cell, tokens or score; a cell of a step that was said to be of another
        size; a cell that is taken (its first report counts); and every cell of a step in which two releases answered,
        or older weights than those that would learn from it."""
        found: list[tuple[Unit, str]] = []
        taken: set[Cell] = set()
        sizes: dict[tuple[str, int], tuple[int, int]] = {}
        releases: dict[tuple[str, int], set[str]] = {}
        left: list[tuple[Unit, Cell]] = []
        for unit in sorted(units, key=lambda unit: (unit.seq, unit.id)):
            cell = Cell.of(unit)
            if cell is None or not batches.scored(unit):
                found.append((unit, "no cell"))
            elif sizes.setdefault(cell.grid, (cell.groups, cell.rollouts)) != (cell.groups, cell.rollouts):
                found.append((unit, "another grid"))
            elif cell in taken:
                found.append((unit, "repeated"))
            else:
                taken.add(cell)
                left.append((unit, cell))
                releases.setdefault(cell.grid, set()).update(origins(unit))
                if unit.lag:
                    releases[cell.grid].add("older than the working weights")
        return found + [(unit, "mixed releases") for unit, cell in left if len(releases[cell.grid]) > 1]

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first complete grid; None until there is one. Constant groups have no sample left (all of them: one group
        has), and are settled with the others."""
        spoilt = {unit.id for unit, _ in self.discard(units)}
        grids: dict[tuple[str, int], dict[Cell, Unit]] = {}
        for unit in units:
            if unit.id not in spoilt and (cell := Cell.of(unit)) is not None:
                grid = grids.setdefault(cell.grid, {})
                grid[cell] = unit
                if len(grid) == cell.groups * cell.rollouts:
                    return _batch(grid)
        return None

    def objective(self) -> Objective:
        rate = self.learning_rate or RATES[self.train]
        return Objective(
            __name__.rpartition(".")[0] + ".loss:Entropic", batches.options(self) | {"learning_rate": rate}
        )

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()


def _batch(grid: dict[Cell, Unit]) -> Batch:
    """The units of a grid in its order, each sample marked with its group."""
    order = sorted(grid, key=lambda cell: (cell.group, cell.rollout))
    scores = [grid[cell].score or 0.0 for cell in order]
    constant = {
        group
        for group in range(order[0].groups)
        if len({grid[cell].score for cell in order if cell.group == group}) == 1
    }
    removed = constant - {0} if len(constant) == order[0].groups else constant  # a step without a sample is no step
    units = []
    for cell in order:
        unit = grid[cell]
        sample = unit.sample
        if sample is not None:
            sample = None if cell.group in removed else replace(sample, group=str(cell.group), reward=unit.score)
        units.append(replace(unit, sample=sample))
    mean = sum(scores) / len(scores)
    metrics = {
        "grid_step": float(order[0].step),
        "reward_min": min(scores),
        "reward_max": max(scores),
        "reward_std": (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5,
        "zero_fraction": sum(score == 0 for score in scores) / len(scores),
        "constant_groups": float(len(constant)),
        "distinct_answers": float(len({_response(unit) for unit in grid.values()})),
    }
    return batches.make(units, metrics)


def _response(unit: Unit) -> tuple[int, ...]:
    return unit.sample.tokens[unit.sample.prompt_length :] if unit.sample is not None else ()
