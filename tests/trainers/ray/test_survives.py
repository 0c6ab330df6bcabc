"""What is killed is made again, once, and nothing is left behind: workers, Ray's own processes, the trainer itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import TrainError
from reef.core.wire import Step
from reef.trainers import folder
from reef.trainers.local.llama import Llama
from reef.trainers.local.step import advance
from tests.trainers.conftest import BASE
from tests.trainers.ray.kit import Process, alive, train

Make = Callable[..., Step]
pytestmark = pytest.mark.model


@pytest.fixture
def process(tmp_path: Path, tiny: Path) -> Iterator[Process]:
    made = Process(tmp_path, tiny, workers=2, cpus=1, timeout=120, retries=2)
    yield made
    made.close()


@pytest.fixture
def held(order: Make, tmp_path: Path) -> Callable[[int], Step]:
    """Steps that wait in their first loss until `go` is there."""

    def make(step: int) -> Step:
        options = {"learning_rate": 0.01, "go": str(tmp_path / "go")}
        return order(step, objective="tests.trainers.ray.kit:Held", options=options)

    return make


def kill(pids: Any) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(900)
async def test_whatever_of_ray_is_killed_the_step_is_made_once(
    process: Process, held: Callable[[int], Step], tmp_path: Path, tiny: Path
) -> None:
    """A worker, then the raylet, then the head, each in the middle of a step. The line is what `local` makes of it."""
    go, before = tmp_path / "go", [set[int]()]

    def strike(what: str) -> Callable[[], None]:
        def do() -> None:
            found = process.below()
            before[0] = set(process.workers())
            assert len(before[0]) == 2
            kill(list(before[0])[:1] if what == "worker" else [pid for pid, line in found.items() if what in line][:1])
            go.touch()

        return do

    process.start()
    async with process.trainer() as trainer:
        for step, what in enumerate(("worker", "raylet/raylet", "gcs_server"), start=1):
            go.unlink(missing_ok=True)
            stages, done = await train(trainer, held(step), {"train": strike(what)})
            assert stages.count("workers") == (4 if step == 1 else 2), stages
            assert not done.reused
            assert not before[0] & set(process.workers())
    model = Llama.load(tiny)
    for step in (1, 2, 3):
        mine = advance(model, tmp_path / "local", held(step), lambda release: BASE)
    local, ray = (folder.read(Path(one.folder)) for one in (mine, done))
    assert local is not None
    assert ray is not None
    assert ray.metrics["nll"] == pytest.approx(local.metrics["nll"], abs=2e-2)  # bfloat16
    left = list(process.below())
    assert process.stop() == 0
    assert alive(left) == []
    assert list(process.training.rglob(".*")) == []


async def test_a_step_that_kills_its_workers_is_given_up_and_one_that_nobody_waits_for_is_left(
    process: Process, order: Make, held: Callable[[int], Step], tmp_path: Path
) -> None:
    """The first says what to do, and the next step has workers again; the second keeps them."""
    process.start()
    async with process.trainer() as trainer:
        deadly = order(objective="tests.trainers.ray.kit:Deadly", options={"learning_rate": 0.01})
        with pytest.raises(TrainError, match=r"lost its workers 3 times.*use more workers or shorter samples"):
            await train(trainer, deadly)
        assert folder.steps(process.training, "demo", "weights", "one") == []
        (tmp_path / "go").touch()
        _, done = await train(trainer, held(1))
        assert not done.reused
        workers = set(process.workers())
        async with process.trainer() as other:
            news = other.step(held(2))
            async for item in news:
                if getattr(item, "stage", "") == "open":
                    break
            await news.aclose()  # type: ignore[attr-defined]
        _, done = await train(trainer, held(2))
        assert not done.reused
        assert set(process.workers()) == workers


async def test_a_killed_trainer_takes_its_ray_with_it_and_its_successor_makes_the_step(
    process: Process, held: Callable[[int], Step], tmp_path: Path
) -> None:
    process.start()
    async with process.trainer() as trainer:
        below: list[int] = []

        def strike() -> None:
            below.extend(process.below())
            process.stop(signal.SIGKILL)

        with pytest.raises(Exception, match=r"."):
            await train(trainer, held(1), {"train": strike})
        assert len(below) > 4
        left = asyncio.create_task(asyncio.to_thread(alive, below))
        assert folder.steps(process.training, "demo", "weights", "one") == []
        process.start()  # at once, as a supervisor does: what the killed one started may still be there
        (tmp_path / "go").touch()
        _, done = await train(trainer, held(1))
        assert not done.reused
        _, again = await train(trainer, held(1))
        assert again.reused
        assert await left == []
