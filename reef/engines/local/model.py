"""A Llama in plain torch for inference: packed linears, rotary positions, attention over key and value slots.

Knows: tensors. One `forward` computes any mix of decode rows (one token of a slot) and prefill rows (a chunk of a
prompt) for one weight set, with LoRAs for some of the rows.
Does not know: requests, text, sampling, or releases.

- Rows are computed apart: what else is in a batch changes a row's result by rounding at most (kernels pick their tiles
  by size), in float32 far below 1e-4.
- The key-value cache is mapped, not allocated: pages that no token reached cost nothing.
"""

from __future__ import annotations

import math
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
from reef.engines.local.broadcast.held import Held
from reef.engines.local.layout import Layout, linear_path

if TYPE_CHECKING:
    from reef.engines.local.lora import Added

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears that share their input are one matrix: fewer, larger calls."""

Pack = Callable[[str, Tensor], Callable[[Tensor], Tensor]]
"""From a group (or `head`) and its weight [out, in], a function like that of `linear`."""

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


def native() -> torch.dtype:
    """What this processor computes soonest in: float32 where it has no products in bfloat16 (AVX2 and older)."""
    return torch.bfloat16 if packs(torch.bfloat16) else torch.float32


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


def load_weights(
    files: Sequence[Path | Held],
    layout: Layout,
    dtype: torch.dtype,
    *,
    finite: bool = False,
    pack: Pack | None = None,
) -> Weights:
    """Read safetensors, on disk or in memory, in the Hugging Face layout. EngineError names a tensor that is missing,
    has another shape, or (when `finite` is asked for) a value that is no number. `pack`: how linears are kept, when not
    in the dtype."""
    handles: list[Any] = [file if isinstance(file, Held) else safe_open(str(file), framework="pt") for file in files]
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
        return keep(group, torch.cat(parts) if len(parts) > 1 else parts[0])

    def keep(group: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return linear(weight, packed=packed) if pack is None else pack(group, weight)

    def norm(name: str) -> Tensor:
        return get(name).float() * math.sqrt(layout.hidden)  # what is normed is divided by its length, see `normal`

    embed = get("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(
            Layer(
                attention_norm=norm(f"model.layers.{layer}.input_layernorm.weight"),
                qkv=fused(layer, "qkv"),
                o=fused(layer, "o"),
                mlp_norm=norm(f"model.layers.{layer}.post_attention_layernorm.weight"),
                gate_up=fused(layer, "gate_up"),
                down=fused(layer, "down"),
            )
            for layer in range(layout.layers)
        ),
        norm=norm("model.norm.weight"),
        head=keep("head", embed if layout.tied else get("lm_head.weight")),
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
        self.whole = whole
        self.stamps = [0] * slots  # each write to a slot changes its stamp
        self.layers = [(whole[layer, 0], whole[layer, 1]) for layer in range(layout.layers)]
        self.flat = [(k.view(-1, layout.head_dim), v.view(-1, layout.head_dim)) for k, v in self.layers]

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Places [tokens * kv_heads] in `flat` where the keys of tokens at (slot, position) go."""
        heads = torch.arange(self.heads)
        return ((slots[:, None] * self.heads + heads) * self.context + positions[:, None]).reshape(-1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give one slot the first `length` tokens of another."""
        self.whole[:, :, target, :, :length] = self.whole[:, :, source, :, :length]
        self.stamps[target] += 1

    def finite(self, slot: int, length: int) -> bool:
        """Whether all that a slot's first tokens left is finite."""
        return bool(torch.isfinite(self.whole[:, :, slot, :, :length]).all())

    def clear(self, slot: int, length: int) -> None:
        """Forget what is not finite: masked keys are weighed with zero, and zero times that would not be zero."""
        self.whole[:, :, slot, :, :length] = 0
        self.stamps[slot] += 1


@dataclass(frozen=True, slots=True)
class Run:
    """Attention of batch rows [start, end): decode rows, one of each slot, or one slot's chunk of a prompt."""

    start: int
    end: int
    spans: tuple[slice, ...]  # the slots, neighbours together, in the order of the rows
    length: int  # keys to look at
    mask: Tensor | None  # 0 or -inf, added to the scores
    whole: bool  # in products over all slots, else in the fused kernel
    chunk: bool = False

    @property
    def slots(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass. Rows are tokens; `wanted` are the rows whose logits are asked for."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    places: Tensor  # [rows * kv_heads], from Cache.rows
    runs: tuple[Run, ...]
    wanted: Tensor  # [n]
    added: tuple[Added, ...] = ()  # by LoRAs, to some of the rows


class Mirror:
    """A dense copy of what the slots of a decode run hold, kept while the same ones go on: to make it anew in each step
    takes a third of attention's time. It is used when it is what the cache holds, by the stamps of the slots."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._room = torch.empty(_MIRROR // cache.whole.element_size(), dtype=cache.whole.dtype)  # touched when needed
        self._last: tuple[Any, ...] | None = None  # the run of the pass before this one, and the stamps after it
        self._held = False  # whether that run's keys and values are here
        self.run: Run | None = None  # the one that is computed from here in this pass
        self._places = self._whole = self._room
        self._follows = False

    def begin(self, runs: Sequence[Run], positions: Tensor) -> None:
        """Choose the run of this pass: the first of decode rows, from its second time on."""
        run = next((run for run in runs if run.whole and not run.chunk), None)
        last, self._last, self.run = self._last, None, None  # a pass that fails leaves nothing to go on from
        if run is not None and last == self._key(run):
            layers, _, _, heads, _, dim = self._cache.whole.shape
            shape = (layers, 2, run.slots, heads, run.length, dim)
            self._whole = self._room[: math.prod(shape)].view(shape)
            self._follows, self.run = self._held, run
            rows = torch.arange(run.slots * heads).view(run.slots, heads) * run.length
            self._places = (rows + positions[run.start : run.end, None]).reshape(-1)

    def end(self, runs: Sequence[Run]) -> None:
        for each in runs:
            for span in each.spans:
                for slot in range(span.start, span.stop):
                    self._cache.stamps[slot] += 1
        run = next((run for run in runs if run.whole and not run.chunk), None)
        self._held = self.run is not None
        size = 0 if run is None else run.slots * run.length * self._cache.whole[:, :, 0, :, 0].numel()
        self._last = None if run is None or size > self._room.numel() else self._key(run)

    def _key(self, run: Run) -> tuple[Any, ...]:
        return run.spans, run.length, [stamp for span in run.spans for stamp in self._cache.stamps[span]]

    def store(self, number: int, k: Tensor, v: Tensor) -> None:
        """Take in a layer's new keys and values [rows * kv_heads, dim], after the cache."""
        run = self.run
        if run is None:
            return
        if self._follows:
            heads = self._cache.heads
            for part, new in zip(self._whole[number].flatten(1, 3), (k, v), strict=True):
                part.index_copy_(0, self._places, new[run.start * heads : run.end * heads])
        else:
            start = 0
            for span in run.spans:
                end = start + span.stop - span.start
                self._whole[number, :, start:end] = self._cache.whole[number, :, span, :, : run.length]
                start = end

    def layer(self, number: int) -> Tensor:
        """[2, slots, kv_heads, keys, dim]"""
        return self._whole[number]


class Model:
    """The architecture: layout, rotary tables and cache. Weights are handed to each call."""

    def __init__(self, layout: Layout, slots: int, context: int, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.cache = Cache(layout, slots, context, dtype)
        self._cos, self._sin = _rotary(layout, context, dtype)
        self._mirror = Mirror(self.cache)
        self._room = torch.empty(max(_SCORES, context), dtype=dtype)  # for attention's scores

    @torch.inference_mode()
    def forward(self, weights: Weights, work: Work) -> Tensor:
        """Logits [wanted, vocab] in the model's dtype; writes the rows' keys and values into the cache."""
        inner, dtype = self.layout.inner, self.dtype
        self._mirror.begin(work.runs, work.positions)
        # The sum that all layers add to stays in float32: its rounding would be most of the error, and it is small.
        wide, x = self._widened(F.embedding(work.ids, weights.embed))
        cos, sin = self._cos[work.positions].unsqueeze(1), self._sin[work.positions].unsqueeze(1)
        for number, layer in enumerate(weights.layers):
            normed = normal(wide, x, layer.attention_norm).to(dtype)
            qkv = layer.qkv(normed)
            for added in work.added:
                added.add(number, "qkv", normed, qkv)
            mixed = self._attend(number, qkv, cos, sin, work)
            out = layer.o(mixed)
            for added in work.added:
                added.add(number, "o", mixed, out)
            x.add_(out)
            normed = normal(wide, x, layer.mlp_norm).to(dtype)
            both = layer.gate_up(normed)
            for added in work.added:
                added.add(number, "gate_up", normed, both)
            act = F.silu(both[:, :inner]).mul_(both[:, inner:])
            out = layer.down(act)
            for added in work.added:
                added.add(number, "down", act, out)
            x.add_(out)
        self._mirror.end(work.runs)
        if work.wanted.numel() != x.shape[0]:
            wide, x = wide[work.wanted], x[work.wanted]
        return weights.head(normal(wide, x, weights.norm).to(dtype))

    def _widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in float32 with one more value, and a view of them without: the length of the wide row is the root of
        the sum of squares plus epsilon, so that a norm is a length, a division and a product."""
        size = self.layout.hidden
        wide = torch.full((x.shape[0], size + 1), math.sqrt(size * self.layout.epsilon))
        narrow = wide[:, :size]
        narrow.copy_(x)
        return wide, narrow

    def _attend(self, number: int, qkv: Tensor, cos: Tensor, sin: Tensor, work: Work) -> Tensor:
        """Rotate, store keys and values, attend. Returns [rows, heads * dim]."""
        layout = self.layout
        heads, kv, dim, count = layout.heads, layout.kv_heads, layout.head_dim, qkv.shape[0]
        each = qkv.view(count, heads + 2 * kv, dim)
        turned = each[:, : heads + kv]
        # x * cos + rotate_half(x) * sin, with the minus of rotate_half moved into the table.
        turned = torch.addcmul(turned * cos, turned.roll(dim // 2, -1), sin)
        k_flat, v_flat = self.cache.flat[number]
        k, v = turned[:, heads:].reshape(-1, dim), each[:, heads + kv :].reshape(-1, dim)
        k_flat.index_copy_(0, work.places, k)
        v_flat.index_copy_(0, work.places, v)
        self._mirror.store(number, k, v)
        out = [self._run(run, number, turned[run.start : run.end, :heads]) for run in work.runs]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _run(self, run: Run, number: int, q: Tensor) -> Tensor:
        """One run's attention for q [rows, heads, dim]: [rows, heads * dim]. The query heads that share a key head are
        queries of that one, so that keys are never copied for each."""
        layout = self.layout
        kv, dim = layout.kv_heads, layout.head_dim
        group, rows = layout.heads // kv, q.shape[0]
        if not run.whole:
            k, v = (part[run.spans[0], :, : run.length] for part in self.cache.layers[number])
            mixed = F.scaled_dot_product_attention(q.reshape(rows, kv, group, dim), k, v, attn_mask=run.mask)
            return mixed.reshape(rows, -1)
        assert run.mask is not None
        slots = run.slots
        if run is self._mirror.run:
            dense = self._mirror.layer(number)
        else:
            # oneDNN multiplies dense matrices only: copied once, they are read from the processor's cache after that.
            parts = [self.cache.whole[number, :, span, :, : run.length] for span in run.spans]
            dense = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)
        k, v = dense.view(2, slots * kv, run.length, dim)
        count = rows // slots
        folded = q.reshape(slots, count, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(slots * kv, group * count, dim)
        mixed = attend(folded, k, v, run.mask, dim**-0.5, self._room)
        return mixed.view(slots, kv, group, count, dim).permute(0, 3, 1, 2, 4).reshape(rows, -1)

    def decode_runs(self, slots: Sequence[int], lengths: Sequence[int], start: int = 0) -> tuple[Run, ...]:
        """Runs for one decode row of each slot, from batch row `start`; `lengths` keys each, own included.

        Rows that follow each other share one padded call, unless their lengths differ too much for that.
        """
        found: list[Run] = []
        begin = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots):
                longest = max(lengths[begin : end + 1])
                if longest * (end + 1 - begin) - sum(lengths[begin : end + 1]) <= _PADDING:
                    continue
            found.append(self._decode_run(slots[begin:end], lengths[begin:end], start + begin))
            begin = end
        return tuple(found)

    def _decode_run(self, slots: Sequence[int], lengths: Sequence[int], start: int) -> Run:
        spans, count, longest = neighbours(slots), len(slots), max(lengths)
        whole = len(spans) > 1 or count * longest >= _FUSED
        length = min(-longest // _SAME * -_SAME, self.cache.context) if whole else longest
        mask = None
        if whole or min(lengths) < longest:
            hidden = torch.arange(length) >= torch.tensor(lengths)[:, None]
            mask = torch.zeros(count, length, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
            heads, group = self.layout.kv_heads, self.layout.heads // self.layout.kv_heads
            if whole:
                mask = mask[:, None, None, :].expand(-1, heads, -1, -1).reshape(count * heads, 1, length)
            else:
                mask = mask[:, None, None, :].expand(-1, 1, group, -1)
        return Run(start, start + count, spans, length, mask, whole)

    def chunk_run(self, slot: int, position: int, count: int, start: int) -> Run:
        """The run of a prompt's tokens [position, position + count), in batch rows from `start`."""
        length = min(-(position + count) // _SAME * -_SAME, self.cache.context)
        hidden = torch.arange(length) > torch.arange(position, position + count)[:, None]
        mask = torch.zeros(count, length, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat(self.layout.heads // self.layout.kv_heads, 1)[None]
        return Run(start, start + count, (slice(slot, slot + 1),), length, mask, whole=True, chunk=True)


def normal(wide: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of rows x, a view of `wide` without its last value (`Model._widened`)."""
    return torch.div(x, torch.linalg.vector_norm(wide, dim=-1, keepdim=True)).mul_(weight)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, room: Tensor) -> Tensor:
    """softmax(q k' scale + mask) v for q [n, rows, dim], k and v [n, keys, dim], mask [n or 1, rows or 1, keys].

    In products over everything: torch's fused kernel makes a small one for each head and block of keys, which takes
    twice to four times as long. Scores are rounded to the dtype. Many of them are computed in parts that fit a cache,
    all in `room` (flat): pages that the system hands out anew each time take a third of the time.
    """
    count, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    if count * rows * keys <= room.numel():
        scores = room[: count * rows * keys].view(count, rows, keys)
        torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale, out=scores)
        return torch.bmm(_softmax(scores), v)
    out, most = torch.empty_like(q), max(1, room.numel() // keys)
    mask = mask.expand(count, rows, keys)
    for number in range(count):
        for start in range(0, rows, most):
            part = slice(start, min(start + most, rows))
            scores = room[: (part.stop - start) * keys].view(-1, keys)
            torch.addmm(mask[number, part], q[number, part], k[number].t(), alpha=scale, out=scores)
            torch.mm(_softmax(scores), v[number], out=out[number, part])
    return out


def _softmax(scores: Tensor) -> Tensor:
    """In place: each row is read for its largest value, then value by value."""
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)  # type: ignore[no-any-return]


def neighbours(slots: Sequence[int]) -> tuple[slice, ...]:
    """Slots in their order, as slices of those that follow each other."""
    found: list[slice] = []
    for slot in slots:
        if found and found[-1].stop == slot:
            found[-1] = slice(found[-1].start, slot + 1)
        else:
            found.append(slice(slot, slot + 1))
    return tuple(found)


_PADDING = 1024  # padded keys that cost about as much as one more attention call
_FUSED = 1024  # keys of all slots together from which on products are faster than the fused kernel
_SAME = 32  # keys are counted up to a multiple of this: oneDNN makes code for each new shape, in about a millisecond
_MIRROR = 256 << 20  # bytes at most
_SCORES = 1 << 21  # scores that are held at once


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
