"""What a method must say to be trained: its modules, its no-grad passes, its loss, and its auxiliary steps.

Knows: the tensors a method sees (`Rows`, `Outputs`) and the passes it may ask for (`Context`).
Does not know: files, micro-batch sizes, the policy's optimizer, or any particular method.

A loss is the sum over its rows divided by totals of the whole batch (`rows.total`), so that micro-batches add up to the
same number however the batch is split. Metrics of a loss add up in the same way. `docs/objectives.md` is the reference
for who writes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    epochs: int = 1  # policy updates of one step, on the same batch; `prepare` and `aux_steps` run once
    teacher: str | None = None  # for `Context.teacher`: a release id, or a folder (a Hugging Face model, a PEFT LoRA)


@dataclass(frozen=True, slots=True)
class Total:
    """Of the whole batch, not of one micro-batch."""

    samples: int
    tokens: int  # response tokens with mask 1


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch: B samples with T response tokens in all, sample after sample, each in its recorded order.

    `contexts` has K entries, the most contexts that any of the B samples has. Entry k holds the same T response tokens
    in the same order behind each sample's k-th context instead of its prompt; a sample with fewer contexts has its own
    prompt there, and `taught[k]` is 0 at its tokens and 1 at the others'.
    """

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
    groups: tuple[str | None, ...] = ()  # [B]: samples of one group are compared with each other
    contexts: tuple[Rows, ...] = ()  # [K]
    taught: tuple[Tensor, ...] = ()  # [K] of [T] float32
    legal: Tensor | None = None  # [T, V] bool: what the grammar allowed at each token; None: all of it everywhere
    extra: dict[str, Tensor] = field(default_factory=dict)  # what `prepare` leaves for `loss`, [T, …] each
    passes: dict[str, Outputs] = field(default_factory=dict)  # whole passes it leaves; each costs [T, d]


class Top(NamedTuple):
    """The K likeliest ids at each response token, and natural log-probs at the sampling temperature."""

    ids: Tensor  # [T, K] int64, likeliest first
    logprobs: Tensor  # [T, K] float32
    sampled: Tensor  # [T] float32: of the recorded token


@dataclass(frozen=True, slots=True)
class Outputs:
    """One forward at the positions that predict response tokens: differentiable for the working policy.

    Log-probs are natural, at the sampling temperature, and over the legal ids only where the rows know them. Each call
    is one product with the head, about a fifth of a forward for the tokens it concerns: ask once. Where `mask` is 0
    nothing is computed: a recorded token has its recorded log-prob there (so that ratios are 1), any other log(1 / V).
    """

    model: Llama
    hidden: Tensor  # [T, d] float32, after the final norm
    rows: Rows

    def logprobs(self) -> Tensor:
        """[T] float32: of the recorded tokens."""
        where = self._trained()
        found, _ = self._pick(where, self.rows.targets[:, None][where])
        return self.rows.logprobs.masked_scatter(where, found[:, 0]) if self._holes() else found[:, 0]

    def chosen(self, ids: Tensor) -> Tensor:
        """[T, K] float32: of other ids [T, K], such as those that another distribution holds likely."""
        where = self._trained()
        found, _ = self._pick(where, ids[where])
        return self._whole(found, where)

    def top(self, count: int) -> Top:
        """The `count` likeliest ids and the recorded token, from one product with the head."""
        where, rows = self._trained(), self.rows
        found, ids = self._pick(where, rows.targets[:, None][where], count)
        if not self._holes():
            return Top(ids, found[:, 1:], found[:, 0])
        whole = ids.new_zeros((len(where), count))
        whole[where] = ids
        sampled = rows.logprobs.masked_scatter(where, found[:, 0])
        return Top(whole, self._whole(found[:, 1:], where), sampled)

    def logits(self) -> Tensor:
        """[T, V] float32 at temperature 1, at every token, illegal ids -inf. Large: 200 kB a token with gradients, for
        losses over the whole vocabulary only. Divide by `rows.temperatures[:, None]` for the sampling temperature."""
        logits = self.model.logits(self.hidden)
        return logits if self.rows.legal is None else logits.masked_fill(~self.rows.legal, float("-inf"))

    def _holes(self) -> bool:
        return not bool(self.rows.mask.all())

    def _trained(self) -> Tensor:
        """[T] bool."""
        return self.rows.mask != 0

    def _pick(self, where: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor]:
        rows = self.rows
        hidden, heat, legal = self.hidden, rows.temperatures, rows.legal
        if self._holes():
            hidden, heat = hidden[where], heat[where]
            legal = None if legal is None else legal[where]
        return self.model.picked(hidden, ids, heat, top=top, legal=legal)

    def _whole(self, found: Tensor, where: Tensor) -> Tensor:
        """[n, K] of the trained tokens -> [T, K]."""
        if not self._holes():
            return found
        blank = found.new_full((len(where), found.shape[1]), -math.log(self.model.layout.vocab))
        return blank.index_put((where,), found)


@dataclass(frozen=True, slots=True)
class Common:
    """A loss that trainers elsewhere know by name: a sum over tokens, r = pi / q, with everything else in `weights`.

    cross_entropy: -w log pi. importance_sampling: -r w. ppo: -min(r w, clip(r) w), at most -`dual` w where w < 0.
    cispo: -sg(clip(r)) w log pi. clip(r) bounds r to [1 - low, 1 + high]. Equal to the objective's own `loss` and its
    gradient wherever |log r| is below 20.
    """

    name: str
    weights: Tensor  # [T] float32, 0 where nothing trains
    low: float = 0.0
    high: float = 0.0
    dual: float | None = None


class Context(Protocol):
    """What the trainer offers a method during one step."""

    model: Llama  # the frozen base
    modules: Mapping[str, nn.Module]
    updates: int  # steps the policy's optimizer has made before this one

    def base(self, rows: Rows) -> Outputs:
        """The frozen base on these rows (or on one of `rows.contexts`), without gradients."""

    def policy(self, rows: Rows) -> Outputs:
        """The working weights on them, without gradients: in `prepare` as before this step, in `aux_steps` after it."""

    def teacher(self, rows: Rows) -> Outputs:
        """The frozen weights that `Plan.teacher` names, without gradients. TeacherError when the plan names none, or
        they do not fit the base (its shape for a LoRA, its tokenizer and vocabulary for a whole model)."""

    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained, float32, by name: a LoRA's matrices or all weights. The live tensors, not for writing."""

    def with_parameters(self, rows: Rows, parameters: Mapping[str, Tensor]) -> Outputs:
        """A pass without gradients with these in the place of `parameters()`: see `shadow.Shadow`."""

    def update(self, name: str, losses: Iterable[Tensor]) -> float:
        """One AdamW step of a module on the sum of `losses` (each freed before the next is made). Returns the sum."""


class Objective(Protocol):
    """One may also have `common(rows) -> Common | None`, asked after `prepare`: its loss by a common name, if it has
    one. A trainer elsewhere is then asked for exactly that (`docs/trainers.md`)."""

    plan: Plan

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        """Fresh auxiliary modules and their learning rates (0: never by gradient). Checkpointed with every step."""

    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """No-grad passes over the whole batch; leaves tensors in `rows.extra`. Returns metrics."""

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's share of the loss (a scalar) and of the metrics."""

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Updates of the modules after the policy's own. Returns metrics."""
