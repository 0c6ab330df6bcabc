"""Turn a Llama GGUF file into a model folder in the Hugging Face layout: bf16 weights, byte-level BPE tokenizer.

Knows: llama.cpp's names and its order of rotary rows (undone here), GGUF's tokenizer fields, the safetensors format.
Does not know: torch or transformers, or where the file came from. Same input, same bytes: the digest of the result is a
property of the GGUF file. gguf and numpy are imported at first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 1  # grows when the same GGUF file would convert to other bytes
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's names for a way of splitting text before BPE; these split digits one by one, then as GPT-2 does.
SPLITS = ("smollm",)


def convert(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of a Llama GGUF into an existing empty folder."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError("converting a model needs the package gguf: pip install 'gguf>=0.10'", param="model") from None
    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"{source} is not a whole GGUF file ({error}); install its package again", param="model"
        ) from None
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.pre") not in SPLITS:
        raise InputError(f"{source} is not a Llama model with a known tokenizer; use a model folder", param="model")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _dump(folder / "tokenizer.json", _tokenizer(fields))
    _dump(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _save(folder / "model.safetensors", dict(_tensors(reader, config)))


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # The file keeps this as a 32-bit float; the shortest decimal that reads back as the same one was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _special(token: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token, **flags}


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: GPT-2's byte-level BPE after a split of digits one by one. Token type 3 is a control token."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(tokens[i], i) for i, kind in enumerate(kinds) if kind == 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "post_processor": None,
        "decoder": {**level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    from gguf.quants import dequantize

    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    top["output.weight"] = "lm_head.weight"
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)  # float32, (out, in)
        if tensor.name in top:
            yield top[tensor.name], _bf16(values)
        elif tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
                values = _unpermute(values, config[key])
            yield f"model.layers.{layer}.{NAMES[part]}.weight", _bf16(values)
        elif tensor.name != "rope_freqs.weight":
            raise InputError(f"the GGUF file has an unknown tensor {tensor.name}; use a model folder", param="model")


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring rows of a head, Llama's own code rows half a head apart: put them apart again."""
    out, inner = values.shape
    return values.reshape(heads, out // heads // 2, 2, inner).swapaxes(1, 2).reshape(out, inner)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, ties to even, as its upper 16 bits."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _save(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
    """A safetensors file of bf16 tensors in the order of their names, so that its digest depends on nothing else."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in sorted(tensors):
            file.write(tensors[name].tobytes())
