"""What backends share that hold no model here: a batch out, log-probs or weights back.

Knows: which objectives need only the log-probs of recorded tokens, what the base model's folder says, PEFT's layout,
and the file of a step that says where the rest of it is.
Does not know: a service, a protocol, who computes.

- An objective that asks for more than it can have is a `ConfigError` before anything is sent: no batch is at fault, and
  reports wait.
- Weights that come back are checked against the base (names, shapes, rank, finite) before they become a step.
- `remote.json` of a step says where the service keeps the state behind it. It is private and goes with the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from reef.core.disk import sha256
from reef.core.errors import ConfigError, InputError, TrainError
from reef.core.load import load
from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.engines.local.layout import Layout, Rope, read_json, read_layout, tensor_shapes, weight_files
from reef.engines.local.text import Text
from reef.trainers import Ground, folder
from reef.trainers import origin as origins
from reef.trainers.local.llama import Packed
from reef.trainers.local.objective import Objective, Outputs, Plan, Rows
from reef.trainers.local.rows import Known, build

REMOTE = "remote.json"
Pass = Callable[[Rows], Tensor]
"""The log-probs [T] of the recorded tokens, under some weights."""


class Beyond(Exception):
    """An objective asked for what the backend does not have."""


def _beyond(what: str) -> NoReturn:
    raise Beyond(what)


class _Absent:
    """In the place of a model that is somewhere else."""

    def __getattr__(self, name: str) -> NoReturn:
        _beyond(f"the model itself (`{name}`)")


class Told:
    """`Outputs` of which only the log-probs of the recorded tokens are known."""

    def __init__(self, rows: Rows, logprobs: Tensor) -> None:
        self.rows = rows
        self._logprobs = logprobs

    def logprobs(self) -> Tensor:
        return torch.where(self.rows.mask != 0, self._logprobs, self.rows.logprobs)

    @property
    def hidden(self) -> NoReturn:
        _beyond("hidden states")

    @property
    def model(self) -> NoReturn:
        _beyond("the model itself")

    def chosen(self, ids: Tensor) -> NoReturn:
        _beyond("log-probs of other tokens (`chosen`)")

    def top(self, count: int) -> NoReturn:
        _beyond("the likeliest tokens (`top`)")

    def logits(self) -> NoReturn:
        _beyond("the whole distribution (`logits`)")


def told(rows: Rows, logprobs: Tensor) -> Outputs:
    return cast(Outputs, Told(rows, logprobs))


class Passes:
    """The `objective.Context` of a step whose model is away. A pass that is None cannot be had."""

    def __init__(
        self, updates: int, *, base: Pass | None = None, policy: Pass | None = None, teacher: Pass | None = None
    ) -> None:
        self.model = cast(Any, _Absent())
        self.modules: Mapping[str, Any] = {}
        self.updates = updates
        self._passes = {"base": base, "policy": policy, "teacher": teacher}

    def base(self, rows: Rows) -> Outputs:
        return self._pass("base", rows)

    def policy(self, rows: Rows) -> Outputs:
        return self._pass("policy", rows)

    def teacher(self, rows: Rows) -> Outputs:
        return self._pass("teacher", rows)

    def parameters(self) -> NoReturn:
        _beyond("the trained parameters")

    def with_parameters(self, rows: Rows, parameters: Mapping[str, Tensor]) -> NoReturn:
        _beyond("a pass with other parameters")

    def update(self, name: str, losses: object) -> NoReturn:
        _beyond("an update of a module of its own")

    @torch.no_grad()
    def _pass(self, whose: str, rows: Rows) -> Outputs:
        found = self._passes[whose]
        if found is None:
            _beyond(f"a pass of the {whose}")
        return told(rows, found(rows))


def objective_of(order: Step) -> Objective:
    made: Objective = load(order.objective, what="objective")(**order.options)
    return made


def examine(backend: str, order: Step, batch: Sequence[Rows], *, passes: bool) -> None:
    """Run the objective on log-probs as recorded, with nothing behind them. ConfigError when it asks for more than the
    backend has; `passes`: whether that has passes of base, policy and teacher."""
    objective = objective_of(order)
    blank = [_blank(rows) for rows in batch]
    same: Pass | None = (lambda rows: rows.logprobs) if passes else None
    try:
        if objective.modules(cast(Any, _Absent())):
            _beyond("a module that learns beside the policy")
        context = Passes(0, base=same, policy=same, teacher=same if objective.plan.teacher is not None else None)
        objective.prepare(context, blank)
        for rows in blank:
            objective.loss(told(rows, rows.logprobs.clone().requires_grad_()), rows)
        objective.aux_steps(context, blank)
    except Beyond as error:
        raise ConfigError(
            f"{order.objective} with these options needs {error}, which the {backend} backend does not have; set "
            "training.backend to local or ray, or choose options of the recipe that do without (docs/trainers.md)"
        ) from None


def _blank(rows: Rows) -> Rows:
    """The rows without what an objective left in them."""
    return replace(rows, extra={}, passes={}, contexts=tuple(_blank(one) for one in rows.contexts))


# --- the base model's folder ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Base:
    """What the base model's folder tells without its weights being read."""

    layout: Layout
    shapes: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every tensor
    text: Text | None  # None: it has no chat template, so no demonstrations and no contexts

    @classmethod
    def read(cls, place: Path) -> Base:
        try:
            shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
            for file in weight_files(place):
                shapes |= tensor_shapes(file)
            try:
                text = Text(place)
            except InputError:
                text = None
            return cls(_layout(place), shapes, text)
        except InputError as error:
            raise ConfigError(error.message, param="model") from None

    def batch(self, data: Sequence[Datum], left_out: list[str]) -> list[Rows]:
        """`rows.build`. Samples that were drawn under a grammar are left out: what it forbade is unknown elsewhere."""
        known = Known(self.layout, lambda: self._text())
        return build(data, known, tokens=1 << 20, left_out=left_out)

    def _text(self) -> Text:
        if self.text is None:
            raise InputError("it needs the model's chat template, and the base model's folder has none")
        return self.text


