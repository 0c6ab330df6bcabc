"""Training on several processes or machines: Ray places and watches the workers, PyTorch's FSDP2 shares the model out.

Knows: actors, a process group, shards, and which of a step's parts each worker makes.
Does not know: objectives, losses and the order of an update; those are `local`'s, to the line.

- The trainer's process drives: it alone reads and writes the training folder. Workers get the batch and what files they
  lack through Ray's object store, and hand the result back through it.
- Workers keep nothing between steps that cannot be read again, so a lost one is replaced and the step made anew.
- `docs/ray.md` says when this pays, and what was measured.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from reef.core.errors import ConfigError

_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9_.\[\]:-]+:\d{1,5}")


@dataclass(frozen=True, slots=True)
class Options:
    """`training.options` of the backend `ray`."""

    workers: int = 1
    address: str | None = None
    """A Ray cluster to join: host:port of its head, ray://host:port, or auto (one that runs on this machine). None: a
    Ray of this trainer's own, on this machine, ended with it."""
    cpus: int | None = None
    """Threads of each worker, and CPUs it reserves. None: this machine's, shared out; on a cluster 1."""
    gpus: int = 0  # GPUs of each worker, 0 or 1; 1 computes there and talks over NCCL
    timeout: float = 600.0  # seconds that workers wait for each other, for room in the cluster, and for the cluster
    retries: int = 2  # how often a step is made again whose worker died

    def __post_init__(self) -> None:
        for name, least, most in (("workers", 1, 1024), ("gpus", 0, 1), ("retries", 0, 100)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; give a whole number from {least} to {most}", param=name)
        if self.cpus is not None and (type(self.cpus) is not int or not 1 <= self.cpus <= 1024):
            raise ConfigError(f"cpus is {self.cpus!r}; give a whole number from 1 to 1024, or null", param="cpus")
        if type(self.timeout) not in (int, float) or not 1 <= self.timeout <= 86400:
            raise ConfigError(f"timeout is {self.timeout!r}; give seconds from 1 to 86400", param="timeout")
        if self.address is not None and (type(self.address) is not str or not _ADDRESS.fullmatch(self.address)):
            raise ConfigError(
                f"address is {self.address!r}; give host:port of a Ray head, ray://host:port, auto, or null for a Ray "
                "of this server's own",
                param="address",
            )
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the trainer ray needs a package that is not here: pip install 'reef-learn[local,ray]'")
