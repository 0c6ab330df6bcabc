"""Studies: a recipe is run on a real server against controls, several seeds each, and what it learnt is measured.

Knows: arms, seeds, points, demands; the public HTTP contract, the learner's socket to wait by, the engine's for drift.
Does not know: any particular recipe. A study is a dotted path (`recipes.sao.study:STUDY`).

One run is one arm with one seed: a server of its own in a folder of its own, so that a run that was cut short goes on
where it was. Whatever is measured is measured with recording off, on prompts that were never trained on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reef.study.run import Run

STUDIES = {
    "sao": "recipes.sao.study:STUDY",
    "skill": "recipes.grpo.study:SKILL",
    "grpo": "recipes.grpo.study:STUDY",
    "openclawrl": "recipes.openclawrl.study:STUDY",
    "tttd": "recipes.tttd.study:STUDY",
    "sft": "recipes.sft.study:STUDY",
    "sdft": "recipes.sdft.study:STUDY",
    "opd": "recipes.opd.study:STUDY",
    "gepa": "recipes.gepa.study:STUDY",
    "harness_evolve": "recipes.harness_evolve.study:STUDY",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a study. `config` is the server's YAML as a mapping (`reef`, `gate`, …), in which the text
    `{seed}` is the run's seed; `options` are the driver's. The first arm is the main one and has three seeds, a placebo
    one."""

    name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """A sentence that must hold of the results, whether it does, and the figures it was judged by."""

    text: str
    met: bool | None  # None: a run it needs is not there
    said: str


Results = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""arm -> seed -> what the drive returned (numbers; `curve`: a list of (x, y)), and `seconds`."""


@dataclass(frozen=True, slots=True)
class Study:
    """`drive` runs one arm with one seed to its end and returns its figures: `base` and `end` (the main score before
    and after), `curve` of the main score ((x, y) pairs), perhaps `training` (the same of what is trained on) and
    `drift` (it calls `run.drift` itself where weights change), others. Figures are plain JSON; what was not measured is
    None.
    """

    name: str
    title: str
    score: str  # what the main score is, for the axis of the figure
    progress: str  # what x is: rollouts, turns, steps
    arms: Sequence[Arm]
    drive: Callable[[Run], Awaitable[dict[str, Any]]]
    demands: Callable[[Results], Sequence[Demand]]
    folder: str = ""  # where table and figure are kept in the repository: the recipe's folder
