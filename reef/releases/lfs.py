"""Large files: Git LFS objects beside the repository, stored and verified by sha256.

Knows: LFS pointer files (spec v1, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md), where objects lie
(`lfs/objects/aa/bb/<sha256>`), and which bytes on disk have been verified already.
Does not know: releases, refs, or which file belongs to what.

- An object appears under its name whole or not at all: temporary file, fsync, rename, fsync of the folder.
- An object that is removed on purpose is named in `reef/pruned` first, so that it is never taken for a lost one.
- A verification holds as long as the file's size, mtime and inode stay the same; then the bytes are hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path

from reef.core import disk
from reef.core.errors import ChainError, DigestError, InputError, PrunedError
from reef.core.failpoint import failpoint
from reef.releases.git import Git, settle

LARGE = 64 * 1024
"""Files of this many bytes or more, and every *.safetensors, are LFS objects."""

_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_CHUNK = 1 << 20
ABANDONED = 3600.0
"""Seconds after which a file that nothing names is nobody's: a publish takes less."""


def large(name: str, size: int) -> bool:
    return size >= LARGE or name.endswith(".safetensors")


def pointer(digest: str, size: int) -> bytes:
    return _POINTER + f"oid sha256:{digest}\nsize {size}\n".encode()


def parse_pointer(data: bytes) -> tuple[str, int] | None:
    """(sha256, size) of an LFS pointer file, or None when it is none."""
    if not data.startswith(_POINTER):
        return None
    found = re.fullmatch(rb"(?:ext-.*\n)*oid sha256:([0-9a-f]{64})\nsize (\d+)\n", data[len(_POINTER) :])
    return (found[1].decode(), int(found[2])) if found else None


def measure(name: str, source: Path | bytes) -> tuple[str, int]:
    """(sha256, size in bytes) of a file to be stored. InputError when it is not what its name says."""
    sha = hashlib.sha256()
    size = 0
    start = b""
    with _reading(name, source) as chunks:
        for chunk in chunks:
            start = start or chunk[:4096]
            sha.update(chunk)
            size += len(chunk)
    if start.startswith(_POINTER):
        raise InputError(f"{name} is an LFS pointer, not the file itself; run `git lfs pull` where it comes from")
    if name.endswith(".safetensors"):
        header = int.from_bytes(start[:8], "little")
        if size < 10 or header > size - 8 or start[8:9] != b"{":
            raise InputError(f"{name} is not a safetensors file (its header is damaged or the file is cut off)")
    return sha.hexdigest(), size


def match(name: str, data: bytes, digest: str, size: int) -> None:
    """DigestError when a small file's content is not that of the digest."""
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise DigestError(f"{name} does not match its digest {digest}; roll back to another release")


