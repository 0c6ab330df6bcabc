"""The trainer process over a real socket: progress, answers, errors, torch only when needed, kills."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from reef.core.errors import ConfigError, ReefError, StoreError, TrainError, WireError
from reef.core.rpc import Client
from reef.core.wire import Datum, Look, Ping, Pong, Progress, Step, Stepped
from reef.engines import WeightFiles
from reef.trainers import Ground, folder
from reef.trainers.client import SocketTrainer
from reef.trainers.fake import FakeTrainer
from reef.trainers.server import Server

Make = Callable[..., Step]

CHILD = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.trainers import Ground
from reef.trainers.server import run

base = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d"}, "kind": "base"})
run(socket.socket(fileno=int(sys.argv[1])), Ground(Path(sys.argv[2]), Path(sys.argv[3]), lambda release: base))
"""


class Process:
    """A trainer whose listening socket outlives it, as under the supervisor."""

    def __init__(self, place: Path, model: Path) -> None:
        self.path = place / "trainer.sock"
        self.training = place / "training"
        self._model = model
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, failpoint: str = "") -> None:
        number = self._listener.fileno()
        environment = os.environ | {"REEF_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
        arguments = [str(number), str(self._model), str(self.training)]
        self._child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=[number], env=environment)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self._child is not None
        self._child.send_signal(number)
        return self._child.wait(30)

    def wait(self) -> int:
        assert self._child is not None
        return self._child.wait(60)

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._listener.close()


@pytest.fixture
def process(tmp_path: Path, tiny: Path) -> Iterator[Process]:
    made = Process(tmp_path, tiny)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def client(process: Process) -> AsyncIterator[SocketTrainer]:
    made = SocketTrainer(process.path)
    try:
        yield made
    finally:
        await made.close()


async def train(trainer: SocketTrainer | FakeTrainer, order: Step) -> tuple[list[Progress], Stepped]:
    news = [item async for item in trainer.step(order)]
    assert isinstance(news[-1], Stepped)
    return [item for item in news[:-1] if isinstance(item, Progress)], news[-1]


async def test_a_steps_life(process: Process, order: Make) -> None:
    process.start()
    async with client(process) as trainer:
        raw = Client(process.path)
        assert await trainer.ready()
        pong = await raw.call(Ping())
        assert isinstance(pong, Pong)
        assert pong.detail == {"loaded": False, "backend": "local"}
        news, done = await train(trainer, order())
        assert [one.stage for one in news] == ["load", "open", "prepare", "train", "modules", "write"]
        assert not done.reused
        assert done.step == 1
        assert folder.read(Path(done.folder)) is not None
        news, again = await train(trainer, order())
        assert news == []
        assert again.reused
        assert again.metrics == done.metrics
        _, second = await train(trainer, order(2))
        assert second.step == 2
        with pytest.raises(TrainError, match="batch-1"):
            await train(trainer, order(1, batch_id="other"))
        with pytest.raises(WireError, match="Look"):
            await raw.call(Look())
        await raw.close()
    assert process.stop() == 0


async def test_two_callers_of_one_step_get_one_step(process: Process, order: Make) -> None:
    process.start()
    async with client(process) as one, client(process) as other:
        results = await asyncio.gather(train(one, order()), train(other, order()))
    assert sorted(done.reused for _, done in results) == [False, True]


async def test_a_failed_order_leaves_the_trainer_working(process: Process, order: Make) -> None:
    process.start()
    async with client(process) as trainer:
        for wrong in (
            order(data=[]),
            order(objective="recipes.sao.loss:Nothing"),
            order(data=[msgspec.structs.replace(order().data[0], reward=None)]),
        ):
            with pytest.raises(Exception, match=r"no trainable token|Nothing|score"):
                await train(trainer, wrong)
        _, done = await train(trainer, order())
        assert not done.reused


