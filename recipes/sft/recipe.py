"""SFT: learn what was shown. A correction (`/fix`) or demonstration on a report is the answer to be given next time.

Knows: its settings and which reports show something. Does not know: torch; the loss is in `loss.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from reef.core.nouns import Batch, PartName, Unit
from reef.experience.units import Signal
from reef.recipe import Entry, Mutation, Objective, batches, chats, fields


@dataclass(frozen=True, slots=True)
class SFTRecipe:
    """The YAML keys of `recipe: sft`. The defaults suit a few corrections at a time on the embedded model; for many
    demonstrations take batches of 16 to 64 and one to three epochs."""

    batch_size: int = 1  # demonstrations of one step
    epochs: int = 12  # updates that a step makes on its batch
    max_staleness: int | None = None  # demonstrations do not age; a bound is for those who want one
    kl: float = 0.1  # weight of KL(base || policy) at the demonstrations' tokens: to forget less
    train: str = "lora"
    learning_rate: float | None = None  # None: batches.RATES
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"
    signals: ClassVar[frozenset[Signal]] = frozenset({"demonstration"})

    def __post_init__(self) -> None:
        fields.policy(self)
        fields.whole(self, "batch_size", 1)
        fields.whole(self, "epochs", 1, 100)
        fields.number(self, "kl", 0)

    @property
    def ages(self) -> bool:
        """Whether lag matters: what was shown is as good as ever, whatever release it was shown to."""
        return self.max_staleness is not None

    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        """Demonstrations of nothing, and those on requests that cannot be said in chat."""
        return [(unit, "no demonstration") for unit in units if taught(unit) is None]

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` demonstrations; None until there are as many."""
        fit = list(islice((made for unit in units if (made := taught(unit)) is not None), self.batch_size))
        return batches.make(fit) if len(fit) == self.batch_size else None

    def objective(self) -> Objective:
        return Objective(__name__.rpartition(".")[0] + ".loss:SFT", batches.options(self))

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()


def taught(unit: Unit) -> Unit | None:
    """The unit with its demonstration as the sample. The answer that was given instead never trains."""
    sample = chats.demonstrated(unit.record, unit.report.demonstration, unit.choice)
    return None if sample is None else replace(unit, sample=sample, score=None)
