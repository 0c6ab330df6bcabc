"""`reef bench learning` on a toy study with real servers: a whole study, a study that is killed, mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef.cli.main import main as reef
from reef.core.errors import StoreError
from reef.study import Study, runner
from reef.study.kept import key, write
from tests.study import toy

ROOT = Path(__file__).parents[2]
NAME = "tests.study.toy:STUDY"


def bench(out, *words, name=NAME):
    return reef(["bench", "learning", name, "--out", str(out), *words])


def finished(out, *arms, end=0.5, seeds=(0,)):
    """As if these arms had run."""
    for arm in arms:
        for seed in seeds:
            folder = out / "toy" / f"{arm.name}-{seed}"
            folder.mkdir(parents=True)
            write(folder / "made.json", {"digest": key(arm.config, arm.options)})
            figures = {"base": 0.0, "end": end, "curve": [[0, 0.0], [16, end]]}
            write(folder / "result.json", {"figures": figures, "seconds": {"all": 60.0}})


def figures(out, arm="main", seed=0):
    found = json.loads((out / "toy" / f"{arm}-{seed}" / "result.json").read_text())
    return found["figures"]


def program(out, *words, kill=""):
    """The program as a process of its own, which `kill` kills at that place."""
    return subprocess.run(
        [sys.executable, "-m", "reef", "bench", "learning", NAME, "--out", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "TOY_KILL": kill},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.timeout(600)  # four servers one after the other
def test_a_study_that_is_killed_ends_with_the_figures_of_one_that_is_not(tmp_path, capsys):
    words = ("--arm", "main", "--seeds", "0", "--no-png")
    for kill in ("1/2", "2/end"):  # between the reports of a batch; trained, and not kept
        killed = program(tmp_path / "killed", *words, kill=kill)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "killed" / "toy" / "main-0" / "result.json").exists()
    resumed = program(tmp_path / "killed", *words)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert bench(tmp_path / "whole", *words) == 0
    whole = figures(tmp_path / "whole")
    assert figures(tmp_path / "killed") == whole
    assert whole["curve"] == [[0, 0.0], [4, 0.25], [8, 0.5], [12, 0.75], [16, 1.0]]
    assert (whole["trained"], whole["steps"], whole["records"]) == (16, [0, 1, 2, 3, 4], 16)
    assert "main reaches 1" in capsys.readouterr().out


def test_what_has_ended_is_not_run_again_and_the_rest_is(tmp_path, capsys):
    finished(tmp_path, toy.STUDY.arms[0], seeds=(0, 1), end=1.0)
    assert bench(tmp_path) == 0
    text = capsys.readouterr().out
    assert "main seed 0: 0.000 -> 1.000" in text
    assert "silent seed 0: batch 3  score 0.000  trained 0" in text
    assert "met: main reaches 1" in text
    assert "met: silent stays" in text
    assert figures(tmp_path, "silent")["releases"] == 1
    folder = tmp_path / "toy"
    assert (folder / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert "| main | median | 0.000 | **1.000** |  |" in (folder / "toy.md").read_text()
    document = json.loads((folder / "toy.json").read_text())
    assert len(document["runs"]) == 3
    assert document["demands"][0]["met"] is True


def test_fresh_starts_over_and_other_settings_are_not_mixed(tmp_path, capsys, monkeypatch):
    main, silent = toy.STUDY.arms
    finished(tmp_path, main)
    (tmp_path / "toy" / "main-0" / "kept.json").write_text("{}")
    monkeypatch.setattr(runner, "Run", Stub)
    monkeypatch.setattr(toy, "STUDY", study())
    assert bench(tmp_path, "--arm", "main", "--seeds", "0", "--fresh", "--no-png") == 0
    assert figures(tmp_path) == {"base": 0.25, "end": 0.75}
    assert not (tmp_path / "toy" / "main-0" / "kept.json").exists()
    changed = toy.Arm("main", {**main.config, "gate": {"policy": "guarded"}}, main.options)
    monkeypatch.setattr(toy, "STUDY", study(changed, silent))
    capsys.readouterr()
    assert bench(tmp_path, "--arm", "main", "--seeds", "0", "--no-png") == 1
    assert "run with other settings of arm main; use --fresh" in capsys.readouterr().out
    assert "No run has ended yet" in (tmp_path / "toy" / "toy.md").read_text()  # the old one counts no more


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"figures": {"base": 1, "end": 2}}', '{"figures": 1, "seconds": {"all": 1}}']
)
def test_a_damaged_result_is_named_with_what_to_do(tmp_path, capsys, monkeypatch, text):
    main, _ = toy.STUDY.arms
    finished(tmp_path, main)
    (tmp_path / "toy" / "main-0" / "result.json").write_text(text)
    monkeypatch.setattr(runner, "Run", Stub)
    monkeypatch.setattr(toy, "STUDY", study())
    words = ("--arm", "main", "--seeds", "0", "--no-png")
    with pytest.raises(StoreError, match=r"result\.json is damaged .*--fresh"):
        runner.outcome(toy.STUDY, main, 0, tmp_path)
    assert bench(tmp_path, *words, "--fresh") == 0
    assert figures(tmp_path) == {"base": 0.25, "end": 0.75}


def test_a_disk_that_fills_up_is_said(tmp_path, capsys, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "Run", Stub)
    monkeypatch.setattr(runner, "write", full)
    monkeypatch.setattr(toy, "STUDY", study())
    assert bench(tmp_path, "--arm", "main", "--seeds", "0", "--no-png") == 1
    assert "main-0 cannot be written: No space left on device; free some space" in capsys.readouterr().out


class Stub:
    """A run without a server."""

    def __init__(self, folder, arm, seed, *, show):
        self.arm, self.seed, self.spent = arm, seed, {"all": 1.0}

    def opened(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


def study(*arms, drive=None, folder=""):
    async def quiet(run):
        return {"base": 0.25, "end": 0.75}

    return Study("toy", "toy", "score", "x", arms or toy.STUDY.arms, drive or quiet, toy.demands_list, folder)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    async def drive(run):
        if run.arm.name == "main" and run.seed == 0:
            raise runner.ReefError("the learner fell over")
        return {"base": 0.0, "end": 1.0} if run.seed else {"base": 0.0}

    monkeypatch.setattr(runner, "Run", Stub)
    monkeypatch.setattr(toy, "STUDY", study(drive=drive))
    assert bench(tmp_path, "--no-png") == 1
    text = capsys.readouterr().out
    assert "main seed 0 failed: the learner fell over" in text
    assert "main seed 1: 0.000 -> 1.000" in text
    assert "silent seed 0 failed: the drive of study toy returned no number 'end'" in text
    assert "2 of 3 runs failed; the same command tries them again" in text


def test_write_goes_into_the_recipes_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    monkeypatch.setattr(runner, "Run", Stub)
    monkeypatch.setattr(toy, "STUDY", study(folder=str(tmp_path / "recipes" / "toy")))
    assert bench(tmp_path / "out", "--write") == 0
    assert sorted(path.name for path in (tmp_path / "recipes" / "toy").iterdir()) == [
        "study.json",
        "study.md",
        "study.png",
    ]


def test_list_runs_nothing(tmp_path, capsys):
    finished(tmp_path, toy.STUDY.arms[1], end=0.25)
    begun = tmp_path / "toy" / "main-1"
    begun.mkdir(parents=True)
    (begun / "kept.json").write_text("{}")
    assert bench(tmp_path, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["main seed 0: not run", "main seed 1: begun", "silent seed 0: 0.00 -> 0.25"]


def test_without_a_name_the_studies_are_listed(capsys):
    assert reef(["bench", "learning"]) == 0
    text = capsys.readouterr().out
    assert "SAO: one-digit addition" in text
    assert "main (3), shuffled (1), lag3 (1)" in text
    assert "bench learning NAME" in text


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("nonsense",), 2, "there is no study 'nonsense'; there are sao, "),
        ((NAME, "--arm", "placebo"), 2, "the study toy has no arm 'placebo'; it has main, silent"),
        ((NAME, "--seeds", "0,0"), 2, "'0,0' is no list of seeds; write 0,1,2"),
        ((NAME, "--seeds", "one"), 2, "'one' is no list of seeds"),
        ((NAME, "--write"), 2, "--write needs the folder of a recipe here"),
        (("tests.study.toy:CONFIG",), 2, "is a dict, not a reef.study.Study"),
        (("tests.study.nothing:STUDY",), 2, "no module 'tests.study.nothing'"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, words, status, said):
    assert reef(["bench", "learning", *words, "--out", str(tmp_path)]) == status
    assert said in capsys.readouterr().err


def test_two_at_once_in_one_folder(tmp_path, capsys):
    with runner.alone(toy.STUDY, tmp_path):
        assert bench(tmp_path) == 2
    assert "runs in" in capsys.readouterr().err


def test_a_server_that_cannot_start_says_why(tmp_path, capsys, monkeypatch):
    wrong = toy.Arm("main", {"reef": {"engine": "fake", "recipe": "soa"}}, {})
    monkeypatch.setattr(toy, "STUDY", study(wrong))
    assert bench(tmp_path, "--no-png") == 1
    text = capsys.readouterr().out
    assert "main seed 0 failed: the server did not start; it said:" in text
    assert "soa" in text


def test_the_study_in_the_docs(tmp_path, capsys, monkeypatch):
    """As it is printed, with an engine and a trainer that are fakes."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)
    fake = text.replace('"recipe": "sao"', '"engine": "fake", "recipe": "sao"')
    fake = fake.replace(
        '"gate": {"policy": "guarded"}', '"gate": {"policy": "always"}, "training": {"backend": "fake"}'
    )
    assert fake.count("fake") == 2
    (tmp_path / "yes.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    assert bench(tmp_path, "--no-png", name="yes:STUDY") == 0
    said = capsys.readouterr().out
    assert "main seed 0: batch 3  trained 32" in said
    assert "NOT met: it says yes; ends [0.0]" in said  # the fake engine never does
    assert len(text.splitlines()) < 40
