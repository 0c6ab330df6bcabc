"""Causal grouped-query attention over packed sequences, from projections before their rotation.

Knows: rotary positions, the shared prefix, right padding, and which of two ways is faster.
Does not know: layers, weights.

- Short rows on a CPU: plain products over blocks of queries, each with the keys up to its end, so that nearly half of
  the scores are never computed. Scores and softmax are float32; what comes after has the type of the inputs. The
  probabilities are kept for the backward pass.
- Others: torch's own attention in float32, in such blocks; nothing of the size of the scores is kept.
- The query heads that share a key head are laid out along the query length, so keys are never repeated.
- What is padded stands behind what is real, so causality hides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from reef.trainers.local.llama import Packed

SHORT = 1024
"""Keys of a row up to which probabilities are kept: on the embedded model 9 kB a token and layer at that length."""
BLOCK, BLOCKS = 64, 8
"""Least queries of a block, and most blocks of a row."""


def attend(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, packed: Packed) -> Tensor:
    """[N, heads, D], [N, kv_heads, D] twice, and [N, 1, D] twice -> [N, heads * D], in the type of the inputs."""
    if query.device.type == "cpu" and packed.prefix + packed.width <= SHORT:
        found: Tensor = _Short.apply(query, key, value, cosine, sine, packed)  # type: ignore[no-untyped-call]
        return found
    return _long(_turn(query, cosine, sine), _turn(key, cosine, sine), value.float(), packed).to(query.dtype)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """Rotate pairs of dimensions, half a head apart, by their position's angle, or back; float32."""
    x, half = x.float(), x.shape[-1] // 2
    found, sine = x * cosine, sine[..., :half]
    one, other = (sine, -sine) if back else (-sine, sine)
    found[..., :half] += x[..., half:] * one
    found[..., half:] += x[..., :half] * other
    return found


def _pad(x: Tensor, packed: Packed) -> Tensor:
    """Own tokens [N - P, …] -> rows [B, L, …], zeros where there is none."""
    whole = packed.count * packed.width
    if len(packed.slots) != whole:
        x = x.new_zeros(whole, *x.shape[1:]).index_copy(0, packed.slots, x)
    return x.view(packed.count, packed.width, *x.shape[1:])


def _unpad(x: Tensor, packed: Packed) -> Tensor:
    """Rows [B, L, …] -> own tokens [N - P, …]."""
    x = x.reshape(packed.count * packed.width, *x.shape[2:])
    return x if len(packed.slots) == len(x) else x.index_select(0, packed.slots)


