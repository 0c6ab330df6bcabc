"""Learning from nothing but scores, end to end: `reef teach` as a person runs it makes the served model better."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


def test_scores_alone_teach_addition(tmp_path):
    """Of held-out sums, never trained on, at least half come out right afterwards, and many more than before."""
    done = subprocess.run(
        [sys.executable, "-m", "reef", "teach", "addition", "--json", "--no-png"],
        cwd=tmp_path,  # and no server there: it starts one of its own
        env={**os.environ, "PYTHONPATH": str(ROOT), "REEF_URL": "http://127.0.0.1:9", "REEF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (lesson,) = json.loads(done.stdout)["lessons"]
    base, after = (lesson["held_out"][name] for name in ("base", "after"))
    print(f"base {base['score']:.2f}, after {after['score']:.2f}, {lesson['reports']} reports, {lesson['minutes']} min")
    assert base["answers"] == after["answers"] >= 60
    assert after["score"] >= max(0.5, base["score"] + 0.25)
    assert lesson["reports"] <= 450
    accepted = [release for release in lesson["releases"] if release["operation"] == "publish"]
    assert after["release_id"] == accepted[0]["release_id"]
    assert all(release["evaluation"]["verdict"] == "accept" for release in accepted)
