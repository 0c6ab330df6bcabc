from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reef.core.errors import EngineError
from reef.engines.local import model as room
from reef.engines.local.layout import read_layout, weight_files
from reef.engines.local.model import Model, Weights, Work, load_weights
from tests.engines.kit import make_tiny


def ready(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, Weights]:
    layout = read_layout(folder)
    return Model(layout, 4, 256, dtype), load_weights(weight_files(folder), layout, dtype)


def prefill(model: Model, weights: Weights, slot: int, ids: list[int], start: int = 0) -> torch.Tensor:
    """Logits of every token of a chunk that begins at `start`."""
    positions = torch.arange(start, start + len(ids))
    places = model.cache.rows(torch.full_like(positions, slot), positions)
    runs = (model.chunk_run(slot, start, len(ids), 0),)
    return model.forward(weights, Work(torch.tensor(ids), positions, places, runs, torch.arange(len(ids))))


def decode(model: Model, weights: Weights, slots: list[int], tokens: list[int], at: list[int]) -> torch.Tensor:
    positions = torch.tensor(at)
    places = model.cache.rows(torch.tensor(slots), positions)
    runs = model.decode_runs(slots, [place + 1 for place in at])
    return model.forward(weights, Work(torch.tensor(tokens), positions, places, runs, torch.arange(len(slots))))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
]


@pytest.mark.parametrize("changes", VARIANTS, ids=["plain", "untied", "linear", "llama3"])
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny(tmp_path / "m", **changes)
    model, weights = ready(folder)
    ids = torch.randint(3, 250, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    found = torch.cat([prefill(model, weights, 2, ids[:33]), prefill(model, weights, 2, ids[33:90], 33)])
    steps = [decode(model, weights, [2], [ids[at]], [at]) for at in range(90, 100)]
    assert torch.allclose(torch.cat([found, *steps]), expected, atol=2e-4)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-4), (torch.bfloat16, 0.4)])
def test_neighbours_change_a_row_by_rounding_at_most(tiny: Path, dtype: torch.dtype, rounding: float) -> None:
    model, weights = ready(tiny, dtype)
    prompts = [[5 + slot, *range(20, 40 + 30 * slot)] for slot in range(4)]
    for slot, prompt in enumerate(prompts):
        prefill(model, weights, slot, prompt)
    at = [len(prompt) for prompt in prompts]
    together = decode(model, weights, [0, 1, 2, 3], [50, 51, 52, 53], at)
    for slot in range(4):
        alone = decode(model, weights, [slot], [50 + slot], [at[slot]])
        assert torch.allclose(alone[0], together[slot], atol=rounding)


def test_unlike_lengths_get_calls_of_their_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = ready(tiny)
    (run,) = model.decode_runs([0, 1, 3], [9, 5, 7])
    assert (run.spans, run.length) == ((slice(0, 2), slice(3, 4)), 32)
    for slot in range(4):
        prefill(model, weights, slot, [7 + slot] * (20 + 50 * slot))
    at = [20, 70, 120, 170]
    padded = decode(model, weights, [0, 1, 2, 3], [9] * 4, at)
    monkeypatch.setattr(room, "_PADDING", 10)
    assert len(model.decode_runs([0, 1, 2, 3], [place + 1 for place in at])) == 4
    assert torch.allclose(decode(model, weights, [0, 1, 2, 3], [9] * 4, at), padded, atol=1e-4)


