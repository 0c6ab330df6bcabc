"""Steps by the Tinker service: open the line's remote state, send the batch, move the optimizer, fetch the LoRA.

Knows: the order of a step and which remote state it starts from. Does not know: how a call fails (`service`), what a
method's loss means.

- Every step starts from the state that the step before it saved. What the service did for a step that never became
  durable here is abandoned: nothing is trained twice, whenever either side dies.
- A failure that may pass makes the step anew from that state; a gradient that may or may not have arrived is not used.
- A loss with a common name (`objective.Common`) is asked for by it: one pass. Any other is computed here from log-probs
  (`forward_backward_custom`): a forward pass more.
- Unverified against the service itself, and says so when it begins.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reef.core.errors import TeacherError, TrainError, UpstreamError
from reef.core.wire import Datum, Step, Stepped
from reef.trainers import Ground, Report, folder
from reef.trainers.away import (
    REMOTE,
    Base,
    Passes,
    check_lora,
    examine,
    held,
    lora_files,
    objective_of,
    origin,
    rescale,
    sequences,
    told,
)
from reef.trainers.local.adam import EPSILON
from reef.trainers.local.objective import Common, Objective, Plan, Rows
from reef.trainers.tinker import Options
from reef.trainers.tinker.service import Service, Transient

NAME = "tinker"
CONFIGS: Mapping[str, Callable[[Common], dict[str, float] | None]] = {
    "cross_entropy": lambda loss: None,
    "importance_sampling": lambda loss: None,
    "ppo": lambda loss: {"clip_low_threshold": 1 - loss.low, "clip_high_threshold": 1 + loss.high},
    "cispo": lambda loss: {"clip_low_threshold": 1 - loss.low, "clip_high_threshold": 1 + loss.high},
}
"""The service's losses that are ours, with their configuration."""
EXPORTED = 3600
"""Seconds that the service keeps what was exported to be fetched: the least it takes."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A training client, and the saved state it is exactly at (None: at something else by now)."""

    client: Any
    state: str | None


