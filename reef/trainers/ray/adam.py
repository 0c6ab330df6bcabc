"""AdamW where several workers hold the gradients: the same update as `local.adam`, on sums over all of them.

Knows: which of two ways a tensor is held: whole on every worker, or a shard on each.
Does not know: what the tensors are, or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from reef.core.errors import TrainError
from reef.trainers.local.adam import Adam

Add = Callable[[Tensor], Tensor]
"""A tensor's sum over the workers, in place."""


class Summed(Adam):
    """Of tensors that every worker holds whole. Each has gradients of its own rows; all make the same update. `share`
    is what each counts for: 1, or less where all workers trained on the same."""

    def __init__(
        self, parameters: Mapping[str, Tensor], rate: float, *, add: Add, share: Callable[[], float], **options: Any
    ) -> None:
        super().__init__(parameters, rate, **options)
        self._add, self._share = add, share

    @torch.no_grad()
    def step(self, what: str) -> float:
        held = list(self.parameters.values())
        if held:
            there = self._add(torch.tensor([float(one.grad is not None) for one in held], device=held[0].device))
            held = [one for one, count in zip(held, there.tolist(), strict=True) if count]
        if held:
            flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).reshape(-1) for one in held])
            sums = torch.split(self._add(flat).mul_(self._share()), [one.numel() for one in held])
            for one, whole in zip(held, sums, strict=True):
                one.grad = whole.view_as(one)
        return super().step(what)


class Sharded(Adam):
    """Of tensors of which every worker holds a shard (DTensor, split along the first dimension). FSDP adds up their
    gradients; `share` as above."""

    def __init__(
        self, parameters: Mapping[str, Tensor], rate: float, *, add: Add, share: Callable[[], float], **options: Any
    ) -> None:
        self._whole: dict[str, DTensor] = {name: _shard(one) for name, one in parameters.items()}
        super().__init__({name: _local(one) for name, one in self._whole.items()}, rate, **options)
        self._add, self._share = add, share

    @torch.no_grad()
    def step(self, what: str) -> float:
        for name, one in self._whole.items():
            mine = self.parameters[name] = _local(one)
            gradient = one.grad
            mine.grad = None if gradient is None else _local(_shard(gradient)) * self._share()
            one.grad = None
        return super().step(what)

    def square(self, gradients: Mapping[str, Tensor]) -> float:
        device = next(iter(self.parameters.values())).device
        return float(self._add(torch.tensor([super().square(gradients)], dtype=torch.float64, device=device)))

    def state(self) -> dict[str, Tensor]:
        return {key: self._wrapped(key, tensor) for key, tensor in super().state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """As of whole tensors, of which each worker takes its shard."""
        found: dict[str, Tensor] = {key: state[key] for key in ("count", "warmup")}
        for name, one in self._whole.items():
            for key in (f"first.{name}", f"second.{name}"):
                if key not in state or state[key].shape != one.shape:
                    raise TrainError(f"the optimizer state does not fit: {key} is missing or has another shape")
                found[key] = cut(state[key], one)
        super().restore(found)

    def _wrapped(self, key: str, tensor: Tensor) -> Tensor:
        like = self._whole.get(key.partition(".")[2])
        if like is None:
            return tensor
        return DTensor.from_local(
            tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def cut(whole: Tensor, like: DTensor) -> Tensor:
    """The shard of a whole tensor that this worker holds of one like it."""
    ranks, rank = like.device_mesh.size(), like.device_mesh.get_local_rank()
    size = -(-whole.shape[0] // ranks)
    start = min(rank * size, whole.shape[0])
    return whole[start : min(start + size, whole.shape[0])]


def _shard(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def _local(tensor: DTensor) -> Tensor:
    """The worker's own values, not a copy."""
    found: Tensor = _shard(tensor.detach()).to_local()
    return found
