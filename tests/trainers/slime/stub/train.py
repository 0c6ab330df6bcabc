"""Slime's synchronous loop by its documented arguments: ask for samples, train, save, again. On a tiny model, really.

The loss is slime's: of each token the clipped policy loss or the negative log-likelihood, summed and divided by the
trained tokens of the step. `--train lora` is what slime itself does not do; `--faults FILE` names what is to go wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora, pack


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, kind, usual in (
        ("hf-checkpoint", str, None), ("rollout-function-path", str, None), ("num-rollout", int, None),
        ("start-rollout-id", int, None), ("save", str, None), ("save-hf", str, None), ("save-interval", int, None),
        ("load", str, None), ("rollout-buffer-url", str, None), ("ckpt-step", int, None),
        ("lr", float, 1e-6), ("lr-decay-style", str, "constant"),
        ("adam-beta1", float, 0.9), ("adam-beta2", float, 0.95), ("weight-decay", float, 0.01),
        ("clip-grad", float, 1.0), ("loss-type", str, "policy_loss"), ("advantage-estimator", str, "grpo"),
        ("eps-clip", float, 0.2), ("eps-clip-high", float, None), ("eps-clip-c", float, None),
        ("rollout-temperature", float, 1.0), ("kl-coef", float, 0.0), ("entropy-coef", float, 0.0),
        ("global-batch-size", int, None), ("train", str, "lora"), ("rank", int, 2), ("faults", str, None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=usual)
    for name in (
        "debug-train-only", "calculate-per-token-loss", "normalize-advantages", "use-rollout-logprobs", "use-kl-loss",
        "use-tis", "use-opsm", "use-opd",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-rollout-global-dataset", action="store_false", dest="rollout_global_dataset")
    parser.add_argument("--disable-rewards-normalization", action="store_false", dest="rewards_normalization")
    args = parser.parse_args()
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    return args


class Policy:
    """The working copy: a LoRA or all weights, and its optimizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = Llama.load(Path(args.hf_checkpoint), torch.float32)
        held: dict[str, torch.Tensor] = {}
        if args.load is not None:
            held = load_file(Path(args.load) / f"iter_{args.ckpt_step:07d}" / "state.safetensors")
        weights = {name.removeprefix("weight."): one for name, one in held.items() if name.startswith("weight.")}
        if args.train == "lora":
            self.lora: Lora | None = (
                Lora.load(self.base, weights, args.rank, 16.0) if held else Lora.fresh(self.base, args.rank, 16.0, 0)
            )
            self.parameters = self.lora.parameters()
        else:
            self.lora = None
            source = weights or self.base.weights
            self.parameters = {name: one.float().clone().requires_grad_() for name, one in source.items()}
            self.base = Llama(self.base.layout, self.parameters, torch.float32)
        self.adam = Adam(
            self.parameters, args.lr, clip=args.clip_grad, betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
        )  # fmt: skip
        if held:
            self.adam.restore(held)

    def train(self, samples: list[Any]) -> None:
        args = self.args
        assert args.global_batch_size == len(samples)
        tokens = sum(max(1, sum(sample.loss_mask)) for sample in samples)
        for sample in samples:
            count = sample.response_length
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == count
            hidden = self.base.hidden(pack([sample.tokens[:-1]]), self.lora)[-count:]
            heat = torch.full((count,), args.rollout_temperature)
            logprobs = self.base.logprobs(hidden, torch.tensor(sample.tokens[-count:]), heat)
            if args.loss_type == "sft_loss":
                each = -logprobs
            else:
                ratio = (logprobs - torch.tensor(sample.rollout_log_probs)).exp()
                bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
                if args.advantage_estimator == "cispo":
                    each = -bounded.detach() * sample.reward * logprobs
                else:
                    each = torch.maximum(-ratio * sample.reward, -bounded * sample.reward)
                    if args.eps_clip_c is not None and sample.reward < 0:
                        each = torch.minimum(each, torch.tensor(-args.eps_clip_c * sample.reward))
            ((each * torch.tensor(sample.loss_mask)).sum() / tokens).backward()
        self.adam.step("policy")

    def save(self, rollout: int) -> None:
        args = self.args
        place = Path(args.save) / f"iter_{rollout:07d}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        weights = {name: one.detach().clone() for name, one in self.parameters.items()}
        save_file(
            {f"weight.{name}": one for name, one in weights.items()} | self.adam.state(), place / "state.safetensors"
        )
        hf = Path(args.save_hf.format(rollout_id=rollout))
        shutil.rmtree(hf, ignore_errors=True)
        hf.mkdir(parents=True)
        (hf / "config.json").write_bytes((Path(args.hf_checkpoint) / "config.json").read_bytes())
        if args.train == "lora":
            save_file(weights, hf / "adapter_model.safetensors")
            (hf / "adapter_config.json").write_text(json.dumps({"r": args.rank, "lora_alpha": 16.0}))
            return
        names = sorted(weights)
        half = len(names) // 2
        shards = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
        for file, held in shards.items():
            save_file({name: weights[name].bfloat16() for name in held}, hf / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (hf / "model.safetensors.index.json").write_text(json.dumps(index))


def fault(args: argparse.Namespace, where: str) -> None:
    """{where: [what, …]}: die | slow | full, or "" for nothing; each is used once."""
    place = Path(args.faults) if args.faults else None
    if place is None or not place.exists():
        return
    faults = json.loads(place.read_text())
    if not faults.get(where):
        return
    what = faults[where].pop(0)
    place.write_text(json.dumps(faults))
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "slow":
        time.sleep(2)
    elif what == "full":
        raise OSError(28, "No space left on device")


def main() -> None:
    args = parse()
    module, _, name = args.rollout_function_path.rpartition(".")
    generate = getattr(importlib.import_module(module), name)
    policy = Policy(args)
    assert args.debug_train_only
    assert not args.rollout_global_dataset
    for rollout in range(args.start_rollout_id, args.num_rollout):
        samples = [sample for group in generate(args, rollout, None, evaluation=False).samples for sample in group]
        fault(args, "before_train")
        policy.train(samples)
        fault(args, "before_save")
        policy.save(rollout)
        fault(args, "after_save")


if __name__ == "__main__":
    sys.exit(main())