def test_many_keys_in_products_are_as_few_in_the_fused_kernel(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and with neighbours, in slots that lie apart, in one part and in many."""
    model, weights = ready(tiny)
    at = [30, 61, 99, 64]
    for slot, length in enumerate(at):
        prefill(model, weights, slot, [7 + slot, *range(20, 20 + length - 1)])
    alone = [decode(model, weights, [slot], [9], [at[slot]])[0] for slot in range(4)]
    whole = model._room
    for fused, scores in ((1 << 30, 1 << 21), (1, 1 << 21), (1, 300)):
        monkeypatch.setattr(room, "_FUSED", fused)
        model._room = whole[:scores]
        for slots in ([0, 1, 2, 3], [0, 2, 3], [3, 1]):
            found = decode(model, weights, slots, [9] * len(slots), [at[slot] for slot in slots])
            assert torch.allclose(found, torch.stack([alone[slot] for slot in slots]), atol=1e-4)
        again = prefill(model, weights, 3, list(range(20, 84)))
        assert torch.allclose(prefill(model, weights, 2, list(range(20, 84))), again, atol=1e-5)
        prefill(model, weights, 3, [10, *range(20, 83)])
        prefill(model, weights, 2, [9, *range(20, 118)])


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("rows", "keys", "held"), [(1, 37, 1 << 12), (6, 160, 1 << 12), (6, 160, 500), (3, 1000, 1000)]
)
def test_attention_is_softmax_of_scaled_products(
    dtype: torch.dtype, near: float, rows: int, keys: int, held: int
) -> None:
    numbers = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(4, size, 16, generator=numbers).to(dtype) for size in (rows, keys, keys))
    mask = torch.zeros(4, rows, keys, dtype=dtype)
    mask[:, :, -5:] = float("-inf")
    wanted = torch.softmax(q.double() @ k.double().transpose(1, 2) * 0.25 + mask.double(), -1) @ v.double()
    scores = torch.full((held,), float("nan"), dtype=dtype)  # what was there before does not matter
    found = room.attend(q, k, v, mask, 0.25, scores)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=near)


def test_a_mirror_is_used_only_for_what_the_cache_holds(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_FUSED", 1)
    model, weights = ready(tiny)
    plain, _ = ready(tiny)
    monkeypatch.setattr(plain._mirror, "begin", lambda runs, positions: None)
    numbers, at, used = torch.Generator().manual_seed(3), [20, 25, 40], 0

    def both(step: Any, *arguments: Any) -> None:
        assert torch.allclose(step(model, weights, *arguments), step(plain, weights, *arguments), atol=1e-4)

    for slot in range(3):
        both(prefill, slot, list(range(5 + slot, 5 + slot + at[slot])))
    for turn in range(60):
        token = int(torch.randint(3, 250, (), generator=numbers))
        kind = turn % 20
        if kind == 11:  # another job goes on in a slot, at the same length
            for one in (model, plain):
                one.cache.copy(2, 0, at[0])
        if kind == 14:
            both(prefill, 1, [token] * 5, at[1])
            at[1] += 5
        slots = [0, 1] if kind == 17 else [0, 1, 2]
        both(decode, slots, [token] * len(slots), at[: len(slots)])
        used += model._mirror._follows and model._mirror.run is not None
        at = [place + (slot in slots) for slot, place in enumerate(at)]
    assert used > 30


def test_without_packed_linears_the_plain_ones_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = ready(tiny)
    expected = prefill(model, weights, 0, [5, 6, 7])
    monkeypatch.setattr(room, "packs", lambda dtype: False)
    model, weights = ready(tiny)
    assert torch.allclose(prefill(model, weights, 0, [5, 6, 7]), expected, atol=1e-4)


def test_a_copied_beginning_continues_alike(tiny: Path) -> None:
    model, weights = ready(tiny)
    ids = list(range(10, 70))
    whole = prefill(model, weights, 0, ids)
    model.cache.copy(0, 3, 40)
    assert torch.allclose(prefill(model, weights, 3, ids[40:], 40), whole[40:], atol=1e-5)


def test_untouched_cache_costs_nothing(tiny: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    model = Model(read_layout(tiny), 64, 200_000, torch.float32)
    assert model.cache.layers[0][0].numel() * 4 > 1 << 30
    assert resident() - before < 200 << 20


def test_missing_tensors_are_named(tiny: Path, tmp_path: Path) -> None:
    layout = read_layout(make_tiny(tmp_path / "m", num_hidden_layers=3))
    with pytest.raises(EngineError, match=r"layers\.2"):
        load_weights(weight_files(tiny), layout, torch.float32)
