"""The repository's own format number, in `reef/format`: made, checked, and brought up to date one step at a time.

Knows: what each format added. Does not know: releases (each says its own format, see `form`), or how a chain is opened.

- 1: the first. 2: large files may be removed on purpose (`reef/pruned` names them), and candidates lose their refs by
  policy instead of by count.
- A later format is refused: what it holds could be taken for damage here, and repaired away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from reef.core.disk import sync
from reef.core.errors import ChainError
from reef.core.failpoint import failpoint


def _to_2(folder: Path) -> None:
    """An older Reef must not take pruned files for lost ones: from here on it refuses this repository."""
    (folder / "pruned").touch(mode=0o644)


STEPS: tuple[Callable[[Path], None], ...] = (_to_2,)
"""Each brings a repository from format n (its place, counted from 1) to n + 1. May be run again after a kill."""

FORMAT = len(STEPS) + 1


def read(path: Path) -> int | None:
    """The format of the repository at `path`; None when it has no number yet. ChainError for one from a later Reef."""
    try:
        text = (path / "reef" / "format").read_text("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ChainError(f"{path / 'reef' / 'format'} holds {text[:20]!r}, not a number; write {FORMAT} into it")
    if int(text) > FORMAT:
        raise ChainError(
            f"the releases in {path} have format {text} and this Reef reads up to {FORMAT}: they were written by "
            "another version of Reef; use that version, or a newer one"
        )
    return int(text)


def settle(path: Path) -> str | None:
    """Bring a repository to today's format; the caller holds the mutex. Returns what was done, when anything was."""
    found = read(path)
    if found == FORMAT:
        return None
    for number in range(found or 1, FORMAT):
        STEPS[number - 1](path / "reef")
        failpoint("releases.migrated")
        write(path, number + 1)
    return None if found is None else f"brought the releases in {path} from format {found} to {FORMAT}"


def write(path: Path, number: int) -> None:
    marker = path / "reef" / "format"
    temporary = marker.with_name(f"format-{os.getpid()}")
    temporary.write_text(f"{number}\n")
    sync(temporary)
    temporary.replace(marker)
    sync(marker.parent)
