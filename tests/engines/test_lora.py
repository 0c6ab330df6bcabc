from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import EngineError, MissingError
from reef.engines import WeightFiles
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path, weight_files
from reef.engines.local.lora import Shelf, load_lora
from reef.engines.local.model import Weights, load_weights
from tests.engines.kit import Releases, ask, lora_files, make_lora, running


@pytest.fixture(scope="module")
def base(tiny: Path, layout: Layout) -> Weights:
    return load_weights(weight_files(tiny), layout, torch.float32)


def merged(folder: Path, lora: Path, target: Path, layout: Layout, scale: float) -> Path:
    """The base with a LoRA added into its weights, as a release of kind full."""
    tensors, pairs = load_file(folder / "model.safetensors"), load_file(lora / "adapter_model.safetensors")
    for layer in range(layout.layers):
        for name in LAYER_LINEARS:
            path = linear_path(layer, name)
            a, b = (pairs[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
            tensors[f"{path}.weight"] += scale * b @ a
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors")
    return target / "model.safetensors"


async def test_a_lora_answers_like_its_merged_weights(tiny: Path, tmp_path: Path, layout: Layout) -> None:
    lora = make_lora(tmp_path / "l", layout, seed=1)
    other = make_lora(tmp_path / "o", layout, seed=2)
    full = merged(tiny, lora, tmp_path / "f", layout, 2.0)
    releases = Releases(
        {
            "lora": lora_files(lora),
            "other": lora_files(other),
            "full": WeightFiles("full", {"model.safetensors": full}, {}),
        }
    )
    sequence = [1, *range(30, 90)]
    async with running(tiny, releases) as engine:
        # All at once: base, two LoRAs and full weights share steps.
        names = ["base", "lora", "other", "full"]
        rated = await asyncio.gather(*(engine.rate(name, [sequence], [1]) for name in names))
    by = dict(zip(names, (torch.tensor(each[0]) for each in rated), strict=True))
    assert len(by["base"]) == len(sequence) - 1
    assert torch.allclose(by["lora"], by["full"], atol=1e-4)
    assert (by["lora"] - by["base"]).abs().mean() > 0.01
    assert (by["lora"] - by["other"]).abs().mean() > 0.01


async def test_releases_mixed_in_a_batch_answer_as_alone(tiny: Path, tmp_path: Path, layout: Layout) -> None:
    known = {f"r{i}": lora_files(make_lora(tmp_path / f"l{i}", layout, seed=i)) for i in range(3)}
    names = ["base", "r0", "r1", "r2", "r0", "base", "r1"]

    async def said(engine: object, name: str) -> tuple[int, ...]:
        from reef.engines import Answer

        request = ask("Say a thing", release=name, seed=5, max_tokens=20)
        *_, answer = [each async for each in engine.answer(request)]  # type: ignore[attr-defined]
        assert isinstance(answer, Answer)
        assert answer.choices is not None
        assert answer.choices[0].spans[0].release_id == name
        return answer.choices[0].output_ids or ()

    async with running(tiny, Releases(known)) as engine:
        alone = [await said(engine, name) for name in names]
        together = await asyncio.gather(*(said(engine, name) for name in names))
    assert list(together) == alone
    assert len(set(alone)) >= 3


def test_pairs_may_be_missing(tmp_path: Path, layout: Layout) -> None:
    folder = make_lora(tmp_path / "l", layout, seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: value for name, value in tensors.items() if "v_proj" in name}
    save_file(kept, folder / "adapter_model.safetensors")
    lora = load_lora(lora_files(folder).files, layout)
    x, out = torch.randn(3, layout.hidden), torch.zeros(3, layout.linear_shape("q_proj")[0] * 2)
    lora.add(0, "qkv", x, out, slice(None))
    keys = layout.linear_shape("k_proj")[0]
    assert torch.count_nonzero(out[:, :-keys]) == 0
    assert torch.count_nonzero(out[:, -keys:]) > 0
    before = out.clone()
    lora.add(0, "down", torch.randn(3, layout.inner), out, slice(None))
    assert torch.equal(before, out)


def change(folder: Path, **config: object) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_the_scale_is_peft_s(tmp_path: Path, layout: Layout) -> None:
    folder = make_lora(tmp_path / "l", layout, seed=1, rank=4, alpha=8)
    x = torch.randn(2, layout.hidden)

    def added() -> torch.Tensor:
        out = torch.zeros(2, layout.hidden)
        load_lora(lora_files(folder).files, layout).add(1, "o", x, out, slice(None))
        return out

    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{linear_path(1, 'o_proj')}.lora_{side}.weight"] for side in "AB")
    assert torch.allclose(added(), 2.0 * x @ a.T @ b.T, atol=1e-6)
    change(folder, use_rslora=True)
    assert torch.allclose(added(), 4.0 * x @ a.T @ b.T, atol=1e-6)


def test_misfits_are_named(tmp_path: Path, layout: Layout) -> None:
    def refused(folder: Path, match: str) -> None:
        with pytest.raises(EngineError, match=match):
            load_lora(lora_files(folder).files, layout)

    def altered(name: str, **changes: torch.Tensor | None) -> Path:
        folder = make_lora(tmp_path / name, layout, seed=1)
        tensors = load_file(folder / "adapter_model.safetensors")
        for key, value in changes.items():
            place = key.replace("__", ".")
            tensors.pop(place, None)
            if value is not None:
                tensors[place] = value
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    query = "base_model__model__model__layers__0__self_attn__q_proj__lora_A__weight"
    refused(altered("wide", **{query: torch.zeros(4, 77)}), r"does not fit the base model.*q_proj")
    refused(altered("rank", **{query: torch.zeros(5, layout.hidden)}), r"does not fit.*q_proj")
    refused(altered("half", **{query: None}), "only one of the two matrices")
    refused(altered("nan", **{query: torch.full((4, layout.hidden), torch.nan)}), "not finite")
    refused(altered("deep", **{query.replace("0", "9"): torch.zeros(4, 64)}), r"layers\.9")
    refused(altered("head", base_model__model__lm_head__lora_A__weight=torch.zeros(4, 64)), "lm_head")
    refused(change(make_lora(tmp_path / "dora", layout, seed=1), use_dora=True), "use_dora")
    refused(change(make_lora(tmp_path / "bias", layout, seed=1), bias="all"), "biases")
    (broken := make_lora(tmp_path / "broken", layout, seed=1)).joinpath("adapter_model.safetensors").write_bytes(b"no")
    refused(broken, "cannot be read")
    with pytest.raises(EngineError, match=r"no adapter_model\.safetensors"):
        load_lora({"adapter_config.json": broken / "adapter_config.json"}, layout)


async def test_the_least_recently_used_leaves_and_one_in_use_never(
    tmp_path: Path, layout: Layout, base: Weights
) -> None:
    known = {f"r{i}": lora_files(make_lora(tmp_path / f"l{i}", layout, seed=i)) for i in range(4)}
    releases = Releases(known)
    shelf = Shelf(base, layout, torch.float32, releases, loras=2, full=1)
    held = await shelf.take("r0")
    for name in ("r1", "r2", "r3", "base"):
        shelf.give(await shelf.take(name))
    assert "r0" in shelf.ids()
    assert len([name for name in shelf.ids() if name != "base"]) == 2
    assert await shelf.take("r0") is held
    assert releases.asked.count("r0") == 1
    shelf.give(held)
    shelf.give(held)
    shelf.give(await shelf.take("r1"))
    assert releases.asked.count("r1") == 2
    assert sorted(shelf.ids()) == ["base", "r0", "r1"]


async def test_one_load_serves_all_that_wait_for_it(tmp_path: Path, layout: Layout, base: Weights) -> None:
    files, gate = lora_files(make_lora(tmp_path / "l", layout, seed=1)), threading.Event()
    asked: list[str] = []

    def slow(release_id: str) -> WeightFiles:
        asked.append(release_id)
        gate.wait(5)
        return files

    shelf = Shelf(base, layout, torch.float32, slow, loras=2, full=1)
    takers = [asyncio.create_task(shelf.take("r")) for _ in range(3)]
    await asyncio.sleep(0.01)
    takers[0].cancel()  # the one that began the load goes away
    gate.set()
    first, second = await asyncio.gather(*takers[1:])
    assert first is second
    assert first.users == 2
    assert asked == ["r"]


async def test_what_cannot_be_loaded_says_why_and_can_be_asked_again(
    tmp_path: Path, layout: Layout, base: Weights
) -> None:
    folder = make_lora(tmp_path / "l", layout, seed=1)
    releases = Releases(
        {
            "foreign": lora_files(folder, base={"name": "other", "digest": "f" * 64}),
            "odd": WeightFiles("merged", {}, {}),
            "gone": WeightFiles("full", {"model.safetensors": tmp_path / "none.safetensors"}, {}),
        }
    )
    shelf = Shelf(base, layout, torch.float32, releases, loras=2, full=1, digest="a" * 64)
    with pytest.raises(EngineError, match=r"made for the base model other"):
        await shelf.take("foreign")
    with pytest.raises(EngineError, match="unknown kind"):
        await shelf.take("odd")
    with pytest.raises(EngineError, match="cannot be loaded"):
        await shelf.take("gone")
    with pytest.raises(MissingError):
        await shelf.take("unknown")
    releases.known["unknown"] = lora_files(folder, base={"name": "tiny", "digest": "a" * 64})
    assert (await shelf.take("unknown")).kind == "lora"
