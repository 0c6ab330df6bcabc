"""`reef demo harness` with the real pi: it fails, its harness learns, it is updated, and it passes."""

import json
import os
import subprocess
import sys

import pytest

from tests.clients.conftest import CLIENTS, ROOT

PI = CLIENTS / "node/node_modules/.bin/pi"


@pytest.mark.timeout(900)
def test_an_agent_learns_from_its_failures(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "reef", "demo", "harness", "--json", "--client", str(PI), "--keep", "kept"],
        cwd=tmp_path, capture_output=True, text=True, timeout=880,
        env={**os.environ, "PYTHONPATH": str(ROOT), "REEF_URL": "", "REEF_TOKEN": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert list(made["before"].values()).count(False) == 4
    assert all(made["after"].values())
    assert "release 1 is out" in made["notice"]
    assert made["updated"] == 0
    release = made["release"]
    assert release["evaluation"]["policy"] == "better"
    assert release["evaluation"]["metrics"]["candidate"] == 1.0
    assert release["evaluation"]["metrics"]["incumbent"] < 0.5
    assert "harness: 2 entries" in done.stderr
    home = tmp_path / "kept/home/.local/share/reef/pi/root"
    assert 'Every Python file begins with the line "# Licence: MIT".' in (home / "AGENTS.md").read_text()
    assert (home / "skills/changelog-entry/SKILL.md").exists()
    assert not list((tmp_path / "kept/home").glob(".pi")), "nothing outside its own config root"
