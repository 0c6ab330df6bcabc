"""A line's working copy in memory: the policy, the modules, their optimizers; from files and back into files.

Knows: which files hold what, what a recipe's plan makes of them, and that several processes may hold it together.
Does not know: batches, losses, the training folder.

- Full weights have a float32 master beside the optimizer; the part holds them rounded, as they are served. A line goes
  on from the master of the release it starts at, or, where that is gone, from what was served.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.engines import WeightFiles
from reef.engines.local.layout import LAYER_LINEARS
from reef.trainers import folder
from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Objective
from reef.trainers.origin import Origin

BETAS = (0.5, 0.9)
"""Of the modules' optimizers. With few updates a step, the usual momentum leaves a critic behind the policy it judges
(measured: a critic loss of 0.47 at a mean score of 0.91, whose variance is 0.09), and every success looks like news."""

Saver = Callable[[Mapping[str, Tensor]], folder.Content]
"""Tensors by name as the content of a safetensors file."""


log = logging.getLogger(__name__)


class Holder(Protocol):
    """Who holds a working copy: this process alone, or several together. `device`: where each of them computes."""

    device: torch.device

    def place(self, model: Llama, *, learns: bool = False) -> Llama:
        """The model as passes use it. One that learns has float32 masters of these weights, which require gradients."""

    def adam(self, parameters: Mapping[str, Tensor], rate: float, **options: Any) -> Adam:
        """The optimizer of a placed model's weights, or of tensors that each process holds whole."""


@dataclass(slots=True)
class Working:
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
    def parameters(self) -> Mapping[str, Tensor]:
        return self.model.weights if self.lora is None else self.lora.parameters()


def open_working(model: Llama, objective: Objective, origin: Origin, holder: Holder) -> Working:
    """The working copy that a step begins with. `model` is the base. The origin's files were verified."""
    plan, source = objective.plan, origin.source
    kept = load_file(origin.kept / "optimizer.safetensors") if origin.kept else {}
    frozen = holder.place(model)
    policy, lora = frozen, None
    if plan.rank == 0:
        weights = {name: kept.get(f"master.{name}", tensor) for name, tensor in _full(model, source).items()}
        policy = holder.place(Llama(model.layout, weights, model.compute), learns=True)
        parameters: Mapping[str, Tensor] = policy.weights
    else:
        lora = near(_lora(model, objective, source), holder.device)
        parameters = lora.parameters()
    made = {name: (module.to(holder.device), rate) for name, (module, rate) in objective.modules(model).items()}
    working = Working(
        model=policy,
        lora=lora,
        policy=holder.adam(
            parameters, plan.learning_rate, clip=plan.clip, betas=plan.betas, weight_decay=plan.weight_decay
        ),
        modules={name: module for name, (module, _) in made.items()},
        optimizers={
            name: holder.adam(
                {key: one for key, one in module.named_parameters() if one.requires_grad}, rate, betas=BETAS
            )
            for name, (module, rate) in made.items()
            if rate > 0
        },
        base=dict(source.meta.get("base", {})),  # type: ignore[call-overload]
        frozen=frozen,
    )
    if origin.kept:
        _restore(working, kept, load_file(origin.kept / "modules.safetensors"))
    elif origin.cold:
        working.policy.warmup = plan.warmup
    return working


def _lora(model: Llama, objective: Objective, source: WeightFiles) -> Lora:
    plan = objective.plan
    if source.kind == "base":
        return Lora.fresh(model, plan.rank, plan.alpha, plan.seed)
    if source.kind != "lora":
        raise TrainError(
            "the weights are full ones, the recipe trains a LoRA, which goes on from the base "
            "or from a LoRA only; set train: full, or roll back to the base"
        )
    rank, alpha = source.meta.get("rank"), source.meta.get("alpha")
    if (rank, alpha) != (plan.rank, plan.alpha):
        raise TrainError(
            f"the weights are a LoRA of rank {rank} and alpha {alpha}, the recipe says {plan.rank} and "
            f"{plan.alpha}; set rank and alpha back, or start a new scenario"
        )
    return Lora.load(model, load_file(source.files["adapter_model.safetensors"]), plan.rank, plan.alpha)


def near(lora: Lora, device: torch.device) -> Lora:
    """The LoRA on a device, its matrices leaves as before."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    if device.type == "cpu":
        return lora
    pairs = {name: (moved(a), moved(b)) for name, (a, b) in lora.pairs.items()}
    return Lora(pairs, lora.rank, lora.alpha)


def _full(model: Llama, source: WeightFiles) -> Mapping[str, Tensor]:
    """Every weight as it was served last."""
    if source.kind == "lora":
        raise TrainError(
            "the weights are a LoRA, the recipe trains full weights, which go on from the base "
            "or from full weights only; set train: lora, or roll back to the base"
        )
    if source.kind != "full":
        return model.weights
    weights = load_file(source.files["model.safetensors"])
    shapes = model.layout.shapes()
    if set(weights) != set(shapes):
        raise TrainError("the full weights do not fit the base model; were they made for another one?")
    return {name: weights[name] for name in shapes}


def _restore(working: Working, kept: Mapping[str, Tensor], modules: Mapping[str, Tensor]) -> None:
    """Optimizers and modules as a step left them. A module that the step did not have, or another of that name (the
    recipe was changed), begins anew."""
    working.policy.restore(_under("policy.", kept))
    for name, module in working.modules.items():
        state, fresh = _under(f"{name}.", modules), module.state_dict()
        if {key: one.shape for key, one in state.items()} != {key: one.shape for key, one in fresh.items()}:
            log.warning("the recipe's %s begins anew: the step before had none or another", name)
            continue
        module.load_state_dict(state)
        adam = _under(f"{name}.", kept)
        if name in working.optimizers and adam:
            working.optimizers[name].restore(adam)


def saved(tensors: Mapping[str, Tensor]) -> folder.Content:
    """A `Saver` for tensors that this process has whole."""
    return lambda file: save_file({name: one.detach().contiguous() for name, one in tensors.items()}, file)


def files(working: Working, save: Saver = saved) -> tuple[str, dict[str, folder.Content]]:
    """A step's kind and files: the part (weights), then what only training needs."""
    optimizer = {f"policy.{key}": tensor for key, tensor in working.policy.state().items()}
    for name, adam in working.optimizers.items():
        optimizer |= {f"{name}.{key}": tensor for key, tensor in adam.state().items()}
    found: dict[str, folder.Content] = {}
    lora = working.lora
    if lora is None:
        weights = working.model.weights
        optimizer |= {f"master.{name}": tensor for name, tensor in weights.items()}
        compute = working.model.compute
        found["model.safetensors"] = save({name: one.detach().to(compute) for name, one in weights.items()})
        meta: dict[str, Any] = {"base": dict(working.base), "kind": "full", "rank": None, "alpha": None}
    else:
        found["adapter_model.safetensors"] = save(lora.parameters())
        found["adapter_config.json"] = _json(peft_config(lora, working.base))
        meta = {"base": dict(working.base), "kind": "lora", "rank": lora.rank, "alpha": lora.alpha}
    modules = {
        f"{name}.{key}": tensor
        for name, module in working.modules.items()
        for key, tensor in module.state_dict().items()
    }
    found |= {
        "weights.json": _json(meta),
        "optimizer.safetensors": save(optimizer),
        "modules.safetensors": save(modules),
    }
    return meta["kind"], found


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


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
