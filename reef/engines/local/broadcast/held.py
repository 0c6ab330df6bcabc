"""Files in one flat buffer: where each lies, their digests, and a safetensors file's tensors as views of it.

Knows: offsets, sha256, the header of a safetensors file, buffers on any device.
Does not know: where the bytes came from, or what the tensors are for.

- Views are of the buffer itself: no copy, on its device. Who keeps one keeps the buffer from being used again.
- Only verified bytes are looked into; a header that lies about its file is an EngineError all the same.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reef.core.errors import EngineError
from reef.engines.local.broadcast.talk import Carried, places

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def plain(files: Sequence[Carried]) -> bool:
    """Whether an offer can be meant: some files, each once, none of a negative size."""
    names = {file.name for file in files}
    return 0 < len(files) <= 64 and len(names) == len(files) and all(file.size >= 0 for file in files)


class Digests:
    """The sha256 of each file, from its bytes in the order in which they come."""

    def __init__(self, files: Sequence[Carried], flat: Tensor) -> None:
        self._files, self._flat = files, flat
        self._starts, self._size = places(files)
        self._shas = [hashlib.sha256() for _ in files]
        self._staging: Tensor | None = None
        self.seconds = 0.0

    def take(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the buffer are there."""
        began = time.perf_counter()
        data = self._bytes(start, stop)
        for file, begin, sha in zip(self._files, self._starts, self._shas, strict=True):
            low, high = max(start, begin), min(stop, begin + file.size)
            if low < high:
                sha.update(data[low - start : high - start])
        self.seconds += time.perf_counter() - began

    def wrong(self) -> str | None:
        """The first file whose bytes are not those of its digest, in words."""
        for file, sha in zip(self._files, self._shas, strict=True):
            if not hmac.compare_digest(sha.hexdigest(), file.sha256):
                return f"{file.name} does not match its digest {file.sha256[:12]}"
        return None

    def _bytes(self, start: int, stop: int) -> memoryview:
        """On a GPU: a copy in page-locked memory, made once and used again."""
        part = self._flat[start:stop]
        if part.device.type == "cpu":
            return part.numpy().data
        if self._staging is None or self._staging.numel() < stop - start:
            self._staging = torch.empty(stop - start, dtype=torch.uint8, pin_memory=True)
        held = self._staging[: stop - start]
        held.copy_(part)
        return held.numpy().data


class Held:
    """A file in memory: [size] uint8 on any device. Reads like a file (`read_bytes`) and like an open safetensors file
    (`keys`, `get_tensor`)."""

    def __init__(self, name: str, flat: Tensor) -> None:
        self.name, self._flat = name, flat
        self._header: dict[str, Any] | None = None
        self._start = 0

    def read_bytes(self) -> bytes:
        return self._flat.cpu().numpy().tobytes()

    def keys(self) -> list[str]:
        return list(self._open())

    def get_tensor(self, name: str) -> Tensor:
        """A view. EngineError for an entry that does not lie in the file as it says."""
        entry = self._open()[name]
        try:
            dtype, shape = DTYPES[entry["dtype"]], [int(length) for length in entry["shape"]]
            begin, end = (self._start + int(offset) for offset in entry["data_offsets"])
            if not self._start <= begin <= end <= self._flat.numel() or min(shape, default=0) < 0:
                raise ValueError(f"shape {shape}, bytes {begin} to {end} of {self._flat.numel()}")
            part = self._flat[begin:end]
            if part.storage_offset() % dtype.itemsize:
                part = part.clone()
            return part.view(dtype).view(shape)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise EngineError(f"{self.name} has no whole tensor {name} ({error})") from None

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self.keys()}

    def _open(self) -> dict[str, Any]:
        if self._header is None:
            try:
                length = int.from_bytes(self._flat[:8].cpu().numpy().tobytes(), "little")
                if not 2 <= length <= self._flat.numel() - 8:
                    raise ValueError(f"header of {length} bytes in a file of {self._flat.numel()}")
                header = json.loads(self._flat[8 : 8 + length].cpu().numpy().tobytes())
                header.pop("__metadata__", None)
                self._start, self._header = 8 + length, dict(header)
            except (ValueError, TypeError, AttributeError) as error:
                raise EngineError(f"{self.name} is no whole safetensors file ({error})") from None
        return self._header
