"""The gate on the real model: what is no better is never called better, and what is better is released.

No better: a LoRA whose second half is zero is the base under another name, so its scores differ by luck alone. Each
generation asks the same tasks with seeds of its own. Better: rules that tell the model its name, and tasks that ask it.
"""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from reef.core.nouns import Part, Release
from reef.engines import WeightFiles
from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.engines.local.layout import read_layout
from reef.evaluation import Means, Scorer, Sizes, Task
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.policies import Better
from reef.evaluation.scorers import make
from reef.evaluation.suite import Listed, Sources
from reef.harness.apply import NOTHING, Applied
from tests.engines.kit import Releases, lora_files, make_lora, running

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SIZES = Sizes(tasks=48, least=16, repeats=2)
MODEL = "smollm2-135m"
SUMS = [(a, b) for a in range(1, 9) for b in range(1, 7)]
NAME = "Your name is Coral."
GENERATIONS = 3


@pytest.fixture(scope="module")
def folder() -> Path:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return prepare(MODEL).path


@pytest.fixture(scope="module")
def empty(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA with nothing but zeros in its second half: it adds nothing."""
    made = make_lora(tmp_path_factory.mktemp("loras") / "empty", read_layout(folder), seed=1)
    path = made / "adapter_model.safetensors"
    save_file({name: value * ("lora_B" not in name) for name, value in load_file(path).items()}, path)
    return made


def release(name: str, weights: str, rules: str | None = None) -> Release:
    parts = {"weights": Part("lora", {"adapter_model.safetensors": (weights, 1)})}
    if rules is not None:
        parts["harness"] = Part("tree", {"harness.json": (rules, 1)})
    return Release(
        name, 1, "s", "publish", None, parts, None, 0, None, None, None, {}, actor="test", reason="", created_at=0.0
    )


def renders(of: Release) -> Applied:
    return Applied(of.parts["harness"].files["harness.json"][0]) if "harness" in of.parts else NOTHING


def gate(engine: LocalEngine, name: str, tasks: list[Task]) -> Better:
    book = Book.memory()
    suite = Sources(name, [Listed(name, tasks)], book)
    return Better(Means(name, engine, "base", book, suite, None, renders, MODEL), SIZES, {})


def number(right: int) -> Scorer:
    return make({"use": "number", "answer": right})


async def test_the_same_quality_is_never_better_and_the_better_is_released(folder: Path, empty: Path) -> None:
    sums = [
        Task(f"{a}+{b}", Question.of(f"What is {a}+{b}?", max_tokens=8, temperature=1.0), number(a + b))
        for a, b in SUMS
    ]
    coral = make({"use": "contains", "answer": "coral"})
    names = [
        Task(f"{ask} {number}", Question.of(ask, max_tokens=8, temperature=0.5), coral)
        for ask in ("Who are you?", "Please introduce yourself.")
        for number in range(24)
    ]
    engines = Releases({f"base-{turn}": WeightFiles("base", {}, {}) for turn in range(GENERATIONS)})
    engines.known["empty"] = lora_files(empty)
    async with running(folder, engines, dtype="auto") as engine:
        same = gate(engine, "sums", sums)
        for turn in range(GENERATIONS):
            incumbent = release(f"base-{turn}", "base")
            found = await same.evaluate(release("empty", "empty"), incumbent, 1)
            assert found.verdict != "accept", found.reason
            assert found.metrics["tasks"] >= SIZES.least
            asked = (1 + SIZES.repeats) * found.metrics["tasks"]
            assert found.cost.calls >= asked, "the seeds of an earlier generation were used again"
            twin = await same.evaluate(release(f"base-{turn}", "base"), incumbent, 1)
            assert twin.verdict != "accept", twin.reason
            assert twin.metrics["tasks"] >= SIZES.least
        better = gate(engine, "names", names)
        found = await better.evaluate(release("base", "base", NAME), release("base", "base"), 1)
        assert found.verdict == "accept", found.reason
        assert found.metrics["candidate"] - found.metrics["incumbent"] > 0.3
        assert found.metrics["tasks"] < 48, "what is plain needs no more tasks"
