"""The engine as a process of its own: started on an inherited socket, ended by SIGTERM, loaded without transformers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from reef.core.errors import ConfigError
from reef.engines import Answer
from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.engines.local.server import Options
from tests.engines.kit import ask

PROGRAM = """
import os, socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.engines.local.server import Options, run
assert "torch" not in sys.modules
base = WeightFiles("base", {}, {})
run(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), lambda _: base, Options(threads=2))
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
assert "transformers" not in sys.modules
print("ended")
"""


async def answered(folder: Path) -> tuple[float, int, str]:
    """Seconds to the first readiness, exit status after SIGTERM, and what the process printed."""
    place = Path(tempfile.mkdtemp(prefix="reef-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "engine.sock"))
    listener.listen(16)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(listener.fileno()), str(folder)],
        pass_fds=(listener.fileno(),),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    engine = LocalEngine(place / "engine.sock", model="m")
    try:
        while not await engine.ready():
            assert process.poll() is None
            await asyncio.sleep(0.02)
        ready = time.monotonic() - started
        *_, answer = [each async for each in engine.answer(ask("Hello", max_tokens=3))]
        assert isinstance(answer, Answer)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
        return ready, process.returncode, out
    finally:
        await engine.close()
        process.kill()
        process.wait()
        shutil.rmtree(place)


async def test_a_process_serves_and_ends(tiny: Path) -> None:
    _, status, out = await answered(tiny)
    assert (status, out) == (0, "ended\n")


@pytest.mark.model
async def test_the_real_model_is_ready_soon() -> None:
    ready, status, _ = await answered(prepare("smollm2-135m").path)
    assert status == 0
    assert ready < 15  # quiet: about 2.5 s; this bound only catches a return of heavy imports on a busy machine


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"slots": 0}, {"share": 0.0}, {"context": -1}, {"threads": 0}])
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Options(**wrong)  # type: ignore[arg-type]


def test_an_answer_without_a_limit_ends_soon() -> None:
    assert Options().max_tokens == 256
