"""Real troubles of a disk; those of a gateway's record store are `async with fault(process):`, over when it ends.

Knows: files, locks, limits and file systems. Does not know: what a gateway or a learner does about it.
`FAULTS` are those of this process and its children: `with FAULTS[name](folder):`.
"""

import asyncio
import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
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


# --- of this process --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stunted(folder: Path) -> Iterator[None]:
    """No file may grow: every write fails half-way, in git too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """The file system of the folder is full, to the last block. Use it on a small one."""
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def barred(folder: Path) -> Iterator[None]:
    """Nothing below may be written or made. For a process without root's rights."""
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if not path.is_symlink()}
    for path in sorted(modes, reverse=True):
        path.chmod(modes[path] & 0o555)
    try:
        yield
    finally:
        for path in sorted(modes):
            with contextlib.suppress(FileNotFoundError):
                path.chmod(modes[path])


SYNCS = "pwrite64,ftruncate,fsync,fdatasync,mkdir,mkdirat,link,linkat,rename,renameat,renameat2"


@contextlib.contextmanager
def quota(folder: Path) -> Iterator[None]:
    """The quota is used up: strace answers EDQUOT to whatever makes something durable, in all threads and children."""
    options = ["-f", "-qq", "-o", "/dev/null", "-e", f"inject={SYNCS}:error=EDQUOT", "-e", f"trace={SYNCS}"]
    tracer = subprocess.Popen(["strace", *options, "-p", str(os.getpid())], stderr=subprocess.DEVNULL)
    while not all(_traced(task) for task in Path("/proc/self/task").iterdir()):
        assert tracer.poll() is None, "strace could not attach"
        time.sleep(0.005)
    try:
        yield
    finally:
        tracer.terminate()
        tracer.wait()


def _traced(task: Path) -> bool:
    try:
        return "TracerPid:\t0\n" not in (task / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
        return True


FAULTS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "stunted": stunted,
    "full": full,
    "barred": barred,
    "quota": quota,
}


def attachable() -> bool:
    """Whether strace is here and may attach to a process."""
    if shutil.which("strace") is None:
        return False
    program = [sys.executable, "-c", "import time; time.sleep(30)"]
    with subprocess.Popen(program) as sleeper:
        try:
            done = subprocess.run(
                ["timeout", "1", "strace", "-qq", "-o", "/dev/null", "-p", str(sleeper.pid)], capture_output=True
            )
            return done.returncode == 124
        finally:
            sleeper.kill()
