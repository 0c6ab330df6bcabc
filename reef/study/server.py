"""A `reef serve` of one's own: started, awaited, ended.

Knows: the command, free ports, /readyz, the lock of a state folder. Does not know: what is asked of the server.

A server that is started with `bound` dies with the process that started it, however that ends (Linux); what it was in
the middle of, its next start finishes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from reef.core.errors import StoreError, WireError

START = 600.0  # seconds a server may take to start; the first start converts the model
STOP = 40.0
_MEANT = ("REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL")  # for another server: they outrank a file
ROOM = 200 << 20  # bytes of disk that a run needs to begin
FULL = 16 << 20  # bytes of disk below which a server's writes fail, or its processes die of memory they have mapped
WATCH = 1.0  # seconds between two looks at a server
LEFT = 30.0  # seconds a server that was killed may still hold its folder


def start(arguments: Sequence[str], log: Path, *, bound: bool = False) -> subprocess.Popen[bytes]:
    """`reef serve ARGUMENTS` in a session of its own, so that Ctrl-C ends its user first."""
    log.parent.mkdir(parents=True, exist_ok=True)
    hidden = {"REEF_URL", *(_MEANT if bound else ())}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "reef", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent if bound and sys.platform == "linux" else None,
        )


def stop(child: subprocess.Popen[bytes], patience: float = STOP) -> None:
    """End it: politely, then not."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def await_start(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START
    while not _up(child, url, log, deadline):
        time.sleep(0.1)


async def started(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """The same, for a task."""
    deadline = time.monotonic() + START
    while not await asyncio.to_thread(_up, child, url, log, deadline):  # noqa: ASYNC110 (no event crosses)
        await asyncio.sleep(0.05)


def room(folder: Path, least: int) -> None:
    """StoreError when the disk of this folder (or the nearest one above it that is there) has fewer bytes free."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(there).free
    if free < least:
        raise StoreError(
            f"the disk of {there} is full: {free >> 20} MB are free, and {least >> 20} MB are needed; free some "
            "space, and give the same command again"
        )


async def fallen(child: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
    """Returns never: StoreError when the disk of `folder` is full, WireError when the server is gone."""
    while True:
        room(folder, FULL)
        if child.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()[-12:]
            raise WireError(f"the server ended with exit code {child.returncode}; it said:\n" + "\n".join(said))
        await asyncio.sleep(WATCH)


@contextlib.asynccontextmanager
async def watched(child: subprocess.Popen[bytes], folder: Path, log: Path) -> AsyncIterator[None]:
    """What happens inside ends with `fallen`'s error as soon as there is one."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.create_task(fallen(child, folder, log))
    inside = True

    def tell(done: asyncio.Task[None]) -> None:
        if inside and not done.cancelled():
            task.cancel()

    watch.add_done_callback(tell)
    try:
        yield
    except asyncio.CancelledError:
        if not watch.done() or watch.cancelled():
            raise
        task.uncancel()
        await watch
    finally:
        inside = False
        watch.cancel()


def answers(url: str) -> bool:
    """Whether a server is ready there."""
    import httpx

    try:
        return httpx.get(f"{url}/readyz", timeout=3.0).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def released(state: Path) -> None:
    """Wait until nobody holds the state folder: what is left of a server that was killed goes at once. WireError when
    somebody stays."""
    deadline = time.monotonic() + LEFT
    while _held(state):
        if time.monotonic() > deadline:
            raise WireError(f"a server runs on {state}: the same run, elsewhere? Stop it, or use another --out")
        await asyncio.sleep(0.05)


def _held(state: Path) -> bool:
    with contextlib.suppress(OSError), (state / "lock").open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _up(child: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> bool:
    if answers(url):
        return True
    if child.poll() is not None or time.monotonic() > deadline:
        said = log.read_text(errors="replace").strip().splitlines()[-12:]
        raise WireError("the server did not start; it said:\n" + "\n".join(said))
    return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
