"""Memory that the gateways of one server share: a file of numbers for each, and who is alive.

Knows: files in a folder, numbers taken by file locks (which the kernel frees when a process dies, however it dies).
Does not know: what the numbers mean.

A gateway takes the lowest free seat, so one that starts again sits where the dead one sat, and files do not pile up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from reef.core.errors import StoreError

if TYPE_CHECKING:
    Numbers = memoryview[float] | array[float]


class Seat:
    """A number of our own below `most`, until `close` or the process's end. StoreError when all are taken."""

    def __init__(self, folder: Path, most: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        for number in range(most):
            if (fd := _try(folder / f"seat-{number}")) is not None:
                self.number, self._fd = number, fd
                return
        raise StoreError(
            f"all {most} seats in {folder} are taken; lower reef.workers, or stop what else uses the folder"
        )

    def taken(self, number: int) -> bool:
        """Whether another living process sits there."""
        if number == self.number:
            return True
        fd = _try(self._folder / f"seat-{number}")
        if fd is None:
            return True
        os.close(fd)
        return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Shared:
    """A file of doubles, mapped. `view[i]` reads and writes one; each is whole, whoever writes beside.

    `with shared:` is alone among processes (and among objects in one), for some microseconds.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _allocate(self._fd, 8 * count)
        except OSError as error:
            os.close(self._fd)
            raise StoreError(f"{path} cannot get its {8 * count} bytes of disk ({error.strerror}); free some") from None
        self._map = mmap.mmap(self._fd, 8 * count)
        self._bytes = memoryview(self._map)
        self.view: memoryview[float] = self._bytes.cast("d")

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            self.view.release()
            self._bytes.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


def _allocate(fd: int, size: int) -> None:
    """Zeros where nothing was, all on disk: a full disk is an error here, and no SIGBUS when a page is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    elif os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)


def _try(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """An open file, alone among processes; written to, it grows."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)
