"""The tinker backend in the real trainer process, killed where it hurts: no step is trained twice."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reef.core.errors import WireError
from reef.core.wire import Step
from reef.trainers.client import SocketTrainer
from tests.trainers.tinker.kit import calls, faults, options
from tests.trainers.tinker.test_work import ask, same, service, work  # noqa: F401 (fixtures)

pytestmark = pytest.mark.model

CHILD = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.trainers import Ground
from reef.trainers.server import run
from tests.trainers.tinker.kit import options

base = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})
model, training, service = map(Path, sys.argv[2:])
ground = Ground(model, training, lambda release: base, "tiny", "d" * 64)
run(socket.socket(fileno=int(sys.argv[1])), ground, "tinker", options(service, model))
"""


@pytest.mark.parametrize("where", ["forward_backward", "save_weights", "after_rename"])
async def test_a_killed_trainer_repeats_the_step_from_the_state_before(
    where: str,
    ask: Callable[..., Step],  # noqa: F811
    work: Callable[..., Any],  # noqa: F811
    service: Path,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the child has: sums shared out among more threads differ in their last bits
    whole = work("whole")
    for step in (1, 2):
        kept = whole.advance(ask(step), lambda stage, done, total: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "trainer.sock"))
    listener.listen()
    training = tmp_path / "training"

    def start(failpoint: str = "") -> subprocess.Popen[bytes]:
        environment = os.environ | {"REEF_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
        number = listener.fileno()
        arguments = [str(number), str(tiny), str(training), str(service)]
        return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=[number], env=environment)

    options(service, tiny)
    before = len(calls(service, "optim_step"))
    if where != "after_rename":
        faults(service, **{where: ["", "die"]})  # the second step's
    child = start("trainers.after_rename:2" if where == "after_rename" else "")
    trainer = SocketTrainer(tmp_path / "trainer.sock")
    try:
        [_ async for _ in trainer.step(ask(1))]
        with pytest.raises(WireError):
            [_ async for _ in trainer.step(ask(2))]
        assert child.wait(60) != 0
        child = start()
        *_, done = [item async for item in trainer.step(ask(2))]
        same(kept, done, rtol=0.0, atol=1e-7)  # an update is 0.01: a step trained twice is far outside
        assert done.reused is (where == "after_rename")
        assert len(calls(service, "optim_step")) - before == {"forward_backward": 2, "save_weights": 3}.get(where, 2)
    finally:
        torch.set_num_threads(threads)
        await trainer.close()
        child.kill()
        child.wait()
        listener.close()
