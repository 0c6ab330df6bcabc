"""What a scenario's recipes and trigger let a person ask for, as the gateway and the start know it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from reef.cli import propose
from reef.cli.bind import bind
from reef.cli.main import main
from reef.cli.route import instructed, nowhere
from reef.config import load

BASE = "reef: {{engine: fake, recipe: {recipe}}}\ntraining: {{backend: fake, trigger: {trigger}}}\n"


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(recipe, trigger):
        Path("reef.yaml").write_text(BASE.format(recipe=recipe, trigger=trigger))
        settings = load().settings
        return settings, settings.scenario("default")

    return make


@pytest.mark.parametrize(
    ("recipe", "parts"), [("sao", ("weights",)), ("feedback_rules", ()), ("record", ()), ("gepa", ("harness",))]
)
@pytest.mark.parametrize("trigger", ["auto", "manual", "hybrid"])
def test_which_parts_take_instructions(scenario, recipe, parts, trigger):
    _, wanted = scenario(recipe, trigger)
    found = instructed(wanted)
    assert (found.trigger, found.parts) == (trigger, parts)


@pytest.mark.parametrize(("trigger", "said"), [("auto", 0), ("manual", 1), ("hybrid", 0)])
def test_a_trigger_under_which_nothing_is_learnt_is_told_at_the_start(scenario, trigger, said):
    settings, wanted = scenario("feedback_rules", trigger)
    asides = bind(settings, wanted, nowhere).asides
    assert [("takes no instructions" in aside, "training.trigger: auto" in aside) for aside in asides] == [
        (True, True)
    ] * said


def test_a_wrong_trigger_is_an_error_of_the_configuration(scenario, capfd):
    Path("reef.yaml").write_text(BASE.format(recipe="record", trigger="sometimes"))
    assert main(["config"]) == 2
    assert "training.trigger" in capfd.readouterr().err


def test_without_a_server_the_next_step_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REEF_URL", "http://127.0.0.1:9")
    assert main(["propose", "Be kind."]) == 1
    assert "reef serve" in capfd.readouterr().err


def test_one_mutation_may_stand_alone_in_the_file(tmp_path):
    file, mutation = tmp_path / "one.json", {"op": "remove", "id": "calm"}
    for given in (mutation, [mutation], {"mutations": [mutation]}):
        file.write_text(json.dumps(given))
        args = argparse.Namespace(text="why", file=str(file), session=None)
        assert propose._asked(args) == (propose.ROUTE, {"mutations": [mutation], "reason": "why"})


@pytest.mark.parametrize(("part", "code"), [("harness", 1), ("weights", 0)])
def test_an_ask_of_which_no_edit_came_is_a_failure(part, code, capfd):
    found = {"id": "ask_a", "scenario": "default", "part": part, "state": "done", "said": "s", "candidate": None}
    assert propose._tell(None, found, argparse.Namespace(json=False)) == code
    assert ("nothing was changed: no edit came of it" in capfd.readouterr().out) == bool(code)
