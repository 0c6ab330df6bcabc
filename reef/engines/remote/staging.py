"""A release's files where an engine's servers read them: one folder for each adapter and each set of full weights.

Knows: what servers need beside the weights (configuration, tokenizer), links, copies, what is left to remove.
Does not know: HTTP, releases' scenarios, or torch: of weights only their bytes are looked at.

- A folder appears whole or not at all: temp folder, fsync, rename, under a lock among processes.
- Files are hard links where the disk allows it, so a folder costs nothing; else copies.
- A set of full weights is named by its content: a candidate and the release that it becomes are one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path

import orjson

from reef.core.disk import advice, full, sync
from reef.core.errors import EngineError, InputError, StoreError
from reef.engines import WeightFiles
from reef.engines.local.layout import tensor_shapes, weight_files
from reef.engines.remote import Away, Want
from reef.engines.remote.untie import head, tied

ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
FULL = "model.safetensors"
KEPT = 3600.0  # seconds that a folder nobody used is kept, so that no server loses one it reads
POLL = 0.02  # seconds between two looks at a lock
Span = tuple[str, str, int, int]
"""A tensor's name and dtype, and where it begins and ends in its file (bytes)."""
_SIDE = (".json", ".model", ".jinja", ".txt")  # what a model folder holds beside its weights
_SLICES = 64  # places of a file that are compared with another's
_SLICE = 4096  # bytes of each
_LEAST = 1e-4  # an adapter whose second matrices are smaller may be too little to be seen
_SHARE = 0.01  # of the weights looked at that differ, after which the answers must, too


class Shelf:
    """An engine's folder, `Away.place`. Blocking; call it in a thread."""

    def __init__(self, away: Away) -> None:
        self._away = away
        self.place = away.place / "weights"

    def want(self, release_id: str, found: WeightFiles) -> Want:
        """What a server must have to answer with a release. EngineError when its files are not what they must be."""
        base = found.meta.get("base")
        digest = base.get("digest") if isinstance(base, Mapping) else None
        if digest and self._away.digest and digest != self._away.digest:
            raise EngineError(
                f"release {release_id} was made for another base model (sha256 {str(digest)[:12]}…, not "
                f"{self._away.digest[:12]}…); serve it with that one, or start a new scenario"
            )
        if found.kind == "base":
            return Want()
        if found.kind == "lora":
            _demand(release_id, found, ADAPTER)
            return Want(lora=release_id)
        if found.kind == "full":
            _demand(release_id, found, (FULL,))
            return Want(full=self._content(found.files[FULL]))
        raise EngineError(f"release {release_id} has weights of kind {found.kind!r}; servers take base, lora and full")

    def stage(self, want: Want, found: WeightFiles) -> Path:
        """The folder of an adapter or a set of weights, made when it is not there. StoreError when the disk is full,
        which is neither a server's fault nor the weights'."""
        name = want.lora or want.full
        folder = self.place / name
        if folder.is_dir():
            with contextlib.suppress(OSError):
                os.utime(folder)
            return folder
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            with _locked(self.place / ".lock"):
                if not folder.is_dir():
                    self._make(folder, want, found)
        except OSError as error:
            kind = EngineError if full(error) is None else StoreError
            raise kind(f"cannot write {folder} ({error.strerror}); {advice(error)}") from None
        return folder

    def sweep(self) -> None:
        """Remove folders that were made an hour ago, but for those that a server has (it may read them again)."""
        servers = self._away.place / "servers"
        with contextlib.suppress(OSError), _locked(self.place / ".lock"):
            kept = {note.name for note in servers.glob("*/loras/*")}
            kept |= {turn.read_text() for turn in servers.glob("*/turn")}
            for folder in self.place.iterdir():
                old = time.time() - folder.stat().st_mtime > KEPT
                if folder.is_dir() and folder.name not in kept and old:
                    shutil.rmtree(folder, ignore_errors=True)

    def moved(self, name: str, other: str) -> bool:
        """Whether staged weights surely answer otherwise than others, or the base's (`base`). False: they may be too
        close to tell, or cannot be compared."""
        try:
            return self._moved(self.place / name, None if other == "base" else self.place / other)
        except (OSError, InputError):
            return False

    def _moved(self, folder: Path, other: Path | None) -> bool:
        if (folder / ADAPTER[0]).exists():
            if other is None or not (other / ADAPTER[0]).exists():
                return other is None and _size(folder / ADAPTER[0]) > _LEAST
            return _share(folder / ADAPTER[0], other / ADAPTER[0]) > _SHARE
        if other is not None:
            return _share(folder / FULL, other / FULL) > _SHARE
        base = weight_files(self._away.folder)
        return len(base) == 1 and _share(base[0], folder / FULL) > _SHARE

    def _make(self, folder: Path, want: Want, found: WeightFiles) -> None:
        temp = self.place / f".{folder.name}.partial"
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
        try:
            self._fill(temp, want, found)
            sync(temp)
            temp.rename(folder)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        sync(self.place)

    def _fill(self, temp: Path, want: Want, found: WeightFiles) -> None:
        if want.lora is not None:
            for name in ADAPTER:
                _link(found.files[name], temp / name)
            return
        for path in self._away.folder.iterdir():
            if path.is_file() and path.suffix in _SIDE and not path.name.endswith(".index.json"):
                _link(path, temp / path.name)
        # Servers may have an output layer of its own where the base has none: to all others it is one tensor more.
        if tied(self._away.folder) and head(found.files[FULL], temp / FULL):
            sync(temp / FULL)
        else:
            _link(found.files[FULL], temp / FULL)

    def _content(self, path: Path) -> str:
        """A name for a file's content. Large files of the chain lie under their own digest."""
        if len(path.name) == 64 and set(path.name) <= set("0123456789abcdef"):
            return path.name
        stat = path.stat()
        told = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        return hashlib.sha256(told.encode()).hexdigest()


