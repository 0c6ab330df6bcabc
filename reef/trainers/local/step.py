"""One optimizer step of a line, from an order to a durable step folder.

Knows: where a line's weights, optimizer and modules come from, the order of an update, and what is written.
Does not know: sockets, queues, what a method's loss means, whether the result will be served.

- The result does not depend on how the batch is split into micro-batches.
- Of a line nothing is kept between steps: each step reads its parent's verified files, so a restart is no special
  case. What stays in memory (the base model, its tokenizer, teachers) is never trained: see `shelf`.
- A loss or gradient that is not finite is a TrainError and nothing is written.
- Full weights have a float32 master beside the optimizer; the part holds them rounded, as they are served. A line goes
  on from the master of the release it starts at, or, where that is gone, from what was served.
- Weights of another base model are a DigestError, here and in the engine: no batch is at fault.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reef.core.disk import sha256
from reef.core.errors import MissingError, TeacherError, TrainError
from reef.core.load import load
from reef.core.wire import Step, Stepped
from reef.engines import Resolver, WeightFiles
from reef.engines.local.layout import LAYER_LINEARS
from reef.trainers import Report, folder
from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Objective, Outputs, Rows
from reef.trainers.local.rows import MICRO_TOKENS, build
from reef.trainers.local.shelf import Shelf, Teacher, same_base

BETAS = (0.5, 0.9)
"""Of the modules' optimizers. With few updates a step, the usual momentum leaves a critic behind the policy it judges
(measured: a critic loss of 0.47 at a mean score of 0.91, whose variance is 0.09), and every success looks like news."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Working:
    """A line's working copy in memory: the policy, its optimizer, the modules and theirs."""

    model: Llama
    lora: Lora | None
    policy: Adam
    modules: dict[str, nn.Module]
    optimizers: dict[str, Adam]
    base: Mapping[str, Any]  # name and digest of the base model
    frozen: Llama  # the base, never trained

    @property
    def updates(self) -> int:
        return self.policy.count

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.policy.parameters

    def outputs(self, rows: Rows) -> Outputs:
        """One forward of the working copy at the positions that predict response tokens."""
        return forward(self.model, self.lora, rows)


def forward(model: Llama, lora: Lora | None, rows: Rows) -> Outputs:
    return Outputs(model, model.hidden(rows.packed, lora, rows.predicts), rows)


class Passes:
    """The `objective.Context` of one step. `teacher` finds the plan's teacher when it is first asked for."""

    def __init__(self, working: Working, teacher: Callable[[], Teacher]) -> None:
        self.model = working.frozen
        self.modules: Mapping[str, nn.Module] = working.modules
        self.updates = working.updates
        self._working = working
        self._teacher = teacher

    @torch.no_grad()
    def base(self, rows: Rows) -> Outputs:
        return forward(self.model, None, rows)

    @torch.no_grad()
    def policy(self, rows: Rows) -> Outputs:
        return self._working.outputs(rows)

    @torch.no_grad()
    def teacher(self, rows: Rows) -> Outputs:
        found = self._teacher()
        return forward(found.model, found.lora, rows)

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._working.parameters.items()}

    @torch.no_grad()
    def with_parameters(self, rows: Rows, parameters: Mapping[str, Tensor]) -> Outputs:
        working = self._working
        if set(parameters) != set(working.parameters):
            raise TrainError("these are not the parameters that are trained")
        if working.lora is not None:
            lora = Lora.of(self.model, parameters, working.lora.rank, working.lora.alpha)
            return forward(self.model, lora, rows)
        return forward(Llama(self.model.layout, dict(parameters), self.model.compute), None, rows)

    @torch.enable_grad()
    def update(self, name: str, losses: Iterable[Tensor]) -> float:
        whole = 0.0
        for loss in losses:
            whole += _finite(loss, name)
            loss.backward()  # type: ignore[no-untyped-call]
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
    shelf = shelf or Shelf(model)
    objective: Objective = load(order.objective, what="objective")(**order.options)
    if objective.plan.teacher is not None:
        _teacher(shelf, objective, resolve, digest)  # what nobody can learn from is found before the work begins
    working = _open(model, training, order, resolve, objective, digest)
    left_out: list[str] = []
    batch = build(order.data, shelf.known(), tokens=micro_tokens, left_out=left_out)
    context = Passes(working, lambda: _teacher(shelf, objective, resolve, digest))

    report("prepare", 0, len(batch))
    metrics = {"left_out": float(len(left_out))} | dict(objective.prepare(context, batch))
    epochs, norms = objective.plan.epochs, []
    for epoch in range(epochs):
        loss, shares = 0.0, dict[str, float]()
        for done_rows, rows in enumerate(batch):
            report("train", epoch * len(batch) + done_rows, epochs * len(batch))
            share, found = objective.loss(working.outputs(rows), rows)
            loss += _finite(share, "policy")
            share.backward()  # type: ignore[no-untyped-call]
            for name, value in found.items():
                shares[name] = shares.get(name, 0.0) + value
        norms.append(working.policy.step("policy"))
        metrics |= shares | {"loss": loss, "grad_norm": max(norms)}
        if epoch == 0 and epochs > 1:
            metrics["loss_first"] = loss
    report("modules", 0, 1)
    metrics |= objective.aux_steps(context, batch)

    for rows in batch:  # a pass holds its rows and the rows hold the pass: without this both wait for the collector
        rows.extra.clear()
        rows.passes.clear()

    report("write", 0, 1)
    kind, files = _files(working)
    metrics["train_seconds"] = time.monotonic() - began
    return folder.write(training, order, kind, files, metrics)


