"""A room: a throw-away home in bubblewrap where one client works, with one way out, which is ours.

Knows: what is in the room and what is not, how it is opened, talked to and ended. Does not know: agents, trees, tokens,
or what goes through the way out (`porter`).

- Everything that can be written is one tmpfs with one size: home, work folder, /tmp. The rest is the machine's /usr,
  libraries, certificates and the client, all read-only. Nothing of Reef, no other user's files, an empty environment.
- The room has a network of its own with nothing in it. Its first process (`warden`) listens on a port there and hands
  the listening socket out; whoever holds it answers.
- It ends with whoever opened it, however that ends; nothing of it is left, since nothing of it was on a disk.
- Opened by root, it gets a user of its own, or the limit of processes would not hold; else a user namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reef.core.errors import ConfigError

START = 20.0  # seconds a room may take to come up; it takes hundredths on an idle machine
GRACE = 30.0  # seconds that the warden may be late with what it must tell
ROOM: Final = "/room"
PORT: Final = 8900
INSTALL = (
    "install bubblewrap 0.7 or newer (Debian, Ubuntu, Fedora, Arch and Alpine have it as the package `bubblewrap`)"
)
HERE = Path(__file__)
LOWER, WARDEN = HERE.with_name("lower.py"), HERE.with_name("warden.py")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/alternatives", "/etc/localtime")
_USER = 1000  # inside a user namespace


class Trouble(Exception):
    """The room's own failure, which says nothing of who was in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one room may use. `memory` is of all its processes together, and `disk` (home, work and /tmp together) is
    memory too; `calls` are requests to Reef."""

    memory: int = 2048  # MiB
    disk: int = 512  # MiB
    entries: int = 50_000  # files and folders
    processes: int = 512  # and threads
    open: int = 4096
    output: int = 16 * 1024 * 1024  # bytes
    copied: int = 32 * 1024 * 1024  # bytes of transcript
    check: float = 120.0  # seconds
    calls: int = 500
    nice: int = 10


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one command. `fault`: why it was ended, as the end of a sentence about it."""

    status: int | None
    fault: str | None
    out: str = ""
    err: str = ""
    seconds: float = 0.0


