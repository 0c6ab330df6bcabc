"""GRPO and its kin: several scored answers to one prompt, each judged against the others.

Knows: its settings, what a group is, and which groups make a batch. Does not know: torch; the equations are in
`loss.py`, which only the trainer process loads.

- A group is `group_size` scored answers by one release: those whose reports say the same `metadata: {"group": TEXT}`,
  else those to the same prompt (the choices of one request with n > 1 are), in the order of their reports.
- Groups that are not complete wait; they never train in part.
- A group whose rewards are all the same tells nothing (zero signal): with `dynamic` it is in no batch and given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from reef.core.errors import ConfigError
from reef.core.nouns import Batch, PartName, Sample, Unit
from reef.experience import holdout
from reef.experience.units import origins
from reef.recipe import Entry, Mutation, Objective, batches, fields

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "reduction": "seq_mean", "kl": 0.04, "dynamic": False},
    "rloo": {"advantage": "rloo", "loss": "cispo", "reduction": "constant", "kl": 0.0, "dynamic": False},
    "dapo": {
        "advantage": "grpo", "loss": "ppo", "reduction": "token_mean", "kl": 0.0, "dynamic": True,
        "epsilon_low": 0.2, "epsilon_high": 0.28,
    },
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "reduction": "constant", "kl": 0.0, "dynamic": False},
    "gspo": {"advantage": "grpo", "loss": "gspo", "reduction": "seq_mean", "kl": 0.0, "dynamic": False},
}  # fmt: skip
"""What each name stands for. grpo: arXiv 2402.03300; rloo: 2402.14740; dapo: 2503.14476; dr_grpo: 2503.20783; gspo:
2507.18071."""

CLIPS: Final = {"ppo": (0.2, 0.2), "cispo": (1.0, 1.0), "gspo": (3e-4, 4e-4), "dis": (0.3, 5.0)}
"""`epsilon_low`, `epsilon_high` of each loss, unless the preset or the settings say more."""

ALIKE: Final = 1e-9
"""Rewards this near to each other are the same."""


@dataclass(frozen=True, slots=True)
class GRPORecipe:
    """The YAML keys of `recipe: grpo`. Where a key is null, the preset's value holds."""

    preset: str = "grpo"  # grpo | rloo | dapo | dr_grpo | gspo
    group_size: int = 4  # scored answers to one prompt
    groups: int = 8  # complete groups per optimizer step
    advantage: str | None = None  # grpo | dr_grpo | rloo
    loss: str | None = None  # ppo | cispo | gspo | dis
    reduction: str | None = None  # token_mean | seq_mean | constant
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    dual_clip: float | None = None  # with ppo: a loss with A < 0 is at most -dual_clip A
    tis_cap: float | None = None  # with ppo: clip against the weights before the step, times min(pi_old / q, tis_cap)
    kl: float | None = None  # weight of a pull (pi / q k3) towards the frozen base
    dynamic: bool | None = None  # leave out groups whose rewards are all the same, and give them up
    length: int | None = None  # tokens: what `constant` divides by (null: the batch's longest), where `overlong` ends
    overlong: int = 0  # the last tokens below `length` cost up to 1 of the reward, longer answers 1 (DAPO)
    merge: bool = False  # one report on several turns of a session is one answer
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    train: str = "lora"  # lora | full
    learning_rate: float | None = None  # None: batches.RATES
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"

    def __post_init__(self) -> None:
        fields.policy(self)
        fields.one_of(self, "preset", *PRESETS)
        fields.whole(self, "group_size", 2)
        fields.whole(self, "groups", 1)
        _maybe(self, "advantage", "grpo", "dr_grpo", "rloo")
        _maybe(self, "loss", *CLIPS)
        _maybe(self, "reduction", "token_mean", "seq_mean", "constant")
        chosen = self.chosen()
        ratio = chosen["loss"] != "dis"  # its mask may be open above 1 only
        fields.number(self, "epsilon_low", 0, 1, above=not ratio, none=True)
        fields.number(self, "epsilon_high", 0, none=True)
        fields.number(self, "dual_clip", 1, above=True, none=True)
        fields.number(self, "tis_cap", 0, above=True, none=True)
        fields.number(self, "kl", 0, none=True)
        if self.dynamic is not None:
            fields.flag(self, "dynamic")
        fields.whole(self, "length", 1, none=True)
        fields.whole(self, "overlong", 0)
        fields.flag(self, "merge")
        self._agree(chosen)

    def _agree(self, chosen: Mapping[str, Any]) -> None:
        """Settings that contradict each other are refused, as one of them would silently mean nothing."""
        loss, reduction = chosen["loss"], chosen["reduction"]
        if loss != "ppo":
            for name in ("dual_clip", "tis_cap"):
                fields.need(getattr(self, name) is None, name, f"null with loss {loss}", getattr(self, name))
        wanted = "seq_mean with loss gspo, whose ratio is a whole answer's"
        fields.need(loss != "gspo" or reduction == "seq_mean", "reduction", wanted, reduction)
        if self.overlong and (self.length is None or self.overlong > self.length):
            raise ConfigError(f"overlong ({self.overlong}) needs length, of at least as many tokens", param="overlong")
        if self.length is not None and not self.overlong and reduction != "constant":
            raise ConfigError(f"length means nothing with reduction {reduction} and no overlong", param="length")

    def chosen(self) -> dict[str, Any]:
        """What the objective works with: the preset's values, and what was set in place of them."""
        preset = dict(PRESETS[self.preset])
        loss = self.loss or preset["loss"]
        low, high = CLIPS.get(loss, (0.0, 0.0))
        if loss != preset["loss"]:  # another loss's bounds mean nothing here
            preset |= {"epsilon_low": low, "epsilon_high": high}
        found = {"epsilon_low": low, "epsilon_high": high} | preset
        own = {name: value for name in found if (value := getattr(self, name)) is not None}
        return found | own

    @property
    def batch_size(self) -> int:
        """Answers per optimizer step."""
        return self.groups * self.group_size

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `groups` complete groups; None until there are as many. Each sample knows its group, and has a
        reward less what an overlong answer costs."""
        dynamic = self.chosen()["dynamic"]
        taken: list[list[Unit]] = []
        for group in self._complete(units):
            if not (dynamic and alike(group)):
                taken.append(group)
            if len(taken) == self.groups:
                named = [_named(unit, f"{number}") for number, group in enumerate(taken) for unit in group]
                metrics = {"groups": float(self.groups), "zero_signal_groups": float(sum(map(alike, taken)))}
                return batches.make(named, metrics)
        return None

    def discard(self, units: Sequence[Unit]) -> Sequence[tuple[Unit, str]]:
        """With `dynamic`: the answers of complete groups whose rewards are all the same. The step's metric `discarded`
        counts the answers that were given up since the step before."""
        if not self.chosen()["dynamic"]:
            return ()
        return [(unit, "zero signal") for group in self._complete(units) if alike(group) for unit in group]

    def objective(self) -> Objective:
        own = ("preset", "group_size", "groups", "merge", "dynamic", "overlong")
        chosen = self.chosen()
        del chosen["dynamic"]
        return Objective(__name__.rpartition(".")[0] + ".loss:GRPO", batches.options(self, own) | chosen)

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()

    def _complete(self, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Complete groups, in the order in which they became so."""
        open_: dict[tuple[str, str], list[Unit]] = {}
        for unit in units:
            if batches.scored(unit) and (key := group_of(unit)) is not None:
                group = open_.setdefault(key, [])
                group.append(self._shaped(unit))
                if len(group) == self.group_size:
                    yield open_.pop(key)

    def _shaped(self, unit: Unit) -> Unit:
        sample = unit.sample
        if not self.overlong or sample is None or sample.reward is None or self.length is None:
            return unit
        cost = overlong(sum(sample.mask), self.length, self.overlong)
        return replace(unit, sample=replace(sample, reward=sample.reward + cost))


