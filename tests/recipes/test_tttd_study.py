"""The study's demands, judged on made-up results; and the driver beside a whole server, killed and run again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.tttd.study import STUDY, best_at, demands, equal
from reef.study import STUDIES

ROOT = Path(__file__).parents[2]


def run(means: list[float], calls: list[int], best: float) -> dict[str, Any]:
    return {
        "base": means[0],
        "end": sum(means[-3:]) / 3,
        "best": best,
        "best_least": best,
        "best_most": best,
        "calls": calls[-1],
        "means_by_calls": [list(pair) for pair in zip(calls, means, strict=True)],
        "bests": [min(best, 2.0 + place / 100) for place in range(calls[-1])],
    }


TRAINED = run([2.2, 2.3, 2.5, 2.6, 2.6], [34, 60, 80, 90, 95], 2.7)
FROZEN = run([2.2, 2.25, 2.25, 2.3, 2.9], [34, 65, 97, 128, 160], 2.6)


def test_runs_are_compared_at_equal_calls() -> None:
    assert equal(FROZEN, 95) == pytest.approx((2.2 + 2.25 + 2.25) / 3)
    assert equal(FROZEN, 128) == pytest.approx((2.25 + 2.25 + 2.3) / 3)
    assert equal(FROZEN, 999) == pytest.approx((2.25 + 2.3 + 2.9) / 3)
    assert equal(FROZEN, 1) == pytest.approx((2.2 + 2.25 + 2.25) / 3)  # never fewer steps than are compared
    assert best_at(FROZEN, 11) == pytest.approx(2.10)
    assert best_at(FROZEN, 9999) == 2.6


def test_demands() -> None:
    every = dict.fromkeys((0, 1, 2), TRAINED)
    met = demands({"trained": every, "frozen": dict.fromkeys((0, 1, 2), FROZEN)})
    assert [one.met for one in met] == [True, True, None, None]
    assert "seed 0: +0.333" in met[0].said
    weak = {**every, 1: run([2.2, 2.2, 2.3], [34, 60, 90], 2.1)}
    failed = demands({"trained": weak, "frozen": dict.fromkeys((0, 1, 2), FROZEN), "climb": {0: FROZEN}})
    assert [one.met for one in failed] == [False, False, None, True]
    assert [one.met for one in demands({"trained": every, "frozen": {0: FROZEN}})] == [None] * 4
    assert demands({})[0].met is None


def test_the_study_is_known_and_its_arms_are_honest() -> None:
    assert STUDIES["tttd"] == "recipes.tttd.study:STUDY"
    arms = {arm.name: arm for arm in STUDY.arms}
    assert arms["trained"].seeds == arms["frozen"].seeds == (0, 1, 2)
    assert arms["trained"].config == arms["frozen"].config  # they differ in the reports alone


def driven(folder: Path, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "reef", "run", str(ROOT / "recipes" / "tttd"), "--reef.port", "0",
        "--reef.state_dir", str(folder / "state"), "--reef.engine", "fake", "--training.backend", "fake",
        "--reef.workers", "1", "--", "--steps", str(steps), "--groups", "2", "--rollouts", "4", "--n", "13",
        "--problem", "autocorrelation", "--keep", str(folder / "search.json"),
    ]  # fmt: skip


@pytest.mark.timeout(240)
def test_reef_run_searches_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The fake engine's answers are no sequences: every reward is 0, every step is one without a gradient."""
    environment = {**os.environ, "REEF_FAILPOINT": "", "PYTHONUNBUFFERED": "1"}
    first = subprocess.Popen(
        driven(tmp_path, 99), env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    for line in first.stdout:
        if re.match(r"\s+2 ", line):  # two steps are committed
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    kept = json.loads((tmp_path / "search.json").read_text())
    done = len(kept["history"])
    assert done >= 2
    time.sleep(0.5)  # what the dead server's children need to notice
    said = subprocess.run(
        driven(tmp_path, done + 2), env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert f"\n{done + 2:>8}  " in said
    assert "best so far" in said
    after = json.loads((tmp_path / "search.json").read_text())
    assert after["history"][:done] == kept["history"]
    assert [one["step"] for one in after["history"]] == list(range(1, done + 3))
    assert after["archive"]["expansions"] == 2 * (done + 2)
