"""Weights that come from the trainer's memory: a torch.distributed broadcast of flat bytes, before a release is loaded.

Knows: how sender and receivers find and prove each other (`talk`), process groups (`group`), files in memory (`held`),
what waits to be loaded (`arrivals`), an engine's receiving thread (`receive`). The sending side is
`reef.trainers.broadcast`.
Does not know: which release a file will belong to. The chain says that: an arrival is found by the sha256 of its bytes.

- The bytes are those of a part's files, so the digest that both ends check is the one that a release records. What
  arrived can never be served under a release that records other bytes.
- An arrival only ever saves reading files. Too late, too large, damaged, cut off or nobody there: files are read.
- Each broadcast has a process group of its own, over those that are there and ready. Nothing waits without an end.

`talk` and this page load no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reef.core.nouns import Part

PLACE = "broadcast"
"""The file in the folder of the sockets in which a trainer says where it listens, and with which secret."""


@dataclass(frozen=True, slots=True)
class Following:
    """What an engine that receives is told: the file that says where the trainer is, and what a release records."""

    place: Path
    recorded: Callable[[str], Part]
    """Release or candidate id to its weights part, whose files nobody has looked at; MissingError when unknown."""
