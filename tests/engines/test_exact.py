"""Log-probabilities of sampled tokens against transformers in float32, on the real model and real prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from reef.core.nouns import Choice
from reef.engines import Answer, WeightFiles
from reef.engines.local.folder import ModelFolder, prepare
from reef.engines.local.model import native
from reef.engines.local.text import Text
from tests.engines.kit import Releases, ask, running

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Write two sentences about the sea at night.",
    "What is 17 + 26? Show your steps.",
    "Name three uses of a paper clip.",
    "Explain what a prime number is to a child.",
    "Übersetze: 'The bread is warm.' 日本語でも。",
    "Give me a recipe for pancakes, with amounts, in a list. " * 3,
    "Who wrote Faust?",
]
LIMIT = 24  # tokens an answer: 8 questions, 3 releases


@pytest.fixture(scope="module")
def model() -> ModelFolder:
    return prepare("smollm2-135m")


@pytest.fixture(scope="module")
def reference(model: ModelFolder) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)


@pytest.fixture(scope="module")
def references(
    model: ModelFolder, reference: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, WeightFiles]]:
    """transformers with two random LoRAs of peft's making, and the files peft saved, as releases."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    files: dict[str, WeightFiles] = {}
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    peft = get_peft_model(reference, config, adapter_name="one")
    peft.add_adapter("two", config)
    for name in ("one", "two"):
        place = tmp_path_factory.mktemp("lora")
        peft.set_adapter(name)
        for key, value in peft.named_parameters():
            if f"lora_B.{name}" in key:
                value.data.mul_(0.2)
        peft.save_pretrained(str(place), selected_adapters=[name])
        files[name] = WeightFiles(
            "lora", {path.name: path for path in (place / name).iterdir()}, {"base": {"digest": model.digest}}
        )
    return peft.eval(), files


def expected(peft: Any, release: str, prompt: list[int], output: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        if release == "base":
            with peft.disable_adapter():
                logits = peft(ids).logits
        else:
            peft.set_adapter(release)
            logits = peft(ids).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), -1)
    return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]


async def answers(model: ModelFolder, files: dict[str, WeightFiles], dtype: str) -> list[tuple[str, Answer]]:
    """Every question to the base and one LoRA in shared batches, then a swap: the other LoRA, then the first again."""

    async def one(engine: Any, release: str, number: int) -> tuple[str, Answer]:
        request = ask(QUESTIONS[number], release=release, seed=number, max_tokens=LIMIT, stream=bool(number % 2))
        *_, answer = [each async for each in engine.answer(request)]
        assert isinstance(answer, Answer)
        return release, answer

    options = {"dtype": dtype, "digest": model.digest, "loras": 1}
    async with running(model.path, Releases(files), **options) as engine:
        numbers = range(len(QUESTIONS))
        found = await asyncio.gather(*(one(engine, release, i) for i in numbers for release in ("base", "one")))
        found += await asyncio.gather(*(one(engine, "two", i) for i in numbers))
        found.append(await one(engine, "one", 0))
        (rated,) = await engine.rate("two", [list(range(100, 400))], [5])
    found.append(
        ("rated", Answer((Choice(0, "", None, tuple(range(105, 400)), tuple(rated)),), tuple(range(100, 105))))
    )
    return found


@pytest.mark.parametrize("dtype", ["float32", "auto"])
async def test_log_probs_equal_transformers(
    model: ModelFolder, references: tuple[Any, dict[str, WeightFiles]], dtype: str
) -> None:
    """`auto` is bfloat16, or float32 with weights in 16 bits: release two has values of more."""
    kind = native() if dtype == "auto" else dtype
    mean, largest = {"float32": (1e-4, 1e-4), torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.06, 0.3)}[kind]
    peft, files = references
    found = await answers(model, files, dtype)
    apart: dict[str, list[float]] = {}
    for release, answer in found:
        assert answer.prompt_ids is not None
        for choice in answer.choices or ():
            assert choice.output_ids is not None
            wanted = expected(
                peft, "two" if release == "rated" else release, list(answer.prompt_ids), list(choice.output_ids)
            )
            apart.setdefault(release, []).extend((wanted - torch.tensor(choice.logprobs)).abs().tolist())
    sampled = sum(len(values) for release, values in apart.items() if release != "rated")
    assert sampled >= 500
    for release, values in apart.items():
        print(f"{dtype} {release}: n={len(values)} mean={sum(values) / len(values):.2g} max={max(values):.2g}")
        assert sum(values) / len(values) < mean
        if release != "rated":  # ids nobody would say: their log-probs are large, and so is bf16's rounding of them
            assert max(values) < largest


def test_templates_render_as_transformers_does(model: ModelFolder) -> None:
    from transformers import AutoTokenizer

    tokenizer, text = AutoTokenizer.from_pretrained(model.path), Text(model.path)
    talks = [
        [{"role": "user", "content": "Hi  there\n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1234 + 5,678?"}],
        [
            {"role": "user", "content": "café 🎉"},
            {"role": "assistant", "content": "Oui."},
            {"role": "user", "content": "don't\n\n\n  100,000 x"},
        ],
    ]
    for messages in talks:
        rendered = text.render(messages)
        assert rendered == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert text.encode(rendered) == expected_ids
        assert tokenizer.decode(expected_ids) == rendered
