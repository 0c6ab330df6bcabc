"""What a method must say to be trained: its modules, its no-grad passes, its loss, and its auxiliary steps.

Knows: the tensors a method sees (`Rows`, `Outputs`) and the passes it may ask for (`Context`).
Does not know: files, micro-batch sizes, the policy's optimizer, or any particular method.

A loss is the sum over its rows divided by totals of the whole batch (`rows.total`), so that micro-batches add up to the
same number however the batch is split. Metrics of a loss add up in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from reef.trainers.local.llama import Llama, Packed


@dataclass(frozen=True, slots=True)
class Plan:
    """How the policy itself is trained. `rank` 0 trains all weights; otherwise a LoRA on every linear."""

    learning_rate: float
    rank: int = 8
    alpha: float = 16.0
    seed: int = 0
    clip: float = 1.0  # largest L2 norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 3  # steps of rising rate, only where a released policy meets a fresh optimizer


@dataclass(frozen=True, slots=True)
class Total:
    """Of the whole batch, not of one micro-batch."""

    samples: int
    tokens: int  # response tokens with mask 1


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch: B samples with T response tokens in all, sample after sample, each in its recorded order."""

    packed: Packed
    predicts: Tensor  # [T] int64: which hidden state of `packed` predicts the token
    targets: Tensor  # [T] int64: the recorded token
    mask: Tensor  # [T] float32: 1 trained, 0 observation
    logprobs: Tensor  # [T] float32: as recorded when it was sampled
    temperatures: Tensor  # [T] float32
    lengths: tuple[int, ...]  # [B], sums to T
    rewards: tuple[float | None, ...]  # [B]
    lags: tuple[int, ...]  # [B]
    total: Total
    extra: dict[str, Tensor] = field(default_factory=dict)  # what `prepare` leaves for `loss`, [T] each


@dataclass(frozen=True, slots=True)
class Outputs:
    """One forward at the positions that predict response tokens: differentiable for the working policy."""

    model: Llama
    hidden: Tensor  # [T, d] float32, after the final norm
    rows: Rows

    def logprobs(self) -> Tensor:
        """[T] float32: natural log-probs of the recorded tokens at the sampling temperature."""
        return self.model.logprobs(self.hidden, self.rows.targets, self.rows.temperatures)

    def logits(self) -> Tensor:
        """[T, V] float32 at temperature 1, for losses over the whole vocabulary. Large: ask for it once, or not."""
        return self.model.logits(self.hidden)


class Context(Protocol):
    """What the trainer offers a method during one step."""

    model: Llama  # the frozen base
    modules: Mapping[str, nn.Module]
    updates: int  # steps the policy's optimizer has made before this one

    def base(self, rows: Rows) -> Outputs:
        """The frozen base on these rows, without gradients."""

    def update(self, name: str, losses: Iterable[Tensor]) -> float:
        """One AdamW step of a module on the sum of `losses` (each freed before the next is made). Returns the sum."""


class Objective(Protocol):
    plan: Plan

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        """Fresh auxiliary modules and their learning rates (0: never by gradient). Checkpointed with every step."""

    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """No-grad passes over the whole batch; leaves tensors in `rows.extra`. Returns metrics."""

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's share of the loss (a scalar) and of the metrics."""

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Updates of the modules after the policy's own. Returns metrics."""
