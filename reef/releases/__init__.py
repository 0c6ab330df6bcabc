"""The release chain: an append-only history of what was served, in an ordinary git repository with LFS objects.

Knows: releases, their parts' files and digests, compare-and-swap of a scenario's head, candidates under their own refs.
Does not know: how a part was made or judged, or which release is being served (that is the board's, in `records`).

- One branch per scenario, `refs/heads/<scenario>`; each commit is a release and its parent the previous release.
- A publish either moves the head from exactly the expected release, or raises StaleHead and changes nothing.
- Publishing is idempotent: the same draft on the same parent returns the same release.
- Commits are never removed. Large files go by policy only (`prune`), and then the release says so (PrunedError).
- No file is handed out before its size and sha256 were checked. safetensors only for weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reef.core.nouns import Consumed, Evaluation, Json, Operation, PartName, Release

CHAINS = {"git": "reef.releases.chain:GitChain"}


@dataclass(frozen=True, slots=True)
class NewPart:
    """A part to be stored: files by name, each a path on disk (moved into LFS when large) or bytes."""

    kind: str  # weights: base | lora | full; harness: tree
    files: Mapping[str, Path | bytes]
    meta: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draft:
    """A release to be made. Parts not named are carried over from `base` (else from the parent)."""

    operation: Operation
    parts: Mapping[PartName, NewPart]
    base: str | None = None
    step: int = 0
    line: str | None = None
    evaluation: Evaluation | None = None
    recipe: str | None = None
    consumed: Mapping[PartName, Consumed] = field(default_factory=dict)
    actor: str = "learner"
    reason: str = ""


class ReleaseChain(Protocol):
    """Blocking (it runs git): call it from a thread when in an event loop."""

    def head(self, scenario: str) -> Release | None:
        """The newest release of a scenario; None when it has no chain yet."""

    def publish(self, scenario: str, draft: Draft, expected: str | None) -> Release:
        """Make a release. `expected` is the head it must replace (None: the chain must not exist yet).

        With operation `candidate` the commit goes under refs/reef/<scenario>/candidates/<id>, its parent is
        `draft.base`, and the head does not move. Raises StaleHead (with the present head), ChainError (disk full, …).
        """

    def get(self, release_id: str, within: Collection[str] | None = None) -> Release:
        """A release or candidate by id (or unique prefix of 7 or more digits). MissingError when there is none.

        `within`: scenarios beside which there are no others, for whoever may not see those.
        """

    def history(self, scenario: str, limit: int = 50, before: str | None = None) -> list[Release]:
        """Releases newest first, beginning at the head, or at the parent of `before`.

        MissingError when `before` is unknown or of another scenario.
        """

    def files(self, release_id: str, part: PartName) -> dict[str, Path]:
        """The part's files on disk, verified against their digests. DigestError names a file that does not match,
        PrunedError one that was removed to bound the disk."""
