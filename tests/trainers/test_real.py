"""The embedded model: a few SAO steps move it the right way, and PEFT reads the saved step as the same policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from reef.core.wire import Datum, Step
from reef.engines import Resolver
from reef.engines.local.folder import ModelFolder, prepare
from reef.trainers import folder
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.rows import build
from reef.trainers.local.step import advance

pytestmark = pytest.mark.model

Make = Callable[..., Step]


@pytest.fixture(scope="module")
def embedded() -> ModelFolder:
    return prepare("smollm2-135m")


def answers(folder: Path) -> list[Datum]:
    """Six sums, each with a short right answer (1) and a rambling one that never ends (-1)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = []
    for a, b in ((1, 2), (2, 4), (3, 5), (4, 1), (5, 2), (6, 3)):
        prompt = tokenizer.encode(f"<|im_start|>user\nWhat is {a}+{b}?<|im_end|>\n<|im_start|>assistant\n").ids
        for text, reward in ((f"{a} + {b} = {a + b}<|im_end|>", 1.0), ("To find the sum we first look at", -1.0)):
            answer = tokenizer.encode(text).ids
            made.append(
                Datum(
                    tokens=prompt + answer,
                    prompt_length=len(prompt),
                    mask=[1] * len(answer),
                    logprobs=[0.0] * len(answer),
                    reward=reward,
                    record_id=f"{len(made):032x}",
                    choice=0,
                    temperature=1.0,
                    lag=0,
                )
            )
    return made


@torch.no_grad()
def rate(model: Llama, lora: Lora | None, data: list[Datum]) -> list[list[float]]:
    found = []
    for datum in data:
        (rows,) = build([datum], model.layout)
        logits = model.logits(model.hidden(rows.packed, lora)[rows.predicts])
        found.append(torch.log_softmax(logits, -1).gather(1, rows.targets[:, None])[:, 0].tolist())
    return found


@pytest.mark.timeout(300)
def test_four_steps_move_the_policy_the_right_way(
    embedded: ModelFolder, tmp_path: Path, order: Make, base: Resolver, options: dict[str, object]
) -> None:
    from safetensors.torch import load_file

    model = Llama.load(embedded.path)
    data = answers(embedded.path)
    lora: Lora | None = None
    before = [sum(one) for one in rate(model, None, data)]
    options |= {"learning_rate": 1e-3, "critic_learning_rate": 5e-3, "rank": 8, "alpha": 16.0}
    for step in range(1, 5):
        sampled = [
            msgspec.structs.replace(datum, logprobs=logprobs)
            for datum, logprobs in zip(data, rate(model, lora, data), strict=True)
        ]
        done = advance(model, tmp_path, order(step, data=sampled, options=options), base)
        assert done.metrics["pg_clipfrac"] < 0.1
        lora = Lora.load(model, load_file(Path(done.folder) / "adapter_model.safetensors"), 8, 16.0)
    after = [sum(one) for one in rate(model, lora, data)]
    good, bad = (sum(after[side::2]) - sum(before[side::2]) for side in (0, 1))
    assert good > 3.0
    assert bad < -3.0


@pytest.mark.timeout(300)
def test_a_demonstration_is_memorised(embedded: ModelFolder, tmp_path: Path, order: Make, base: Resolver) -> None:
    """Fifteen steps on one chat: its answer, end of turn included, becomes what the model says."""
    model = Llama.load(embedded.path)
    told = [{"role": "user", "content": "What grows on Reef?"}, {"role": "assistant", "content": "Blue kelp, slowly."}]
    chat = msgspec.structs.replace(
        answers(embedded.path)[0], tokens=[], prompt_length=0, mask=[], logprobs=[], chat=json.dumps({"messages": told})
    )
    wanted = {"objective": "tests.trainers.objectives:Imitate", "data": [chat]}
    options = {"learning_rate": 3e-3, "rank": 8, "alpha": 16.0}
    losses: list[float] = []
    while len(losses) < 15 and (not losses or losses[-1] > 0.05):
        done = advance(model, tmp_path, order(len(losses) + 1, options=options, **wanted), base)
        losses.append(done.metrics["nll"])
    assert losses[0] > 1
    assert losses[-1] < 0.05, losses


@pytest.mark.timeout(600)
def test_the_full_critic_on_the_real_model(
    embedded: ModelFolder, tmp_path: Path, order: Make, base: Resolver, options: dict[str, object]
) -> None:
    """Three steps on four answers: the critic's error falls, the policy moves, and the copy is all but attention."""
    from safetensors.torch import load_file

    model = Llama.load(embedded.path)
    data = answers(embedded.path)[:4]
    sampled = [
        msgspec.structs.replace(one, logprobs=logprobs)
        for one, logprobs in zip(data, rate(model, None, data), strict=True)
    ]
    options |= {"learning_rate": 5e-4, "critic_learning_rate": 1e-4, "critic": "full", "rank": 8, "alpha": 16.0}
    errors = []
    for step in (1, 2, 3):
        done = advance(model, tmp_path, order(step, data=sampled, options=options), base)
        errors.append(done.metrics["critic_loss"])
        assert done.metrics["grad_norm"] > 0
        folder.slim(tmp_path, "demo", "weights", "one", step)  # each holds 1.3 GB
    assert errors[2] < errors[0]
    critic = load_file(Path(done.folder) / "modules.safetensors")
    assert len(critic) == len([name for name in model.weights if "self_attn" not in name]) + 2


@pytest.mark.timeout(300)
def test_peft_reads_the_saved_step(
    embedded: ModelFolder, tmp_path: Path, order: Make, base: Resolver, options: dict[str, object]
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = Llama.load(embedded.path, torch.float32)
    data = answers(embedded.path)[:4]
    sampled = rate(model, None, data)
    data = [msgspec.structs.replace(datum, logprobs=logprobs) for datum, logprobs in zip(data, sampled, strict=True)]
    options |= {"learning_rate": 1e-3, "rank": 8, "alpha": 16.0}
    done = advance(model, tmp_path, order(data=data, options=options), base)
    lora = Lora.load(model, load_file(Path(done.folder) / "adapter_model.safetensors"), 8, 16.0)
    reference = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(embedded.path, dtype=torch.float32), done.folder
    )
    moved = 0.0
    for datum, mine, old in zip(data, rate(model, lora, data), sampled, strict=True):
        ids = torch.tensor([datum.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(ids).logits[0, datum.prompt_length - 1 : -1], -1)
        expected = logprobs.gather(1, ids[0, datum.prompt_length :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(mine), expected, rtol=0, atol=1e-4)
        moved = max(moved, *(abs(one - other) for one, other in zip(mine, old, strict=True)))
    assert moved > 0.01