class TinkerWork:
    def __init__(self, ground: Ground, options: Options) -> None:
        log.warning("the tinker backend is unverified: no step of it was ever made by the service itself")
        self._ground = ground
        self._options = options
        self._base = Base.read(ground.folder)
        self._service = Service(options)
        self._live: _Live | None = None

    def close(self) -> None:
        self._live = None

    def advance(self, order: Step, report: Report) -> Stepped:
        """ConfigError for an objective that needs more than log-probs; UpstreamError while the service is away;
        TrainError when this step cannot be made."""
        if (done := folder.answered(self._ground.training, order)) is not None:
            return done
        report("open", 0, 1)
        left_out: list[str] = []
        batch = self._base.batch(_plain(order.data, left_out), left_out)
        plan = objective_of(order).plan
        if plan.rank == 0:
            raise TrainError("the Tinker service trains a LoRA; set train: lora, or use another backend")
        examine(NAME, order, batch, passes=True)
        wait, attempts = self._options.wait, self._options.attempts
        for attempt in range(1, attempts + 1):
            try:
                return self._step(order, report, plan, batch, float(len(left_out)))
            except Transient as error:
                self._live = None
                self._service.forget()
                log.warning("step %d of line %s, attempt %d: %s", order.step, order.line, attempt, error)
                if attempt == attempts:
                    raise UpstreamError(
                        f"the Tinker service failed {attempts} times ({error}); the step is asked for again", status=503
                    ) from None
                _rest(wait * 2 ** (attempt - 1), report)
            except BaseException:
                self._live = None
                raise
        raise AssertionError("unreachable")

    def _step(self, order: Step, report: Report, plan: Plan, batch: Sequence[Rows], left_out: float) -> Stepped:
        began = time.monotonic()
        start = origin(NAME, self._ground, order, plan)
        updates = int(start.remote["updates"]) if start.remote else 0
        client = self._open(start.remote, plan, report)
        objective = objective_of(order)
        turn = _Turn(self._service, client, batch, report, self._options, self._teacher(order, plan))
        metrics = {"left_out": left_out} | dict(objective.prepare(turn.passes(updates), batch))
        for epoch in range(plan.epochs):
            found = turn.update(objective, plan, epoch)
            if epoch == 0 and plan.epochs > 1:
                metrics["loss_first"] = found["loss"]
            metrics |= found
        metrics |= dict(objective.aux_steps(turn.passes(updates + plan.epochs), batch))
        for rows in batch:  # a pass holds its rows and the rows hold the pass
            rows.extra.clear()
            rows.passes.clear()

        report("fetch", 0, 2)
        name = f"reef-{order.step}-{uuid.uuid4().hex}"
        days = self._options.expire_days
        state = turn.saved("save_state", name, None if days is None else int(days * 86400))
        exported = turn.saved("save_weights_external", name, EXPORTED)
        report("fetch", 1, 2)
        given, config = self._service.adapter(exported, turn.tick("fetch"))
        if config["r"] != plan.rank:
            raise TrainError(f"the LoRA that came back has rank {config['r']}, the recipe says {plan.rank}")
        tensors = rescale(check_lora(given, plan.rank, self._base), config["lora_alpha"], plan.alpha)

        report("write", 0, 1)
        metrics["train_seconds"] = time.monotonic() - began
        remote = {
            "backend": NAME,
            "base_model": self._options.base_model,
            "state": state,
            "updates": updates + plan.epochs,
            "client": self._service.version,
        }
        base = start.base or {"name": self._ground.name, "digest": self._ground.digest}
        done = folder.write(self._ground.training, order, "lora", lora_files(tensors, plan, base, remote), metrics)
        self._live = _Live(client, state)
        return done

    def _open(self, remote: Mapping[str, Any] | None, plan: Plan, report: Report) -> Any:
        """A training client at that state, or a fresh LoRA of the base. One that is there already is used once: from
        here on it is at no saved state until the step is durable."""
        live, self._live = self._live, None
        if remote is not None and live is not None and live.state == remote["state"]:
            return live.client
        tick = _ticker(report, "open")
        service = self._service.client(tick)
        if remote is None:
            return self._service.call(
                "open",
                lambda: service.create_lora_training_client(
                    base_model=self._options.base_model, rank=plan.rank, seed=plan.seed, train_unembed=False
                ),
                tick,
            )
        if remote.get("base_model") != self._options.base_model:
            raise TrainError(
                f"the line trains {remote.get('base_model')} at the Tinker service, the options name "
                f"{self._options.base_model}; set base_model back, or start a new scenario"
            )
        state = remote["state"]
        return self._service.call("open", lambda: service.create_training_client_from_state_with_optimizer(state), tick)

    def _teacher(self, order: Step, plan: Plan) -> str | None:
        """The saved state of the release that the plan names as teacher; None for the base model."""
        if plan.teacher is None:
            return None
        try:
            source = self._ground.resolve(plan.teacher)
        except Exception as error:
            raise TeacherError(
                f"the teacher {plan.teacher} is no release of the chain ({error}); the tinker backend knows no others"
            ) from None
        if source.kind == "base":
            return None
        for step in sorted({*_steps(self._ground, order)}, reverse=True):
            if (place := held(self._ground, order, source, step)) is not None:
                return str(json.loads((place / REMOTE).read_bytes())["state"])
        raise TeacherError(f"the teacher {plan.teacher} was not made by the tinker backend, or its folder is gone")


def _steps(ground: Ground, order: Step) -> list[int]:
    root = ground.training / order.scenario / order.part
    return [int(place.name) for place in root.glob("*/*") if place.name.isdigit()]


