"""What recipes of weights have in common: which units can train, a batch of them, and the options of an objective.

Knows: units and batches. Does not know: what a unit is worth, or any loss.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from reef.core.nouns import Batch, PartName, Unit

RATES = {"lora": 5e-4, "full": 1e-5}
"""The policy's learning rate by what is trained, where a recipe names none."""


def exact(unit: Unit) -> bool:
    """Whether the unit has sampled tokens that a step may train on."""
    return unit.sample is not None and any(unit.sample.mask)


def scored(unit: Unit) -> bool:
    """Whether it has them and a score that is a number."""
    return unit.score is not None and math.isfinite(unit.score) and exact(unit)


def spread(scores: Sequence[float]) -> float:
    """How far the scores lie apart: largest less smallest, 0 for fewer than two. Where it is 0 there is no signal to
    compare: a group without variance has no advantage, a batch without it (`zero_signal`) no direction."""
    return max(scores) - min(scores) if len(scores) > 1 else 0.0


def make(units: Sequence[Unit], metrics: Mapping[str, float] | None = None, part: PartName = "weights") -> Batch:
    """The batch of these units. Its id is a digest of part and unit ids, so that a retry is recognised."""
    name = json.dumps([part, *sorted(unit.id for unit in units)]).encode()
    found = {"samples": float(len(units))} | dict(metrics or {})
    scores = [unit.score for unit in units if unit.score is not None]
    if scores:
        found.setdefault("score", math.fsum(scores) / len(scores))
    return Batch(hashlib.sha256(name).hexdigest(), part, tuple(units), found)


def options(recipe: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The recipe's fields as the arguments of its objective: all but those that concern batches, with the learning
    rate that holds and rank 0 for full weights."""
    own = {"batch_size", "max_staleness", "train", *without}
    chosen = {key: value for key, value in asdict(recipe).items() if key not in own}
    chosen["learning_rate"] = recipe.learning_rate or RATES[recipe.train]
    chosen["rank"] = recipe.rank if recipe.train == "lora" else 0
    return chosen