class Objects:
    """The LFS objects and the small-file cache of one repository. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self._objects = path / "lfs" / "objects"
        self._small = path / "reef" / "files"
        self._temporary = path / "reef" / "tmp"
        self._list = path / "reef" / "pruned"
        self._verified: dict[Path, tuple[str, int, int, int]] = {}  # path -> sha256, size, mtime_ns, inode

    def prepare(self) -> None:
        """Make the folders; remove temporary files that a killed process left."""
        for folder in (self._objects, self._small, self._temporary):
            folder.mkdir(parents=True, exist_ok=True)
        for left in self._temporary.iterdir():
            owner = left.name.partition("-")[0]
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > ABANDONED or not (owner.isdigit() and _alive(int(owner))):
                    left.unlink()

    def place(self, digest: str) -> Path:
        """Where the object with this sha256 is, or would be."""
        return self._objects / digest[:2] / digest[2:4] / digest

    def store(self, name: str, source: Path | bytes, digest: str, size: int) -> None:
        """Make the object of this digest exist, durably; a damaged one is replaced. ChainError when it cannot be."""
        place = self.place(digest)
        with contextlib.suppress(DigestError):
            self._check(place, name, digest, size)
            return
        self._write(place, name, source, digest)
        for folder in (place.parent, place.parent.parent, self._objects):
            settle(folder)
        failpoint("releases.lfs_written")

    def blobs(self, git: Git, contents: Sequence[bytes]) -> list[str]:
        """Store small contents as git blobs, all with one command; returns their ids in order."""
        stem = f"{os.getpid()}-{secrets.token_hex(8)}"
        files = [self._temporary / f"{stem}-{place}" for place in range(len(contents))]
        try:
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(content)
            names = "".join(f"{file.relative_to(git.path)}\n" for file in files)
            ids = git.run("hash-object", "-w", "--no-filters", "--stdin-paths", data=names.encode()).stdout
        except OSError as error:
            raise ChainError(f"cannot write to {self._temporary}: {error}; {disk.advice(error)}") from error
        finally:
            for file in files:
                with contextlib.suppress(OSError):  # `prepare` removes it; the error above says more
                    file.unlink()
        return ids.decode().split()

    def find(self, name: str, digest: str, size: int) -> Path:
        """The verified object. DigestError names the file when it is missing, cut off or changed."""
        place = self.place(digest)
        if not place.exists():
            if digest in self.pruned():
                raise PrunedError(
                    f"{name} was pruned: its large files were removed to bound the disk (releases.keep). Fetch them "
                    "with `git lfs fetch REMOTE RELEASE` in the folder releases.git, where the releases were pushed to "
                    "a remote; else use a release that is kept",
                    param="release_id",
                )
            raise DigestError(
                f"{name} is only an LFS pointer here: its object {digest} is missing from {self._objects}; "
                "fetch it with `git lfs fetch --all` from where the chain was copied, or roll back to another release"
            )
        self._check(place, name, digest, size)
        return place

    def small(self, name: str, data: bytes, digest: str, size: int) -> Path:
        """A small file's content as a file on disk. DigestError when the content is not that of the digest."""
        if (place := self.cached(name, digest, size)) is not None:
            return place
        place = self._small / digest
        match(name, data, digest, size)
        self._write(place, name, data, digest)  # a cache of what git holds: needs no fsync of the folder
        self._check(place, name, digest, size)
        return place

    def cached(self, name: str, digest: str, size: int) -> Path | None:
        """The small file from the cache, verified; None when it has to be read from git."""
        place = self._small / digest
        with contextlib.suppress(OSError):
            if time.time() - place.stat().st_mtime > ABANDONED / 2:
                place.touch()  # it is in use, so it does not go while somebody reads it
        with contextlib.suppress(DigestError):
            self._check(place, name, digest, size)
            return place
        return None

    def held(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every object there is, by its digest."""
        yield from _entries(self._objects.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]/*"))

    def copies(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every small file that lies here beside its blob in git, by its digest."""
        yield from _entries(self._small.iterdir() if self._small.is_dir() else ())

    def pruned(self) -> set[str]:
        """Digests of the objects that were removed on purpose; some may be back."""
        try:
            return {line[:64] for line in self._list.read_text("ascii", "replace").splitlines() if len(line) >= 64}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ChainError(f"cannot read {self._list}: {error}") from error

    def remove(self, digests: Sequence[str]) -> None:
        """Remove objects on purpose. All are named in the list, durably, before the first goes. The caller holds the
        repository's mutex and knows that nothing needs them."""
        if not digests:
            return
        try:
            with self._list.open("a") as file:
                file.write("".join(f"{digest} {int(time.time())}\n" for digest in digests))
                file.flush()
                os.fsync(file.fileno())
            settle(self._list.parent)
            failpoint("releases.pruned_listed")
            for digest in digests:
                self.place(digest).unlink(missing_ok=True)
                failpoint("releases.pruned_one")
        except OSError as error:
            raise ChainError(f"cannot remove large files in {self._objects}: {error}; {disk.advice(error)}") from error

    def drop_copy(self, digest: str) -> None:
        """Forget a small file's copy; it is made again from git when it is asked for."""
        with contextlib.suppress(OSError):
            (self._small / digest).unlink()

    def _check(self, path: Path, name: str, digest: str, size: int) -> None:
        try:
            stat = path.stat()
            seen = (digest, stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if self._verified.get(path) == seen and stat.st_size == size:
                return
            if stat.st_size != size:
                raise DigestError(f"{name} has {stat.st_size} bytes where {size} were recorded ({path})")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise DigestError(f"{name} is missing ({path})") from None
        except OSError as error:
            raise ChainError(f"cannot read {name} ({path}): {error}") from error
        if found != digest:
            raise DigestError(f"{name} does not match its digest: recorded {digest}, found {found} ({path})")
        self._verified[path] = seen

    def _write(self, place: Path, name: str, source: Path | bytes, digest: str) -> None:
        temporary = self._temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        sha = hashlib.sha256()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _reading(name, source) as chunks, temporary.open("xb", buffering=0) as file:
                for chunk in chunks:
                    sha.update(chunk)
                    _write_all(file, chunk)
                if sha.hexdigest() != digest:
                    raise ChainError(f"{name} changed while it was being published; publish it again")
                file.flush()
                os.fsync(file.fileno())
            failpoint("releases.lfs_temporary")
            temporary.chmod(0o444)
            temporary.replace(place)
        except OSError as error:
            raise ChainError(f"cannot store {name} in {place.parent}: {error}; {disk.advice(error)}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _entries(paths: Iterable[Path]) -> Iterator[tuple[str, os.stat_result]]:
    for path in paths:
        with contextlib.suppress(OSError):
            if re.fullmatch(r"[0-9a-f]{64}", path.name):
                yield path.name, path.stat()


@contextlib.contextmanager
def _reading(name: str, source: Path | bytes) -> Iterator[Iterator[bytes]]:
    if isinstance(source, bytes):
        yield iter([source])
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {name} from {source}: {error}") from error
    with file:
        yield iter(lambda: file.read(_CHUNK), b"")


def _write_all(file: FileIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