def _plain(data: Sequence[Datum], left_out: list[str]) -> list[Datum]:
    """The samples whose recorded log-probs are of temperature 1, at which the service computes. The others are left
    out; TrainError when none is left."""
    kept = []
    for datum in data:
        if datum.temperature == 1.0:
            kept.append(datum)
            continue
        left_out.append(
            f"sample {datum.record_id}:{datum.choice} cannot be trained: it was sampled at temperature "
            f"{datum.temperature:g}, and the Tinker service computes log-probs at temperature 1"
        )
        log.warning("left out of the step: %s", left_out[-1])
    if data and not kept:
        raise TrainError(f"{left_out[0]}; ask for temperature 1, or use another backend")
    return kept


def _ticker(report: Report, stage: str) -> Callable[[], None]:
    return lambda: report(stage, 0, 1)


def _rest(seconds: float, report: Report) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        report("wait", 0, 1)
        time.sleep(min(0.5, left))


class _Turn:
    """One batch at one training client."""

    def __init__(
        self,
        service: Service,
        client: Any,
        batch: Sequence[Rows],
        report: Report,
        options: Options,
        teacher: str | None,
    ) -> None:
        self._service = service
        self._client = client
        self._batch = batch
        self._report = report
        self._options = options
        self._teacher = teacher
        self._samplers: dict[str | None, Any] = {}

    def tick(self, stage: str) -> Callable[[], None]:
        return _ticker(self._report, stage)

    def call(self, what: str, made: Callable[[], Any]) -> Any:
        return self._service.call(what, made, self.tick(what))

    # --- passes -------------------------------------------------------------------------------------------------------

    def passes(self, updates: int) -> Passes:
        return Passes(
            updates,
            base=lambda rows: self._sampled(None, rows),
            policy=self._policy,
            teacher=lambda rows: self._sampled(self._teacher, rows),
        )

    def _sampled(self, path: str | None, rows: Rows) -> Tensor:
        """Log-probs [T] of the recorded tokens under a sampler: the base model, or a saved LoRA."""
        if path not in self._samplers:
            service = self._service.client(self.tick("prepare"))
            given = {"base_model": self._options.base_model} if path is None else {"model_path": path}
            self._samplers[path] = self.call("prepare", lambda: service.create_sampling_client(**given))
        sampler, package = self._samplers[path], self._service.package
        found: list[float] = []
        for whole, length in zip(sequences(rows.packed), rows.lengths, strict=True):
            prompt = package.ModelInput.from_ints(whole)
            each = self.call("prepare", partial(sampler.compute_logprobs, prompt))
            if len(each) != len(whole) or None in each[-length:]:
                raise TrainError("the Tinker service gave no log-prob for a token of an answer")
            found += each[-length:]
        return torch.tensor(found, dtype=torch.float32)

    def _policy(self, rows: Rows) -> Tensor:
        data = self._data(rows, {"weights": rows.mask})
        answer = self.call("prepare", lambda: self._client.forward(data, "cross_entropy"))
        return self._returned([rows], [_values(one["logprobs"]) for one in answer.loss_fn_outputs])[0]

    # --- one update ---------------------------------------------------------------------------------------------------

    def update(self, objective: Objective, plan: Plan, epoch: int) -> dict[str, float]:
        """Gradient and optimizer step; the objective's metrics, from the log-probs as they were before it."""
        self._report("train", epoch, plan.epochs)
        common = self._common(objective)
        found = self._custom(objective) if common is None else self._by_name(objective, common)
        package = self._service.package
        adam = package.AdamParams(
            learning_rate=plan.learning_rate,
            beta1=plan.betas[0],
            beta2=plan.betas[1],
            eps=EPSILON,
            weight_decay=plan.weight_decay,
            grad_clip_norm=plan.clip,
        )
        self.call("train", lambda: self._client.optim_step(adam))
        return found

    def _common(self, objective: Objective) -> list[Common] | None:
        ask: Callable[[Rows], Common | None] = getattr(objective, "common", lambda rows: None)
        found = [ask(rows) for rows in self._batch]
        known = [one for one in found if one is not None and one.name in CONFIGS and one.dual is None]
        return known if len(known) == len(found) else None

    def _by_name(self, objective: Objective, losses: list[Common]) -> dict[str, float]:
        data: list[Any] = []
        for rows, loss in zip(self._batch, losses, strict=True):
            if loss.name == "cross_entropy":
                data += self._data(rows, {"weights": loss.weights})
            else:
                data += self._data(rows, {"logprobs": rows.logprobs, "advantages": loss.weights})
        name, config = losses[0].name, CONFIGS[losses[0].name](losses[0])
        answer = self.call("train", lambda: self._client.forward_backward(data, name, config))
        logprobs = self._returned(self._batch, [_values(one["logprobs"]) for one in answer.loss_fn_outputs])
        with torch.no_grad():
            return self._shares(objective, logprobs)[1]

    def _custom(self, objective: Objective) -> dict[str, float]:
        found: dict[str, float] = {}

        def loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
            """Called by the client with log-probs [N] of each sample, which the gradient is taken of."""
            whole, metrics = self._shares(objective, self._returned(self._batch, logprobs))
            found.update(metrics)
            for one in logprobs:
                whole = whole + one.sum() * 0.0  # each has a gradient, be it 0
            return whole, {}

        data = [one for rows in self._batch for one in self._data(rows, {"weights": rows.mask})]
        self.call("train", lambda: self._client.forward_backward_custom(data, loss))
        return found

    def _shares(self, objective: Objective, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The objective's loss of the whole batch, and its metrics."""
        whole, metrics = torch.zeros(()), dict[str, float]()
        for rows, each in zip(self._batch, logprobs, strict=True):
            share, found = objective.loss(told(rows, each), rows)
            whole = whole + share
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0.0) + value
        value = float(whole.detach())
        if value != value or value in (float("inf"), float("-inf")):
            raise TrainError(f"the loss of the policy is {value}; nothing was written")
        return whole, metrics | {"loss": value}

    # --- data ---------------------------------------------------------------------------------------------------------

    def _data(self, rows: Rows, inputs: Mapping[str, Tensor]) -> list[Any]:
        """A datum a sample: its tokens but the last as input, its tokens but the first as targets; `inputs` [T] are 0
        at the prompt."""
        package, made, at = self._service.package, [], 0
        for whole, length in zip(sequences(rows.packed), rows.lengths, strict=True):
            blank = [0.0] * (len(whole) - 1 - length)
            given: dict[str, Any] = {
                name: _floats(package, blank + values[at : at + length].tolist()) for name, values in inputs.items()
            }
            given["target_tokens"] = package.TensorData(data=whole[1:], dtype="int64", shape=[len(whole) - 1])
            made.append(package.Datum(model_input=package.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=given))
            at += length
        return made

    def _returned(self, batch: Sequence[Rows], each: Sequence[Tensor]) -> list[Tensor]:
        """Log-probs [N] by sample, as the service gives them, to [T] by micro-batch."""
        lengths = [length for rows in batch for length in rows.lengths]
        if len(each) != len(lengths) or any(one.numel() < length for one, length in zip(each, lengths, strict=True)):
            raise TrainError("the Tinker service gave log-probs for other samples than were sent")
        rest = iter(each)
        return [torch.cat([next(rest).flatten()[-length:] for length in rows.lengths]) for rows in batch]

    def saved(self, how: str, name: str, seconds: int | None) -> str:
        return str(self.call("save", lambda: getattr(self._client, how)(name, ttl_seconds=seconds)).path)


def _floats(package: Any, values: list[float]) -> Any:
    return package.TensorData(data=values, dtype="float32", shape=[len(values)])


def _values(given: Any) -> Tensor:
    return torch.tensor(given.data, dtype=torch.float32)
