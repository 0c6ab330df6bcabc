"""A recipe of one's own is found in the folder that `reef serve` was started in, by every process of the server."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served
from reef.cli import process

KEPT = """
from dataclasses import dataclass
from reef.recipe import Objective
from recipes.sft.recipe import SFTRecipe

@dataclass(frozen=True, slots=True)
class Kept(SFTRecipe):
    def objective(self):
        return Objective("kept_loss:Loss", {})
"""
CONFIG = """
reef: {{recipe: "kept:Kept", batch_size: 1, engine: fake, port: {port}, state_dir: {state}}}
training: {{backend: fake}}
gate: {{policy: always}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept.py").write_text(KEPT)
    (tmp_path / "kept_loss.py").write_text("class Loss: pass")
    (tmp_path / "json.py").write_text("raise SystemExit('this hides a module of the standard library')")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_server_learns_by_it(own: Path) -> None:
    (own / "json.py").unlink()  # `python -m` itself looks here first; the installed program does not
    with (
        served(own / "run" / "state", CONFIG) as (url, token),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=30) as client,
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "Say hello."}]}
        answer = client.post("/v1/chat/completions", json=body)
        shown = {"references": [answer.headers["x-reef-agent-record-id"]], "demonstration": "Hello."}
        client.post("/reef/report", json=shown).raise_for_status()
        for _ in range(600):
            learner = client.get("/reef/status").json()["scenarios"]["default"].get("learner") or {}
            if (part := (learner.get("parts") or {}).get("weights") or {}).get("trained"):
                break
            time.sleep(0.1)
    assert part.get("trained") == 1, part


class Reached(Exception):
    pass


@pytest.mark.parametrize("role", ["trainer", "learner", "gateway", "prepare"])
def test_every_process_looks_there_last(own: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Before anything of the role is done."""

    def stop() -> None:
        raise Reached

    before = [place for place in sys.path if place not in ("", str(own))]
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setattr(sys, "argv", ["process", role])
    monkeypatch.setattr(process, "_prepare" if role == "prepare" else "die_with_parent", stop)
    with pytest.raises(Reached):
        process.main()
    assert sys.path == [*before, str(own)]


def test_a_child_loads_an_objective_from_there(own: Path) -> None:
    """With `-P`, as children run: Python itself looks elsewhere only, and the folder hides nothing."""
    code = (
        "from reef.cli import process; process.own_folder()\n"
        "import json; from reef.core.load import load\n"
        "print(load('kept_loss:Loss', what='objective').__name__)"
    )
    command = [*process.command("trainer")[:2], "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=None, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Loss"), done.stderr


def test_a_folder_that_is_gone_is_no_place(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(process.os, "getcwd", gone)
    process.own_folder()
