"""A tiny random Llama in an HF-shaped folder, and orders to train it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from reef.core.wire import Datum, Step
from reef.engines import WeightFiles

SIZE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
    "architectures": ["LlamaForCausalLM"],
}
BASE = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny")
    generator = torch.Generator().manual_seed(3)
    hidden, wide, kv = 32, 48, 16

    def weight(out: int, into: int) -> torch.Tensor:
        return torch.randn((out, into), generator=generator) / math.sqrt(into)

    tensors = {"model.embed_tokens.weight": weight(61, hidden) * 3, "model.norm.weight": torch.ones(hidden)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name, out, into in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            tensors[f"{at}.{name}.weight"] = weight(out, into)
        tensors[f"{at}.input_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
        tensors[f"{at}.post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SIZE))
    return folder


@pytest.fixture
def base() -> Callable[[str], WeightFiles]:
    return lambda release: BASE


OPTIONS = {
    "learning_rate": 0.01,
    "critic_learning_rate": 0.01,
    "critic": "linear",
    "epsilon_low": 0.3,
    "epsilon_high": 5.0,
    "critic_steps": 2,
    "critic_warmup": 0,
    "length_alpha": 1.5,
    "kl": 0.0,
    "rank": 2,
    "alpha": 4.0,
    "seed": 0,
}


def data(count: int = 6, seed: int = 0) -> list[Datum]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt, response = [1, 5, 6, *(rng.randrange(3, 61) for _ in range(rng.randrange(1, 9)))], rng.randrange(1, 9)
        made.append(
            Datum(
                tokens=[*prompt, *(rng.randrange(3, 61) for _ in range(response))],
                prompt_length=len(prompt),
                mask=[1] * (response - 1) + [1 if response == 1 else rng.randrange(2)],
                logprobs=[-4.0 - rng.random() for _ in range(response)],
                reward=float(rng.randrange(2)),
                record_id=f"{number:032x}",
                choice=0,
                temperature=1.0,
                lag=0,
            )
        )
    return made


def make_order(step: int = 1, **changes: object) -> Step:
    wanted = {
        "scenario": "demo",
        "part": "weights",
        "line": "one",
        "step": step,
        "base_release": "r0",
        "base_step": 0,
        "objective": "recipes.sao.loss:SAO",
        "options": dict(OPTIONS),
        "batch_id": f"batch-{step}",
        "unit_ids": [f"u{step}-{number}" for number in range(6)],
        "cursor": step * 10,
        "data": data(seed=step),
    }
    return Step(**(wanted | changes))  # type: ignore[arg-type]


@pytest.fixture
def order() -> Callable[..., Step]:
    return make_order


@pytest.fixture
def samples() -> Callable[..., list[Datum]]:
    return data


@pytest.fixture
def options() -> dict[str, object]:
    return dict(OPTIONS)