def group_of(unit: Unit) -> tuple[str, str] | None:
    """(group, release) of a unit: the group that its report names, else its prompt, else its request. None: more than
    one release sampled it, so it is in no group."""
    releases = origins(unit)
    if len(releases) != 1:
        return None
    (release,) = releases
    metadata = unit.report.metadata
    named = metadata.get("group") if isinstance(metadata, dict) else None
    if isinstance(named, str) and named:
        return f"named {named}", release
    prompt = holdout.read(unit.record)
    return (f"request {unit.record.id}" if prompt is None else f"prompt {prompt.key}"), release


def alike(group: Sequence[Unit]) -> bool:
    """Whether the rewards of a group are all the same, so that it tells nothing."""
    rewards = [sample.reward for unit in group if (sample := unit.sample) is not None and sample.reward is not None]
    return not rewards or max(rewards) - min(rewards) <= ALIKE


def overlong(tokens: int, length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `length - cache` tokens, then falling
    evenly to -1 at `length`, and -1 beyond."""
    return max(-1.0, min(0.0, (length - cache - tokens) / cache))


def _named(unit: Unit, group: str) -> Unit:
    sample: Sample | None = unit.sample
    return unit if sample is None else replace(unit, sample=replace(sample, group=group))


def _maybe(recipe: GRPORecipe, name: str, *values: str) -> None:
    if getattr(recipe, name) is not None:
        fields.one_of(recipe, name, *values)
