"""One Ray for a whole test run, since starting one, and workers that load torch, takes seconds each time; a trainer's
process with a Ray of its own, and what runs below it; an objective that waits for the test."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from reef.core.wire import Progress, Step, Stepped
from reef.trainers import Ground
from reef.trainers.client import SocketTrainer
from reef.trainers.local.objective import Outputs, Rows
from reef.trainers.ray import Options
from reef.trainers.ray.cluster import Cluster
from reef.trainers.ray.group import Group
from reef.trainers.ray.work import RayWork
from tests.trainers.objectives import Imitate


class Lasting(RayWork):
    """Its Ray and its workers outlive it, for the next one with as many workers and the same model."""

    cluster: ClassVar[Cluster | None] = None
    groups: ClassVar[dict[tuple[Path, int, str], Group]] = {}

    def __init__(self, ground: Ground, options: Options, compute: str = "float32") -> None:
        if Lasting.cluster is None:
            place = tempfile.TemporaryDirectory(prefix="reef-")
            most = 2 if options.gpus else 6  # with GPUs, as many as there may be
            Lasting.cluster = Cluster(Options(workers=most, cpus=1, gpus=options.gpus), Path(place.name) / "training")
            atexit.register(place.cleanup)
            atexit.register(Lasting.cluster.close)
        super().__init__(ground, options, compute, Lasting.cluster)
        self._key = (ground.folder, options.workers, compute)
        self._group = self.groups.pop(self._key, None)
        for other in [key for key in self.groups if key[0] != ground.folder]:  # another file's tests are over
            self.groups.pop(other).close()

    def close(self) -> None:
        if self._group is not None and self._options.workers == 2:
            self.groups[self._key] = self._group
            self._group = None
        self._drop()


class Held(Imitate):
    """Its losses wait for a file: a test has all the time it wants in the middle of a step."""

    def __init__(self, *, go: str, **options: Any) -> None:
        super().__init__(**options)
        self._go = Path(go)

    def loss(self, outputs: Outputs, rows: Rows) -> Any:
        until = time.monotonic() + 120
        while not self._go.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        return super().loss(outputs, rows)


class Odd(Imitate):
    """Has no number, or fails, where a certain token trains: in one worker only."""

    def loss(self, outputs: Outputs, rows: Rows) -> Any:
        found, metrics = super().loss(outputs, rows)
        if bool((rows.targets == 251).any()):
            raise KeyError("odd")
        return found * math.nan if bool((rows.targets == 250).any()) else found, metrics


class Deadly(Imitate):
    """Kills the process that trains on it."""

    def loss(self, outputs: Outputs, rows: Rows) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


CHILD = """
import logging, socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.trainers import Ground
from reef.trainers.ray import Options
from reef.trainers.server import run

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
base = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})
ground = Ground(Path(sys.argv[2]), Path(sys.argv[3]), lambda release: base, "tiny")
run(socket.socket(fileno=int(sys.argv[1])), ground, "ray", Options(**eval(sys.argv[4])))
"""


class Process:
    """A trainer's process, whose listening socket outlives it, as under the supervisor."""

    def __init__(self, place: Path, model: Path, **options: Any) -> None:
        self.training = place / "state" / "training"
        self.training.mkdir(parents=True)
        self.log = place / "trainer.log"
        self._short = tempfile.TemporaryDirectory(prefix="reef-")
        self._path = Path(self._short.name) / "trainer.sock"
        self._model, self._options = model, options
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        number = self._listener.fileno()
        arguments = [str(number), str(self._model), str(self.training), repr(self._options)]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", CHILD, *arguments], pass_fds=[number], stdout=log, stderr=log
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.child is not None
        self.child.send_signal(number)
        return self.child.wait(60)

    def below(self) -> dict[int, str]:
        """What runs below it: pid to command line."""
        assert self.child is not None
        return below(self.child.pid)

    def workers(self) -> list[int]:
        return [pid for pid, line in self.below().items() if line.startswith("ray::Worker")]

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self._listener.close()
        self._short.cleanup()

    @contextlib.asynccontextmanager
    async def trainer(self) -> AsyncIterator[SocketTrainer]:
        made = SocketTrainer(self._path)
        try:
            yield made
        finally:
            await made.close()


def below(pid: int) -> dict[int, str]:
    """All descendants of a process that are no zombies."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    lines = {}
    for one in found - {pid}:
        with contextlib.suppress(OSError):
            lines[one] = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return lines


def alive(pids: Any) -> list[int]:
    """Those that still run, after two minutes in which they may end: Ray's agents notice late that a node is gone."""
    until = time.monotonic() + 120
    while left := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > until:
            return left
        time.sleep(0.1)
    return []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def train(trainer: SocketTrainer, order: Step, at: dict[str, Any] | None = None) -> tuple[list[str], Stepped]:
    """(stages, the end). `at` maps a stage to what is called when it is told first."""
    calls, stages = dict(at or {}), []
    async for item in trainer.step(order):
        if isinstance(item, Stepped):
            return stages, item
        assert isinstance(item, Progress)
        stages.append(item.stage)
        if item.stage in calls:
            calls.pop(item.stage)()
    raise AssertionError("no end")
