"""Slime's side in processes of its own, started as one starts slime."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reef.trainers.slime import Options

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def options(place: Path, **changes: Any) -> Options:
    given: dict[str, Any] = {"exchange": str(place / "exchange"), "seconds": 60.0, "poll": 0.02}
    return Options(**(given | changes))


def flags(**changes: Any) -> list[str]:
    """Slime's arguments for the recipe grpo with rank 2 and no pull towards the base."""
    from recipes.grpo.recipe import GRPORecipe
    from reef.core.load import load

    objective = GRPORecipe(rank=2, kl=0.0).objective()
    plan = load(objective.path, what="objective")(**objective.options).plan
    given: dict[str, Any] = {
        "lr": plan.learning_rate,
        "adam_beta1": plan.betas[0],
        "adam_beta2": plan.betas[1],
        "weight_decay": plan.weight_decay,
        "clip_grad": plan.clip,
        "calculate_per_token_loss": True,
        "use_rollout_logprobs": True,
        "disable_rewards_normalization": True,
    } | changes
    found = []
    for name, value in given.items():
        if value is True:
            found.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}", str(value)]
    return found


def start(place: Path, model: Path, **changes: Any) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "reef.trainers.slime.run", "--exchange", str(place / "exchange"), "--save",
        str(place / "save"), "--", sys.executable, str(HERE / "stub" / "train.py"), "--hf-checkpoint", str(model),
        "--faults", str(place / "faults.json"), *flags(**changes),
    ]  # fmt: skip
    paths = os.pathsep.join((str(ROOT), str(HERE / "stub")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    log = (place / "slime.log").open("ab")
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a session of our own
    process.wait()


@contextlib.contextmanager
def cluster(place: Path, model: Path, *, temperature: float = 1.0, **changes: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = start(place, model, rollout_temperature=temperature, **changes)
    try:
        yield process
    finally:
        stop(process)


def faults(place: Path, **given: list[str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "faults.json").write_text(json.dumps(given))