def _open(
    model: Llama, training: Path, order: Step, resolve: Resolver, objective: Objective, digest: str | None
) -> Working:
    """The working copy at `order.step - 1`: from the line's own last step, else from the release it starts at."""
    if order.step > order.base_step + 1:
        place = folder.path(training, order.scenario, order.part, order.line, order.step - 1)
        state = folder.read(place)
        if state is None:
            raise TrainError(f"line {order.line} has no step {order.step - 1} to continue from; start a new line")
        folder.verify(place, state)
        if not state.files:
            raise TrainError(f"step {order.step - 1} of line {order.line} was gone beyond already; start a new line")
        kind, files, meta = folder.part_files(place, check=False)
        same_base(f"step {order.step - 1} of line {order.line}", meta, digest)
        working = _working(model, objective, WeightFiles(kind, files, meta))
        _restore(working, place)
        return working
    try:
        source = resolve(order.base_release)
    except MissingError:
        raise TrainError(f"release {order.base_release} is not in the chain; start the line from one that is") from None
    same_base(f"release {order.base_release}", source.meta, digest)
    working = _working(model, objective, source)
    if kept := _kept(training, order, source):
        _restore(working, kept)
    elif order.base_step > 0:
        working.policy.warmup = objective.plan.warmup
    return working


def _kept(training: Path, order: Step, source: WeightFiles) -> Path | None:
    """The training folder that a release came from, if its optimizer state is still there and whole. One that is
    damaged is as good as gone: the weights are the release's own."""
    name = "adapter_model.safetensors" if source.kind == "lora" else "model.safetensors"
    if source.kind == "base" or name not in source.files:
        return None
    digest = sha256(source.files[name])
    found = folder.find(training, order.scenario, order.part, order.base_step, name, digest)
    if found is None or (state := folder.read(found)) is None:
        return None
    try:
        folder.verify(found, state)
    except TrainError as error:
        log.warning("a fresh optimizer for line %s: %s", order.line, error.message)
        return None
    return found


def _teacher(shelf: Shelf, objective: Objective, resolve: Resolver, digest: str | None) -> Teacher:
    name = objective.plan.teacher
    if name is None:
        raise TeacherError("the method wants a teacher and none is named; set the recipe's `teacher`")
    return shelf.teacher(name, resolve, digest)


