"""A server of the measurement as a process: started, waited for, watched and ended.

Knows: process trees in /proc (CPU time, resident memory), free ports, process groups.
Does not know: what the server is. Every process started here is ended here, and no other.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
INSTALL = {
    "nginx": "apt-get install nginx-light (as root, after apt-get update)",
    "wrk": "apt-get install wrk (as root, after apt-get update), or use --client python",
}


class Trouble(Exception):
    """A measurement that cannot be made; the message says what to do."""


def tool(name: str) -> str:
    """The path of a program, or Trouble that says how to get it."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Trouble(f"{name} is missing; install it: {INSTALL[name]}")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def busy(seconds: float = 1.0) -> float:
    """The part of the machine's CPU time that others use now."""

    def look() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle, and waiting for the disk

    before = look()
    time.sleep(seconds)
    after = look()
    return 1 - (after[1] - before[1]) / max(after[0] - before[0], 1)


class Server:
    """A running server: its port and its process tree."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.port = port
        self.process = process

    def tree(self) -> list[int]:
        """The process and everything below it."""
        parents: dict[int, list[int]] = {}
        for pid, fields in _processes():
            parents.setdefault(int(fields[1]), []).append(pid)
        found = [self.process.pid]
        for pid in found:
            found += parents.get(pid, [])
        return found

    def cpu(self) -> float:
        """Seconds of CPU time that the tree has used, in user and system mode."""
        tree = set(self.tree())
        return sum(int(fields[11]) + int(fields[12]) for pid, fields in _processes() if pid in tree) / TICK

    def resident(self, word: str = "") -> int:
        """Resident bytes of the tree's processes whose command line has the word."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        return total


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Every process, with the fields of its /proc/PID/stat from the state on (the parent is number 1)."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry), Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    port: int,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    ready: str = "/",
    patience: float = 60.0,
) -> Iterator[Server]:
    """Run the command in `folder`, a process group of its own, until the block ends. Its output is in `<name>.log`."""
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(name, process, port, ready, patience, log)
        yield Server(name, port, process)
    finally:
        _end(process)


def _wait(name: str, process: subprocess.Popen[bytes], port: int, path: str, patience: float, log: Path) -> None:
    deadline = time.monotonic() + patience
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        connection.close()
        if process.poll() is not None or time.monotonic() > deadline:
            what = "ended" if process.poll() is not None else f"was not ready after {patience:.0f} s"
            raise Trouble(f"{name} {what}; the end of its output:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to stop, give it ten seconds, then kill its group (its id is ours until it is reaped)."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and not _ended(process.pid):
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True