def _layout(place: Path) -> Layout:
    """The layout, also of models that are no Llama: then only vocabulary, context and end tokens are true of it."""
    try:
        return read_layout(place)
    except InputError:
        whole = read_json(place / "config.json")
        config = whole | whole.get("text_config", {})
        generation = read_json(place / "generation_config.json") if (place / "generation_config.json").exists() else {}
        ends = generation.get("eos_token_id") or config.get("eos_token_id")
        try:
            vocab, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except KeyError as error:
            raise InputError(f"{place / 'config.json'} has no {error}; fetch the model again", param="model") from None
        return Layout(
            layers=0, hidden=0, inner=0, heads=0, kv_heads=0, head_dim=0, vocab=vocab, context=context, epsilon=0.0,
            tied=False, rope=Rope(0.0), ends=tuple(ends) if isinstance(ends, list) else (ends,) if ends else (),
        )  # fmt: skip


def sequences(packed: Packed) -> list[list[int]]:
    """The whole sequences of a micro-batch, in its order."""
    ids = packed.ids.tolist()
    ends = [*packed.starts[1:], len(ids)]
    return [ids[: packed.prefix] + ids[start:end] for start, end in zip(packed.starts, ends, strict=True)]


# --- where a line goes on ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """What a step starts from: `remote` is what `remote.json` said, None at the base model itself."""

    base: Mapping[str, Any]  # name and digest, as in weights.json
    remote: Mapping[str, Any] | None


def origin(backend: str, ground: Ground, order: Step, plan: Plan) -> Origin:
    """The working copy at `order.step - 1`, by name. TrainError when there is none to go on from."""
    found = origins.find(ground.training, order, ground.resolve, ground.digest)
    own = order.step > order.base_step + 1
    what = f"step {order.step - 1} of line {order.line}" if own else f"release {order.base_release}"
    meta = found.source.meta
    base = meta.get("base")
    base = base if isinstance(base, Mapping) else {}
    if found.source.kind == "base":
        return Origin(base, None)
    wanted = ("full", None, None) if plan.rank == 0 else ("lora", plan.rank, plan.alpha)
    if (kind := (meta.get("kind"), meta.get("rank"), meta.get("alpha"))) != wanted:
        raise TrainError(
            f"{what} has weights of kind {kind[0]}, rank {kind[1]} and alpha {kind[2]}, the recipe says {wanted[0]}, "
            f"{wanted[1]} and {wanted[2]}; set train, rank and alpha back, or start a new scenario"
        )
    try:
        remote = json.loads((found.kept / REMOTE).read_bytes()) if found.kept is not None else {}
    except (OSError, ValueError):
        remote = {}
    if not isinstance(remote, dict) or remote.get("backend") != backend:
        raise TrainError(
            f"{what} was not made by the {backend} backend, or its training folder is gone, so {backend} has no state "
            "to go on from; roll back to the base (reef rollback 0) or set training.backend to the one that made it"
        )
    return Origin(base, remote)


