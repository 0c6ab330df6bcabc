"""`reef demo harness --plain` as a person runs it: no agent, no Node, no account."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def demo(folder, *words, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "reef", "demo", *words], cwd=folder, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "REEF_URL": "", "REEF_TOKEN": "", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_plain_application_learns_through_its_requests(tmp_path):
    code, out, err = demo(tmp_path, "harness", "--plain", "--json", "--keep", "kept", PATH="/usr/bin:/bin")
    assert code == 0, err
    made = json.loads(out)
    assert list(made["before"].values()).count(False) == 4
    assert all(made["after"].values())
    release = made["release"]
    assert (release["seq"], release["operation"]) == (1, "publish")
    assert release["evaluation"]["policy"] == "better"
    assert release["evaluation"]["metrics"]["candidate"] == 1.0
    assert release["evaluation"]["metrics"]["incumbent"] < 0.5
    assert "What is scripted: the model" in err
    assert "harness: 2 entries" in err
    assert 'Every Python file begins with the line "# Licence: MIT".' in err
    assert (tmp_path / "kept/reef.yaml").exists()
    code, _, err = demo(tmp_path, "harness", "--plain", "--keep", "kept")
    assert (code, "name a new folder to keep" in err) == (2, True)


def test_the_demos_are_listed(tmp_path):
    code, out, _ = demo(tmp_path)
    assert code == 0
    assert "demo harness    a coding agent" in out
    assert "--plain" in out
    code, _, err = demo(tmp_path, "nothing")
    assert code == 2
    assert "there is no 'nothing'" in err


def test_what_it_needs_is_said_before_anything_starts(tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    code, _, err = demo(tmp_path, "harness", PATH=str(empty))
    assert code == 2
    assert "bwrap is missing" in err
    assert "--plain" in err
