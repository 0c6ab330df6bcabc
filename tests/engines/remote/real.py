"""What an engine of a kind relies on, asked of a real server: for kinds that cannot be run where the tests are.

Compared are the server's own words: log-probs of an answer with those of a rating, releases with each other, the base
before with the base after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reef.engines import WeightFiles
from reef.engines.local.layout import tensor_shapes, weight_files
from reef.engines.remote import Away
from reef.engines.remote.engine import RemoteEngine
from tests.engines.remote.kit import ask, collect, trainable

BASE, LORA, FULL = "b" * 40, "1" * 40, "f" * 40
QUESTION = "Name three colours of the rainbow, and say for each of them in one sentence where it can be seen in nature."
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(slots=True)
class Found:
    """`worst`: the largest distance of an answer's log-prob from its rating, by what answered; seconds of each step."""

    apart: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        return max(self.apart.values())


async def verify(
    kind: Callable[..., RemoteEngine], url: str, folder: Path, place: Path, *, key: str | None = None
) -> Found:
    """Base, adapter and (for a model of one file) full weights on a server. Fails by an assertion that says what is not
    as it must be. The server is left with the base's weights."""
    files = weight_files(folder)
    known = {BASE: WeightFiles("base", {}, {}), LORA: _lora(folder, files, place / "made")}
    if len(files) == 1:
        known[FULL] = _full(files[0], place / "made" / "full.safetensors")
    away = Away("real", (url,), None, key, folder, "base", "", known.__getitem__, place / "engine", 10.0, 120.0)
    engine, found = kind(away), Found()
    try:
        before = await _look(engine, BASE, found)
        answers = {BASE: before}
        for release in [each for each in known if each != BASE]:
            begun = time.monotonic()
            await engine.load(release)
            found.seconds[f"load {known[release].kind}"] = time.monotonic() - begun
            answers[release] = await _look(engine, release, found)
            assert _far(before, answers[release]), f"{known[release].kind} weights change nothing: were they loaded?"
        begun = time.monotonic()
        after = await _look(engine, BASE, found)
        found.seconds["back to the base"] = time.monotonic() - begun
        assert not _far(before, after), "the base does not answer as before: is a cache or a release left?"
        await _shapes(engine)
    finally:
        await engine.close()
    return found


async def _look(engine: RemoteEngine, release: str, found: Found) -> list[float]:
    """Answers of a release, twice (the second time from its cache); the base's answer rated with it."""
    for number in range(2):
        _, _, answer = await collect(engine, ask(release, QUESTION, max_tokens=24, seed=number))
        assert trainable(answer), answer.untrainable
        (choice,) = answer.choices or ()
        prompt, ids = answer.prompt_ids or (), choice.output_ids or ()
        (rated,) = await engine.rate(release, [[*prompt, *ids]], [len(prompt)])
        apart = max(abs(one - other) for one, other in zip(rated, choice.logprobs or (), strict=True))
        found.apart[f"{release[:1]}{number}"] = apart
    (fixed,) = await engine.rate(release, [list(range(16, 80))], [1])
    return fixed


async def _shapes(engine: RemoteEngine) -> None:
    """Streams, several choices, stop strings, greedy answers."""
    _, pieces, answer = await collect(engine, ask(BASE, QUESTION, stream=True, n=2, max_tokens=16))
    assert pieces[-1].data.endswith(b"data: [DONE]\n\n")
    assert [choice.index for choice in answer.choices or ()] == [0, 1]
    assert trainable(answer), answer.untrainable
    _, _, one = await collect(engine, ask(BASE, QUESTION, temperature=0, max_tokens=16))
    _, _, two = await collect(engine, ask(BASE, QUESTION, temperature=0, max_tokens=16, stream=True))
    assert (one.choices or ())[0].text == (two.choices or ())[0].text
    text = (one.choices or ())[0].text
    stop = text[3:6]
    _, _, cut = await collect(engine, ask(BASE, QUESTION, temperature=0, max_tokens=16, stop=[stop]))
    assert (cut.choices or ())[0].text == text[: text.index(stop)]


def _far(one: list[float], other: list[float]) -> bool:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one) > 0.02


def _lora(folder: Path, files: list[Path], place: Path) -> WeightFiles:
    """A random adapter on the attention of any model in the usual layout."""
    target = place / "lora"
    target.mkdir(parents=True, exist_ok=True)
    seeded = torch.Generator().manual_seed(1)
    tensors: dict[str, Any] = {}
    shapes = {name: shape for file in files for name, (_, shape) in tensor_shapes(file).items()}
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in LINEARS and len(shape) == 2:
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.randn(8, shape[1], generator=seeded) * 0.05
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.randn(shape[0], 8, generator=seeded) * 0.05
    assert tensors, f"{folder} has no linears of the names {LINEARS}"
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(LINEARS), "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder)}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return WeightFiles("lora", {path.name: path for path in target.iterdir()}, {})


def _full(source: Path, target: Path) -> WeightFiles:
    """The model's weights, each a little larger."""
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: each * 1.02 for name, each in load_file(source).items()}, target, metadata={"format": "pt"})
    return WeightFiles("full", {"model.safetensors": target}, {})
