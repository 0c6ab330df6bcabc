"""Trainers turn a batch into the next step of a line: new weights in a folder, and nothing else.

Knows: token ids, masks, log-probs, an objective, an optimizer, and the training folder.
Does not know: records, the chain, whether the result will be served.

- A step is idempotent: `training/<scenario>/<part>/<line>/<step>/state.json`, written by temp folder, fsync and rename,
  names the batch and is the acknowledgement. The same order again is answered from disk.
- Every objective has up to four parts: `modules`, `prepare`, `loss`, `aux_steps`; the same ones run on any trainer.
- The learner sees a `Trainer`. Where steps need a process of their own, that is a socket, behind which `server` hands
  orders to a backend's `Work`, one at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reef.core.wire import Progress, Step, Stepped
from reef.engines import Resolver

WORKS = {
    "local": "reef.trainers.local.work:LocalWork",
    "ray": "reef.trainers.ray.work:RayWork",
    "tinker": "reef.trainers.tinker.work:TinkerWork",
    "slime": "reef.trainers.slime.work:SlimeWork",
}
"""Backends that make steps in the trainer's process."""

OPTIONS = {name: f"reef.trainers.{name}:Options" for name in WORKS}
"""What the configuration may tell each of them (`training.options`): a dataclass, read without torch."""

TRAINERS = {"fake": "reef.trainers.fake:FakeTrainer"} | dict.fromkeys(WORKS, "reef.trainers.client:SocketTrainer")

Report = Callable[[str, int, int], None]
"""Told (stage, done, total) as a step goes on. May raise to stop it; nothing is written then."""


class Trainer(Protocol):
    def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        """Progress, any number; then one Stepped, durable. TrainError when the step cannot be made."""

    async def ready(self) -> bool: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ground:
    """What a backend works on: the base model's folder (Hugging Face layout) with its name and the sha256 of its
    weights, the training folder, and how a release's weights are found."""

    folder: Path
    training: Path
    resolve: Resolver
    name: str = ""
    digest: str | None = None


class Work(Protocol):
    """Makes steps, in the trainer's process. Constructed as `Work(ground, options)` at the first order that is not
    answered from disk; may then take its time and load what it needs, telling `report`."""

    def advance(self, order: Step, report: Report) -> Stepped:
        """One step, durable (`folder.write`). Blocking, in a thread of its own, never two at a time. ReefError as a
        `Trainer` raises it; any other exception becomes TrainError."""

    def close(self) -> None:
        """The process ends. Steps in the making are left."""


Make = Callable[[Ground, Any], Work]


def options(backend: str, given: Mapping[str, Any]) -> Any:
    """A backend's options as its dataclass; ConfigError (or TypeError, for a key it does not have)."""
    from reef.core.load import load

    return load(OPTIONS[backend], what="options")(**given)
