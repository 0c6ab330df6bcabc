"""Pieces of a layer whose backward passes are written by hand: what they keep and compute is what a step must.

Knows: tensors. Each piece equals the plain torch expression in its docstring, value and gradients, within rounding.
Does not know: layers, names, losses. (Attention is in `attention`, the head in `head`.)

- Weights that do not learn cost no gradient. What does learn may be float32: its gradient comes in its own type.
- Memory-bound work is done in as few passes as torch has operations for; on a CPU it is a third of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reef.engines.local.model import packs

_ONEDNN = packs(torch.float32)


def norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """`F.rms_norm(x, …, weight.float(), epsilon).to(dtype)` of x [N, d] float32."""
    found: Tensor = _Norm.apply(x, weight, epsilon, dtype)  # type: ignore[no-untyped-call]
    return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        found: Tensor = (x * scale).mul_(weight).to(dtype)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        learnt = None
        if ctx.needs_input_grad[1]:
            learnt = (gradient * (x * scale)).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, learnt, None, None
        found = gradient.float() * weight
        along = torch.linalg.vecdot(found, x).unsqueeze(-1).mul_(scale).mul_(scale).div_(x.shape[-1])
        return found.addcmul_(x, along, value=-1).mul_(scale), learnt, None, None


def joined(x: Tensor, more: Tensor) -> Tensor:
    """`x + more` of a float32 x and a `more` of another type, without a float32 copy of it beside the sum."""
    found: Tensor = _Joined.apply(x, more)  # type: ignore[no-untyped-call]
    return found


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor) -> Tensor:
        ctx.dtype = more.dtype
        return more.to(x.dtype, copy=True).add_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.to(ctx.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`F.silu(gate) * up`; only its inputs are kept."""
    found: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        active = F.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), active


Pair = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r] of a LoRA."""


def project(x: Tensor, weights: Sequence[Tensor], pairs: Sequence[Pair] = (), scale: float = 1.0) -> tuple[Tensor, ...]:
    """`x @ W.T + scale * (x @ A.T) @ B.T` for each weight W [out, in], and its pair when there are any, all of one x
    [N, in]. Computed in the type of x, to which weights and pairs are rounded."""
    flat = [tensor for pair in pairs for tensor in pair]
    found: tuple[Tensor, ...] = _Project.apply(x, scale, len(weights), *weights, *flat)  # type: ignore[no-untyped-call]
    return found


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`. In float32 oneDNN's product is a tenth faster than the one that `F.linear` takes on a CPU."""
    if _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu":
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
        return found
    return F.linear(x, weight)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        weights = [weight.to(x.dtype) for weight in given[:count]]
        ctx.scale, ctx.count, ctx.given = scale, count, [tensor.dtype for tensor in given]
        found = [_times(x, weight) for weight in weights]
        if len(given) == count:
            ctx.save_for_backward(x, *weights)
            return tuple(found)
        downs, ups = torch.cat(given[count::2]).to(x.dtype), [up.to(x.dtype) for up in given[count + 1 :: 2]]
        low = F.linear(x, downs)
        for one, up, narrow in zip(found, ups, low.chunk(count, 1), strict=True):
            one.addmm_(narrow, up.t(), alpha=scale)
        ctx.save_for_backward(x, *weights, downs, low, *ups)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        count, scale = ctx.count, ctx.scale
        weights, rest = saved[:count], saved[count:]
        learnt: list[Tensor | None] = [
            (gradient.t() @ x).to(dtype) if wanted else None
            for gradient, dtype, wanted in zip(gradients, ctx.given[:count], ctx.needs_input_grad[3:], strict=False)
        ]
        back = None
        if ctx.needs_input_grad[0]:
            back = _times(gradients[0], weights[0].t())
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                back += _times(gradient, weight.t())
        if not rest:
            return back, None, None, *learnt
        downs, low, *ups = rest
        narrow = torch.cat([gradient @ up for gradient, up in zip(gradients, ups, strict=True)], 1)
        if scale != 1:
            narrow.mul_(scale)
        if back is not None:
            back.addmm_(narrow, downs)
        if any(ctx.needs_input_grad[3 + count :]):
            down = (narrow.t() @ x).float().chunk(count, 0)
            for number, gradient in enumerate(gradients):
                up = (gradient.t() @ low.chunk(count, 1)[number]).float().mul_(scale)
                learnt += [down[number], up]
        else:
            learnt += [None] * (2 * count)
        return back, None, None, *learnt
