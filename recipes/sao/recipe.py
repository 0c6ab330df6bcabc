"""SAO: one scored answer per prompt, trained as soon as enough of them are there.

Knows: its settings and how a batch is chosen. Does not know: torch; the equations are in `loss.py`, which only the
trainer process loads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from reef.core.errors import ConfigError
from reef.core.nouns import Batch, PartName, Unit
from reef.recipe import Entry, Mutation, Objective

RATES = {"lora": 5e-4, "full": 1e-5}
"""The policy's learning rate by what is trained."""


@dataclass(frozen=True, slots=True)
class SAORecipe:
    """The YAML keys of `recipe: sao`. Where the paper's values differ: batch 128, rates 1e-6 and 5e-6, warm-up 10.

    The defaults suit the embedded model; the paper's suit full weights of a 30-billion-parameter one.
    """

    batch_size: int = 32  # scored answers per optimizer step
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    train: str = "lora"  # lora | full: all weights, at about 200 times the disk of a LoRA
    learning_rate: float | None = None  # None: RATES
    critic_learning_rate: float = 1e-2
    critic: str = "linear"  # linear: a head on the frozen base; full: a copy of the model with a head
    epsilon_low: float = 0.3  # a token trains while 1 - low < ratio < 1 + high
    epsilon_high: float = 5.0
    critic_steps: int = 2  # critic updates per policy update
    critic_warmup: int = 0  # first steps that move only the critic
    length_alpha: float = 1.5  # lambda = 1 - 1 / (length_alpha * response length)
    kl: float = 0.0  # weight of a pull (k3) towards the frozen base; the paper has none
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"

    def __post_init__(self) -> None:
        for name in ("batch_size", "critic_steps", "critic_warmup", "rank", "seed"):
            value = getattr(self, name)
            _need(isinstance(value, int) and not isinstance(value, bool), name, "a whole number", value)
        for name in (
            "critic_learning_rate",
            "epsilon_low",
            "epsilon_high",
            "length_alpha",
            "kl",
            "alpha",
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _need(number and math.isfinite(value), name, "a finite number", value)
        _need(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        stale = self.max_staleness
        whole = isinstance(stale, int) and not isinstance(stale, bool) and stale >= 0
        _need(stale is None or whole, "max_staleness", "null or a whole number of at least 0", stale)
        _need(self.train in tuple(RATES), "train", "'lora' or 'full'", self.train)
        rate = self.learning_rate
        number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= 1
        _need(rate is None or number, "learning_rate", "null or a number above 0 and at most 1", rate)
        _need(
            0 < self.critic_learning_rate <= 1,
            "critic_learning_rate",
            "above 0 and at most 1",
            self.critic_learning_rate,
        )
        _need(self.critic in ("linear", "full"), "critic", "'linear' or 'full'", self.critic)
        _need(0 < self.epsilon_low <= 1, "epsilon_low", "above 0 and at most 1", self.epsilon_low)
        _need(self.epsilon_high > 0, "epsilon_high", "above 0", self.epsilon_high)
        _need(self.critic_steps >= 0, "critic_steps", "at least 0", self.critic_steps)
        _need(self.critic_warmup >= 0, "critic_warmup", "at least 0", self.critic_warmup)
        _need(self.length_alpha > 0, "length_alpha", "above 0", self.length_alpha)
        _need(self.kl >= 0, "kl", "at least 0", self.kl)
        _need(1 <= self.rank <= 512, "rank", "between 1 and 512", self.rank)
        _need(self.alpha > 0, "alpha", "above 0", self.alpha)
        _need(0 <= self.seed < 2**63, "seed", "between 0 and 2^63", self.seed)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The oldest `batch_size` units that carry a score and exact tokens; None until there are as many."""
        fit = [unit for unit in units if _fits(unit)]
        if len(fit) < self.batch_size:
            return None
        taken = tuple(sorted(fit, key=lambda unit: (unit.seq, unit.id))[: self.batch_size])
        name = json.dumps([self.part, *(unit.id for unit in taken)]).encode()
        scores = [unit.score for unit in taken if unit.score is not None]
        metrics = {"score": math.fsum(scores) / len(scores), "samples": float(len(taken))}
        return Batch(id=hashlib.sha256(name).hexdigest(), part="weights", units=taken, metrics=metrics)

    def objective(self) -> Objective:
        own = ("batch_size", "max_staleness", "train")
        options = {key: value for key, value in asdict(self).items() if key not in own}
        options["learning_rate"] = self.learning_rate or RATES[self.train]
        options["rank"] = self.rank if self.train == "lora" else 0
        return Objective(__name__.rpartition(".")[0] + ".loss:SAO", options)

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()


def _fits(unit: Unit) -> bool:
    return unit.score is not None and math.isfinite(unit.score) and unit.sample is not None and any(unit.sample.mask)


def _need(right: bool, name: str, wanted: str, value: object) -> None:
    if not right:
        raise ConfigError(f"{name} must be {wanted}, not {value!r}", param=name)
