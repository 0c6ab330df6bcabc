"""One optimizer step of a line, from an order to a durable step folder.

Knows: the order of an update, and that several processes may make one together (`Team`).
Does not know: sockets, queues, what a method's loss means, where files are, whether the result will be served.

- The result does not depend on how the batch is split into micro-batches, nor on how many processes share them out.
- Of a line nothing is kept between steps: each step reads its parent's verified files, so a restart is no special
  case. What stays in memory (the base model, its tokenizer, teachers) is never trained: see `shelf`.
- A loss or gradient that is not finite is a TrainError and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from reef.core.errors import TeacherError, TrainError
from reef.core.load import load
from reef.core.wire import Step, Stepped
from reef.engines import Resolver
from reef.trainers import Report, folder, origin
from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora, pack
from reef.trainers.local.objective import Context, Objective, Outputs, Rows
from reef.trainers.local.rows import MICRO_TOKENS, build
from reef.trainers.local.shelf import Shelf, Teacher
from reef.trainers.local.working import Holder, Working, files, open_working


class Team(Holder, Protocol):
    """The processes that make a step together. Each has the whole batch and calls these at the same places."""

    def passes(self, working: Working, teacher: Callable[[], Teacher], model: Llama, batch: Sequence[Rows]) -> Context:
        """What an objective may ask for in this step. `model` is the base."""

    def settle(self) -> None:
        """`prepare` is over: every pass it asked for is made."""

    def rounds(self, batch: Sequence[Rows]) -> Sequence[Rows | None]:
        """What this process trains on, in its order; None where it only keeps step with the others."""

    def total(self, shares: Mapping[str, float]) -> dict[str, float]:
        """The sums over all processes."""


class Alone:
    """One process: nothing to share out, and nothing to add up."""

    device = torch.device("cpu")

    def place(self, model: Llama, *, learns: bool = False) -> Llama:
        if not learns:
            return model
        masters = {name: one.detach().float().clone().requires_grad_() for name, one in model.weights.items()}
        return Llama(model.layout, masters, model.compute)

    def adam(self, parameters: Mapping[str, Tensor], rate: float, **options: Any) -> Adam:
        return Adam(parameters, rate, **options)

    def passes(self, working: Working, teacher: Callable[[], Teacher], model: Llama, batch: Sequence[Rows]) -> Context:
        return Passes(working, teacher, model, self)

    def settle(self) -> None:
        pass

    def rounds(self, batch: Sequence[Rows]) -> Sequence[Rows | None]:
        return batch

    def total(self, shares: Mapping[str, float]) -> dict[str, float]:
        return dict(shares)


def forward(model: Llama, lora: Lora | None, rows: Rows) -> Outputs:
    """One forward at the positions that predict response tokens."""
    return Outputs(model, model.hidden(rows.packed, lora, rows.predicts), rows)


class Passes:
    """The `objective.Context` of one step. `teacher` finds the plan's teacher when it is first asked for."""

    def __init__(self, working: Working, teacher: Callable[[], Teacher], model: Llama, team: Team) -> None:
        self.model = model
        self.modules: Mapping[str, nn.Module] = working.modules
        self.updates = working.updates
        self._working = working
        self._teacher = teacher
        self._team = team

    @torch.no_grad()
    def base(self, rows: Rows) -> Outputs:
        return forward(self._working.frozen, None, rows)

    @torch.no_grad()
    def policy(self, rows: Rows) -> Outputs:
        return forward(self._working.model, self._working.lora, rows)

    @torch.no_grad()
    def teacher(self, rows: Rows) -> Outputs:
        found = self._teacher()
        return forward(found.model, found.lora, rows)

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._working.parameters.items()}

    @torch.no_grad()
    def with_parameters(self, rows: Rows, parameters: Mapping[str, Tensor]) -> Outputs:
        return forward(*self.made_of(parameters), rows)

    def made_of(self, parameters: Mapping[str, Tensor]) -> tuple[Llama, Lora | None]:
        """A model with these in the place of what is trained."""
        working = self._working
        if set(parameters) != set(working.parameters):
            raise TrainError("these are not the parameters that are trained")
        if working.lora is not None:
            return working.frozen, Lora.of(self.model, parameters, working.lora.rank, working.lora.alpha)
        return Llama(self.model.layout, dict(parameters), self.model.compute), None

    @torch.enable_grad()
    def update(self, name: str, losses: Iterable[Tensor]) -> float:
        whole = 0.0
        for loss in losses:
            whole += float(loss.detach())
            loss.backward()  # type: ignore[no-untyped-call]
        whole = _finite(self._team.total({name: whole})[name], name)
        self._working.optimizers[name].step(name)
        return whole


