"""How a batch is dealt out, and the file that shards are written to. No Ray, no process group."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reef.trainers.ray.files import write
from reef.trainers.ray.team import deal

pytestmark = pytest.mark.model


def test_everybody_gets_something_and_about_as_much() -> None:
    draw = random.Random(1)
    for _ in range(200):
        count = draw.randrange(1, 6)
        sizes = [draw.randrange(1, 500) for _ in range(draw.randrange(count, 20))]
        owners = deal(sizes, count)
        loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(count)]
        assert min(loads) > 0
        assert max(loads) - min(loads) <= max(sizes)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        "count": torch.tensor([7]),
        "half": torch.randn(3, 5).bfloat16(),
        "odd": torch.randn(3).bfloat16(),
        "first.a": torch.randn(4, 2).t(),  # not contiguous
        "none": torch.zeros(0, 4),
        "yes": torch.tensor([True, False, True]),
    }
    write(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    write(None, tensors)
