"""The embedded trainer: plain torch in one process, a LoRA or all weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Nothing can be chosen here yet: the recipe says how to train."""
