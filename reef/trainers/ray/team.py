"""One worker's place in a team: what it holds of the model, which rows are its own, and how sums are made.

Knows: torch.distributed, ranks, how a batch is dealt out. Does not know: Ray, files, objectives.

- Every worker has the whole batch as numbers, and owns some of its micro-batches: those cost passes.
- A batch of fewer micro-batches than workers is trained on by all of them alike, and each counts for its part.
- Two process groups: tensors travel over the device's (gloo, or NCCL between GPUs), small things over gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from reef.core.wire import Datum
from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama
from reef.trainers.local.objective import Context, Rows
from reef.trainers.local.rows import MICRO_TOKENS
from reef.trainers.local.shelf import Teacher
from reef.trainers.local.working import Working
from reef.trainers.ray.adam import Sharded, Summed
from reef.trainers.ray.passes import CrewPasses
from reef.trainers.ray.spread import Spread


class Member:
    """A worker of a team, for as long as that lives. The process groups are there already; `small` is the gloo one."""

    def __init__(self, mesh: DeviceMesh, small: dist.ProcessGroup) -> None:
        self.device = torch.device(mesh.device_type)
        self.together = False
        self._mesh, self._small = mesh, small
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self._spread: WeakKeyDictionary[Llama, Spread] = WeakKeyDictionary()
        self._owners: list[int] = []  # by row; empty: every worker owns all
        self._passes: CrewPasses | None = None

    # --- Holder -------------------------------------------------------------------------------------------------------

    def place(self, model: Llama, *, learns: bool = False) -> Llama:
        if learns:
            return Spread(model, self._mesh, learns=True)
        if model not in self._spread:
            self._spread[model] = Spread(model, self._mesh)
        return self._spread[model]

    def adam(self, parameters: Mapping[str, Tensor], rate: float, **options: Any) -> Adam:
        made: type[Summed] | type[Sharded] = Summed
        if any(isinstance(one, DTensor) for one in parameters.values()):
            made = Sharded
        return made(parameters, rate, add=self.add, share=self._share, **options)

    # --- Team ---------------------------------------------------------------------------------------------------------

    def passes(self, working: Working, teacher: Callable[[], Teacher], model: Llama, batch: Sequence[Rows]) -> Context:
        self._owners = deal([len(rows.packed.ids) for rows in batch], self._size) if len(batch) >= self._size else []
        self.together = bool(self._owners)
        self._passes = CrewPasses(working, teacher, model, self, batch)
        return self._passes

    def settle(self) -> None:
        assert self._passes is not None
        self._passes.settle()
        self.together = False

    def rounds(self, batch: Sequence[Rows]) -> Sequence[Rows | None]:
        return [None if number is None else batch[number] for number in self.shifts(range(len(batch)))]

    def total(self, shares: Mapping[str, float]) -> dict[str, float]:
        told: list[Mapping[str, float]] = [{}] * self._size
        dist.all_gather_object(told, dict(shares), group=self._small)
        names = dict.fromkeys(name for one in told for name in one)
        return {name: sum(one.get(name, 0.0) for one in told) * self._share() for name in names}

    # --- Crew ---------------------------------------------------------------------------------------------------------

    def owns(self, number: int) -> bool:
        return not self._owners or self._owners[number] == self._rank

    def shifts(self, numbers: Iterable[int]) -> Sequence[int | None]:
        listed = list(numbers)
        if not self._owners:
            return listed
        mine: list[int | None] = [number for number in listed if self._owners[number] == self._rank]
        most = max((sum(self._owners[one] == rank for one in listed) for rank in range(self._size)), default=0)
        return mine + [None] * (most - len(mine))

    def add(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._mesh.get_group())
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return found

    # --- the worker's own ---------------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        return self._rank == 0

    def anybody(self, flag: bool) -> bool:
        """Whether one of the workers says so."""
        told = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._small)
        return bool(told.item())

    def micro_tokens(self, data: Sequence[Datum]) -> int:
        """Tokens of a micro-batch: as many as alone, or fewer, so that every worker has some of a small batch."""
        whole = sum(len(datum.tokens) for datum in data)
        return max(1, min(MICRO_TOKENS, math.ceil(whole / self._size)))

    def forget(self) -> None:
        """What was placed may be in the middle of something: it is placed anew at the next step."""
        self._spread.clear()
        self._passes = None

    def _share(self) -> float:
        return 1.0 if self._owners else 1.0 / self._size


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """Who gets what, so that all have about as much and everybody has something: the largest first, each to whoever has
    least so far."""
    loads, owners = [0] * count, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def moved(rows: Rows, device: torch.device) -> Rows:
    """The rows with every tensor on a device."""
    if device.type == "cpu":
        return rows
    packed = replace(rows.packed, **_moved(rows.packed, device))
    contexts = tuple(moved(other, device) for other in rows.contexts)
    taught = tuple(one.to(device) for one in rows.taught)
    return replace(rows, packed=packed, contexts=contexts, taught=taught, extra={}, passes={}, **_moved(rows, device))


def _moved(thing: Any, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
