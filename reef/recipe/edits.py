"""The recipe that only carries out what people propose: the harness of a scenario whose own recipe does not touch it.

Knows: nothing; a person's mutations need no method. It is put in the place of a harness recipe while something waits.
Does not know: experience. It reads none and never makes a batch.
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
class Edits:
    part: ClassVar[PartName | None] = "harness"
    signals: ClassVar[frozenset[str]] = frozenset()
    max_staleness: int | None = None

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        return None

    def objective(self) -> Objective:
        raise ConfigError("what people propose edits the harness and has no objective; name a weights recipe to train")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()
