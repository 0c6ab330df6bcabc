"""Linears in float32 whose weights are kept in 16 bits: for processors without products in bfloat16.

Knows: FBGEMM's product of float32 rows with float16 weights, and when torch has it. Does not know: layers, releases.

- One token reads half the bytes of float32 weights and computes exactly with them. Measured on AVX2 against float32 in
  oneDNN: 2.4 times as fast with one row, 1.7 with 16, 1.1 with 128 (docs/engine-speed.md).
- bfloat16 weights stay what they are: float16 has three bits more. Only below 6e-5 are some rounded, by 3e-8 at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from reef.engines.local.model import linear, packs

_LARGEST = torch.finfo(torch.float16).max


def halves(group: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A function x [rows, in] -> x @ weight.T [rows, out] in float32 for a weight [out, in]: a `Pack`.

    In float32 all through where this torch lacks the product, or a weight is too large for 16 bits."""
    if not available() or not bool(weight.abs().max() <= _LARGEST):  # `not <=`: no number is too large as well
        return linear(weight.float(), packed=packs(torch.float32))
    ready = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)
    run = torch.ops.quantized.linear_dynamic_fp16.default

    def apply(x: Tensor) -> Tensor:
        found: Tensor = run(x, ready)
        return found

    return apply


@cache
def available() -> bool:
    """Whether this torch multiplies float32 rows with float16 weights, which x86 builds with FBGEMM do."""
    try:
        ready = torch.ops.quantized.linear_prepack_fp16(torch.full((8, 16), 0.5), None)
        found = torch.ops.quantized.linear_dynamic_fp16(torch.full((2, 16), 1 + 2.0**-12), ready)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found == 8 + 2.0**-9).all())  # the rows were not rounded to 16 bits
