"""Reef's training step on demand: `python -m kit.pupil FOLDER`, a line of JSON in, a line of JSON out.

Asked for {"do": "step"} it makes one durable step of a line and says how long its parts took; "exact" compares
bfloat16 with float32 on the same weights and tokens; "train" makes steps until it is killed.
Knows: how a step is ordered without server or learner. Does not know: clocks of others, or what is compared.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.engines.local.folder import ModelFolder, prepare
from reef.trainers import folder as steps
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.rows import build
from reef.trainers.local.shelf import Shelf
from reef.trainers.local.step import advance, forward

RANK, ALPHA, RATE = 8, 16.0, 1e-5
PLAN = {"learning_rate": RATE, "alpha": ALPHA, "seed": 0, "kl": 0.0}
GRPO = {
    "advantage": "grpo", "loss": "ppo", "reduction": "token_mean", "epsilon_low": 0.2, "epsilon_high": 0.2,
    "dual_clip": None, "tis_cap": 2.0, "length": None,
}  # fmt: skip
LOSSES = {"grpo": ("recipes.grpo.loss:GRPO", PLAN | GRPO), "sft": ("recipes.sft.loss:SFT", PLAN | {"epochs": 1})}


def data(sequences: Sequence[Sequence[int]], prompt: int) -> list[Datum]:
    """Sampled answers, every second one good, in groups of four."""
    return [
        Datum(
            tokens=list(ids), prompt_length=prompt, mask=[1] * (len(ids) - prompt),
            logprobs=[-2.0] * (len(ids) - prompt), reward=float(number % 2), record_id=f"{number:032x}", choice=0,
            temperature=1.0, lag=0, group=str(number // 4),
        )
        for number, ids in enumerate(sequences)
    ]  # fmt: skip


class Pupil:
    """One line of steps for each kind of training that was asked for."""

    def __init__(self, training: Path) -> None:
        self._folder: ModelFolder = prepare("smollm2-135m")
        self._training = training
        self._models: dict[str, Llama] = {}
        self._made: dict[str, int] = {}

    def model(self, dtype: str) -> Llama:
        if dtype not in self._models:
            self._models[dtype] = Llama.load(self._folder.path, getattr(torch, dtype))
        return self._models[dtype]

    def step(self, asked: Mapping[str, Any]) -> dict[str, float]:
        """One step further on the line of this kind: seconds, and the most memory this process ever had (GB)."""
        model, line = self.model(asked["dtype"]), f"{asked['kind']}-{asked['dtype']}-{asked['loss']}"
        number = self._made[line] = self._made.get(line, 0) + 1
        path, options = LOSSES[asked["loss"]]
        order = Step(
            scenario="bench", part="weights", line=line, step=number, base_release="r0", base_step=0, objective=path,
            options=options | {"rank": RANK if asked["kind"] == "lora" else 0}, batch_id=str(number),
            unit_ids=[f"{number}"], cursor=number, data=data(asked["tokens"], asked["prompt"]),
        )  # fmt: skip
        base = {"base": {"name": self._folder.name, "digest": self._folder.digest}, "kind": "base"}
        moments: dict[str, float] = {}
        began = time.perf_counter()
        advance(
            model,
            self._training,
            order,
            lambda _: WeightFiles("base", {}, base),
            report=lambda stage, done, total: moments.setdefault(stage, time.perf_counter()) and None,
            digest=self._folder.digest,
            shelf=Shelf(model),
        )
        ended = time.perf_counter()
        steps.slim(self._training, "bench", "weights", line, number)
        return {
            "step": moments["modules"] - moments["train"],
            "whole": ended - began,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }

    def exact(self, asked: Mapping[str, Any]) -> dict[str, float]:
        """How far bfloat16 is from float32: log-probs and loss of the answers, and the gradient of their
        cross-entropy."""
        found = []
        for dtype in ("float32", "bfloat16"):
            model = self.model(dtype)
            policy, lora, learnt = _copy(model, asked["kind"])
            whole = []
            for rows in build(data(asked["tokens"], asked["prompt"]), model.layout):
                logprobs = forward(policy, lora, rows).logprobs()
                (-logprobs.sum() / rows.total.tokens).backward()  # type: ignore[no-untyped-call]
                whole.append(logprobs.detach())
            gradients = torch.cat([one.grad.flatten() for one in learnt if one.grad is not None])
            found.append((torch.cat(whole), gradients.double()))
        (exact, right), (near, rough) = found
        apart = (near - exact).abs()
        return {
            "logprob_mean": float(apart.mean()),
            "logprob_max": float(apart.max()),
            "loss_relative": abs(float(near.mean() / exact.mean()) - 1),
            "gradient_cosine": float(right @ rough / (right.norm() * rough.norm())),
            "gradient_norm": float(rough.norm() / right.norm()),
        }


def _copy(model: Llama, kind: str) -> tuple[Llama, Lora | None, list[Tensor]]:
    """A policy that may learn: all weights in float32, or a LoRA that already does something."""
    if kind == "full":
        weights = {name: one.detach().float().clone().requires_grad_() for name, one in model.weights.items()}
        return Llama(model.layout, weights, model.compute), None, list(weights.values())
    lora = Lora.fresh(model, RANK, ALPHA, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, b in lora.pairs.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.01)
    return model, lora, list(lora.parameters().values())


def main() -> None:
    pupil = Pupil(Path(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        while asked["do"] == "train":
            pupil.step(asked)
        print(json.dumps(getattr(pupil, asked["do"])(asked)), flush=True)


if __name__ == "__main__":
    main()
