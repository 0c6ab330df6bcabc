"""One process group a broadcast, made by hand and thrown away, and flat bytes in chunks through it.

Knows: torch.distributed's stores and process groups, which backend carries a device's buffers, chunks.
Does not know: what the bytes are, who the members are, or what happens when a group breaks.

- No default group, no `init_process_group`, no order in which groups are made: each has a store of its own, which lives
  as long as the group. What an earlier or another group left behind cannot be met again.
- gloo for CPU buffers and nccl for CUDA buffers, by the device alone; the rest is the same code.
- Every wait has an end: a chunk that does not come within `patience` breaks the group for whoever waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # what is used of it has no types of its own

CHUNK = 16 * 1024 * 1024
AHEAD = 2  # chunks under way at once: while one is hashed, the next is carried
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Group(Protocol):
    """What is used of a process group."""

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any: ...

    def abort(self) -> None: ...


def buffer(device: torch.device, size: int) -> Tensor:
    """Flat memory [size] uint8 that bytes are packed or received into. Worth keeping: first touched it is slow."""
    return torch.empty(size, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in a group: where the store is, its keys' prefix, this member's rank and own address."""

    store: str
    port: int
    prefix: str
    rank: int
    world: int
    own: str
    patience: float
    chunk: int = CHUNK


@contextlib.contextmanager
def store(host: str) -> Iterator[tuple[Any, int]]:
    """A store that members find each other with, on a free port of `host` alone, and that port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    made = dist.TCPStore(
        host, port, None, True, timedelta(seconds=30), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    yield made, port


@contextlib.contextmanager
def group(seat: Seat, device: torch.device, made: Any = None) -> Iterator[Group]:
    """The process group of a seat; all members have to come within its patience. RuntimeError or OSError when they do
    not. `made` is the store of the member that has it."""
    patience = timedelta(seconds=seat.patience)
    if made is None:
        # A store that is gone is seen at once here; its own client would call again until its patience ends.
        socket.create_connection((seat.store, seat.port), seat.patience).close()
        made = dist.TCPStore(seat.store, seat.port, None, False, patience, wait_for_workers=False)
    kept = dist.PrefixStore(seat.prefix, made)
    kept.set_timeout(patience)
    if BACKENDS[device.type] == "nccl":
        torch.cuda.set_device(device)
        found = _nccl(kept, seat, patience)
    else:
        found = _gloo(kept, seat, patience)
    try:
        yield found
    finally:
        with contextlib.suppress(RuntimeError):
            found.abort()


def _gloo(kept: Any, seat: Seat, patience: timedelta) -> Group:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=seat.own)]
    options._threads = 1
    options._timeout = patience
    made: Group = dist.ProcessGroupGloo(kept, seat.rank, seat.world, options)
    return made


def _nccl(kept: Any, seat: Seat, patience: timedelta) -> Group:
    # Its watchdog would end the whole process when a member dies; here the wait raises, and the group is thrown away.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    made: Group = dist.ProcessGroupNCCL(kept, seat.rank, seat.world, options)
    return made


Step = Callable[[int, int], None]
"""Told of bytes [start, stop) of the buffer. May raise, to give up."""


def carry(
    made: Group,
    seat: Seat,
    flat: Tensor,
    done: Step = lambda start, stop: None,
    before: Step = lambda start, stop: None,
) -> None:
    """Broadcast `flat` from rank 0, chunk by chunk in order: `before` each, and when it is `done`, while the next is
    under way. RuntimeError when the group breaks."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=seat.patience)
    size, sent = flat.numel(), 0
    under_way: list[tuple[int, int, Any]] = []
    while sent < size or under_way:
        while sent < size and len(under_way) < AHEAD:
            stop = min(size, sent + seat.chunk)
            before(sent, stop)
            under_way.append((sent, stop, made.broadcast([flat[sent:stop]], options)))
            sent = stop
        start, stop, work = under_way.pop(0)
        work.wait(options.timeout)
        done(start, stop)
