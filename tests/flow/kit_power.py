"""A state folder after a power cut, from a system-call trace of a learner, an operator and all their git children.

Knows: which bytes a sync had covered, which names a journal had. Does not know: what is in a file.

The disk it stands for loses every byte that was not synced by its own file's fsync: a file that was renamed without one
is there and empty. Names (made, renamed, linked, removed) are kept in their order, and all of them up to the last sync
of anything, as file systems with a journal do it (ext4, XFS); of the later ones a prefix may be there.

Run as a program, it is what is traced: `python -m tests.flow.kit_power FOLDER SEED DEEDS` does deeds of the story and
tells, after each, the head that was promised.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "openat,open,creat,write,pwrite64,pwritev,writev,ftruncate,lseek,sendfile,copy_file_range,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync"
)
_LINE = re.compile(
    r"(?P<at>\d+\.\d+) (?P<name>\w+)\((?P<rest>.*)\) += (?P<result>-?\d+)(?:<[^>]*>)?.*<(?P<took>[\d.]+)>$"
)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PLACE = re.compile(r"(?:\d+|AT_FDCWD)<([^>]*)>")
_FD = re.compile(r"(\d+)<")


def command(traces: Path) -> list[str]:
    options = f"-f -ff -o {traces}/t -ttt -T -y -xx -s 4000000 --signal=none --seccomp-bpf -e trace={CALLS}"
    return ["strace", *options.split()]


@dataclass(frozen=True)
class Call:
    at: float
    end: float
    thread: str
    name: str
    rest: str
    result: int

    @property
    def texts(self) -> list[bytes]:
        return [_bytes(text) for text in _TEXT.findall(self.rest)]

    @property
    def places(self) -> list[str]:
        return [_bytes(place).decode() if place.startswith("\\x") else place for place in _PLACE.findall(self.rest)]

    @property
    def numbers(self) -> list[int]:
        return [int(fd) for fd in _FD.findall(self.rest)]


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def read(traces: Path) -> list[Call]:
    """Every call that did something, in the order in which they ended."""
    found = []
    for file in traces.glob("t.*"):
        for line in file.read_text().splitlines():
            match = _LINE.match(line)
            if match is not None and int(match["result"]) >= 0:
                at = float(match["at"])
                end = at + float(match["took"])
                found.append(Call(at, end, file.suffix, match["name"], match["rest"], int(match["result"])))
    return sorted(found, key=lambda call: call.end)


@dataclass(eq=False)
class Inode:
    """A file: its bytes now, and those of its last sync. `folder`: it has none."""

    data: bytearray = field(default_factory=bytearray)
    sure: bytes = b""
    folder: bool = False


class Disk:
    """The folder `root`, as the kernel has it and as the disk has it, while the trace goes on."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.names: dict[str, Inode] = {self.root: Inode(folder=True)}
        for path in root.rglob("*"):
            data = b"" if path.is_dir() else path.read_bytes()
            self.names[str(path)] = Inode(bytearray(data), data, path.is_dir())
        self.kept = dict(self.names)  # as of the last sync of anything
        self.later: list[dict[str, Inode]] = []  # as of each change after that
        self.at: dict[
            tuple[str, int], tuple[Inode, int, bool]
        ] = {}  # (file, position, append) by thread and descriptor

    def take(self, call: Call) -> bool:
        """Whether something became durable by this call."""
        if call.name in ("fsync", "fdatasync"):
            inode = self.names.get(call.places[0].removesuffix(" (deleted)"))
            if inode is None:
                return False
            inode.sure = bytes(inode.data)
            self.kept, self.later = dict(self.names), []
            return True
        before = self.names
        handler = getattr(self, f"_{call.name.removesuffix('64').removesuffix('at2').removesuffix('at')}", None)
        if handler is not None:
            handler(call)
        if self.names is not before:
            self.later.append(self.names)
        return False

    # --- names ----------------------------------------------------------------------------------------------------

    def _paths(self, call: Call) -> list[str]:
        """The paths a call names, whole."""
        places = iter(call.places if "at" in call.name else [])
        found = []
        for text in call.texts:
            base = next(places, "/elsewhere")  # only the remote's own git names files from where it stands
            found.append(os.path.normpath(os.path.join(base, text.decode())))
        return found

    def _mine(self, path: str) -> bool:
        return path.startswith(self.root + "/") and not path.endswith("-shm")

    def _set(self, path: str, inode: Inode | None) -> None:
        self.names = dict(self.names)
        if inode is None:
            self.names.pop(path, None)
        else:
            self.names[path] = inode

    def _open(self, call: Call) -> None:
        (path,) = self._paths(call)[:1]
        if not self._mine(path) or "O_DIRECTORY" in call.rest:
            return
        if path not in self.names:
            if "O_CREAT" not in call.rest:
                return
            self._set(path, Inode())
        inode = self.names[path]
        if "O_TRUNC" in call.rest:
            del inode.data[:]
        for key in [key for key in self.at if key[1] == call.result]:
            if key[0] == call.thread:
                del self.at[key]
        self.at[call.thread, call.result] = (inode, 0, "O_APPEND" in call.rest)

    _creat = _open

    def _mkdir(self, call: Call) -> None:
        (path,) = self._paths(call)
        if self._mine(path):
            self._set(path, Inode(folder=True))

    def _rmdir(self, call: Call) -> None:
        self._unlink(call)

    def _unlink(self, call: Call) -> None:
        (path,) = self._paths(call)
        if self._mine(path):
            self._set(path, None)

    def _link(self, call: Call) -> None:
        old, new = self._paths(call)
        if self._mine(new) and old in self.names:
            self._set(new, self.names[old])

    def _rename(self, call: Call) -> None:
        old, new = self._paths(call)
        if old not in self.names:
            return
        moved = {path: inode for path, inode in self.names.items() if path == old or path.startswith(old + "/")}
        self.names = {path: inode for path, inode in self.names.items() if path not in moved}
        self.names |= {new + path[len(old) :]: inode for path, inode in moved.items()}

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _file(self, call: Call) -> Inode | None:
        place = call.places[0].removesuffix(" (deleted)") if call.places else ""
        inode = self.names.get(place)
        return None if inode is None or inode.folder or not self._mine(place) else inode

    def _write(self, call: Call) -> None:
        if (inode := self._file(call)) is None:
            return
        data = b"".join(call.texts)[: call.result]
        key = (call.thread, call.numbers[0])
        held, position, append = self.at.get(key, (inode, len(inode.data), True))
        if held is not inode:
            position, append = len(inode.data), True
        position = len(inode.data) if append else position
        _put(inode.data, position, data)
        self.at[key] = (inode, position + len(data), append)

    _writev = _write

    def _pwrite(self, call: Call) -> None:
        if (inode := self._file(call)) is not None:
            offset = int(call.rest.rsplit(", ", 1)[1])
            _put(inode.data, offset, b"".join(call.texts)[: call.result])

    def _ftruncate(self, call: Call) -> None:
        if (inode := self._file(call)) is not None:
            size = int(call.rest.rsplit(", ", 1)[1])
            del inode.data[size:]
            inode.data.extend(bytes(size - len(inode.data)))

    def _lseek(self, call: Call) -> None:
        if (inode := self._file(call)) is not None:
            append = self.at.get((call.thread, call.numbers[0]), (inode, 0, False))[2]
            self.at[call.thread, call.numbers[0]] = (inode, call.result, append)

    def _sendfile(self, call: Call) -> None:
        assert not self._mine(call.places[0]), f"{call.name} is not understood"  # a backup is copied elsewhere

    _copy_file_range = _pwritev = _sendfile

    # --- after the cut --------------------------------------------------------------------------------------------

    def restore(self, target: Path, luck: random.Random | None = None) -> None:
        """Write what is there after a power cut now. `luck`: some of what was not sure came through."""
        names = self.kept
        if luck is not None and self.later:
            names = luck.choice([self.kept, *self.later])
        for path, inode in sorted(names.items()):
            place = target / os.path.relpath(path, self.root)
            if inode.folder:
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                whole = luck is not None and luck.random() < 0.3
                place.write_bytes(inode.data if whole else inode.sure)


