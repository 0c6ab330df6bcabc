"""A trainer without torch: a real step folder with tiny, deterministic LoRA files. For tests and dry runs.

Knows: the training folder's rules (the same code as the local trainer's) and how a batch's rewards are summed.
Does not know: models, losses, optimizers; its weights depend only on the order, so a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from reef.core.errors import TrainError
from reef.core.wire import Progress, Step, Stepped
from reef.trainers import folder


class FakeTrainer:
    """`delay` seconds pass in each step. `refuse` may turn an order down: it returns a reason, or None to train it."""

    def __init__(
        self, training: Path, *, delay: float = 0.0, refuse: Callable[[Step], str | None] | None = None
    ) -> None:
        self._training = training
        self._delay = delay
        self._refuse = refuse
        self.orders: list[Step] = []  # every order that was not answered from disk

    async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        if (done := folder.answered(self._training, order)) is not None:
            yield done
            return
        self.orders.append(order)
        if self._refuse is not None and (reason := self._refuse(order)) is not None:
            raise TrainError(reason)
        if not order.data:
            raise TrainError("the batch holds no samples; a step needs at least one")
        self._parent(order)
        yield Progress(stage="train", done=0, total=1)
        await asyncio.sleep(self._delay)
        yield Progress(stage="train", done=1, total=1)
        rewards = [datum.reward for datum in order.data if datum.reward is not None]
        metrics = {"loss": -math.fsum(rewards) / len(order.data), "samples": float(len(order.data))}
        if rewards:
            metrics["reward"] = math.fsum(rewards) / len(rewards)
        yield folder.write(self._training, order, "lora", _files(order), metrics)

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None

    def _parent(self, order: Step) -> None:
        """A line continues from its own last step; a gap is an error here as in the real trainer."""
        if order.step == order.base_step + 1:
            return
        place = folder.path(self._training, order.scenario, order.part, order.line, order.step - 1)
        state = folder.read(place)
        if state is None:
            raise TrainError(f"line {order.line} has no step {order.step - 1} to continue from; start a new line")
        folder.verify(place, state)
        if not state.files:
            raise TrainError(f"step {order.step - 1} of line {order.line} was gone beyond already; start a new line")


def _files(order: Step) -> dict[str, folder.Content]:
    seed = hashlib.sha256(f"{order.base_release} {order.step} {order.batch_id}".encode()).digest()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    sizes = {name: order.options.get(name, 1) for name in ("rank", "alpha")}  # as the recipe says, as real ones do
    weights = {"base": {"name": "fake", "digest": "0" * 64}, "kind": "lora", **sizes}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    values = [byte / 1024 for byte in seed[:8]]
    return {
        "adapter_model.safetensors": _tensors({name.format("A"): values[:4], name.format("B"): values[4:]}),
        "adapter_config.json": json.dumps(config, sort_keys=True).encode(),
        "weights.json": json.dumps(weights, sort_keys=True).encode(),
        "optimizer.safetensors": _tensors({"step": [float(order.step)]}),
        "modules.safetensors": _tensors({}),
    }


def _tensors(rows: dict[str, list[float]]) -> bytes:
    """A safetensors file of float32 rows: 8 bytes of header length, a JSON header, the data."""
    header, data = {}, b""
    for name, row in rows.items():
        packed = struct.pack(f"<{len(row)}f", *row)
        header[name] = {"dtype": "F32", "shape": [1, len(row)], "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data
