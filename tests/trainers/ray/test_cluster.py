"""A cluster that somebody else runs: waited for, joined by its address, and left as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reef.core.errors import WireError
from reef.core.wire import Step
from tests.trainers.ray.kit import Process, train

Make = Callable[..., Step]
pytestmark = pytest.mark.model


@contextlib.contextmanager
def head(port: int) -> Iterator[None]:
    """A head of two CPUs in a process group of its own."""
    place = tempfile.TemporaryDirectory(prefix="reef-")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={place.name}/ray", "--include-dashboard=false"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with (Path(place.name) / "log").open("wb") as log:
        child = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert time.monotonic() < until
            time.sleep(0.2)
        yield
        assert child.poll() is None  # nobody ended it
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        place.cleanup()


@pytest.mark.timeout(600)
async def test_a_cluster_is_waited_for_joined_and_left(
    tmp_path: Path, tiny: Path, order: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hasty = Process(tmp_path / "hasty", tiny, address=f"127.0.0.1:{port}", timeout=2)
    patient = Process(tmp_path / "patient", tiny, address=f"127.0.0.1:{port}", workers=2, timeout=240)
    try:
        hasty.start()
        async with hasty.trainer() as trainer:
            with pytest.raises(WireError, match=rf"127.0.0.1:{port} could not be joined for 2 s.*ray start --head"):
                await train(trainer, order())
        assert hasty.stop() == 0
        with head(port):
            patient.start()
            async with patient.trainer() as trainer:
                _, done = await train(trainer, order())
                assert not done.reused
                _, done = await train(trainer, order(2))
                assert not done.reused
            assert patient.stop() == 0
    finally:
        hasty.close()
        patient.close()