def _put(image: bytearray, offset: int, data: bytes) -> None:
    image.extend(bytes(max(0, offset - len(image))))
    image[offset : offset + len(data)] = data


# --- what is traced, and what is checked ----------------------------------------------------------------------------


async def act(place: Path, seed: int, deeds: int) -> None:
    from tests.flow.kit_story import Story
    from tests.loop.kit import NAME

    story = Story(place, seed)
    await story.open()
    for number in range(deeds):
        story.notes.write("done", number)
        await story.do(story.plan(number))
        head = story.world.chain.head(NAME)
        assert head is not None
        with (place / "promised").open("a") as file:
            file.write(f"{head.id}\n")
    await story.close()


def promised(call: Call, place: Path) -> str | None:
    """The head that this call promises to the world."""
    if call.name == "write" and call.places and call.places[0] == str(place / "promised"):
        return call.texts[0].decode().strip()
    return None


async def check(place: Path, seed: int, promise: str | None) -> list[str]:
    """What is wrong with a restart on this folder."""
    from reef.scenario import serving
    from tests.flow.kit_story import Story, served
    from tests.loop.kit import NAME

    story = Story(place, seed)
    await story.open()
    wrong = list(story.wrong)
    if promise is not None and promise not in {one.id for one in story.world.chain.history(NAME, 10_000)}:
        wrong.append(f"release {promise} was promised and is gone")
    wrong += story.world.chain.verify(NAME)
    if story.world.board.archived(NAME):  # it was away at that moment
        serving.restore(NAME, story.world.chain, story.world.board, actor="ada", reason="back")
    await story.rest()
    wrong += [work.error for work in story.world.works.values() if work.error]
    wrong += served(story)
    await story.close()
    return wrong


def trace(place: Path, seed: int, deeds: int) -> tuple[list[Call], Disk]:
    """Do the deeds under strace on a new state folder; the calls, and the disk as it was before."""
    traces = place.with_name(place.name + "-trace")
    traces.mkdir()
    (place / "state").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", "--bare", str(place / "remote.git")], check=True)
    disk = Disk(place / "state")
    program = [sys.executable, "-m", "tests.flow.kit_power", str(place), str(seed), str(deeds)]
    subprocess.run([*command(traces), *program], check=True, cwd=Path(__file__).parents[2], capture_output=True)
    return read(traces), disk


def cuts(calls: list[Call], disk: Disk, place: Path) -> Iterator[str | None]:
    """Go on with the trace; stops at each sync, with what was promised by then."""
    promise = None
    for call in calls:
        promise = promised(call, place) or promise
        if disk.take(call):
            yield promise


if __name__ == "__main__":
    asyncio.run(act(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps("done"))
