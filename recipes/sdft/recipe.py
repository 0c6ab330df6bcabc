"""SDFT: the model that reads a demonstration teaches the one that does not, on what the latter says itself.

Knows: its settings, and what the teacher reads. Does not know: torch; the loss is in `loss.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from reef.core.nouns import Batch, PartName, Unit
from reef.experience.units import Signal
from reef.recipe import Entry, Mutation, Objective, batches, chats, fields

PLACE = "{demonstration}"


@dataclass(frozen=True, slots=True)
class SDFTRecipe:
    """The YAML keys of `recipe: sdft`. Where the paper's values differ: batch 32, rate 1e-5 on full weights, skip 3,
    a moving average of 0.01 as the teacher."""

    batch_size: int = 16  # answers with a demonstration of one step
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    divergence: str = "forward"  # forward: KL(teacher || policy); reverse: KL(policy || teacher); jsd: half of each
    top_k: int = 0  # of the policy's likeliest tokens, and the rest as one; 0: the whole vocabulary
    cap: float = 2.0  # importance weight of a token, at most; 0: no weight
    skip: int = 0  # first tokens of an answer that do not train
    average: float = 0.0  # rate at which the teacher follows the policy; 0: the frozen base
    template: str = "Here is an example of a good answer: {demonstration}\nNow answer in the same way."
    """What the teacher reads after the user's last message."""
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
        fields.one_of(self, "divergence", "forward", "reverse", "jsd")
        fields.whole(self, "top_k", 0, 4096)
        fields.number(self, "cap", 0)
        fields.whole(self, "skip", 0)
        fields.number(self, "average", 0, 1)
        fits = isinstance(self.template, str) and PLACE in self.template
        fields.need(fits, "template", f"a text with {PLACE} in it", self.template)

    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        """Without a text to read there is no teacher, without the answer's own tokens no pupil."""
        return [(unit, "no demonstration") for unit in units if not _fits(unit)]

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` answers that a demonstration came for; None until there are as many."""
        fit = list(islice(filter(_fits, units), self.batch_size))
        return batches.make([self._taught(unit) for unit in fit]) if len(fit) == self.batch_size else None

    def _taught(self, unit: Unit) -> Unit:
        told = self.template.replace(PLACE, chats.shown(unit.report.demonstration) or "")
        context = json.dumps(chats.hinted(chats.spoken(unit.record), told), ensure_ascii=False)
        assert unit.sample is not None  # `exact`
        return replace(unit, sample=replace(unit.sample, contexts=(context,)))

    def objective(self) -> Objective:
        return Objective(__name__.rpartition(".")[0] + ".loss:SDFT", batches.options(self, ("template",)))

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()


def _fits(unit: Unit) -> bool:
    shown = chats.shown(unit.report.demonstration) is not None
    return shown and batches.exact(unit) and bool(chats.spoken(unit.record)["messages"])
