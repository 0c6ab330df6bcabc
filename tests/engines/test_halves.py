"""Linears in float32 with weights in 16 bits: what is computed on a processor without products in bfloat16."""

from __future__ import annotations

import pytest

from reef.engines.local.server import Options

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch")

from reef.engines.local import halves as module  # noqa: E402
from reef.engines.local.halves import halves  # noqa: E402
from reef.engines.local.model import native, packs  # noqa: E402
from reef.engines.local.service import kept  # noqa: E402


def drawn(tall: int, wide: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tall, wide, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 16, 130])
def test_weights_of_bfloat16_are_multiplied_as_in_float32(rows: int) -> None:
    weight, x = drawn(263, 96).mul_(0.05).bfloat16().float(), drawn(rows, 96, 1)
    found = halves("qkv", weight)(x)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (rows, 263))
    torch.testing.assert_close(found, (x.double() @ weight.double().t()).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("large", [1e5, float("inf"), float("nan")])
def test_weights_too_large_for_16_bits_stay_in_float32(large: float) -> None:
    weight, x = drawn(16, 32), drawn(2, 32, 1)
    weight[3, 4] = large
    torch.testing.assert_close(halves("qkv", weight)(x), x @ weight.t(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_without_the_product_all_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: False)
    weight, x = drawn(16, 32), drawn(2, 32, 1)  # 24 bits, which halves would round
    torch.testing.assert_close(halves("qkv", weight)(x), x @ weight.t(), rtol=1e-6, atol=1e-6)


def test_a_processor_gets_what_it_computes_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native() == (torch.bfloat16 if packs(torch.bfloat16) else torch.float32)
    monkeypatch.setattr("reef.engines.local.service.native", lambda: torch.float32)
    assert kept(Options()) == (torch.float32, halves)
    assert kept(Options(dtype="float32")) == (torch.float32, None)  # exactly the weights of the file
    assert kept(Options(dtype="bfloat16")) == (torch.bfloat16, None)
    monkeypatch.setattr("reef.engines.local.service.native", lambda: torch.bfloat16)
    assert kept(Options()) == (torch.bfloat16, None)
