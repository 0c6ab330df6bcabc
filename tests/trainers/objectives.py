"""Small objectives that use what the trainer offers, for its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reef.trainers.local.losses import jsd, seq_mean, tail, token_mean
from reef.trainers.local.objective import Context, Outputs, Plan, Rows
from reef.trainers.local.shadow import Shadow


class Imitate:
    """Cross-entropy of the recorded tokens: what demonstrations are for."""

    def __init__(self, *, learning_rate: float, rank: int = 2, alpha: float = 4.0, **_: Any) -> None:
        self.plan = Plan(learning_rate=learning_rate, rank=rank, alpha=alpha)

    def modules(self, model: Any) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        found = token_mean(-outputs.logprobs(), rows.mask, rows.total)
        return found, {"nll": float(found.detach())}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}


class Distil(Imitate):
    """Towards what a moving average of the policy, or a named teacher, says behind each context."""

    def __init__(self, *, learning_rate: float, rank: int = 2, teacher: str | None = None, **_: Any) -> None:
        self.plan = Plan(learning_rate=learning_rate, rank=rank, alpha=4.0, teacher=teacher)

    def modules(self, model: Any) -> Mapping[str, tuple[nn.Module, float]]:
        return {} if self.plan.teacher else {"shadow": (Shadow(model, self.plan, 0.25), 0.0)}

    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        for rows in batch:
            for number, other in enumerate(rows.contexts):
                if self.plan.teacher:
                    found = context.teacher(other)
                else:
                    shadow: Any = context.modules["shadow"]
                    found = context.with_parameters(other, shadow.tensors(context.parameters()))
                rows.passes[f"teacher{number}"] = found
            assert torch.equal(context.policy(rows).logprobs(), context.policy(rows).logprobs())
        return {"grouped": float(sum(group is not None for rows in batch for group in rows.groups))}

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        top = outputs.top(5)
        whole = outputs.hidden.sum() * 0.0 + seq_mean(-0.1 * top.sampled, rows.mask, rows.lengths, rows.total)
        for number, taught in enumerate(rows.taught):
            told = rows.passes[f"teacher{number}"].chosen(top.ids)
            whole = whole + token_mean(jsd(tail(top.logprobs), tail(told)), rows.mask * taught, rows.total)
        return whole, {}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        if not self.plan.teacher:
            shadow: Any = context.modules["shadow"]
            shadow.update(context.parameters())
        return {}