@contextlib.asynccontextmanager
async def locked(path: Path, seconds: float) -> AsyncGenerator[None]:
    """Held by one process, and one task of it, at a time. TimeoutError when it is not free within `seconds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        async with asyncio.timeout(seconds):
            while not seized(descriptor, fcntl.LOCK_EX):  # noqa: ASYNC110 (another process frees it)
                await asyncio.sleep(POLL)
        yield
    finally:
        os.close(descriptor)


def seized(descriptor: int, kind: int) -> bool:
    """Whether a lock could be had at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _demand(release_id: str, found: WeightFiles, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if name not in found.files]:
        raise EngineError(f"release {release_id} lacks {', '.join(missing)}; roll back to another release")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where there can be none (another disk, a file of somebody else's)."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def _spans(path: Path, part: str = "") -> list[Span]:
    """Where tensors lie in a safetensors file, those whose name holds `part`."""
    tensor_shapes(path)  # that the file is whole
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = orjson.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return [
        (name, entry["dtype"], start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in sorted(header.items())
        if part in name
    ]


def _size(path: Path) -> float:
    """The largest value among those looked at of an adapter's second matrices, which are zero until it is trained."""
    found = 0.0
    with path.open("rb") as file:
        for _, dtype, begin, end in _spans(path, "lora_B"):
            file.seek(begin)
            data = file.read(min(end - begin, _SLICE))
            found = max([found, *(abs(value) for value in _floats(dtype, data))])
    return found


def _floats(dtype: str, data: bytes) -> list[float]:
    if dtype == "F32":
        return list(struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4]))
    if dtype == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data[: len(data) // 2 * 2]))
    if dtype == "BF16":
        wide = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data) // 2 * 2, 2))
        return list(struct.unpack(f"<{len(wide) // 4}f", wide))
    return []


def _share(one: Path, other: Path) -> float:
    """The share of weights that differ in bfloat16, of those looked at; 0 where the files are not laid out alike."""
    spans, others = _spans(one), {name: (dtype, begin, end) for name, dtype, begin, end in _spans(other)}
    total = sum(end - begin for _, _, begin, end in spans)
    looked = differ = 0
    with one.open("rb") as first, other.open("rb") as second:
        for number in range(_SLICES):
            name, dtype, begin, end, skip = _at(spans, total * number // _SLICES)
            place = others.get(name)
            if place is None or place[0] != dtype or place[2] - place[1] != end - begin:
                return 0.0
            first.seek(begin + skip)
            second.seek(place[1] + skip)
            size = min(_SLICE, end - begin - skip)
            left, right = _rounded(dtype, first.read(size)), _rounded(dtype, second.read(size))
            looked += len(left)
            differ += sum(a != b for a, b in zip(left, right, strict=False))
    return differ / looked if looked else 0.0


def _at(spans: list[Span], place: int) -> tuple[str, str, int, int, int]:
    """The tensor that holds the byte at `place`, counted over all of them, and how far into it (a multiple of 8)."""
    for name, dtype, begin, end in spans:
        if place < end - begin:
            return name, dtype, begin, end, place // 8 * 8
        place -= end - begin
    return (*spans[-1], 0)


def _rounded(dtype: str, data: bytes) -> list[bytes]:
    """Weights cut to their sixteen highest bits."""
    if dtype == "F32":
        return [data[at + 2 : at + 4] for at in range(0, len(data) // 4 * 4, 4)]
    return [data[at : at + 2] for at in range(0, len(data) // 2 * 2, 2)]
