"""A tiny random Llama in a folder, and the embedded engine over a real unix socket in the test's own loop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import save_file

from reef.core.errors import MissingError
from reef.engines import Ask, WeightFiles
from reef.engines.local.client import LocalEngine
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path, read_layout
from reef.engines.local.server import Options
from reef.engines.local.service import Service, serve

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RECEIPT = "0197" + "ab" * 14


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte, as byte-level BPE vocabularies spell them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte) if byte in plain else chr(256 + extra)
        extra += byte not in plain
    return [letters[byte] for byte in range(256)]


def write_tokenizer(folder: Path) -> int:
    """One token for each byte and a few merges; returns the size of the vocabulary."""
    letters = byte_letters()
    merges = [["t", "h"], ["th", "e"], ["a", "n"], ["Ã", "©"]]
    tokens = [*SPECIAL, *letters, *("".join(merge) for merge in merges)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(tokens)


def make_tiny(folder: Path, **changes: Any) -> Path:
    """A random Llama of two layers that says something else to every prompt. `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
        "torch_dtype": "float32",
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    seeded = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in read_layout(folder).shapes().items():
        spread = 1.0 if "embed" in name else 0.25
        tensors[name] = torch.randn(shape, generator=seeded) * spread
        if "norm" in name:
            tensors[name] = tensors[name] * 0.2 + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_lora(folder: Path, layout: Layout, *, seed: int, rank: int = 4, alpha: int = 8, size: float = 0.1) -> Path:
    """A random LoRA on every linear, in PEFT's files."""
    folder.mkdir(parents=True, exist_ok=True)
    seeded = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layout.layers):
        for name in LAYER_LINEARS:
            tall, wide = layout.linear_shape(name)
            path = f"base_model.model.{linear_path(layer, name)}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, wide, generator=seeded) * size
            tensors[f"{path}.lora_B.weight"] = torch.randn(tall, rank, generator=seeded) * size
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(LAYER_LINEARS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora_files(folder: Path, **meta: Any) -> WeightFiles:
    return WeightFiles("lora", {path.name: path for path in folder.iterdir()}, meta)


class Releases:
    """A resolver over a dict; counts how often each id was asked for."""

    def __init__(self, known: Mapping[str, WeightFiles] | None = None) -> None:
        self.known = {"base": WeightFiles("base", {}, {}), **(known or {})}
        self.asked: list[str] = []

    def __call__(self, release_id: str) -> WeightFiles:
        self.asked.append(release_id)
        if release_id not in self.known:
            raise MissingError(f"no release {release_id}")
        return self.known[release_id]


def ask(content: str | list[dict[str, Any]], *, release: str = "base", stream: bool = False, **fields: Any) -> Ask:
    priority = fields.pop("priority", 0)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    body = json.dumps({"model": "any", "messages": messages, **fields}).encode()
    return Ask(RECEIPT, release, "chat", body, stream, {}, priority)


@contextlib.asynccontextmanager
async def running(folder: Path, resolve: Callable[[str], WeightFiles], **options: Any) -> AsyncIterator[LocalEngine]:
    """The engine's service on a real unix socket, and a client of it."""
    place = Path(tempfile.mkdtemp(prefix="reef-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "engine.sock"))
    service = Service(folder, resolve, Options(**{"dtype": "float32", "threads": 2, **options}))
    server = await serve(listener, service)
    client = LocalEngine(place / "engine.sock", model="tiny")
    try:
        yield client
    finally:
        await client.close()
        server.close()
        service.close()
        shutil.rmtree(place)