def _working(model: Llama, objective: Objective, source: WeightFiles) -> Working:
    """Policy from a release's or step's files; fresh optimizers and modules."""
    plan = objective.plan
    base = dict(source.meta.get("base", {}))  # type: ignore[call-overload]
    policy, lora = model, None
    if plan.rank == 0:
        policy = Llama(model.layout, _full(model, source), model.compute)
        parameters = policy.weights
    elif source.kind == "base":
        lora = Lora.fresh(model, plan.rank, plan.alpha, plan.seed)
        parameters = lora.parameters()
    elif source.kind == "lora":
        rank, alpha = source.meta.get("rank"), source.meta.get("alpha")
        if (rank, alpha) != (plan.rank, plan.alpha):
            raise TrainError(
                f"the weights are a LoRA of rank {rank} and alpha {alpha}, the recipe says {plan.rank} and "
                f"{plan.alpha}; set rank and alpha back, or start a new scenario"
            )
        lora = Lora.load(model, load_file(source.files["adapter_model.safetensors"]), plan.rank, plan.alpha)
        parameters = lora.parameters()
    else:
        raise TrainError(
            "the weights are full ones, the recipe trains a LoRA, which goes on from the base "
            "or from a LoRA only; set train: full, or roll back to the base"
        )
    made = dict(objective.modules(model))
    return Working(
        model=policy,
        lora=lora,
        policy=Adam(parameters, plan.learning_rate, clip=plan.clip, betas=plan.betas, weight_decay=plan.weight_decay),
        modules={name: module for name, (module, _) in made.items()},
        optimizers={
            name: Adam({key: one for key, one in module.named_parameters() if one.requires_grad}, rate, betas=BETAS)
            for name, (module, rate) in made.items()
            if rate > 0
        },
        base=base,
        frozen=model,
    )


def _full(model: Llama, source: WeightFiles) -> dict[str, Tensor]:
    """Float32 master weights of every parameter."""
    if source.kind == "lora":
        raise TrainError(
            "the weights are a LoRA, the recipe trains full weights, which go on from the base "
            "or from full weights only; set train: lora, or roll back to the base"
        )
    weights: Mapping[str, Tensor] = model.weights
    if source.kind == "full":
        weights = load_file(source.files["model.safetensors"])
        if set(weights) != set(model.weights):
            raise TrainError("the full weights do not fit the base model; were they made for another one?")
    return {name: tensor.detach().float().clone().requires_grad_() for name, tensor in weights.items()}


def _restore(working: Working, place: Path) -> None:
    """Optimizer and modules as a step left them. The caller verified the files."""
    kept = load_file(place / "optimizer.safetensors")
    if working.lora is None:
        with torch.no_grad():  # the served file is rounded; the master weights live beside the optimizer
            for name, tensor in working.model.weights.items():
                tensor.copy_(kept.get(f"master.{name}", tensor))
    working.policy.restore(_under("policy.", kept))
    for name, optimizer in working.optimizers.items():
        optimizer.restore(_under(f"{name}.", kept))
    modules = load_file(place / "modules.safetensors")
    for name, module in working.modules.items():
        try:
            module.load_state_dict(_under(f"{name}.", modules))
        except RuntimeError as error:
            raise TrainError(f"the kept {name} does not fit the recipe's ({error}); start a new line") from None


def _files(working: Working) -> tuple[str, dict[str, folder.Content]]:
    """A step's files: the part (weights), then what only training needs."""
    optimizer = {f"policy.{key}": tensor for key, tensor in working.policy.state().items()}
    for name, adam in working.optimizers.items():
        optimizer |= {f"{name}.{key}": tensor for key, tensor in adam.state().items()}
    files: dict[str, folder.Content] = {}
    lora = working.lora
    if lora is None:
        weights = working.model.weights
        optimizer |= {f"master.{name}": tensor for name, tensor in weights.items()}
        files["model.safetensors"] = _saver({name: one.to(working.model.compute) for name, one in weights.items()})
        meta: dict[str, Any] = {"base": dict(working.base), "kind": "full", "rank": None, "alpha": None}
    else:
        files["adapter_model.safetensors"] = _saver(lora.parameters())
        files["adapter_config.json"] = _json(peft_config(lora, working.base))
        meta = {"base": dict(working.base), "kind": "lora", "rank": lora.rank, "alpha": lora.alpha}
    modules = {
        f"{name}.{key}": tensor
        for name, module in working.modules.items()
        for key, tensor in module.state_dict().items()
    }
    files |= {
        "weights.json": _json(meta),
        "optimizer.safetensors": _saver(optimizer),
        "modules.safetensors": _saver(modules),
    }
    return meta["kind"], files


def peft_config(lora: Lora, base: Mapping[str, Any]) -> dict[str, Any]:
    """The `adapter_config.json` with which PEFT reads the same LoRA."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.get("name"),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(LAYER_LINEARS),
    }


def _saver(tensors: Mapping[str, Tensor]) -> Callable[[Path], None]:
    return lambda file: save_file({name: one.detach().contiguous() for name, one in tensors.items()}, file)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _finite(loss: Tensor, what: str) -> float:
    value = float(loss.detach())
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainError(f"the loss of the {what} is {value}; nothing was written")
    return value
