"""Tables, numbers and the picture of results that are made up."""

import dataclasses
import json
import sys

import pytest

from reef.core.errors import InputError
from reef.study import Demand, figure, table
from reef.study.runner import Outcome, results
from tests.study.toy import STUDY

DRIFT = {"kl": 0.1, "kl_k3": 0.2, "perplexity_before": 30.0, "perplexity_after": 31.0, "guard_after": 0.5}


def outcome(arm, seed, base, end, **more):
    figures = {"base": base, "end": end, "curve": [[0, base], [10, end]], **more}
    return Outcome(arm, seed, figures, {"asking": 5.0, "all": 90.0})


FOUND = [
    outcome("main", 0, 0.1, 0.9, tokens=7.5, drift=DRIFT),
    outcome("main", 1, 0.2, 0.5, tokens=None),
    outcome("main", 2, 0.0, 0.7, tokens=3),
    outcome("silent", 0, 0.1, 0.1),
]
DEMANDS = [
    Demand("it learns", True, "ends .9"),
    Demand("it is quick", False, "9 min"),
    Demand("it stays", None, "no run"),
]


def page():
    return table.markdown(STUDY, FOUND, DEMANDS, "reef bench learning toy")


def test_every_arm_and_seed_has_a_row_and_seeds_have_median_and_minimum():
    text = page()
    for row in (
        "| main | 0 | 0.100 | 0.900 | 1.5 |",
        "| main | 1 | 0.200 | 0.500 | 1.5 |",
        "| main | median | 0.100 | **0.700** |  |",
        "| main | minimum |  | **0.500** |  |",
        "| silent | 0 | 0.100 | 0.100 | 1.5 |",
    ):
        assert row in text, row
    assert "| silent | median" not in text
    assert "`reef bench learning toy`" in text


def test_what_was_not_measured_is_a_dash():
    assert "| tokens | 7.500 | – | 3 | – |" in page()
    assert "| main | 0 | 0.100 | 0.200 | 30.000 | 31.000 | 0.500 |" in page()  # drift, of what was measured
    assert "| main | 1 | –" not in page()  # a run without drift has no row there


def test_demands_say_whether_they_are_met_and_by_what():
    text = page()
    assert "- it learns: met; ends .9" in text
    assert "- it is quick: **not met**; 9 min" in text
    assert "- it stays: not known (a run is missing); no run" in text


def test_arms_that_were_not_run_are_named():
    text = table.markdown(STUDY, FOUND[:3], [], "x")
    assert "Not run: silent." in text
    assert "No run has ended yet." in table.markdown(STUDY, [], [], "x")


def test_the_document_has_every_figure():
    found = json.loads(table.dumps(table.document(STUDY, FOUND, DEMANDS, "x")))
    assert [run["figures"]["end"] for run in found["runs"]] == [0.9, 0.5, 0.7, 0.1]
    assert found["summary"]["main"] == {"base": 0.1, "median": 0.7, "minimum": 0.5}
    assert [one["met"] for one in found["demands"]] == [True, False, None]


def test_results_are_by_arm_and_seed_with_the_time():
    found = results(FOUND)
    assert list(found["main"]) == [0, 1, 2]
    assert found["silent"][0]["seconds"] == 90.0


def test_files_of_a_recipes_second_study_have_its_own_name():
    assert table.stem(dataclasses.replace(STUDY, name="sao", folder="recipes/sao")) == "study"
    assert table.stem(dataclasses.replace(STUDY, name="skill", folder="recipes/grpo")) == "skill"


@pytest.mark.parametrize("found", [FOUND, FOUND[3:], []])
def test_the_picture(tmp_path, found):
    path = figure.draw(STUDY, found, tmp_path / "new" / "toy.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"reef-learn\[local\].*--no-png"):
        figure.draw(STUDY, FOUND, tmp_path / "x.png")
