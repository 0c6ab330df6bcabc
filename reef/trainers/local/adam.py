"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) over named tensors, with a state that is two tensors a name.

Knows: the update, the gradient's norm, a linear warm-up, and how its state becomes a flat dict of tensors.
Does not know: what the tensors are, or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from reef.core.errors import TrainError

EPSILON = 1e-8


class Adam:
    """Learns `parameters`, which are contiguous, in place. `count` steps were made; while it is below `warmup` the rate
    rises linearly."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rate: float,
        *,
        clip: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        warmup: int = 0,
    ) -> None:
        self.parameters = dict(parameters)
        if ragged := [name for name, tensor in self.parameters.items() if not tensor.is_contiguous()]:
            raise TrainError(f"the optimizer needs contiguous parameters; make {ragged[0]} one with .contiguous()")
        self.rate = rate
        self.clip = clip
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.count = 0
        self._first = {name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()}

    @torch.no_grad()
    def step(self, what: str) -> float:
        """One update from the gradients, which are cleared. Returns their norm before clipping.

        TrainError, with nothing changed, when a gradient is not finite.
        """
        # The fused update reads memory in order, whatever the strides say.
        gradients = {
            name: tensor.grad.contiguous() for name, tensor in self.parameters.items() if tensor.grad is not None
        }
        norm = math.sqrt(self.square(gradients))
        if not math.isfinite(norm):
            self.clear()
            raise TrainError(f"the gradient of the {what} is not finite; nothing was changed")
        scale = min(1.0, self.clip / norm) if norm > 0 else 1.0
        self.count += 1
        rate = self.rate * min(1.0, self.count / (self.warmup + 1))
        if gradients:
            torch._fused_adamw_(
                [self.parameters[name] for name in gradients],
                list(gradients.values()),
                [self._first[name] for name in gradients],
                [self._second[name] for name in gradients],
                [],
                [torch.tensor(float(self.count))] * len(gradients),
                lr=rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
                grad_scale=None if scale == 1 else torch.tensor(1 / scale),
            )
        self.clear()
        return norm

    def square(self, gradients: Mapping[str, Tensor]) -> float:
        """The gradient's squared L2 norm."""
        return sum(float(torch.linalg.vecdot(one, one).sum(dtype=torch.float64)) for one in gradients.values())

    def clear(self) -> None:
        for tensor in self.parameters.values():
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """`count`, `warmup`, and for each parameter `first.<name>` and `second.<name>`."""
        found = {"count": torch.tensor([self.count]), "warmup": torch.tensor([self.warmup])}
        for name in self.parameters:
            found[f"first.{name}"] = self._first[name]
            found[f"second.{name}"] = self._second[name]
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state. TrainError when it was another set of parameters'."""
        for name, tensor in self.parameters.items():
            for key, mine in ((f"first.{name}", self._first), (f"second.{name}", self._second)):
                if key not in state or state[key].shape != tensor.shape:
                    raise TrainError(f"the optimizer state does not fit: {key} is missing or has another shape")
                mine[name].copy_(state[key])
        self.count, self.warmup = int(state["count"]), int(state["warmup"])
