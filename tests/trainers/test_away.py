"""What backends without a model share: what they ask of a folder, of an objective, and of weights that come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reef.core.errors import ConfigError, TrainError

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model that the embedded trainer cannot run."""
    from safetensors.torch import save_file

    from tests.engines.kit import write_tokenizer

    vocab = write_tokenizer(tmp_path)
    config = {"architectures": ["OtherForCausalLM"], "vocab_size": vocab, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 0]}))
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_model_that_is_no_llama_is_known_by_its_folder(other: Path) -> None:
    from reef.trainers.away import Base

    base = Base.read(other)
    assert (base.layout.context, base.layout.ends) == (64, (2, 0))
    assert base.shapes == {"model.layers.0.self_attn.q_proj.weight": ("F32", (6, 4))}
    assert base.text is not None
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        Base.read(other)


def test_a_lora_is_checked_against_the_folder(other: Path) -> None:
    from reef.trainers.away import Base, check_lora, rescale

    base, name = Base.read(other), "model.layers.0.self_attn.q_proj.lora_{}.weight"
    a, b = torch.ones(2, 4), torch.ones(6, 2)
    whole = {name.format("A"): a, name.format("B"): b}
    found = check_lora(whole | {"model.layers.0.mlp.w3.lora_A.weight": torch.zeros(0)}, 2, base)
    assert set(found) == {f"base_model.model.{key}" for key in whole}
    for wrong, said in (
        ({name.format("A"): a}, "not whole"),
        ({}, "no matrix"),
        (whole | {name.format("A"): torch.ones(3, 4)}, "expected"),
        (whole | {name.format("B"): b * torch.nan}, "not finite"),
        (whole | {"model.unembed_tokens.lora_A.weight": a}, "does not have"),
        (whole | {"model.layers.0.self_attn.q_proj.bias": a}, "not a matrix"),
    ):
        with pytest.raises(TrainError, match=said):
            check_lora(wrong, 2, base)
    scaled = rescale(found, 32.0, 16.0)
    assert torch.equal(scaled[f"base_model.model.{name.format('B')}"], b * 2)
    assert torch.equal(scaled[f"base_model.model.{name.format('A')}"], a)
