from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import BusyError, EngineError, MissingError
from reef.engines import WeightFiles
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path, weight_files
from reef.engines.local.lora import _PATIENCE, NAMES, Alone, Lora, Mixer, Shelf, load_lora
from reef.engines.local.model import GROUPS, Weights, load_weights
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


async def test_full_weights_answer_as_the_trainer_computes_them(tiny: Path, tmp_path: Path, layout: Layout) -> None:
    """A step's own file, in the engine and in the trainer's forward: the same log-probs."""
    from reef.trainers.local.llama import Llama, pack

    full = full_files(tiny, tmp_path, 0)
    tensors = {name: one.bfloat16() for name, one in load_file(full.files["model.safetensors"]).items()}
    save_file(tensors, tmp_path / "rounded.safetensors")
    released = WeightFiles("full", {"model.safetensors": tmp_path / "rounded.safetensors"}, {})
    sequence = [1, *range(30, 90)]
    async with running(tiny, Releases({"full": released})) as engine:
        rated, plain = [(await engine.rate(each, [sequence], [1]))[0] for each in ("full", "base")]
    model = Llama(layout, {key: one.float() for key, one in tensors.items()}, torch.float32)
    with torch.no_grad():
        hidden = model.hidden(pack([sequence]))[:-1]
        own = model.logprobs(hidden, torch.tensor(sequence[1:]), torch.ones(len(sequence) - 1))
    assert torch.allclose(torch.tensor(rated), own, atol=1e-4)
    assert (torch.tensor(plain) - own).abs().mean() > 0.02


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


def test_each_row_gets_what_its_own_lora_adds(tmp_path: Path, layout: Layout) -> None:
    """Together or alone, of other ranks, in any order, beside rows without; and none pays for another's infinity."""
    loras: list[Lora | None] = [None]
    for number in range(6):
        folder = make_lora(tmp_path / f"l{number}", layout, seed=number, rank=2 + number)
        if number == 2:
            tensors = load_file(folder / "adapter_model.safetensors")
            save_file(
                {name: one for name, one in tensors.items() if "o_proj" in name}, folder / "adapter_model.safetensors"
            )
        loras.append(load_lora(lora_files(folder).files, layout))
    assert loras[6] is not None
    for groups in loras[6].pairs:
        groups["qkv"][0][:] = torch.inf
    mixer, numbers = Mixer(), random.Random(0)
    for turn in range(60):
        known = loras if turn < 40 else loras[:4]
        rows = [numbers.choice(known) for _ in range(numbers.randrange(1, 17))]
        more = numbers.randrange(2)
        for group, wide in (("qkv", layout.hidden), ("o", layout.heads * layout.head_dim)):
            x = torch.randn(len(rows) + more, wide)
            out = torch.randn(len(x), sum(layout.linear_shape(name)[0] for name in GROUPS[group]))
            expected = out.clone()
            for row, lora in enumerate(rows):
                if lora is not None:
                    Alone(lora).add(1, group, x[row : row + 1], expected[row : row + 1])
            for added in mixer.mix(rows, whole=not more):
                added.add(1, group, x, out)
            assert torch.allclose(out, expected, atol=1e-5, equal_nan=True)


def test_loras_lie_together_as_long_as_they_are_asked_for(tmp_path: Path, layout: Layout) -> None:
    loras = [load_lora(lora_files(make_lora(tmp_path / f"l{i}", layout, seed=i)).files, layout) for i in range(5)]
    mixer = Mixer()
    mixer.mix(loras, whole=True)
    laid = mixer._pairs
    mixer.mix(loras[1:4], whole=True)
    assert mixer._pairs is laid
    for _ in range(_PATIENCE + 1):
        mixer.mix(loras[:2], whole=True)
    assert len(mixer._loras) == 2


