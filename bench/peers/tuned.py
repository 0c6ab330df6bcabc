"""TRL's trainers on a CPU, a step at a time: `.bench-peers/trl/bin/python bench/peers/tuned.py MODEL`.

A line of JSON in ({"tokens", "prompt", "loss", "dtype", "checkpoint"}), a line out: the seconds of that step. It runs
`Trainer.train()` as it is, with PEFT's LoRA; a callback waits for the next line between two steps. GRPOTrainer is given
what its generation would have made: prompts, answers and advantages. SFTTrainer is given ids and labels.
Knows: TRL 1.16. Does not know: Reef, which is not installed beside it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Turns(TrainerCallback):
    """Waits for what to do next, and says how long each step took."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self._began = 0.0

    def read(self) -> bool:
        """Whether the next line wants another trainer. Ends the process when there is none."""
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        before, self.asked = self.asked, json.loads(line)
        return any(before.get(key) != self.asked[key] for key in ("loss", "dtype", "checkpoint"))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(json.dumps({"step": time.perf_counter() - self._began}), file=OUT, flush=True)
        control.should_training_stop = self.read()


class Grpo(GRPOTrainer):
    turns: Turns

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        ids, prompt = torch.tensor(self.turns.asked["tokens"]), self.turns.asked["prompt"]
        rewards = (torch.arange(len(ids)) % 2).float().view(-1, 4)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        answers = torch.ones_like(ids[:, prompt:])
        return {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": torch.ones_like(ids[:, :prompt]),
            "completion_ids": ids[:, prompt:],
            "completion_mask": answers,
            "advantages": advantages.flatten(),
            "num_items_in_batch": answers.sum(),
        }


class Sft(SFTTrainer):
    turns: Turns

    def _prepare_inputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        ids = torch.tensor(self.turns.asked["tokens"])
        labels = ids.clone()
        labels[:, : self.turns.asked["prompt"]] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def train(model: str, turns: Turns, place: str) -> None:
    """TRL's own loop with what was asked for, until something else is."""
    asked = turns.asked
    common = {
        "output_dir": place, "use_cpu": True, "bf16": asked["dtype"] == "bfloat16", "max_steps": 1_000_000,
        "gradient_checkpointing": asked["checkpoint"], "per_device_train_batch_size": 8, "learning_rate": 1e-5,
        "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer: Any
    if asked["loss"] == "grpo":
        trainer = Grpo(
            model=model,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=GRPOConfig(**common, num_generations=4, max_completion_length=128, beta=0.0),
            train_dataset=Dataset.from_list([{"prompt": "Say something."}] * 64),
            processing_class=tokenizer,
            peft_config=lora,
        )
    else:
        trainer = Sft(
            model=model,
            args=SFTConfig(**common, max_length=None),
            train_dataset=Dataset.from_list([{"prompt": "Say", "completion": " something."}] * 64),
            processing_class=tokenizer,
            peft_config=lora,
        )
    trainer.turns = turns
    trainer.add_callback(turns)
    trainer.train()


if __name__ == "__main__":
    OUT = os.fdopen(os.dup(1), "w")  # libraries print what they like to standard output
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as place:
        turns = Turns()
        turns.read()
        while True:
            train(sys.argv[1], turns, place)
