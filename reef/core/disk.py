"""What every durable file needs: to be on disk, to be what it says it is, and to be its owner's alone.

Knows: paths. Does not know: what is in a file, or when one is complete (that is the writer's rename).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path
from typing import IO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BARRED = (errno.EACCES, errno.EPERM, errno.EROFS)


def advice(error: OSError) -> str:
    """What a person does about a write that failed, to end a sentence with."""
    if error.errno in _FULL:
        return "free some disk space (or raise the quota) and try again"
    if error.errno in _BARRED:
        return "let the server's user write there (owner and rights) and try again"
    return "check its disk space, its rights and the disk, and try again"


def full(error: BaseException) -> OSError | None:
    """The full disk (or quota, or largest file) behind an error. Libraries in Rust tell it in words alone."""
    if not isinstance(error, OSError):
        if (said := re.search(r"\bos error (\d+)", str(error))) is None:
            return None
        number = int(said[1])
        error = OSError(number, os.strerror(number))
    return error if error.errno in _FULL else None


def create(path: Path) -> IO[bytes]:
    """A new file (or an old one, emptied) to write, which nobody but its owner may read."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


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
