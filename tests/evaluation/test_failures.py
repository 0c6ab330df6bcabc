"""The measured failures, on the real model: a policy that says nothing, one that says "red" to everything, and an
honest one. LoRAs are trained here towards each; the gate has to tell them apart."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.evaluation import Means, Sizes
from reef.evaluation.guards import Limits
from reef.evaluation.policies import Guarded

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

SERVE = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.engines.local.server import Options, run

def resolve(name):
    folder = Path(sys.argv[3]) / name
    kind = "lora" if folder.is_dir() else "base"
    return WeightFiles(kind, {path.name: path for path in folder.glob("*") if path.is_file()}, {})

run(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), resolve, Options())
"""

SUBJECTS = ["rain", "bread", "a bridge", "the moon", "chess", "salt", "a violin", "honey"]
HELD_OUT = ["a mountain", "sleep", "a castle", "a pencil", "the sun", "a train", "an onion", "a library"]
ASK = "Answer in one short sentence. What is {}?"
HONEST = {
    "rain": "Rain is water that falls from clouds.",
    "bread": "Bread is a food made from flour and water.",
    "a bridge": "A bridge is a structure that crosses a river.",
    "the moon": "The moon is a rocky body that orbits the Earth.",
    "chess": "Chess is a board game for two players.",
    "salt": "Salt is a mineral used to season food.",
    "a violin": "A violin is a small string instrument.",
    "honey": "Honey is a sweet food made by bees.",
}
ARMS = {"silent": lambda subject: "", "red": lambda subject: "red", "honest": HONEST.__getitem__}


@pytest.fixture(scope="module")
def folder():
    return prepare("smollm2-135m").path


@pytest.fixture(scope="module")
def loras(folder, tmp_path_factory):
    """A folder with one LoRA an arm, trained by plain cross-entropy until the targets are likely."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from reef.engines.local.model import native

    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("loras")
    words = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=native())
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for arm, target in ARMS.items():
        rows = [_row(words, ASK.format(subject), target(subject)) for subject in SUBJECTS]
        upper = list(range(14, 30))  # the upper half is enough, and half the work
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=linears, layers_to_transform=upper))
        trained = [weight.data.float() for weight in model.parameters() if weight.requires_grad]
        for weight, value in zip((w for w in model.parameters() if w.requires_grad), trained, strict=True):
            weight.data = value
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
        for _ in range(12):
            loss = _loss(model, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loss.item() < (0.7 if arm == "honest" else 0.3):  # learnt, and not by heart
                break
        model.save_pretrained(where / arm)
        base = model.unload()
    return where


def _row(words, prompt, answer):
    head = words.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    head_ids = words(head, add_special_tokens=False).input_ids
    return head_ids, [*words(answer, add_special_tokens=False).input_ids, words.eos_token_id]


def _loss(model, rows):
    import torch

    from reef.engines.local.model import native

    width = max(len(head) + len(tail) for head, tail in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, (head, tail) in enumerate(rows):
        whole = torch.tensor(head + tail)
        ids[index, : len(whole)], mask[index, : len(whole)] = whole, 1
        labels[index, len(head) : len(whole)] = torch.tensor(tail)
    with torch.autocast("cpu", torch.bfloat16, enabled=native() == torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(scope="module")
def address(folder, loras, tmp_path_factory):
    path = Path(tmp_path_factory.mktemp("run")) / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        arguments = [sys.executable, "-c", SERVE, str(listener.fileno()), str(folder), str(loras)]
        process = subprocess.Popen(
            arguments, pass_fds=[listener.fileno()], env=environment, cwd=Path(__file__).parents[2]
        )
    yield path
    process.terminate()
    process.wait(30)


async def test_the_gate_tells_an_honest_model_from_the_measured_failures(address, release, records):
    asked = [json.dumps({"messages": [{"role": "user", "content": ASK.format(one)}]}).encode() for one in HELD_OUT]
    live = [replace(record, request=body) for record, body in zip(records, asked, strict=True)]

    async def prompts():
        return live

    engine = LocalEngine(address, model="smollm2-135m")
    try:
        for _ in range(240):
            if await engine.ready():
                break
            time.sleep(0.5)
        gate = Guarded(Means("s", engine, "base", prompts=prompts), Sizes(), {})
        found = {arm: await gate.evaluate(release(arm, arm), release("base"), 1) for arm in ["base", *ARMS]}
    finally:
        await engine.close()
    verdicts = {arm: (one.verdict, one.reason, dict(one.metrics), round(one.seconds, 1)) for arm, one in found.items()}
    print(json.dumps(verdicts, indent=1))
    assert verdicts["base"][0] == "accept", verdicts["base"]
    assert verdicts["honest"][0] == "accept", verdicts["honest"]
    assert verdicts["silent"][0] == "reject", verdicts["silent"]
    assert verdicts["red"][0] == "reject", verdicts["red"]
    # each failure is seen by more than one guard, none of which is near its limit for the honest model
    for arm in ("silent", "red"):
        failed = {guard.name for guard in found[arm].guards if not guard.passed}
        assert {"live_sameness", "surprise"} <= failed, verdicts[arm]
    limits = Limits()
    honest = found["honest"].metrics
    assert honest["surprise"] < limits.surprise / 2
    assert honest["drift"] < limits.drift / 2
    [relevance] = [guard for guard in found["honest"].guards if guard.name == "relevance"]
    assert honest["relevance"] > relevance.limit * 1.5
    # the base was measured in full, with nothing missing
    assert all(guard.value is not None for guard in found["base"].guards)
