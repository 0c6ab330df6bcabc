"""The first process of a room: it starts the client, ends it, and tells what came of it.

Knows: files, processes and limits inside the room, and a socket to whoever opened it. Does not know: Reef, agents, or
what a good outcome is; this file is handed as text to a sandboxed Python of the standard library (`room.program`).

- Number 1 of its process namespace: nothing inside can end or stop it, and what it ends (everything but itself) stays
  ended. Nobody can read its memory, so the exam's hidden files are safe before they are written, too.
- The port that the client knows is listened on from outside: the listening socket is made here, where there is no
  network, and handed out. Nothing else leads out of the room.
- Memory is watched, not limited by the kernel: engines of JavaScript reserve more addresses than they ever use.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from typing import Any

from reef.harness.lower import lower

ROOM = "/room"
STEP = 0.1  # seconds between two looks at the limits
TAIL = 8 * 1024  # bytes of each output that are told
DEEP, MANY = 8, 2000  # folders below each other, and files, that are looked through for what is copied


def tell(link: socket.socket, said: Any) -> None:
    data = json.dumps(said).encode()
    link.sendall(struct.pack("!I", len(data)) + data)


def take(link: socket.socket) -> Any:
    """The next order; whoever gives them is gone: the room ends."""
    size = struct.unpack("!I", _exactly(link, 4))[0]
    return json.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 1 << 20))
        if not piece:
            os._exit(1)
        data += piece
    return bytes(data)


def settle(asked: dict[str, Any]) -> None:
    """Give up rights, be the first to go when memory runs out, and step back for others."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(asked["nice"])
    lower(asked["limits"], asked["user"])
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(4, 0, 0, 0, 0) or call(1, signal.SIGKILL, 0, 0, 0):  # not DUMPABLE; PDEATHSIG, which a new user undoes
        raise OSError(ctypes.get_errno(), "the kernel does not hide a process")
    os.umask(0o022)
    for name in ("home", "work", "tmp", "exam"):
        os.mkdir(f"{ROOM}/{name}", 0o700)


def put(path: str, text: str) -> None:
    """A file of the room, whatever was in its place: a link is replaced, never followed."""
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise ValueError(f"the path {path!r} leaves its folder")
    place = ROOM
    for name in names[:-1]:
        place += f"/{name}"
        if stat.S_ISDIR(_mode(place)):
            os.chmod(place, 0o755)  # noqa: S103 - the agent may have closed it
        else:
            _remove(place)
            os.mkdir(place, 0o755)
    place += f"/{names[-1]}"
    _remove(place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(place, flags, 0o755 if text.startswith("#!") else 0o644), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))


def _mode(place: str) -> int:
    try:
        return os.lstat(place).st_mode
    except FileNotFoundError:
        return 0


def _remove(place: str) -> None:
    mode = _mode(place)
    if stat.S_ISDIR(mode):
        shutil.rmtree(place, ignore_errors=True)
    elif mode:
        os.unlink(place)


# --- one run ----------------------------------------------------------------------------------------------------------


