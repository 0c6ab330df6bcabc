"""What a Llama-family model folder must hold: its configuration as plain numbers, and each tensor's name and shape.

Knows: config.json in the spellings of transformers 4 and 5, the header of a safetensors file, rotary variants.
Does not know: torch, tokens, or where the folder came from. Everything wrong with a folder is an InputError that says
which file and what to do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.core.errors import InputError

ARCHITECTURES = ("LlamaForCausalLM",)
ROPES = ("default", "linear", "llama3")
LAYER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `kind` default | linear | llama3; `factor` is for the last two, the rest for llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class Layout:
    """A Llama as numbers. Sizes are in elements, `context` in tokens."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    epsilon: float
    tied: bool
    rope: Rope
    ends: tuple[int, ...]  # token ids that end an answer

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(out, in) of one layer's linear, by its short name, such as `q_proj`."""
        attention, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (attention, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, attention),
            "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its name in the Hugging Face layout."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            found[f"model.layers.{layer}.input_layernorm.weight"] = (self.hidden,)
            found[f"model.layers.{layer}.post_attention_layernorm.weight"] = (self.hidden,)
            for name in LAYER_LINEARS:
                found[linear_path(layer, name) + ".weight"] = self.linear_shape(name)
        return found


def linear_path(layer: int, name: str) -> str:
    """The dotted place of a layer's linear in the Hugging Face layout."""
    block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{block}.{name}"


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("not a file")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}; a model folder needs it", param="model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); fetch the model again", param="model") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object; fetch the model again", param="model")
    return found


def read_layout(folder: Path) -> Layout:
    """The numbers in a folder's config.json and generation_config.json. InputError for a model that cannot run here."""
    config = read_json(folder / "config.json")
    found = config.get("architectures") or [config.get("model_type")]
    if not any(name in ARCHITECTURES for name in found):
        raise InputError(
            f"{folder} holds a {', '.join(map(str, found))}; the embedded engine runs {', '.join(ARCHITECTURES)}. "
            "Serve it with another engine (an OpenAI-compatible server, engine kind `upstream`)",
            param="model",
        )
    if config.get("quantization_config"):
        raise InputError(f"{folder} holds quantized weights; use the unquantized model", param="model")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise InputError(f"{folder} has biases in its linears, which the embedded engine does not run", param="model")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise InputError(f"{folder} has {act} between its linears; the embedded engine runs silu", param="model")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Layout(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config, folder),
            ends=_ends(config, folder),
        )
    except KeyError as error:
        raise InputError(f"{folder / 'config.json'} has no {error}; fetch the model again", param="model") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"{folder / 'config.json'} is damaged ({error}); fetch the model again", param="model"
        ) from None


def _rope(config: dict[str, Any], folder: Path) -> Rope:
    given: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ROPES:
        raise InputError(f"{folder} uses {kind} rotary positions; known are {', '.join(ROPES)}", param="model")
    return Rope(
        theta=float(given.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_context=int(given.get("original_max_position_embeddings", config["max_position_embeddings"])),
    )


def _ends(config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """End tokens, from the generation config when there is one, as transformers does."""
    place = folder / "generation_config.json"
    given = read_json(place).get("eos_token_id") if place.exists() else None
    if given is None:
        given = config.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (int(given),)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights: one file, or the shards its index names."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if names and not missing:
            return [folder / name for name in names]
        raise InputError(f"{folder} lacks {', '.join(missing) or 'its shards'}; fetch the model again", param="model")
    raise InputError(
        f"{folder} has no model.safetensors; save the model with safetensors (pickled weights are never loaded)",
        param="model",
    )


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's dtype and shape from a safetensors header, after checking that the file is as long as it says."""
    try:
        if not path.is_file():
            raise ValueError("not a file")
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes long, {8 + length + end} expected")
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); fetch it again", param="model") from None


def check(folder: Path) -> Layout:
    """That a folder holds a whole Llama this engine can run; its layout. Reads headers only, never the weights."""
    layout = read_layout(folder)
    if layout.heads % layout.kv_heads:
        raise InputError(f"{folder}: {layout.heads} heads cannot share {layout.kv_heads} key heads", param="model")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        found |= tensor_shapes(path)
    if layout.layers > len(found):
        raise InputError(f"{folder} has {len(found)} tensors for {layout.layers} layers; fetch it again", param="model")
    for name, shape in layout.shapes().items():
        if name not in found:
            raise InputError(f"{folder} has no tensor {name}, which its config.json asks for", param="model")
        dtype, got = found[name]
        if got != shape:
            raise InputError(f"{folder}: {name} is {got}, its config.json asks for {shape}", param="model")
        if dtype not in ("BF16", "F16", "F32"):
            raise InputError(f"{folder}: {name} is {dtype}; weights must be BF16, F16 or F32", param="model")
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there", param="model")
    return layout
