"""What a process did to a file and told the world, from a system-call trace; and the file after a power cut.

Knows: strace's lines, which bytes of a file are sure to be on the disk after which sync, that names need a sync too.
Does not know: SQLite's formats, or what an answer promises.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CALLS = "openat,unlink,ftruncate,write,pwrite64,pwritev,writev,sendto,sendmsg,fsync,fdatasync"
_LINE = re.compile(
    r"(?P<at>\d+\.\d+) (?P<name>\w+)\((?P<rest>.*) = (?P<result>-?\d+)(?:<[^>]*>)?.* <(?P<took>[\d.]+)>$"
)
_FD = re.compile(r"\d+<(?P<path>TCP:\[[^\]]*\]|[^>]*)>")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(?P<cut>\.\.\.)?')


def command(folder: Path) -> tuple[str, ...]:
    """What to put before a program to have a file per thread in this folder."""
    options = f"-ff -o {folder}/thread -ttt -T -yy -xx -s 1000000 --signal=none --seccomp-bpf -e trace={CALLS}"
    return ("strace", *options.split())


@dataclass(frozen=True)
class Event:
    """A call: when it began and ended (seconds), its file (a path or strace's name of a socket), its bytes."""

    begun: float
    ended: float
    name: str
    path: str
    data: bytes = b""
    offset: int = 0

    @property
    def sent(self) -> bool:
        """It went into a socket."""
        return self.path.startswith("TCP:")


def read(folder: Path) -> list[Event]:
    """Every call that did something: in the order in which they ended, but what went into a socket as it began."""
    found: list[Event] = []
    for part in folder.glob("thread.*"):
        for line in part.read_text().splitlines():
            if (event := _event(line)) is not None:
                found.append(event)
    return sorted(found, key=lambda event: event.begun if event.sent else event.ended)


def _event(line: str) -> Event | None:
    match = _LINE.match(line)
    if match is None or (result := int(match["result"])) < 0:
        return None
    name, rest = match["name"], match["rest"].removesuffix(")").rstrip()
    begun, texts = float(match["at"]), [bytes.fromhex(text[0].replace("\\x", "")) for text in _TEXT.findall(rest)]
    assert not any(text[1] for text in _TEXT.findall(rest)), "strace cut a string"
    if name in ("unlink", "openat"):
        path = texts[0].decode()
        if name == "openat" and "O_CREAT" not in rest:
            return None
        return Event(begun, begun + float(match["took"]), name, path)
    path = _FD.match(rest)["path"]
    if path.startswith("\\x"):
        path = bytes.fromhex(path.replace("\\x", "")).decode()
    offset = int(rest.rsplit(", ", 1)[1]) if name in ("pwrite64", "ftruncate") else 0
    data = b"".join(texts)[: result or None] if name not in ("fsync", "fdatasync", "ftruncate") else b""
    return Event(begun, begun + float(match["took"]), name, path, data, offset)


@dataclass
class File:
    """A file's bytes that are on the disk for sure, and the writes after them in their order."""

    sure: bytearray | None
    named: bool = True  # its name is on the disk too
    loose: list[Event] = field(default_factory=list)

    def sync(self, since: float) -> None:
        """A sync that began at this time has ended."""
        if self.sure is None:
            self.sure = bytearray()
        for event in self.loose:
            if event.ended <= since:
                apply(self.sure, event)
        self.loose = [event for event in self.loose if event.ended > since]


def apply(image: bytearray, event: Event) -> None:
    if event.name == "ftruncate":
        del image[event.offset :]
        image.extend(bytes(event.offset - len(image)))
        return
    image.extend(bytes(max(0, event.offset - len(image))))
    image[event.offset : event.offset + len(event.data)] = event.data


class Disk:
    """The disk under some files of one folder, as it is known to be while the trace goes on.

    An unlinked file is gone at once; a new one is there once its folder was synced and then holds what was synced.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = str(folder)
        self.files: dict[str, File] = {}
        for name in names:
            path = folder / name
            exists = path.exists()
            self.files[str(path)] = File(bytearray(path.read_bytes()) if exists else None, exists)

    def changes(self, event: Event) -> bool:
        """Whether this call may change what is sure to be there."""
        return event.name in ("fsync", "fdatasync", "unlink") and event.path in (self.folder, *self.files)

    def take(self, event: Event) -> None:
        file = self.files.get(event.path)
        if event.path == self.folder and event.name in ("fsync", "fdatasync"):
            for each in self.files.values():
                each.named = True
        elif file is None:
            pass
        elif event.name == "unlink":
            file.sure, file.named, file.loose = None, False, []
        elif event.name in ("fsync", "fdatasync"):
            file.sync(event.begun)
        elif event.name in ("write", "pwrite64", "ftruncate"):
            file.loose.append(event)
        else:
            assert event.name == "openat", f"{event.name} of {event.path} is not understood"

    def after(self, luck: Callable[[Event], bool] = lambda event: False) -> dict[str, bytes]:
        """The files after a power cut now. `luck` says of a write that was not synced whether it came through."""
        found = {}
        for path, file in self.files.items():
            if not file.named or file.sure is None:
                continue
            image = bytearray(file.sure)
            for event in file.loose:
                if luck(event):
                    apply(image, event)
            found[Path(path).name] = bytes(image)
        return found


def tracee(pid: int) -> int:
    """The process that this strace started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