def run(link: socket.socket, asked: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end, or to the end of its time or room; nothing that it started is left."""
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            asked["command"],
            cwd=f"{ROOM}/work",
            env=asked["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"trouble": f"{asked['command'][0]} cannot be started: {error.strerror}"}
    assert child.stdout is not None
    assert child.stderr is not None
    tails = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    status, fault = _follow(link, child.pid, tails, asked, began)
    status = _end(child.pid, status)
    for number, tail in tails.items():
        while data := os.read(number, 1 << 16):  # no writer is left, so this ends
            tail += data
    child.returncode = status
    out, err = (bytes(tail[-TAIL:]).decode("utf-8", "replace") for tail in tails.values())
    for pipe in (child.stdout, child.stderr):
        pipe.close()
    return {"status": status, "fault": fault, "out": out, "err": err, "seconds": time.monotonic() - began}


def _follow(
    link: socket.socket, pid: int, tails: dict[int, bytearray], asked: dict[str, Any], began: float
) -> tuple[int | None, str | None]:
    """(exit status, None) of the command, or (None, why it must be ended)."""
    poll = select.poll()
    for number in (link.fileno(), *tails):
        poll.register(number, select.POLLIN)
    written, looked = 0, began
    while True:
        for number, _ in poll.poll(STEP * 1000):
            if number == link.fileno():
                os._exit(1)  # nobody waits for it any more
            data = os.read(number, 1 << 16)
            written += len(data)
            tails[number] += data
            del tails[number][:-TAIL]
            if not data:
                poll.unregister(number)
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == pid:
                return os.waitstatus_to_exitcode(status), None
            if not ended:
                break
        if written > asked["output"]:
            return None, f"wrote more than {asked['output']} bytes of output"
        if time.monotonic() >= looked + STEP:
            looked = time.monotonic()
            if (fault := _over(asked, looked - began)) is not None:
                return None, fault


def _over(asked: dict[str, Any], seconds: float) -> str | None:
    """Which limit was passed, as the end of a sentence about the agent."""
    if seconds > asked["seconds"]:
        return f"was not done within {asked['seconds']:g} s"
    processes, held = _load()
    if processes > asked["limits"]["processes"]:  # the kernel does not count root's own, in a user namespace
        return f"started more than {asked['limits']['processes']} processes"
    if held > asked["memory"]:
        return f"took more than {asked['memory'] >> 20} MiB of memory"
    room = os.statvfs(ROOM)
    if room.f_files - room.f_ffree > asked["entries"]:
        return f"made more than {asked['entries']} files and folders"
    return None


def _load() -> tuple[int, int]:
    """How many processes there are but this one, and how many bytes they hold. Files count as disk, but memory that is
    shared is of no file, and of each that has it."""
    count = held = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            count += 1
            try:
                with open(f"/proc/{name}/status") as file:
                    for line in file:
                        if line.startswith(("RssAnon:", "RssShmem:")):
                            held += int(line.split()[1]) << 10
            except (OSError, IndexError, ValueError):
                continue
    return count, held


def _end(pid: int, status: int | None) -> int:
    """End everything inside but this process, and wait for it. The command's exit status."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        try:
            ended, how = os.waitpid(-1, 0)
        except ChildProcessError:
            return -signal.SIGKILL if status is None else status
        if ended == pid and status is None:
            status = os.waitstatus_to_exitcode(how)


# --- what is handed out -----------------------------------------------------------------------------------------------


def copy(link: socket.socket, root: str, most: int) -> None:
    """Send the plain files below a folder, the newest first, `most` bytes of them. No link is followed."""
    for _, path in sorted(_files(root), reverse=True):
        try:
            name = os.path.relpath(path, root)
            name.encode()
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, UnicodeError):
            continue
        with open(number, "rb") as file:
            seen = os.fstat(number)
            if not stat.S_ISREG(seen.st_mode) or seen.st_size > most:
                continue
            data = file.read(most)
        most -= len(data)
        tell(link, {"file": name, "size": len(data)})
        link.sendall(data)


def _files(root: str) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    folders = [(root, 0)]
    while folders and len(found) < MANY:
        folder, depth = folders.pop()
        try:
            inside = list(os.scandir(folder))
        except OSError:
            continue
        for item in inside:
            if item.is_symlink():
                continue
            if item.is_dir(follow_symlinks=False):
                if depth < DEEP and item.name != "node_modules":
                    folders.append((item.path, depth + 1))
            elif item.is_file(follow_symlinks=False):
                found.append((item.stat(follow_symlinks=False).st_mtime, item.path))
    return found


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    door = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64)
    socket.send_fds(link, [b"+"], [door.fileno()])
    door.close()
    asked = take(link)
    settle(asked)
    try:
        for path, text in asked["files"].items():
            put(path, text)
    except (OSError, ValueError) as error:
        tell(link, {"fault": f"needs files that cannot be written: {error}"})
    else:
        tell(link, run(link, asked))
    copy(link, f"{ROOM}/{asked['root']}", asked["copied"])
    tell(link, {"end": True})
    asked = take(link)
    try:
        for path, text in asked["hidden"].items():
            put(path, text)
    except (OSError, ValueError, RecursionError) as error:
        tell(link, {"fault": f"left no room for the check: {error}"})
    else:
        tell(link, run(link, asked))
    take(link)


if __name__ == "__main__":
    main()
