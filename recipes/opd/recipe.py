"""OPD, on-policy distillation: a frozen teacher says of each token the policy chose how likely it would have been.

Knows: its settings and which answers train (all of them: nobody needs to report anything).
Does not know: torch; the loss is in `loss.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef.core.nouns import Batch, PartName, Unit
from reef.experience.units import Signal
from reef.recipe import Entry, Mutation, Objective, batches, fields


@dataclass(frozen=True, slots=True)
class OPDRecipe:
    """The YAML keys of `recipe: opd`. `teacher` is a release id of any scenario here, or a folder: a model with the
    base's own tokenizer, or a LoRA for it."""

    teacher: str = ""
    batch_size: int = 16  # answers of one step
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    scale: float = 1.0  # c: how much a nat between teacher and policy weighs
    cap: float = 0.0  # importance weight of a token, at most; 0: no weight
    top_k: int = 20  # reverse KL over the policy's likeliest tokens and the rest; 0: the sampled token alone
    train: str = "lora"
    learning_rate: float | None = None  # None: batches.RATES
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"
    trusted: ClassVar[frozenset[str]] = frozenset({"teacher"})
    signals: ClassVar[frozenset[Signal]] = frozenset({"answer"})

    def __post_init__(self) -> None:
        fields.policy(self)
        named = isinstance(self.teacher, str) and bool(self.teacher.strip())
        fields.need(named, "teacher", "a release id or a folder", self.teacher)
        fields.whole(self, "batch_size", 1)
        fields.number(self, "scale", 0, above=True)
        fields.number(self, "cap", 0)
        fields.whole(self, "top_k", 0, 4096)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` answers with exact tokens; None until there are as many."""
        fit = [unit for unit in units if batches.exact(unit)][: self.batch_size]
        return batches.make(fit) if len(fit) == self.batch_size else None

    def objective(self) -> Objective:
        return Objective(__name__.rpartition(".")[0] + ".loss:OPD", batches.options(self))

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()