def advance(
    model: Llama,
    training: Path,
    order: Step,
    resolve: Resolver,
    *,
    report: Report = lambda stage, done, total: None,
    micro_tokens: int = MICRO_TOKENS,
    digest: str | None = None,
    shelf: Shelf | None = None,
) -> Stepped:
    """Make the step an order asks for, or answer it from disk. `model` is the base, unchanged afterwards, and `digest`
    the sha256 of its weights: what was made for another base is refused. `shelf` is what stays between steps."""
    if (done := folder.answered(training, order)) is not None:
        return done
    began = time.monotonic()
    report("open", 0, 1)
    kept = shelf or Shelf(model)
    objective: Objective = load(order.objective, what="objective")(**order.options)

    def teacher() -> Teacher:
        return kept.teacher(named(objective), resolve, digest)

    if objective.plan.teacher is not None:
        teacher()  # what nobody can learn from is found before the work begins
    team = Alone()
    working = open_working(model, objective, origin.find(training, order, resolve, digest).own(), team)
    left_out: list[str] = []
    batch = build(order.data, kept.known(), tokens=micro_tokens, left_out=left_out)
    metrics = {"left_out": float(len(left_out))} | learn(working, objective, batch, teacher, model, team, report)
    report("write", 0, 1)
    kind, contents = files(working)
    metrics["train_seconds"] = time.monotonic() - began
    return folder.write(training, order, kind, contents, metrics)


def named(objective: Objective) -> str:
    """The teacher that the plan names."""
    if objective.plan.teacher is None:
        raise TeacherError("the method wants a teacher and none is named; set the recipe's `teacher`")
    return objective.plan.teacher


def learn(
    working: Working,
    objective: Objective,
    batch: Sequence[Rows],
    teacher: Callable[[], Teacher],
    model: Llama,
    team: Team,
    report: Report,
) -> dict[str, float]:
    """The updates of one step, in memory; the metrics. `prepare` sees the whole batch, also where a team trains on it
    in shares; `aux_steps` sees this process's share, and what it gives to `update` is added up."""
    context = team.passes(working, teacher, model, batch)
    report("prepare", 0, len(batch))
    metrics = dict(objective.prepare(context, batch))
    team.settle()
    rounds = team.rounds(batch)
    epochs, norms = objective.plan.epochs, []
    for epoch in range(epochs):
        loss, shares = 0.0, dict[str, float]()
        for number, rows in enumerate(rounds):
            report("train", epoch * len(rounds) + number, epochs * len(rounds))
            if rows is None:
                _idle(working)
                continue
            share, found = objective.loss(forward(working.model, working.lora, rows), rows)
            loss += float(share.detach())
            share.backward()  # type: ignore[no-untyped-call]
            for name, value in found.items():
                shares[name] = shares.get(name, 0.0) + value
        added = team.total(shares | {"loss": loss})
        _finite(added["loss"], "policy")
        norms.append(working.policy.step("policy"))
        metrics |= added | {"grad_norm": max(norms)}
        if epoch == 0 and epochs > 1:
            metrics["loss_first"] = added["loss"]
    report("modules", 0, 1)
    metrics |= objective.aux_steps(context, [rows for rows in rounds if rows is not None])

    for rows in batch:  # a pass holds its rows and the rows hold the pass: without this both wait for the collector
        rows.extra.clear()
        rows.passes.clear()
    return metrics


def _idle(working: Working) -> None:
    """A forward and a backward of nothing."""
    hidden = working.model.hidden(pack([[0]]), working.lora)
    (hidden.sum() * 0.0).backward()  # type: ignore[no-untyped-call]


def _finite(value: float, what: str) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainError(f"the loss of the {what} is {value}; nothing was written")
    return value