class Room:
    """An open room: `run` once, `files` to their end, then perhaps `check`. Trouble when it does not do its part."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        listener: socket.socket,
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        bounds: Mapping[str, Any],
    ) -> None:
        self.listener = listener
        self._process, self._bounds = process, bounds
        self._reader, self._writer = link

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, reads: Iterable[tuple[Path, str]], limits: Limits, *, root: bool | None = None
    ) -> AsyncIterator[Room]:
        """A room with these paths in it, to read: (outside, inside)."""
        root = os.geteuid() == 0 if root is None else root
        user = 200_000_000 + secrets.randbelow(2**28) if root else None  # nobody else's, so its processes count alone
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            files = {name: stack.enter_context(_pipe(text)) for name, text in _accounts(user or _USER).items()}
            try:
                process = await asyncio.create_subprocess_exec(
                    *command(root, theirs.fileno(), reads, files, limits),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=(theirs.fileno(), *files.values()),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise Trouble(f"the sandbox cannot start: {error}") from None
        try:
            theirs.close()
            listener = await _handed(process, ours)
            with contextlib.closing(listener):
                reader, writer = await asyncio.open_connection(sock=ours)
                with contextlib.closing(writer):
                    yield cls(process, listener, (reader, writer), _bounds(limits, user))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the room's first process dies with it, and all with that one
            await asyncio.shield(process.wait())
            ours.close()

    def _order(self, what: Mapping[str, Any]) -> None:
        data = json.dumps({**self._bounds, **what}).encode()
        self._writer.write(struct.pack("!I", len(data)) + data)

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[str, str],
        root: str,
        seconds: float,
    ) -> Ran:
        """Write the files (paths from the room's folder), run the command in `work`; afterwards `files` are those below
        `root`."""
        self._order(
            {"command": list(command), "environment": dict(environment), "files": dict(files)}
            | {"root": root, "seconds": seconds}
        )
        return _ran(await self._told(seconds + START + GRACE))

    async def files(self, most: int) -> AsyncIterator[tuple[str, bytes]]:
        """The plain files that the run left below its root, the newest first, `most` bytes of them."""
        while "file" in (said := await self._told(GRACE)):
            size = int(said["size"])
            most -= size
            if size < 0 or most < 0:
                raise Trouble("the room hands out more than it may")
            yield str(said["file"]), await self._exactly(size, GRACE)

    async def check(
        self, command: Sequence[str], environment: Mapping[str, str], hidden: Mapping[str, str], seconds: float
    ) -> Ran:
        """Write the hidden files, over what is in their place, and run another command in `work`."""
        self._order(
            {"command": list(command), "environment": dict(environment), "hidden": dict(hidden), "seconds": seconds}
        )
        return _ran(await self._told(seconds + START + GRACE))

    async def _told(self, patience: float) -> dict[str, Any]:
        size = struct.unpack("!I", await self._exactly(4, patience))[0]
        if size > 1 << 20:
            raise Trouble("the room says too much")
        try:
            said = json.loads(await self._exactly(size, GRACE))
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise Trouble("the room says what nobody understands")
        if "trouble" in said:
            raise Trouble(str(said["trouble"]))
        return said

    async def _exactly(self, size: int, patience: float) -> bytes:
        try:
            async with asyncio.timeout(patience):
                return await self._reader.readexactly(size)
        except TimeoutError:
            raise Trouble(f"the room was silent for {patience:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Trouble(f"the room ended: {await _last(self._process)}") from None


def _ran(said: Mapping[str, Any]) -> Ran:
    fault = said.get("fault")
    status, seconds = said.get("status"), said.get("seconds", 0.0)
    return Ran(
        status if isinstance(status, int) else None,
        None if fault is None else str(fault),
        str(said.get("out", "")),
        str(said.get("err", "")),
        float(seconds),
    )


async def _handed(process: asyncio.subprocess.Process, link: socket.socket) -> socket.socket:
    """The listening socket of the room's one port."""
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(link.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        async with asyncio.timeout(START):
            await ready
        _, fds, _, _ = socket.recv_fds(link, 1, 1)
    except TimeoutError:
        raise Trouble(f"the sandbox was not up within {START:g} s") from None
    except OSError:
        fds = []
    finally:
        loop.remove_reader(link.fileno())
    if not fds:
        raise Trouble(f"the sandbox cannot start: {await _last(process)}")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


async def _last(process: asyncio.subprocess.Process) -> str:
    """The last line that bubblewrap or the warden said."""
    assert process.stderr is not None
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            said = await process.stderr.read(1 << 16)
            await process.wait()
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"bubblewrap ended with {process.returncode}"


# --- what is in it ----------------------------------------------------------------------------------------------------


def command(
    root: bool, link: int, reads: Iterable[tuple[Path, str]], files: Mapping[str, int], limits: Limits
) -> list[str]:
    """The room's command line. `link` is the warden's socket; `files` are pipes with the text of a file each."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    line = [bubblewrap("an agent's episode"), "--die-with-parent", "--as-pid-1", "--clearenv", "--hostname", "room"]
    line += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--cap-drop", "ALL"]
    if root:
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-user", "--uid", str(_USER), "--gid", str(_USER)]
    line += ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        if os.path.islink(name):
            line += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            line += ["--ro-bind", name, name]
    own = [python, *(f"{sys.base_prefix}/{name}" for name in ("lib", "lib64"))]
    binds = [(path, path) for path in (*_ETC, *own) if os.path.exists(path) and not path.startswith("/usr/")]
    binds += [(str(outside), inside) for outside, inside in reads]
    above = {str(folder) for _, inside in binds for folder in Path(inside).parents if folder != Path("/")}
    for folder in sorted(above | {"/etc", "/var"}):  # made by themselves, they would be readable for root alone
        line += ["--perms", "0755", "--dir", folder]
    for outside, inside in binds:
        line += ["--ro-bind", outside, inside]
    for name, number in files.items():
        line += ["--perms", "0644", "--file", str(number), name]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    line += ["--perms", "1777", "--size", str(limits.disk << 20), "--tmpfs", ROOM]
    line += ["--symlink", f"{ROOM}/tmp", "/tmp", "--symlink", f"{ROOM}/tmp", "/var/tmp"]  # noqa: S108 - the room's own
    line += ["--remount-ro", "/", "--chdir", "/"]
    return [*line, python, "-I", "-S", "-B", "-c", program(WARDEN), str(link), str(PORT)]


def program(main: Path) -> str:
    """A file of the standard library alone, with `lower` as the module that it imports, as one text for `python -c`."""
    lower = LOWER.read_text(encoding="utf-8")
    before = "import sys, types\nmade = sys.modules['reef.harness.lower'] = types.ModuleType('reef.harness.lower')\n"
    return f"{before}exec({lower!r}, made.__dict__)\n{main.read_text(encoding='utf-8')}"


def bubblewrap(what: str) -> str:
    """The path of bwrap. ConfigError says what needs it and what to install."""
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigError(f"{what} runs in a sandbox and needs bwrap: {INSTALL}")
    if not _able(found):
        raise ConfigError(f"{what} needs a newer bwrap than {found}: {INSTALL}")
    return found


@functools.lru_cache(4)
def _able(path: str) -> bool:
    try:
        said = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "--size" in said.stdout + said.stderr


def _bounds(limits: Limits, user: int | None) -> dict[str, Any]:
    """What the warden must know of the limits: `limits` are the kernel's to hold, the others its own."""
    return {
        "user": user,
        "limits": {"file": limits.disk << 20, "open": limits.open, "processes": limits.processes},
        "memory": limits.memory << 20,
        "entries": limits.entries,
        "output": limits.output,
        "copied": limits.copied,
        "nice": limits.nice,
    }


def _accounts(user: int) -> dict[str, str]:
    return {
        "/etc/passwd": f"agent:x:{user}:{user}:agent:{ROOM}/home:/bin/sh\n",
        "/etc/group": f"agent:x:{user}:\n",
        "/etc/hosts": "127.0.0.1 localhost\n",
    }


@contextlib.contextmanager
def _pipe(text: str) -> Any:
    """The reading end of a pipe that holds this much text, which is little."""
    reading, writing = os.pipe()
    try:
        os.write(writing, text.encode())
        os.close(writing)
        yield reading
    finally:
        os.close(reading)