def held(ground: Ground, order: Step, source: WeightFiles, step: int) -> Path | None:
    """The training folder that a release came from, if it is still there."""
    name = "adapter_model.safetensors" if source.kind == "lora" else "model.safetensors"
    if name not in source.files:
        return None
    found = folder.find(ground.training, order.scenario, order.part, step, name, sha256(source.files[name]))
    return found if found is not None and (found / REMOTE).is_file() else None


# --- what comes back --------------------------------------------------------------------------------------------------


def check_lora(tensors: Mapping[str, Tensor], rank: int, base: Base) -> dict[str, Tensor]:
    """A LoRA in PEFT's names, float32, checked against the base. TrainError names the first tensor that is wrong."""
    found: dict[str, Tensor] = {}
    for given, tensor in sorted(tensors.items()):
        if tensor.numel() == 0:
            continue  # a place without a matrix
        name = given if given.startswith("base_model.model.") else f"base_model.model.{given}"
        side = name[-len(".lora_A.weight") :]
        if side not in (".lora_A.weight", ".lora_B.weight"):
            raise TrainError(f"the LoRA that came back holds {given}, which is not a matrix of a LoRA")
        linear = name.removeprefix("base_model.model.").removesuffix(side) + ".weight"
        if linear not in base.shapes:
            raise TrainError(f"the LoRA that came back has a matrix for {linear}, which the base model does not have")
        wide = base.shapes[linear][1]
        shape = (rank, wide[1]) if side == ".lora_A.weight" else (wide[0], rank)
        if tuple(tensor.shape) != shape:
            raise TrainError(
                f"the LoRA that came back does not fit: {given} is {tuple(tensor.shape)}, expected {shape}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise TrainError(f"the LoRA that came back has values that are not finite in {given}")
        found[name] = tensor.detach().float().contiguous()
    halves = [
        {name.removesuffix(f".lora_{side}.weight") for name in found if f".lora_{side}." in name} for side in "AB"
    ]
    if not found or halves[0] != halves[1]:
        alone = min(halves[0] ^ halves[1], default=None)
        raise TrainError(f"the LoRA that came back is not whole: {alone or 'it holds no matrix'}")
    return found


def rescale(tensors: Mapping[str, Tensor], made: float, wanted: float) -> dict[str, Tensor]:
    """The same LoRA (alpha / rank B A) with the recipe's alpha in the place of the service's."""
    if made == wanted:
        return dict(tensors)
    return {name: one * (made / wanted) if ".lora_B." in name else one for name, one in tensors.items()}


def lora_files(
    tensors: Mapping[str, Tensor], plan: Plan, base: Mapping[str, Any], remote: Mapping[str, Any]
) -> dict[str, folder.Content]:
    """A step's files: a LoRA, and where the rest of its state is."""
    modules = sorted({name.removesuffix(".weight").rsplit(".", 2)[-2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.get("name"),
        "r": plan.rank,
        "lora_alpha": plan.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    weights = {"base": dict(base), "kind": "lora", "rank": plan.rank, "alpha": plan.alpha}
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return {
        "adapter_model.safetensors": lambda file: save_file(held, file),
        "adapter_config.json": _json(config),
        "weights.json": _json(weights),
        REMOTE: _json(remote),
    }


def full_files(
    content: folder.Content, base: Mapping[str, Any], remote: Mapping[str, Any]
) -> dict[str, folder.Content]:
    """The same for all weights."""
    weights = {"base": dict(base), "kind": "full", "rank": None, "alpha": None}
    return {"model.safetensors": content, "weights.json": _json(weights), REMOTE: _json(remote)}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
