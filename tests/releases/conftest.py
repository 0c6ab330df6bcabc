"""A chain in a temporary folder, and the smallest files that look like weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain


def safetensors(fill: int, size: int = 256) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill % 256]) * size


@pytest.fixture
def tensors() -> Callable[..., bytes]:
    """A valid safetensors file of one tensor, filled with one byte value."""
    return safetensors


@pytest.fixture
def lora() -> Callable[..., NewPart]:
    """A weights part like a real one: two small files and one LFS object."""

    def make(fill: int, size: int = 256) -> NewPart:
        files: dict[str, Path | bytes] = {
            "weights.json": json.dumps({"kind": "lora", "rank": 8, "fill": fill}).encode(),
            "adapter_config.json": b'{"r": 8}',
            "adapter_model.safetensors": safetensors(fill, size),
        }
        return NewPart("lora", files, {"kind": "lora", "rank": 8, "fill": fill})

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "releases.git"


@pytest.fixture
def chain(path: Path) -> GitChain:
    chain = GitChain(path)
    assert chain.open() == []
    return chain


@pytest.fixture
def base() -> Draft:
    return Draft("create", {"weights": NewPart("base", {"weights.json": b'{"kind":"base"}'}, {"kind": "base"})})