@pytest.mark.parametrize(
    ("fault", "wanted", "words"),
    [
        (OverflowError("math range error"), TrainError, "OverflowError: math range error"),
        (KeyError("gone"), TrainError, "KeyError: 'gone'"),
        (OSError(errno.EIO, "Input/output error"), TrainError, "Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError, "No space left on device"),
        (ConfigError("no such objective"), ConfigError, "no such objective"),
    ],
)
def test_what_goes_wrong_inside_is_an_error_that_ends(
    tmp_path: Path, order: Make, monkeypatch: pytest.MonkeyPatch, fault: Exception, wanted: type[ReefError], words: str
) -> None:
    def fail(*_: object, **__: object) -> Stepped:
        raise fault

    monkeypatch.setattr("reef.trainers.local.work.advance", fail)
    monkeypatch.setattr("reef.trainers.local.llama.Llama.load", lambda folder: object())
    made = Server(Ground(tmp_path, tmp_path / "training", lambda release: WeightFiles("base", {}, {})))
    with pytest.raises(ReefError, match=words) as caught:
        made._advance(order(), lambda stage, done, total: None)
    assert type(caught.value) is wanted


async def test_a_caller_that_leaves_stops_the_step(
    process: Process, order: Make, samples: Callable[..., list[Datum]]
) -> None:
    process.start()
    long = order(data=samples(3000))  # many micro-batches, so that there is something left to stop
    async with client(process) as trainer:
        async with contextlib.aclosing(trainer.step(long)) as items:
            async for item in items:
                if isinstance(item, Progress) and item.stage == "load":
                    break
        _, done = await train(trainer, order(batch_id="next"))  # the turn is free again and nothing was written
        assert not done.reused


@pytest.mark.parametrize("point", ["before_write", "after_write", "after_rename"])
async def test_killed_at_a_durable_step_and_started_again(process: Process, order: Make, point: str) -> None:
    process.start(failpoint=f"trainers.{point}")
    async with client(process) as trainer:
        with pytest.raises(WireError):
            await train(trainer, order())
        assert process.wait() == -signal.SIGKILL
        process.start()
        _, done = await train(trainer, order())
        assert done.reused == (point == "after_rename")
        _, second = await train(trainer, order(2))
        assert not second.reused
    line = process.training / "demo" / "weights" / "one"
    assert sorted(entry.name for entry in line.iterdir()) == ["1", "2"]


async def test_killed_anywhere_in_a_step(process: Process, order: Make) -> None:
    async with client(process) as trainer:
        for stage in ("load", "prepare", "train", "write"):
            process.start()
            with contextlib.suppress(WireError):
                async for item in trainer.step(order()):
                    if isinstance(item, Progress) and item.stage == stage:
                        process.stop(signal.SIGKILL)
        process.start()
        while not await trainer.ready():  # a message may still go to the socket of the one that was killed
            await asyncio.sleep(0.02)
        _, done = await train(trainer, order())
    state = folder.read(Path(done.folder))
    assert state is not None
    folder.verify(Path(done.folder), state)
    assert [entry.name for entry in Path(done.folder).parent.iterdir()] == ["1"]


async def test_nobody_there(tmp_path: Path, order: Make) -> None:
    trainer = SocketTrainer(tmp_path / "none.sock")
    assert not await trainer.ready()
    with pytest.raises(WireError, match="cannot reach"):
        await train(trainer, order())


async def test_the_fake_refuses_like_the_real_one(tmp_path: Path, order: Make) -> None:
    fake = FakeTrainer(tmp_path, refuse=lambda wanted: "not today" if wanted.step == 2 else None)
    news, done = await train(fake, order())
    assert news
    assert done.metrics["samples"] == 6
    assert await fake.ready()
    for wrong, words in ((order(2), "not today"), (order(3), "no step 2"), (order(1, line="x", data=[]), "no samples")):
        with pytest.raises(TrainError, match=words):
            await train(fake, wrong)
    _, again = await train(fake, order())
    assert again.reused
    assert [one.step for one in fake.orders] == [1, 2, 3, 1]
    await fake.close()
