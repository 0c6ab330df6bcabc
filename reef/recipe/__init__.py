"""The contract a method fills in. A recipe is a frozen dataclass whose fields are its YAML keys.

Knows: experience in, batches out, and which part (`weights` or `harness`) it improves.
Does not know: HTTP, the store, the chain, when it is called, or whether its candidate will be accepted.

A weights recipe names an objective (a dotted path to `trainers.local.objective.Objective`, loaded only by the trainer
process, so that the recipe itself imports no torch); a harness recipe proposes an edit of the tree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from reef.core.nouns import Batch, Json, PartName, Unit
from reef.harness.tree import Entry, Mutation

RECIPES = {
    "record": "reef.recipe.record:RecordRecipe",
    "sao": "recipes.sao.recipe:SAORecipe",
    "grpo": "recipes.grpo.recipe:GRPORecipe",
    "openclawrl": "recipes.openclawrl.recipe:OpenClawRecipe",
    "tttd": "recipes.tttd.recipe:DiscoverRecipe",
    "sft": "recipes.sft.recipe:SFTRecipe",
    "sdft": "recipes.sdft.recipe:SDFTRecipe",
    "opd": "recipes.opd.recipe:OPDRecipe",
    "feedback_rules": "recipes.feedback_rules.recipe:FeedbackRules",
    "harness_evolve": "recipes.harness_evolve.recipe:HarnessEvolve",
    "gepa": "recipes.gepa.recipe:GEPARecipe",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """Where the trainer finds the loss, and its arguments (plain JSON)."""

    path: str
    options: Mapping[str, Json]


Asking = Callable[[str | None, Mapping[str, Json]], Awaitable[str]]
"""Ask a model: (an engine's name in the configuration, or None for the scenario's own base; a chat body without stream
and model) to the text of its answer. EngineError, WireError or UpstreamError when there is none."""


class Recipe(Protocol):
    """Besides these, a recipe may have

    - `signals: ClassVar[frozenset[Signal]]`: what makes a unit (`experience.units`). Default: score for weights,
      feedback for the harness. `next` is the message that follows an answer.
    - `ages: bool`: whether lag matters (default true); without, samples are never stale or foreign.
    - `trusted: ClassVar[frozenset[str]]`: its fields that name files or code of the server. A request that makes a
      scenario cannot choose them, only repeat what the configuration says.
    - `engines`: names of the engines that `assess` asks; one that the configuration lacks is an error at the start.
    - `applies: ClassVar[bool]`: a harness recipe whose rules and skills are put into each request, for applications
      without a client that has them in its files (default false). `harness.apply` of the configuration goes before it.
    - `merge: bool`: one report on several turns of a session is one unit, its turns one sequence (default false).
    - `def discard(self, units) -> Sequence[tuple[Unit, str]]`: ready units that can be in no batch, each with the
      reason in a word or two; they are settled with it. Asked before `batch`. A reason is never `duplicate`.
    - `async def search(self, batch: Batch | None, tree, bench: Bench) -> Proposed`, of a harness recipe, instead of
      `propose`: it may ask models and measure trees (`recipe.bench`), for as long as it takes, beside the updates of
      other parts. `batch` is None for a person's instruction that no report came with. A crash or a stop begins it
      again, with the same `bench.folder`; what it raises is tried again, an error of its own three times at most.
      Only a harness recipe that has it takes instructions.
    - `async def assess(self, unit, ask: Asking) -> Json`: what another model or a rule makes of a unit before it can be
      in a batch; done once for each unit, kept, and given back as `unit.assessment`. None: the unit never trains.
    """

    part: ClassVar[PartName | None]  # None: records only, never learns
    max_staleness: int | None  # None: evaluate_every * patience

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The units to learn from next, or None when there are too few. `units` are ready, fresh and not yet used, in
        the order in which they should be taken. A batch may hold copies with other samples (a reward, a group,
        contexts); their ids stay."""

    def objective(self) -> Objective:
        """For part `weights`: the loss that a step minimises. A recipe with a field `train` (`lora` or `full`) is not
        given units while what is served is of the other kind."""

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        """For part `harness`: the edit this batch suggests; empty when it suggests none."""


__all__ = ["RECIPES", "Any", "Asking", "Batch", "Entry", "Mutation", "Objective", "Recipe", "Unit"]
