"""The engine process: what it may be told, and its entry.

Knows: its options and how to set the process up before torch is loaded.
Does not know: who started it; the listening socket and the resolver are handed in. Imports torch only inside `run`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from reef.core.errors import ConfigError
from reef.engines import Resolver
from reef.engines.local.broadcast import Following

PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For the environment the process is started in: weights in large pages are read faster. Read by glibc alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the embedded engine runs. `context` is cut to the model's own; `threads` None leaves it to torch."""

    dtype: str = "auto"  # auto | bfloat16 | float32; auto: bfloat16 where the processor multiplies it, else `halves`
    quantised: str | None = None  # int4 | int8: sooner for few answers at once, and for scenarios that do not train
    slots: int = 16  # answers at once
    context: int = 8192  # tokens of one prompt and its answer
    threads: int | None = None
    loras: int = 8  # LoRA releases resident at once
    full: int = 2  # sets of full weights resident at once, beside the base: 1 can only swap while nobody asks
    share: float = 0.5  # part of the slots that evaluation may use
    queue: int = 1024  # waiting answers before more are refused
    max_tokens: int = 256  # of an answer whose request names no limit: it ends within seconds on a laptop
    model: str | None = None  # the name to answer with; default: the folder's
    digest: str | None = None  # sha256 of the base weights, to refuse a LoRA made for others
    arrival_bytes: int = 2 * 1024 * 1024 * 1024  # of weights that a trainer broadcast and that wait to be loaded

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype must be auto, bfloat16 or float32, not {self.dtype!r}", param="dtype")
        if self.quantised not in (None, "int4", "int8"):
            raise ConfigError(f"quantised must be int4 or int8, not {self.quantised!r}", param="quantised")
        if self.quantised and self.dtype == "float32":
            raise ConfigError(f"quantised: {self.quantised} rounds to bfloat16; leave out dtype", param="quantised")
        for name in ("slots", "context", "loras", "full", "queue", "max_tokens", "arrival_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", param=name)
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads must be at least 1; left out, torch takes what the machine has", param="threads")
        if not 0 < self.share <= 1:
            raise ConfigError("share must be above 0 and at most 1", param="share")


def run(
    listener: socket.socket, folder: Path, resolve: Resolver, options: Options, following: Following | None = None
) -> None:
    """Serve the model in `folder` on a listening unix socket until SIGTERM. Blocking; has a process to itself.
    `following`: where a trainer broadcasts weights that are taken instead of files."""
    # Threads that spin while they wait slow a busy machine several times over; read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from reef.engines.local.service import main

    main(listener, folder, resolve, options, following)
