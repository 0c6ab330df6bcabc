"""SAO: one scored answer per prompt, trained as soon as enough of them are there.

Knows: its settings and how a batch is chosen. Does not know: torch; the equations are in `loss.py`, which only the
trainer process loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef.core.nouns import Batch, PartName, Unit
from reef.recipe import Entry, Mutation, Objective, batches, fields


@dataclass(frozen=True, slots=True)
class SAORecipe:
    """The YAML keys of `recipe: sao`. Where the paper's values differ: batch 128, rates 1e-6 and 5e-6, warm-up 10.

    The defaults suit the embedded model; the paper's suit full weights of a 30-billion-parameter one.
    """

    batch_size: int = 32  # scored answers per optimizer step
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    train: str = "lora"  # lora | full: all weights, at about 200 times the disk of a LoRA
    learning_rate: float | None = None  # None: batches.RATES
    critic_learning_rate: float = 1e-2
    critic: str = "linear"  # linear: a head on the frozen base; full: a copy of the model with a head
    epsilon_low: float = 0.3  # a token trains while 1 - low < ratio < 1 + high
    epsilon_high: float = 5.0
    critic_steps: int = 2  # critic updates per policy update
    critic_warmup: int = 0  # first steps that move only the critic
    length_alpha: float = 1.5  # lambda = 1 - 1 / (length_alpha * response length)
    merge: bool = False  # one report on several turns of a session is one sample; false: each turn is judged alone
    kl: float = 0.0  # weight of a pull (pi / q k3) towards the frozen base; the paper has none
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"

    def __post_init__(self) -> None:
        fields.policy(self)
        fields.whole(self, "batch_size", 1)
        fields.number(self, "critic_learning_rate", 0, 1, above=True)
        fields.one_of(self, "critic", "linear", "full")
        fields.number(self, "epsilon_low", 0, 1, above=True)
        fields.number(self, "epsilon_high", 0, above=True)
        fields.whole(self, "critic_steps", 0)
        fields.whole(self, "critic_warmup", 0)
        fields.number(self, "length_alpha", 0, above=True)
        fields.flag(self, "merge")
        fields.number(self, "kl", 0)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` units that carry a score and exact tokens; None until there are as many."""
        fit = [unit for unit in units if batches.scored(unit)][: self.batch_size]
        return batches.make(fit) if len(fit) == self.batch_size else None

    def objective(self) -> Objective:
        return Objective(__name__.rpartition(".")[0] + ".loss:SAO", batches.options(self, {"merge"}))

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()
