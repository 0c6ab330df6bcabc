"""Where a step begins: which weights a line goes on from, and where the optimizer and modules behind them are.

Knows: the training folder, releases as files, which base model weights were made for. No torch here.
Does not know: tensors, or what a step does with them.

- A line goes on from its own last step; its first step from the release it starts at.
- Weights of another base model are a DigestError, here and in the engine: no batch is at fault.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.core.disk import sha256
from reef.core.errors import DigestError, MissingError, TrainError
from reef.core.wire import Step
from reef.engines import Resolver, WeightFiles
from reef.trainers import folder

log = logging.getLogger(__name__)


STATE = ("optimizer.safetensors", "modules.safetensors")
"""What a step of the backends `local` and `ray` keeps for the next one beside the weights."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The working copy at `order.step - 1`. `kept` is the step folder whose optimizer and modules belong to `source`;
    None: they begin anew, and where the weights do not (`cold`), the optimizer warms up."""

    source: WeightFiles
    kept: Path | None = None
    cold: bool = False

    def own(self) -> Origin:
        """The same for `local` and `ray`: a step of another backend keeps its optimizer elsewhere."""
        if self.kept is None or all((self.kept / name).is_file() for name in STATE):
            return self
        return Origin(self.source, cold=True)


def find(training: Path, order: Step, resolve: Resolver, digest: str | None) -> Origin:
    """Files are verified. TrainError when there is nothing to go on from; DigestError for another base model's."""
    if order.step > order.base_step + 1:
        place = folder.path(training, order.scenario, order.part, order.line, order.step - 1)
        state = folder.read(place)
        if state is None:
            raise TrainError(f"line {order.line} has no step {order.step - 1} to continue from; start a new line")
        folder.verify(place, state)
        if not state.files:
            raise TrainError(f"step {order.step - 1} of line {order.line} was gone beyond already; start a new line")
        kind, files, meta = folder.part_files(place, check=False)
        same_base(f"step {order.step - 1} of line {order.line}", meta, digest)
        return Origin(WeightFiles(kind, files, meta), place)
    try:
        source = resolve(order.base_release)
    except MissingError:
        raise TrainError(f"release {order.base_release} is not in the chain; start the line from one that is") from None
    same_base(f"release {order.base_release}", source.meta, digest)
    kept = _kept(training, order, source)
    return Origin(source, kept, cold=kept is None and order.base_step > 0)


def same_base(what: str, meta: Mapping[str, Any], digest: str | None) -> None:
    """Weights hold for one base model. An unknown digest (none, or all zeros) is believed to be the right one."""
    base = meta.get("base") or {}
    made = str(base.get("digest") or "")
    if digest and made.strip("0") and made != digest:
        raise DigestError(
            f"{what} belongs to the base model {base.get('name') or 'unknown'} ({made[:12]}), the trainer has "
            f"{digest[:12]}; serve the model that the scenario was made with, or start a new scenario"
        )


def _kept(training: Path, order: Step, source: WeightFiles) -> Path | None:
    """The training folder that a release came from, if its optimizer state is still there and whole. One that is
    damaged is as good as gone: the weights are the release's own."""
    name = "adapter_model.safetensors" if source.kind == "lora" else "model.safetensors"
    if source.kind == "base" or name not in source.files:
        return None
    digest = sha256(source.files[name])
    found = folder.find(training, order.scenario, order.part, order.base_step, name, digest)
    if found is None or (state := folder.read(found)) is None:
        return None
    try:
        folder.verify(found, state)
    except TrainError as error:
        log.warning("a fresh optimizer for line %s: %s", order.line, error.message)
        return None
    return found
