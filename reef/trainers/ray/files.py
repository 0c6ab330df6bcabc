"""Files between the trainer's machine and a worker's, which may be one and the same; and tensors of which each worker
holds a shard, as one safetensors file.

Knows: how a worker tells that it sees the very file the driver means; the safetensors format as it is written.
Does not know: what the files are for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16 << 20
"""Bytes of one message with a file's content."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A file of the driver's machine. On a shared disk, or the same machine, a worker sees the same inode."""

    path: str
    size: int
    inode: int
    changed: int  # nanoseconds

    @classmethod
    def of(cls, path: Path) -> Sight:
        status = path.stat()
        return cls(os.path.abspath(path), status.st_size, status.st_ino, status.st_mtime_ns)

    def here(self) -> bool:
        try:
            return Sight.of(Path(self.path)) == self
        except OSError:
            return False


class Spool:
    """A worker's folder for what it was sent and what it hands back. Files of one folder stay together."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._have: dict[Path, Sight] = {}
        self.made = place / "made"
        self.made.mkdir(parents=True)

    def missing(self, files: Collection[Sight]) -> list[Sight]:
        """Those that must be sent. What was sent before and is wanted no more is removed."""
        wanted = {self._kept(one) for one in files}
        for file in self._have.keys() - wanted:
            file.unlink()
            del self._have[file]
        return [one for one in files if not one.here() and self._have.get(self._kept(one)) != one]

    def receive(self, one: Sight, offset: int, chunk: bytes) -> None:
        kept = self._kept(one)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f".{kept.name}")
        with part.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(chunk)
        if offset + len(chunk) >= one.size:
            part.rename(kept)
            self._have[kept] = one

    def path(self, one: Sight) -> Path:
        return Path(one.path) if one.here() else self._kept(one)

    def clear(self) -> None:
        """Remove what was handed back."""
        for file in self.made.iterdir():
            file.unlink()

    def remove(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def _kept(self, one: Sight) -> Path:
        parent = hashlib.sha256(os.path.dirname(one.path).encode()).hexdigest()[:16]
        return self._place / "sent" / parent / os.path.basename(one.path)


def write(file: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of whole or sharded tensors, one tensor in memory at a time. All workers call it; the one that
    writes gives a path."""
    import torch
    from torch.distributed.tensor import DTensor

    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as the library does
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        start, one = end, tensors[name]
        end += one.numel() * one.element_size()
        header[name] = {"dtype": _DTYPES[str(one.dtype)], "shape": list(one.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(file.open("wb")) if file is not None else None
        if out is not None:
            out.write(struct.pack("<Q", len(head)) + head)
        for name in names:
            one = tensors[name].detach()
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            if out is not None and whole.numel():
                out.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip
