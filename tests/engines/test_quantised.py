"""Weights of 4 and 8 bits: what they stand for, one model whatever the number of rows, and what it is not for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reef.core.errors import ConfigError, EngineError
from reef.core.nouns import Sampling
from reef.engines import Answer, WeightFiles
from reef.engines.local.client import LocalEngine, why_not
from reef.engines.local.folder import prepare
from reef.engines.local.layout import Layout
from reef.engines.local.quantised import GROUP, ROWS, packer, quantise, values
from reef.engines.local.server import Options
from tests.engines.kit import Releases, ask, lora_files, make_lora, make_tiny, running
from tests.engines.test_client import collect


def grid(tall: int, wide: int) -> torch.Tensor:
    """Weights as a 4-bit file has them: 16 levels for each 32 of a row, both ends in use."""
    seeded = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 16, (tall, wide // GROUP, GROUP), generator=seeded)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = torch.rand(tall, wide // GROUP, 1, generator=seeded) * 0.02 + 0.01
    low = -scale * (torch.rand(tall, wide // GROUP, 1, generator=seeded) * 4 + 5.5)
    return (low + levels * scale).view(tall, wide)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def test_what_came_from_a_file_of_four_bits_stays_as_it_was() -> None:
    weight = grid(48, 96)
    assert off(values(*quantise(weight, 4), 4), weight) < 0.005
    assert off(values(*quantise(torch.randn(48, 96), 4), 4), torch.randn(48, 96)) > 0.05


def test_eight_bits_are_finer_than_four() -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    levels, scale, zero = quantise(weight, 8)
    assert (int(levels.min()), int(levels.max())) == (0, 255)
    assert off(values(levels, scale, zero, 8), weight) < 0.008
    assert off(values(*quantise(weight, 4), 4), weight) > 0.05
    for same in (torch.zeros(16, 32), torch.full((16, 32), 0.5)):  # a group of equal weights has no spread to divide
        assert torch.equal(values(*quantise(same, 4), 4), same)


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("tall", [64, 263])  # the kernel takes outputs by 16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_number_of_rows_is_one_model(name: str, tall: int, dtype: torch.dtype) -> None:
    seeded = torch.Generator().manual_seed(2)
    weight, x = torch.randn(tall, 96, generator=seeded), torch.randn(12, 96, generator=seeded).bfloat16().to(dtype)
    bits = {"int4": 4, "int8": 8}[name]
    apply = packer(name, dtype)("qkv", weight)
    stood = x.float() @ values(*quantise(weight, bits), bits).t()
    for rows in (1, ROWS[dtype][bits] or 1, ROWS[dtype][bits] + 1, 12):
        found = apply(x[:rows])
        assert (found.dtype, tuple(found.shape)) == (dtype, (rows, tall))
        assert off(found, stood[:rows]) < 0.01
    head = packer(name, dtype)("head", weight)
    assert off(head(x[:1]), x[:1].float() @ weight.t()) < 0.012  # eight bits in both modes


@pytest.mark.parametrize("name", ["int4", "int8"])
async def test_recorded_log_probs_are_those_sampled_from(tiny: Path, tmp_path: Path, layout: Layout, name: str) -> None:
    """Drawn one token at a time by the kernel, rated all at once in bfloat16: the same model, also under a LoRA and
    with weights of its own."""
    full = make_tiny(tmp_path / "f", rms_norm_eps=1e-5) / "model.safetensors"
    known = {
        "lora": lora_files(make_lora(tmp_path / "l", layout, seed=1)),
        "full": WeightFiles("full", {"model.safetensors": full}, {}),
    }
    async with running(tiny, Releases(known), dtype="bfloat16", quantised=name) as engine:
        for release in ("base", "lora", "full"):
            answer = (await collect(engine, ask("Tell me of the sea.", release=release, seed=3, max_tokens=40)))[2]
            assert await apart(engine, release, answer) < 0.15
            assert answer.untrainable == f"quantised {name}: other weights answered than those that are trained"
        assert await apart(engine, "lora", answer) > 0.3


async def apart(engine: LocalEngine, release: str, answer: Answer) -> float:
    (choice,) = answer.choices or ()
    ids, prompt = choice.output_ids or (), answer.prompt_ids or ()
    (rated,) = await engine.rate(release, [[*prompt, *ids]], [len(prompt)])
    return sum(abs(one - other) for one, other in zip(rated, choice.logprobs or (), strict=True)) / len(ids)


def test_answers_of_whole_weights_train() -> None:
    assert why_not(Sampling()) is None
    assert why_not(Sampling(), "int4") is not None


@pytest.mark.parametrize("wrong", [{"quantised": "int2"}, {"quantised": "int4", "dtype": "float32"}])
def test_options_are_checked(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="quantised"):
        Options(**wrong)  # type: ignore[arg-type]


async def test_a_model_that_has_no_groups_is_refused_with_what_to_do(tmp_path: Path) -> None:
    odd = make_tiny(tmp_path / "odd", intermediate_size=80)
    with pytest.raises(EngineError, match=r"80 inputs.*leave out the engine's option `quantised`"):
        async with running(odd, Releases(), dtype="bfloat16", quantised="int4"):
            pass


@pytest.mark.model
async def test_the_real_model_says_nearly_what_float32_says() -> None:
    folder = prepare("smollm2-135m").path
    async with running(folder, Releases(), context=256, dtype="auto", quantised="int4") as engine:
        answer = (await collect(engine, ask("What is the capital of France?", seed=1, max_tokens=24)))[2]
    async with running(folder, Releases(), context=256) as engine:
        assert await apart(engine, "base", answer) < 0.15
