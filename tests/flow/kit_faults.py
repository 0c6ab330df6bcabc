"""Real troubles of a record store's disk, each as `async with fault(process):`, over when the block ends.

Knows: files, locks, limits and file systems. Does not know: what a gateway does about it.
"""

import asyncio
import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.flow.kit_load import Process


@contextlib.asynccontextmanager
async def locked(process: Process) -> AsyncIterator[None]:
    """Another process is in a write transaction."""
    with contextlib.closing(sqlite3.connect(process.state / "records.db", isolation_level=None, timeout=30)) as base:
        base.execute("BEGIN IMMEDIATE")
        yield


@contextlib.asynccontextmanager
async def limited(process: Process) -> AsyncIterator[None]:
    """Files may grow a little and then no more, so that a commit also fails half-way."""
    pid, kind = process.running.pid, resource.RLIMIT_FSIZE
    before = resource.prlimit(pid, kind)
    size = max(path.stat().st_size for path in process.state.glob("records.db*"))
    resource.prlimit(pid, kind, (size + 30_000, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


@contextlib.asynccontextmanager
async def filled(process: Process) -> AsyncIterator[None]:
    """The file system is full."""
    filler = process.state / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    try:
        yield
    finally:
        filler.unlink()


@contextlib.asynccontextmanager
async def readonly(process: Process) -> AsyncIterator[None]:
    """Nobody may write the files. A connection that is open may all the same, so a lock makes the store open anew."""
    files = list(process.state.glob("records.db*"))
    async with locked(process):
        for path in files:
            path.chmod(0o400)
        await asyncio.sleep(2 * process.more["busy"])
    try:
        yield
    finally:
        for path in files:
            path.chmod(0o600)


@contextlib.asynccontextmanager
async def gone(process: Process) -> AsyncIterator[None]:
    """The folder was moved away, and the store has to open anew."""
    away = process.state.with_name("away")
    async with locked(process):
        process.state.rename(away)
        await asyncio.sleep(2 * process.more["busy"])
    try:
        yield
    finally:
        shutil.rmtree(process.state, ignore_errors=True)
        away.rename(process.state)


@contextlib.contextmanager
def small(folder: Path, size: str = "24m") -> Iterator[bool]:
    """A file system of this size there; False where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
            try:
                yield True
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=True)
            return
    yield False
