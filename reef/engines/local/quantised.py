"""Linears whose weights are kept in 4 or 8 bits, for an engine that only serves: few rows are computed sooner.

Knows: groups of weights with a scale and a zero each, torch's 4-bit kernel, and up to how many rows it is the faster.
Does not know: layers, releases, or what is computed.

- To compute one token is to read every weight once: a quarter of the bytes is most of what is won. With more rows the
  unpacking costs more than the reading, so those are computed in 16 bits, with the very values that the bits stand
  for: however many rows there are, it is one model. (The kernel rounds its rows to bfloat16, whatever they are.)
- Groups are 32 inputs of an output, as in the 4-bit files of llama.cpp (Q4_0, Q4_1): what came from such a file stays
  as it was. 8 bits are two times 4, added up. The head always has 8: a vocabulary bears less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reef.core.errors import EngineError
from reef.engines.local.halves import halves
from reef.engines.local.model import linear, packs

BITS = {"int4": 4, "int8": 8}
GROUP = 32
ROWS = {torch.bfloat16: {4: 6, 8: 2}, torch.float32: {4: 4, 8: 0}}
"""The most rows for which the kernel is faster, by bits: than bfloat16 on AVX-512, than `halves` on AVX2."""
_TALL = 16  # the kernel takes outputs by so many
_TILES = 2  # of its layout; ignored on the CPU


def packer(name: str, dtype: torch.dtype) -> Callable[[str, Tensor], Callable[[Tensor], Tensor]]:
    """How `load_weights` keeps a linear in the mode called `name`, for rows of a dtype."""

    def pack(group: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
        bits = 8 if group == "head" else BITS[name]
        levels, scale, zero = quantise(weight, bits)
        few, most, whole = kernel(levels, scale, zero, bits), ROWS[dtype][bits], values(levels, scale, zero, bits)
        many = halves(group, whole) if dtype == torch.float32 else linear(whole.to(dtype), packed=packs(dtype))
        return lambda x: few(x) if x.shape[0] <= most else many(x)

    return pack


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [out, in] of 0 to 2**bits - 1, and scale and zero [out, in / GROUP]: a weight is
    zero + (level - 2**(bits - 1)) * scale. EngineError for a width that is no multiple of GROUP."""
    tall, wide = weight.shape
    if wide % GROUP:
        raise EngineError(
            f"a linear of this model has {wide} inputs, and weights are quantised in groups of {GROUP}; leave out the "
            "engine's option `quantised`"
        )
    groups, half = weight.float().view(tall, -1, GROUP), 1 << (bits - 1)
    low, high = groups.amin(-1), groups.amax(-1)
    # Rounded as the kernel reads them, before the levels are chosen: these make up for most of it.
    scale = ((high - low) / (2 * half - 1)).clamp_(min=torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    zero = (low + half * scale).bfloat16().float()
    levels = ((groups - zero[..., None]) / scale[..., None]).round_().add_(half).clamp_(0, 2 * half - 1)
    return levels.view(tall, wide).to(torch.int32), scale, zero


def values(levels: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """What the levels stand for: [out, in] in float32."""
    groups = levels.view(*scale.shape, GROUP) - (1 << (bits - 1))
    return (groups * scale[..., None] + zero[..., None]).view(levels.shape)


def kernel(levels: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Callable[[Tensor], Tensor]:
    """A function x [rows, in] -> x @ weight.T [rows, out], computed in bfloat16, in the dtype of x."""
    if bits == 4:
        few = _nibbles(levels, scale, zero)
        return lambda x: few(x.bfloat16()).to(x.dtype)
    high = _nibbles(levels >> 4, scale * 16, zero)
    low = _nibbles(levels & 15, scale, scale * 8)

    def apply(x: Tensor) -> Tensor:
        rounded = x.bfloat16()
        return high(rounded).add_(low(rounded)).to(x.dtype)

    return apply


def _nibbles(levels: Tensor, scale: Tensor, zero: Tensor) -> Callable[[Tensor], Tensor]:
    tall = levels.shape[0]
    if extra := -tall % _TALL:
        levels, scale, zero = (torch.nn.functional.pad(each, (0, 0, 0, extra)) for each in (levels, scale, zero))
    ready = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.contiguous(), _TILES)
    both = torch.stack((scale, zero), -1).transpose(0, 1).contiguous().bfloat16()  # [groups, out, 2]
    run = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    if not extra:
        return lambda x: run(x, ready, GROUP, both)
    return lambda x: run(x, ready, GROUP, both)[:, :tall]
