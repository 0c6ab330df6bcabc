"""The state folder: who holds it, its token, its sockets.

Knows: the lock (one server on a folder, its children included), `token`, `run/` and `address`.
Does not know: what is in the records or the chain.

- The lock is an flock on an open file that the children inherit: it is free only when all of them are gone, so a server
  started right after a `kill -9` never overlaps with the old one.
- Socket paths are limited to about 100 bytes, so a deep state folder keeps its sockets in a short one and links to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reef.core.errors import StoreError

log = logging.getLogger(__name__)
SOCKETS = ("engine", "learner", "trainer")
_LONGEST = 100


@dataclass(slots=True)
class Lock:
    """The state folder is ours until `release`, or until the last process that inherited `fd` is gone."""

    fd: int

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def claim(folder: Path, *, patience: float = 3.0) -> Lock:
    """Make the folder if it is missing, check that it can be written, and lock it.

    Waits `patience` seconds for the last children of a server that has just died. StoreError says who holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "logs").mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(
            f"the state folder {folder} cannot be written ({error.strerror or error}); "
            "choose another with --reef.state_dir FOLDER"
        ) from None
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            if time.monotonic() < deadline and not _alive(holder):
                time.sleep(0.05)
                continue
            os.close(fd)
            raise StoreError(
                f"the state folder {folder} is in use by the server with process id {holder or 'unknown'}; "
                "stop that one, or choose another with --reef.state_dir FOLDER"
            ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return Lock(fd)


def held(folder: Path) -> bool:
    """Whether a server (or what is left of one) holds the folder now."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def token(folder: Path) -> tuple[str, bool]:
    """The folder's token, and whether it was made just now. The file has mode 0600."""
    path = folder / "token"
    if found := read_token(folder):
        return found, False
    made = "rf_" + secrets.token_urlsafe(32)
    temp = folder / f".token.{os.getpid()}"
    try:
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(made + "\n")
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
    except OSError as error:
        raise StoreError(f"cannot write {path} ({error.strerror}); make the folder writable") from None
    return made, True


def read_token(folder: Path) -> str | None:
    """The folder's token, if it has one. A file that others may read or write is made private, with a warning."""
    path = folder / "token"
    try:
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            with contextlib.suppress(OSError):  # not ours: it can still be read
                path.chmod(0o600)
                log.warning(
                    "%s had mode %o, which lets others use the token; it is 600 now. If others use this machine, "
                    "remove the file and restart to get a new token", path, mode,
                )  # fmt: skip
        return path.read_text().strip() or None
    except OSError:
        return None


def run_folder(folder: Path) -> Path:
    """The folder of the sockets, made if missing: `run/` itself, or what it links to when that path is too long."""
    wanted = folder.absolute() / "run"
    if len(str(wanted / "trainer.sock")) <= _LONGEST:
        if wanted.is_symlink():
            wanted.unlink()
        wanted.mkdir(exist_ok=True, mode=0o700)
        return wanted
    name = f"reef-{os.getuid()}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108 (checked below: ours, 0700, no link)
    short = (parent if parent.is_dir() and len(str(parent)) < 60 else Path("/tmp")) / name  # noqa: S108
    with contextlib.suppress(FileExistsError):
        short.mkdir(mode=0o700)
    status = short.lstat()
    if not short.is_dir() or short.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StoreError(f"{short} exists and is not a private folder of yours; remove it, or use a shorter state_dir")
    if wanted.is_symlink() or wanted.is_file():
        wanted.unlink()
    elif wanted.is_dir():
        shutil.rmtree(wanted)
    wanted.symlink_to(short)
    return short


def listen(path: Path) -> socket.socket:
    """A listening unix socket at a path; what a dead server left there is replaced. The caller holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(128)
    return listener


def bind(host: str, port: int) -> socket.socket:
    """The HTTP listening socket. StoreError when the port is taken or the host is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise StoreError(f"no address for host {host!r}; use 127.0.0.1 or 0.0.0.0") from None
        why = "is in use" if error.errno == 98 or "in use" in str(error) else f"cannot be bound ({error.strerror})"
        raise StoreError(
            f"port {port} on {host} {why}; stop what holds it, or choose another with --reef.port {port + 1}"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """http://host:port as a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (a comparison)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _alive(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