def test_pairs_may_be_missing(tmp_path: Path, layout: Layout) -> None:
    folder = make_lora(tmp_path / "l", layout, seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: value for name, value in tensors.items() if "v_proj" in name}
    save_file(kept, folder / "adapter_model.safetensors")
    lora = load_lora(lora_files(folder).files, layout)
    x, out = torch.randn(3, layout.hidden), torch.zeros(3, layout.linear_shape("q_proj")[0] * 2)
    Alone(lora).add(0, "qkv", x, out)
    keys = layout.linear_shape("k_proj")[0]
    assert torch.count_nonzero(out[:, :-keys]) == 0
    assert torch.count_nonzero(out[:, -keys:]) > 0
    before = out.clone()
    Alone(lora).add(0, "down", torch.randn(3, layout.inner), out)
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
        Alone(load_lora(lora_files(folder).files, layout)).add(1, "o", x, out)
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
    tiny: Path, tmp_path: Path, layout: Layout, base: Weights
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
    nan = load_file(tiny / "model.safetensors")
    nan["model.norm.weight"][3] = torch.nan
    save_file(nan, tmp_path / "nan.safetensors")
    releases.known["nan"] = WeightFiles("full", {"model.safetensors": tmp_path / "nan.safetensors"}, {})
    with pytest.raises(EngineError, match=r"model\.norm\.weight has values that are not finite"):
        await shelf.take("nan")
    releases.known["unknown"] = lora_files(folder, base={"name": "tiny", "digest": "a" * 64})
    assert (await shelf.take("unknown")).kind == "lora"


def full_files(tiny: Path, place: Path, number: int) -> WeightFiles:
    """A release with weights of its own: the base with one norm moved."""
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"] += 0.1 * (number + 1)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / f"{number}.safetensors")
    return WeightFiles("full", {"model.safetensors": place / f"{number}.safetensors"}, {"kind": "full"})


async def test_the_same_files_are_one_set_in_memory(tiny: Path, tmp_path: Path, layout: Layout, base: Weights) -> None:
    """A candidate and its release, a rollback and what it restored: other ids, the same bytes."""
    full, lora = full_files(tiny, tmp_path, 0), lora_files(make_lora(tmp_path / "l", layout, seed=1))
    known = {"f1": full, "f2": full, "f3": full, "l1": lora, "l2": lora, "other": full_files(tiny, tmp_path, 1)}
    shelf = Shelf(base, layout, torch.float32, Releases(known), loras=1, full=1)
    one, two = await shelf.take("f1"), await shelf.take("f2")
    assert one.weights is two.weights
    assert (one.release_id, two.release_id, one.key) == ("f1", "f2", two.key)
    assert (await shelf.take("l1")).lora is (await shelf.take("l2")).lora
    shelf.give(one)
    assert "f1" in shelf.ids()  # not in use itself, but its weights are
    shelf.give(two)
    other = await shelf.take("other")
    assert other.weights is not one.weights
    assert not {"f1", "f2"} & set(shelf.ids())
    shelf.give(other)
    assert (await shelf.take("f3")).weights is not one.weights


async def test_full_weights_never_exceed_the_limit_and_wait_for_room(
    tiny: Path, tmp_path: Path, layout: Layout, base: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 38: what answers is never unloaded."""
    known = {f"f{number}": full_files(tiny, tmp_path, number) for number in range(5)}
    shelf = Shelf(base, layout, torch.float32, Releases(known), loras=1, full=2)
    most, read = 0, shelf._read

    def counted(release_id: str, files: WeightFiles, source: object) -> object:
        nonlocal most
        most = max(most, sum(name.startswith("f") for name in shelf.ids()) + 1)
        return read(release_id, files, source)  # type: ignore[arg-type]

    monkeypatch.setattr(shelf, "_read", counted)
    for name in ("f0", "f1", "f2", "f1"):
        shelf.give(await shelf.take(name))
    assert shelf.ids() == ["f2", "f1"]  # the least recently used one went
    first, second = await shelf.take("f1"), await shelf.take("f2")
    waiting = asyncio.create_task(shelf.take("f3"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    shelf.give(first)
    shelf.give(await waiting)
    assert sorted(shelf.ids()) == ["f2", "f3"]
    assert second.weights is (await shelf.take("f2")).weights
    assert most == 2
    monkeypatch.setattr("reef.engines.local.lora.ROOM", 0.05)
    held = await shelf.take("f3")
    with pytest.raises(BusyError, match="2 releases with full weights are in memory and all of them in use"):
        await shelf.take("f4")
    shelf.give(held)
    assert (await shelf.take("f4")).kind == "full"


async def test_ids_of_one_set_are_forgotten_in_the_end(
    tiny: Path, tmp_path: Path, layout: Layout, base: Weights
) -> None:
    full = full_files(tiny, tmp_path, 0)
    known = {f"f{number}": full for number in range(3 * NAMES)}
    shelf = Shelf(base, layout, torch.float32, Releases(known), loras=1, full=1)
    held = await shelf.take("f0")
    for name in known:
        again = await shelf.take(name)
        assert again.weights is held.weights
        shelf.give(again)
    assert len(shelf.ids()) <= NAMES
    assert "f0" in shelf.ids()
