"""The forward against transformers and PEFT; packing and the shared prefix against computing everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama, Lora, pack
from reef.trainers.local.working import peft_config

SEQUENCES = [[1, 5, 6, 7, 8, 9], [1, 5, 6, 10], [1, 5, 6, 7, 11, 12, 13, 14, 15], [1, 5, 6, 60]]


def warm(model: Llama, rank: int = 3) -> Lora:
    """A LoRA that does something."""
    lora = Lora.fresh(model, rank, 6.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, b in lora.pairs.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return lora


@pytest.mark.parametrize("share", [0, 2, 3, 99])
def test_equals_transformers(tiny: Path, share: int) -> None:
    model = Llama.load(tiny, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    packed = pack(SEQUENCES, share)
    assert packed.prefix == min(share, 3)
    logits = model.logits(model.hidden(packed))
    for start, sequence in zip(packed.starts, SEQUENCES, strict=True):
        expected = reference(torch.tensor([sequence])).logits[0, packed.prefix :]
        torch.testing.assert_close(logits[start : start + len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_peft_reads_the_lora_as_the_same_policy(tiny: Path, tmp_path: Path) -> None:
    model = Llama.load(tiny, torch.float32)
    lora = warm(model)
    save_file({name: one.detach() for name, one in lora.parameters().items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(lora, {"name": "tiny"})))
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), tmp_path)
    packed = pack(SEQUENCES)
    mine = torch.log_softmax(model.logits(model.hidden(packed, lora)), -1)
    for start, sequence in zip(packed.starts, SEQUENCES, strict=True):
        expected = torch.log_softmax(reference(torch.tensor([sequence])).logits[0], -1)
        torch.testing.assert_close(mine[start : start + len(sequence)], expected, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_changes_no_gradient(tiny: Path) -> None:
    model = Llama.load(tiny, torch.float32)
    found = []
    for share in (0, 3):
        lora, packed = warm(model), pack(SEQUENCES, share)
        places = [start + 3 - packed.prefix for start in packed.starts]
        hidden = model.hidden(packed, lora)[torch.tensor(places)]
        model.logprobs(hidden, torch.tensor([2, 3, 4, 5]), torch.ones(4)).sum().backward()
        found.append({name: one.grad for name, one in lora.parameters().items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-5)


def test_padding_and_neighbours_change_nothing(tiny: Path) -> None:
    model = Llama.load(tiny, torch.float32)
    packed = pack(SEQUENCES)
    together = model.hidden(packed)
    for start, sequence in zip(packed.starts, SEQUENCES, strict=True):
        torch.testing.assert_close(together[start : start + len(sequence)], model.hidden(pack([sequence])))


def test_a_fresh_lora_is_the_base(tiny: Path) -> None:
    model = Llama.load(tiny, torch.float32)
    packed = pack(SEQUENCES)
    assert torch.equal(model.hidden(packed, Lora.fresh(model, 2, 4.0, 0)), model.hidden(packed))


def test_bfloat16_is_near(tiny: Path) -> None:
    packed = pack(SEQUENCES, 3)
    rows = [
        torch.log_softmax(model.logits(model.hidden(packed)), -1)
        for model in (Llama.load(tiny, torch.float32), Llama.load(tiny, torch.bfloat16))
    ]
    assert float((rows[0] - rows[1]).abs().mean()) < 0.06


def test_without_products_in_bfloat16_weights_are_rounded_to_it_and_multiplied_in_float32(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor of that kind: exactly the float32 forward of the weights as they are served, and what learns
    gets that forward's gradient."""
    whole = Llama.load(tiny, torch.float32)
    monkeypatch.setattr("reef.trainers.local.llama.native", lambda: torch.float32)
    rounded = {name: one.bfloat16().float().requires_grad_() for name, one in whole.weights.items()}
    served = Llama(whole.layout, rounded, torch.float32)
    masters = {name: one.clone().requires_grad_() for name, one in whole.weights.items()}
    learns, base = Llama(whole.layout, masters, torch.bfloat16), Llama.load(tiny)
    small = Llama(whole.layout, {name: one.detach().bfloat16() for name, one in rounded.items()})
    packed, targets, ones = pack(SEQUENCES), torch.arange(4), torch.ones(4)
    states, found = [], []
    for model in (served, learns, base, small):
        states.append(model.hidden(packed)[torch.tensor(packed.starts)])
        found.append(model.logprobs(states[-1], targets, ones))
        assert torch.equal(states[-1], states[0])
        torch.testing.assert_close(found[-1], found[0])  # the head of one that learns is another product
    assert not torch.equal(states[0], whole.hidden(packed)[torch.tensor(packed.starts)])
    for one in found[:2]:
        one.sum().backward()
    for name, one in masters.items():
        near = 1e-2 if "norm" in name or "embed" in name else 0.0  # their rounding has autograd's own gradient
        torch.testing.assert_close(one.grad, rounded[name].grad, rtol=near, atol=near)


@pytest.mark.parametrize("temperatures", [[1.0, 1.0, 1.0], [1.0, 0.5, 2.0]])
def test_logprobs_and_their_gradient_are_log_softmax(tiny: Path, temperatures: list[float]) -> None:
    model = Llama.load(tiny, torch.float32)
    targets, weights = torch.tensor([0, 1, 2]), torch.tensor([0.5, -2.0, 1.0])
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for fused in (True, False):
        one = hidden.clone().requires_grad_()
        if fused:
            logprobs = model.logprobs(one, targets, torch.tensor(temperatures))
        else:
            logits = model.logits(one) / torch.tensor(temperatures)[:, None]
            logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        (logprobs * weights).sum().backward()
        found.append((logprobs.detach(), one.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0, 2])
def test_only_the_states_that_are_wanted(tiny: Path, share: int) -> None:
    """Values and gradients are those of computing every state and taking these."""
    model = Llama.load(tiny, torch.float32)
    packed = pack([[1, 5, 6, 7], [1, 5, 9, 8, 3]], share=share)
    wanted = torch.tensor([len(packed.ids) - 1, packed.starts[0]])
    found = []
    for some in (True, False):
        lora = warm(model)
        states = model.hidden(packed, lora, wanted) if some else model.hidden(packed, lora)[wanted]
        states.square().sum().backward()
        found.append([states.detach(), *(one.grad for one in lora.parameters().values())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_lora_that_does_not_fit_is_refused(tiny: Path) -> None:
    model = Llama.load(tiny, torch.float32)
    tensors = {name: one.detach() for name, one in warm(model).parameters().items()}
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    with pytest.raises(TrainError, match=r"layers\.1\.mlp\.up_proj\.lora_B"):
        Lora.load(model, tensors | {name: torch.zeros(5, 3)}, 3, 6.0)
    with pytest.raises(TrainError, match=r"up_proj\.lora_B.* is None"):
        Lora.load(model, {key: one for key, one in tensors.items() if key != name}, 3, 6.0)
    with pytest.raises(TrainError, match="unexpected"):
        Lora.load(model, tensors | {"x": torch.zeros(1)}, 3, 6.0)


@pytest.mark.parametrize("change", [{"architectures": ["GPT2LMHeadModel"]}, {"rope_scaling": {"rope_type": "yarn"}}])
def test_another_architecture_is_refused(tiny: Path, tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | change))
    with pytest.raises(TrainError, match=r"embedded engine|yarn"):
        Llama.load(tmp_path)


def test_a_model_with_missing_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(TrainError, match=r"no model\.safetensors"):
        Llama.load(tmp_path)


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_nothing_to_pack(sequences: list[list[int]]) -> None:
    with pytest.raises(TrainError, match="at least one token"):
        pack(sequences)
