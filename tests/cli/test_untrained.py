"""`reef records --why-not-trained`: one sentence on a record, or a table of reasons; with a server and without."""

import contextlib
import json
from copy import copy
from dataclasses import replace

import pytest

from reef.core.nouns import Choice, Sampling
from reef.experience.units import Drop
from reef.loop.ledger import Ledger
from tests.cli.kept import Folder
from tests.gateway.conftest import TOKEN
from tests.gateway.test_imports import build, build_report


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


@pytest.fixture(params=["server", "folder"])
def where(request, folder):
    """A context in which commands find a server, or none."""
    return folder.serving if request.param == "server" else contextlib.nullcontext


def exact(release):
    choice = Choice(0, "yes", "stop", output_ids=(1, 2), logprobs=(-0.5, -0.5))
    return replace(build(release), choices=(choice,), prompt_ids=(3,), sampling=Sampling(), untrainable=None)


def ask(folder, *words):
    return folder.run("records", "--why-not-trained", *words, "--reef.recipe", "sao")


def test_one_record(folder, where):
    waits, silent = exact(folder.head.id), exact(folder.head.id)
    old = exact(folder.head.id)
    told, late = build_report(waits.id, score=1.0), build_report(old.id, score=1.0)
    folder.store(waits, silent, old, told, late)
    ledger = Ledger(folder.path / "learn.db")
    ledger.drop("default", "weights", [Drop(f"{old.id}:0", late.id, "stale")], 0)
    ledger.close()
    with where():
        assert ask(folder, waits.id)[:2] == (
            0, f"{waits.id}: it waits for a batch of the weights: 1 of 32 units are ready\n",
        )  # fmt: skip
        assert ask(folder, f"chatcmpl-{silent.id}")[1] == f"{silent.id}: no report has come on it\n"
        code, out, _ = ask(folder, old.id, "--json")
        assert json.loads(out) == {
            "agent_record_id": old.id, "reason": "stale",
            "sentence": f"the answer was too many steps old when its turn came (report {late.id})",
        }  # fmt: skip
        assert ask(folder, "0" * 32)[0] == 1
        code, _, err = ask(folder, told.id)
        assert (code, "is a report" in err) == (1, True)
        code, _, err = ask(folder, waits.id, "--scenario", "other")
        assert (code, "it is of 'default'" in err) == (1, True)


def test_a_table_of_reasons(folder, where):
    many = [exact(folder.head.id) for _ in range(3)]
    tool = replace(exact(folder.head.id), untrainable="a tool was called")
    folder.store(*many, tool, build_report(many[0].id, score=1.0))
    with where():
        code, out, err = ask(folder)
        assert (code, err) == (0, "")
        for said in ("waits for a report", "waits for a batch", "untrainable", "a tool was called", "newest 4 records"):
            assert said in out
        found = json.loads(ask(folder, "--json")[1])
        assert [(row["reason"], row["count"]) for row in found] == [
            ("waits for a report", 2), ("untrainable", 1), ("waits for a batch", 1),
        ]  # fmt: skip
        assert found[2]["example"]["agent_record_id"] == many[0].id
        few = json.loads(ask(folder, "--json", "--min-score", "0.5")[1])
        assert [(row["reason"], row["count"]) for row in few] == [("waits for a batch", 1)]


def test_a_scenario_that_only_records_and_one_that_is_not_there(folder):
    one = exact(folder.head.id)
    folder.store(one)
    code, out, _ = folder.run("records", "--why-not-trained", one.id, "--reef.recipe", "record")
    assert (code, "no recipe learns from them" in out) == (0, True)
    code, _, err = folder.run("records", "--why-not-trained", "-s", "nowhere")
    assert (code, "there is no scenario 'nowhere'" in err) == (1, True)


def test_a_recipe_of_next_messages_reads_sessions_and_writes_nothing(folder):
    one = exact(folder.head.id)
    folder.store(one)
    before = sorted(path.name for path in folder.path.iterdir())
    code, out, err = folder.run("records", "--why-not-trained", one.id, "--reef.recipe", "openclawrl")
    assert (code, err) == (0, "")
    assert "the next message" in out or "last turn" in out or "no conversation" in out or "anything after it" in out
    assert sorted(path.name for path in folder.path.iterdir()) == before


def replace_path(folder, path):
    made = copy(folder)
    made.path = path
    return made


def test_a_named_server_is_asked_only_where_there_is_no_folder(folder, monkeypatch, tmp_path):
    """REEF_URL does not silently turn a question about this folder into a smaller one."""
    one, tool = exact(folder.head.id), replace(exact(folder.head.id), untrainable="a tool was called")
    folder.store(one, tool, build_report(one.id, score=1.0))
    Ledger(folder.path / "learn.db").close()
    away = replace_path(folder, tmp_path / "nowhere")
    with folder.serving():
        monkeypatch.setenv("REEF_URL", folder.gateway.url)
        monkeypatch.setenv("REEF_TOKEN", TOKEN)
        code, out, err = ask(folder, one.id)
        assert (code, out) == (0, f"{one.id}: it waits for a batch of the weights: 1 of 32 units are ready\n")
        assert err == f"reef: read from {folder.path}, not from {folder.gateway.url}\n"
        assert "waits for a batch" in ask(folder)[1]
        for at, words in ((folder, ["--url", folder.gateway.url]), (away, [])):
            code, out, err = at.run("records", "--why-not-trained", *words)
            assert (code, "a server tells less" in err, "a tool was called" in out) == (0, True, True)
            assert "1 of the newest 2 records can never train" in out
            code, out, err = at.run("records", "--why-not-trained", tool.id, *words)
            assert (code, "a server tells less" in err, out) == (0, True, f"{tool.id}: a tool was called\n")
            code, out, _ = at.run("records", "--why-not-trained", one.id, *words)
            assert (code, out) == (0, f"{one.id}: whether it trained is not known\n"), "no audit is kept here"