def _keys(x: Tensor, packed: Packed) -> Tensor:
    """[N, kv_heads, D] -> [B, P + L, kv_heads, D]: each row's own behind the prefix."""
    own, cut = _pad(x[packed.prefix :], packed), packed.prefix
    return torch.cat((x[:cut].expand(packed.count, *x[:cut].shape), own), 1) if cut else own


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the blocks of queries, in turn."""
    step = math.ceil(length / max(1, min(BLOCKS, length // BLOCK)))
    for start in range(0, length, step):
        yield start, min(length, start + step)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, packed: Packed
    ) -> Tensor:
        cut, groups = packed.prefix, key.shape[1]
        q, k = (_turn(x, cosine, sine) for x in (query, key))
        split = q.view(len(q), groups, -1, q.shape[-1])
        own, kept = _scores(_pad(split[cut:], packed), _keys(k, packed), _keys(value, packed))
        found = _unpad(own, packed)
        ctx.packed, ctx.kept, ctx.first = packed, len(kept), 0
        if cut:
            shared, more = _scores(split[None, :cut], k[None, :cut], value[None, :cut])
            found, kept = torch.cat((shared[0], found)), kept + more
        ctx.save_for_backward(cosine, sine, *kept)
        return found.reshape(len(q), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed: Packed = ctx.packed
        cosine, sine, *saved = ctx.saved_tensors
        kept, more, cut = saved[: ctx.kept], saved[ctx.kept :], packed.prefix
        groups = len(kept[0]) // packed.count
        split = gradient.view(len(gradient), groups, -1, cosine.shape[-1])
        dq, dk, dv = _slopes(_pad(split[cut:], packed), kept)
        q, k, v = (_unpad(x, packed) for x in (dq, dk[:, cut:], dv[:, cut:]))
        if cut:
            first = _slopes(split[None, :cut], more)
            q = torch.cat((first[0][0], q))
            k = torch.cat((first[1][0] + dk[:, :cut].sum(0), k))
            v = torch.cat((first[2][0] + dv[:, :cut].sum(0), v))
        q = q.reshape(len(q), -1, q.shape[-1])
        dtype = gradient.dtype
        back = (_turn(x, cosine, sine, back=True).to(dtype) for x in (q, k))
        return (*back, v.to(dtype), None, None, None)


def _scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[B, L, groups, share, D] and [B, K, groups, D] twice -> attention in the shape of q, and what `_slopes` needs.

    The last query sees all K keys, each one before it one key less."""
    (many, length, groups, share, size), dtype = q.shape, v.dtype
    k, v = (x.transpose(1, 2).reshape(many * groups, -1, size) for x in (k, v))
    found = v.new_empty(q.shape)
    kept = [k.to(dtype), v]
    for start, end in _blocks(length):
        rows, seen = end - start, k.shape[1] - length + end
        each = q.new_empty(many, groups, rows, share, size)
        torch.mul(q[:, start:end].transpose(1, 2), 1 / math.sqrt(size), out=each)
        each = each.view(many * groups, rows * share, size)
        scores = each @ k[:, :seen].transpose(1, 2)
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores.view(-1, rows, share, seen)[..., seen - rows :].masked_fill_(later[:, None], float("-inf"))
        chance = torch.softmax(scores, -1).to(dtype)
        out = (chance @ v[:, :seen]).view(many, groups, rows, share, size)
        found[:, start:end] = out.transpose(1, 2)
        kept += [each.to(dtype), chance]
    return found, kept


def _slopes(gradient: Tensor, kept: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, float32, of what `_scores` was given, from that of what it found."""
    many, length, groups, share, size = gradient.shape
    k, v, *blocks = kept
    dq = gradient.new_empty(gradient.shape, dtype=torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for number, (start, end) in enumerate(_blocks(length)):
        each, chance = blocks[2 * number : 2 * number + 2]
        rows, seen = end - start, chance.shape[-1]
        out = gradient[:, start:end].transpose(1, 2).reshape(many * groups, rows * share, size)
        dv[:, :seen] += chance.transpose(1, 2) @ out
        slope = torch._softmax_backward_data(out @ v[:, :seen].transpose(1, 2), chance, -1, chance.dtype)
        dk[:, :seen] += slope.transpose(1, 2) @ each
        back = (slope @ k[:, :seen]).view(many, groups, rows, share, size).transpose(1, 2)
        torch.mul(back, 1 / math.sqrt(size), out=dq[:, start:end])
    dk, dv = (x.view(many, groups, -1, size).transpose(1, 2) for x in (dk, dv))
    return dq, dk, dv


def _long(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """The same through torch's attention: [N, heads, D], [N, kv_heads, D] twice -> [N, heads * D], all float32."""
    cut, groups, size = packed.prefix, k.shape[1], q.shape[-1]
    rows = _pad(q[cut:].reshape(-1, groups, q.shape[1] // groups, size), packed)
    own = _unpad(_seen(rows, *(_keys(x, packed).transpose(1, 2) for x in (k, v))), packed)
    if cut:
        split = q[None, :cut].view(1, cut, groups, -1, size)
        own = torch.cat((_seen(split, *(x[None, :cut].transpose(1, 2) for x in (k, v)))[0], own))
    return own.reshape(len(q), -1)


def _seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, L, groups, share, D] and [B, groups, K, D] twice -> attention in the shape of q; see `_scores`."""
    many, length, groups, share, size = q.shape
    found = []
    for start, end in _blocks(length):
        rows, seen = end - start, k.shape[2] - length + end
        each = q[:, start:end].transpose(1, 2).reshape(many, groups, rows * share, size)
        mask = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(seen - rows)
        mask = mask.repeat_interleave(share, 0)
        out = F.scaled_dot_product_attention(each, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)
        found.append(out.view(many, groups, rows, share, size).transpose(1, 2))
    return torch.cat(found, 1)
