"""Two things every durable file needs: to be on disk, and to be what it says it is.

Knows: paths. Does not know: what is in a file, or when one is complete (that is the writer's rename).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on disk. OSError when the disk will not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
