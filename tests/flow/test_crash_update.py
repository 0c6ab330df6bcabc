"""kill -9 at every durable step of an update: each life goes on where the last one died, and nothing trains twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(place: Path, seed: int, budget: int) -> Counter[str]:
    """One story of kills; returns how many at each failpoint."""
    program = [sys.executable, "-m", "tests.loop.kills", str(place), str(seed), str(budget)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["wrong"] == []
    return Counter(told["kills"])


@pytest.mark.parametrize(("seed", "budget", "least"), [(0, 2, 45), (1, 2, 35)])
def test_a_learner_killed_again_and_again_does_its_work_once(
    tmp_path: Path, seed: int, budget: int, least: int
) -> None:
    """Seed 0 kills at every point; the others by chance, and the odd ones with an operator's rollback in between.
    That each failpoint is passed is in `test_faults`."""
    kills = run(tmp_path, seed, budget)
    assert kills.total() >= least


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 30))
def test_a_longer_story(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 6)
