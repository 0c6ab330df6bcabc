"""Log-probs of some tokens from hidden states: the head's product, log-softmax and gather in one.

Knows: [n, V] tensors and how to hold few rows of one at a time. Does not know: which tokens, or losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 128
"""Rows of logits at a time: 25 MB in float32 on the embedded model, most of which a large cache holds."""


def sampled(hidden: Tensor, head: Tensor, ids: Tensor, temperatures: Tensor, legal: Tensor | None) -> Tensor:
    """Log-probs [n] in float32 of `ids` [n] after hidden states [n, d], for a head [V, d] that does not learn.

    The gradient is made in the same pass, while a row's probabilities are at hand; no logits are kept.
    """
    found: Tensor = _Sampled.apply(hidden, head, ids, temperatures, legal, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return found


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, temperatures: Tensor, legal: Tensor | None, learn: bool
    ) -> Tensor:
        learn = learn and ctx.needs_input_grad[0]
        found = hidden.new_empty(len(ids), dtype=torch.float32)
        slope = (
            torch.empty_like(hidden) if learn else None
        )  # of the log-prob, by the hidden state, times the temperature
        warm = bool((temperatures != 1).any())
        for start in range(0, len(ids), ROWS):
            rows = slice(start, start + ROWS)
            logits, wanted = F.linear(hidden[rows], head), ids[rows, None]
            if legal is not None:
                logits.masked_fill_(~legal[rows], float("-inf"))
            if warm:
                logits = logits.float().div_(temperatures[rows, None])
            logs = torch.log_softmax(logits, -1, dtype=torch.float32)
            found[rows] = logs.gather(1, wanted)[:, 0]
            if slope is not None:
                chance = logs.exp_().neg_()
                chance.scatter_add_(1, wanted, torch.ones_like(wanted, dtype=torch.float32))
                slope[rows] = chance.to(head.dtype) @ head
        if slope is not None:
            ctx.save_for_backward(slope, temperatures)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slope, temperatures = ctx.saved_tensors
        return (slope * (gradient / temperatures)[:, None]).to(slope.dtype), None, None, None, None, None


def picked(
    hidden: Tensor, head: Tensor, ids: Tensor, temperatures: Tensor, top: int, legal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [n, k + top] in float32 of `ids` [n, k] and of the `top` likeliest after hidden states [n, d], for a
    head [V, d] that does not learn; and the likeliest ids [n, top].

    Keeps the logits once, in the head's type, where autograd would keep three float32 copies of [n, V].
    """
    found: tuple[Tensor, Tensor] = _Picked.apply(hidden, head, ids, temperatures, top, legal)  # type: ignore[no-untyped-call]
    return found


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, temperatures: Tensor, top: int, legal: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, head)
        if legal is not None:
            logits.masked_fill_(~legal, float("-inf"))
        best = logits.topk(top).indices if top else ids[:, :0]
        ids = torch.cat((ids, best), 1)
        scaled = _scaled(logits, temperatures)
        whole = scaled.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, head, ids, temperatures, whole)
        ctx.mark_non_differentiable(best)
        return scaled.gather(1, ids) - whole, best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, head, ids, temperatures, whole = ctx.saved_tensors
        each = gradient / temperatures[:, None]
        found = _scaled(logits, temperatures)
        found.sub_(whole).exp_().mul_(-each.sum(-1, keepdim=True))
        found.scatter_add_(1, ids, each)
        return found.to(head.dtype) @ head, None, None, None, None, None


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """A float32 copy of [n, V] logits, each row at its temperature."""
    found = logits.to(torch.float32, copy=True)
    return found.div_(temperatures[:, None]) if bool((temperatures != 1).any()) else found
