"""The recipe that only records: every exchange and report is kept, and nothing is learnt from them.

Knows: nothing. It is the default in front of an upstream engine, whose weights are not ours to change.
Does not know: units, batches, trees; its scenario's releases stay at the base until an operator changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef.core.errors import ConfigError
from reef.core.nouns import Batch, PartName, Unit
from reef.harness.tree import Entry, Mutation
from reef.recipe import Objective


@dataclass(frozen=True, slots=True)
class RecordRecipe:
    part: ClassVar[PartName | None] = None
    max_staleness: int | None = None

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        return None

    def objective(self) -> Objective:
        raise ConfigError("the recipe `record` never trains and has no objective; choose another recipe to learn")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()
