"""A slow copy of what is trained, as a module: the EMA teacher of self-distillation.

Knows: an exponential moving average of named tensors, kept as buffers so that every step's checkpoint holds it.
Does not know: passes or losses. `Context.with_parameters(rows, shadow.tensors(context.parameters()))` is its answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Plan


class Shadow(nn.Module):
    """theta <- (1 - rate) theta + rate * trained, once a step (call `update` in `aux_steps`). Float32.

    It begins as the policy of the first step that asks for it. Rate 0 keeps that one for good, rate 1 has no memory.
    Give it the learning rate 0 in `Objective.modules`. With `rank` 0 it is as large as the model in float32.
    """

    started: Tensor

    def __init__(self, model: Llama, plan: Plan, rate: float) -> None:
        super().__init__()
        self.rate = rate
        shapes = model.layout.shapes() if plan.rank == 0 else Lora.shapes(model, plan.rank)
        self.names = {name: name.replace(".", "/") for name in shapes}  # a buffer's name may hold no dot
        for name, size in shapes.items():
            self.register_buffer(self.names[name], torch.zeros(size, dtype=torch.float32))
        self.register_buffer("started", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shadow by parameter name; before its first update it is a copy of these `parameters`."""
        if not int(self.started):
            for name, buffer in self._pairs(parameters):
                buffer.copy_(parameters[name])
            self.started.fill_(1)
        return dict(self._pairs(parameters))

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor]) -> None:
        """Move towards `parameters` by `rate`. TrainError when they are not the ones it was made for."""
        for name, buffer in self.tensors(parameters).items():
            buffer.lerp_(parameters[name].float(), self.rate)

    def _pairs(self, parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        if set(parameters) != set(self.names):
            raise TrainError("the moving average was made for other parameters; start a new line")
        return [(name, getattr(self, key)) for name, key in self.names.items()]
