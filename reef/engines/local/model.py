"""A Llama in plain torch for inference: packed linears, rotary positions, attention over key and value slots.

Knows: tensors. One `forward` computes any mix of decode rows (one token of a slot) and prefill rows (a chunk of a
prompt) for one weight set, with LoRAs for some of the rows.
Does not know: requests, text, sampling, or releases.

- Rows are computed apart: what else is in a batch changes a row's result by rounding at most (kernels pick their tiles
  by size), in float32 far below 1e-4.
- The key-value cache is mapped, not allocated: pages that no token reached cost nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from reef.core.errors import EngineError
from reef.engines.local.layout import Layout, linear_path

if TYPE_CHECKING:
    from reef.engines.local.lora import Lora

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears that share their input are one matrix: fewer, larger calls."""

_ROWS_HINT = 16  # the number of rows the packed layout is made for; any number works


def packs(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's packed linears for a dtype: on bf16 they are what makes a CPU usable."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), _ROWS_HINT)
        found = torch.ops.mkldnn._linear_pointwise(torch.ones(2, 16, dtype=dtype), weight, None, "none", [], "")
        return bool((found == 16).all())
    except RuntimeError:
        return False


def linear(weight: Tensor, *, packed: bool) -> Callable[[Tensor], Tensor]:
    """A function x [rows, in] -> x @ weight.T [rows, out] for a weight [out, in], packed for the CPU where possible."""
    if not packed:
        return lambda x: F.linear(x, weight)
    run = torch.ops.mkldnn._linear_pointwise.default
    ready = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    none: list[Any] = []

    def apply(x: Tensor) -> Tensor:
        found: Tensor = run(x, ready, None, "none", none, "")
        return found

    return apply


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Callable[[Tensor], Tensor]
    o: Callable[[Tensor], Tensor]
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """One whole set of weights, ready to run. Never changed after loading, so any number of requests may hold it."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Callable[[Tensor], Tensor]


def load_weights(files: Sequence[Path], layout: Layout, dtype: torch.dtype, *, finite: bool = False) -> Weights:
    """Read safetensors in the Hugging Face layout. EngineError names a tensor that is missing, has another shape, or
    (when `finite` is asked for) a value that is no number."""
    handles: list[Any] = [safe_open(str(path), framework="pt") for path in files]
    place = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (not a dict)
    packed, shapes = packs(dtype), layout.shapes()

    def get(name: str) -> Tensor:
        if name not in place:
            raise EngineError(f"the weights have no tensor {name}, which this model needs")
        found: Tensor = place[name].get_tensor(name)
        if tuple(found.shape) != shapes[name]:
            raise EngineError(f"the weights' {name} is {tuple(found.shape)}; this model needs {shapes[name]}")
        if finite and not bool(torch.isfinite(found).all()):
            raise EngineError(f"the weights' {name} has values that are not finite")
        return found.to(dtype, copy=True)  # not a view of the file, which may be cut off while we answer from it

    def fused(layer: int, group: str) -> Callable[[Tensor], Tensor]:
        parts = [get(linear_path(layer, name) + ".weight") for name in GROUPS[group]]
        return linear(torch.cat(parts) if len(parts) > 1 else parts[0], packed=packed)

    embed = get("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(
            Layer(
                attention_norm=get(f"model.layers.{layer}.input_layernorm.weight").float(),
                qkv=fused(layer, "qkv"),
                o=fused(layer, "o"),
                mlp_norm=get(f"model.layers.{layer}.post_attention_layernorm.weight").float(),
                gate_up=fused(layer, "gate_up"),
                down=fused(layer, "down"),
            )
            for layer in range(layout.layers)
        ),
        norm=get("model.norm.weight").float(),
        head=linear(embed if layout.tied else get("lm_head.weight"), packed=packed),
    )


class Cache:
    """Keys and values of `slots` sequences of up to `context` tokens: [layer, 2, slot, kv_head, position, dim]."""

    def __init__(self, layout: Layout, slots: int, context: int, dtype: torch.dtype) -> None:
        self.slots, self.context, self.heads = slots, context, layout.kv_heads
        shape = (layout.layers, 2, slots, layout.kv_heads, context, layout.head_dim)
        size = torch.tensor(shape).prod().item() * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if hasattr(mmap, "MAP_POPULATE") else 0)  # no reserve
        memory = mmap.mmap(-1, int(size), flags=flags)
        if hasattr(memory, "madvise") and hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page per head and slot would cost gigabytes
        whole = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.layers = [(whole[layer, 0], whole[layer, 1]) for layer in range(layout.layers)]
        self.flat = [(k.view(-1, layout.head_dim), v.view(-1, layout.head_dim)) for k, v in self.layers]

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Places [tokens * kv_heads] in `flat` where the keys of tokens at (slot, position) go."""
        heads = torch.arange(self.heads)
        return ((slots[:, None] * self.heads + heads) * self.context + positions[:, None]).reshape(-1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give one slot the first `length` tokens of another."""
        for k, v in self.layers:
            k[target, :, :length] = k[source, :, :length]
            v[target, :, :length] = v[source, :, :length]


@dataclass(frozen=True, slots=True)
class Run:
    """Attention of batch rows [start, end): decode rows of neighbouring slots, or one slot's chunk of a prompt."""

    start: int
    end: int
    slot: int  # the first slot
    length: int  # keys to look at
    mask: Tensor | None  # decode [slots, 1, heads per key head, length]; chunk [rows, length]; None: see all (causal)
    chunk: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass. Rows are tokens; `wanted` are the rows whose logits are asked for."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    places: Tensor  # [rows * kv_heads], from Cache.rows
    runs: tuple[Run, ...]
    wanted: Tensor  # [n]
    loras: tuple[tuple[Lora, slice | Tensor], ...] = ()


class Model:
    """The architecture: layout, rotary tables and cache. Weights are handed to each call."""

    def __init__(self, layout: Layout, slots: int, context: int, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.cache = Cache(layout, slots, context, dtype)
        self._cos, self._sin = _rotary(layout, context, dtype)
        self._shape = (layout.hidden,)

    @torch.inference_mode()
    def forward(self, weights: Weights, work: Work) -> Tensor:
        """Logits [wanted, vocab] in the model's dtype; writes the rows' keys and values into the cache."""
        shape, epsilon, inner, dtype = self._shape, self.layout.epsilon, self.layout.inner, self.dtype
        # The sum that all layers add to stays in float32: its rounding would be most of the error, and it is small.
        x = F.embedding(work.ids, weights.embed).float()
        cos, sin = self._cos[work.positions].unsqueeze(1), self._sin[work.positions].unsqueeze(1)
        for number, layer in enumerate(weights.layers):
            normed = F.rms_norm(x, shape, layer.attention_norm, epsilon).to(dtype)
            qkv = layer.qkv(normed)
            for lora, rows in work.loras:
                lora.add(number, "qkv", normed, qkv, rows)
            mixed = self._attend(number, qkv, cos, sin, work)
            out = layer.o(mixed)
            for lora, rows in work.loras:
                lora.add(number, "o", mixed, out, rows)
            x.add_(out)
            normed = F.rms_norm(x, shape, layer.mlp_norm, epsilon).to(dtype)
            both = layer.gate_up(normed)
            for lora, rows in work.loras:
                lora.add(number, "gate_up", normed, both, rows)
            act = F.silu(both[:, :inner]).mul_(both[:, inner:])
            out = layer.down(act)
            for lora, rows in work.loras:
                lora.add(number, "down", act, out, rows)
            x.add_(out)
        last = x if work.wanted.numel() == x.shape[0] else x[work.wanted]
        return weights.head(F.rms_norm(last, shape, weights.norm, epsilon).to(dtype))

    def _attend(self, number: int, qkv: Tensor, cos: Tensor, sin: Tensor, work: Work) -> Tensor:
        """Rotate, store keys and values, attend. Returns [rows, heads * dim]."""
        layout = self.layout
        heads, kv, dim = layout.heads, layout.kv_heads, layout.head_dim
        count, group = qkv.shape[0], heads // kv
        each = qkv.view(count, heads + 2 * kv, dim)
        turned = each[:, : heads + kv]
        # x * cos + rotate_half(x) * sin, with the minus of rotate_half moved into the table.
        turned = torch.addcmul(turned * cos, turned.roll(dim // 2, -1), sin)
        k_flat, v_flat = self.cache.flat[number]
        k_flat.index_copy_(0, work.places, turned[:, heads:].reshape(-1, dim))
        v_flat.index_copy_(0, work.places, each[:, heads + kv :].reshape(-1, dim))
        keys, values = self.cache.layers[number]
        out: list[Tensor] = []
        for run in work.runs:
            if run.chunk:
                q = turned[run.start : run.end, :heads].transpose(0, 1).unsqueeze(0)
                k = keys[run.slot : run.slot + 1, :, : run.length]
                v = values[run.slot : run.slot + 1, :, : run.length]
                mixed = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=run.mask, is_causal=run.mask is None, enable_gqa=group > 1
                )
                out.append(mixed[0].transpose(0, 1).reshape(-1, heads * dim))
            else:
                # The query heads that share a key head become its query positions: no copy of keys.
                slots = run.end - run.start
                q = turned[run.start : run.end, :heads].reshape(slots, kv, group, dim)
                k = keys[run.slot : run.slot + slots, :, : run.length]
                v = values[run.slot : run.slot + slots, :, : run.length]
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=run.mask)
                out.append(mixed.reshape(slots, heads * dim))
        return out[0] if len(out) == 1 else torch.cat(out)

    def decode_runs(self, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> tuple[Run, ...]:
        """Runs for decode rows in order of their slots, from batch row `start`; `lengths` keys each, own included.

        Neighbouring slots share one padded call, unless their lengths differ too much for that.
        """
        group = self.layout.heads // self.layout.kv_heads
        found: list[Run] = []
        begin = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and slots[end] == slots[end - 1] + 1:
                longest = max(lengths[begin : end + 1])
                if longest * (end + 1 - begin) - sum(lengths[begin : end + 1]) <= _PADDING:
                    continue
            part = lengths[begin:end]
            longest = max(part)
            mask = None
            if min(part) < longest:
                hidden = torch.arange(longest) >= torch.tensor(part)[:, None]
                mask = torch.zeros(end - begin, longest, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
                mask = mask[:, None, None, :].expand(-1, 1, group, -1)
            found.append(Run(start + begin, start + end, slots[begin], longest, mask, chunk=False))
            begin = end
        return tuple(found)

    def chunk_run(self, slot: int, position: int, count: int, start: int) -> Run:
        """The run of a prompt's tokens [position, position + count), in batch rows from `start`."""
        length, mask = position + count, None
        if position:
            hidden = torch.arange(length) > torch.arange(position, length)[:, None]
            mask = torch.zeros(count, length, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return Run(start, start + count, slot, length, mask, chunk=True)


_PADDING = 1024  # padded keys that cost about as much as one more attention call


def frequencies(layout: Layout) -> Tensor:
    """Radians a position [dim / 2] by which pairs of a head's dimensions turn (RoPE, with the layout's scaling)."""
    rope, dim = layout.rope, layout.head_dim
    frequency = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended (Dubey et al. 2024).
        wave = 2 * torch.pi / frequency
        smooth = (rope.original_context / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
    return frequency


def _rotary(layout: Layout, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables [context, dim] of cosines and of sines whose first half is negated (see `_attend`)."""
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequencies(layout))
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
