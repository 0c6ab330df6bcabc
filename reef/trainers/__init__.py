"""Trainers turn a batch into the next step of a line: new weights in a folder, and nothing else.

Knows: token ids, masks, log-probs, an objective, an optimizer, and the training folder.
Does not know: records, the chain, whether the result will be served.

- A step is idempotent: `training/<scenario>/<part>/<line>/<step>/state.json`, written by temp folder, fsync and rename,
  names the batch and is the acknowledgement. The same order again is answered from disk.
- Every objective has up to four parts: `modules`, `prepare`, `loss`, `aux_steps`; the same ones run on any trainer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from reef.core.wire import Progress, Step, Stepped

TRAINERS = {"local": "reef.trainers.local.client:LocalTrainer", "fake": "reef.trainers.fake:FakeTrainer"}


class Trainer(Protocol):
    def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        """Progress, any number; then one Stepped, durable. TrainError when the step cannot be made."""

    async def ready(self) -> bool: ...

    async def close(self) -> None: ...
