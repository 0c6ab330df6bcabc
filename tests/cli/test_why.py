"""`reef why`: the same story from a server and from the state folder, as a tree for people and as JSON."""

import contextlib
import json

import pytest

from reef.core.ids import new_receipt
from reef.core.wire import Looked
from reef.experience.units import Drop
from reef.gateway import health
from reef.loop.audit import Audit
from reef.loop.ledger import Ledger
from reef.records import keep
from reef.records.queue import Queue
from tests.cli.kept import Folder
from tests.gateway.life import Life
from tests.gateway.test_imports import build, build_report


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


@pytest.fixture(params=["server", "folder"])
def where(request, folder):
    """A context in which commands find a server, or none."""
    if request.param == "server":
        return lambda: folder.serving(audit=Audit(folder.path / "learn.db"))
    return contextlib.nullcontext


@pytest.fixture
def story(folder):
    """An answer of the base with a report that a release learnt from, a rival that was rejected, and a later answer."""
    life = Life(folder.path, folder.gateway.chain, folder.gateway.board)
    first = build(life.head.id)
    report = build_report(first.id, feedback="too \x1b[31mlong")
    rival = life.reject(reason="worse by 4 points")
    release = life.publish({f"{first.id}:0": report.id})
    later = build(release.id)
    folder.store(first, report, later)
    return first, report, rival, release, later


def test_an_answer_is_explained(folder, story, where):
    first, report, rival, release, later = story
    with where():
        code, out, err = folder.run("why", later.id)
        assert (code, err) == (0, "")
        for said in (
            f"record {later.id} of default", f"answered by release 1 ({release.id[:10]})", "the gate let it in",
            "measured by better against release", "on tasks 0123", "1 turned down since the release before",
            f"{rival.id[:10]}, by learner: worse by 4 points", "learnt from 1 unit itself", "comes from: 1",
        ):  # fmt: skip
            assert said in out
        code, out, _ = folder.run("why", f"chatcmpl-{first.id}")
        assert f"by report {report.id}: trained in step 1 of line {release.line}, released as 1" in out
        assert "\x1b" not in out


def test_programs_get_the_same_from_a_server_and_without_one(folder, story):
    first, report, rival, release, later = story
    names = (first.id, report.id, rival.id, release.id, later.id[:32], release.id[:8], "1")
    alone = [json.loads(folder.run("why", name, "--json")[1]) for name in names]
    with folder.serving(audit=Audit(folder.path / "learn.db")):
        served = [json.loads(folder.run("why", name, "--json")[1]) for name in names]
    assert alone == served
    assert [item["kind"] for item in served] == [
        "record", "report", "candidate", "release", "record", "release", "release",
    ]  # fmt: skip


def test_units_that_wait_are_listed_beside_later_duplicates(folder, where):
    first, counted = build(folder.head.id), new_receipt()
    report, late = build_report(first.id), build_report(first.id, score=0.0)
    folder.store(first, report, late)
    heard = build(folder.head.id)
    folder.store(heard)
    ledger = Ledger(folder.path / "learn.db")
    ledger.drop("default", "weights", [Drop(f"{first.id}:0", late.id, "duplicate")], 0)
    ledger.drop("default", "weights", [Drop(f"{heard.id}:0", counted, "duplicate")], 0)
    ledger.assess("default", "weights", f"{heard.id}:0", {"verdict": -1, "hints": ["Be brief and plain."]})
    waits = "it waits for a batch: what was said of it first counts"
    with where():
        out = folder.run("why", first.id)[1]
        assert f"{first.id}:0 weights by report {report.id}: {waits}\n" in out
        assert f"by report {late.id}: not trained: an earlier report" in out
        assert out.count("what was said of it first") == 1
        out = folder.run("why", heard.id)[1]
        assert (
            f'{heard.id}:0 weights: {waits}; it was judged: {{"verdict": -1, "hints": ["Be brief and plain."]}}' in out
        )
        ledger.drop("default", "weights", [Drop(f"{first.id}:0", report.id, "stale")], 0)
        assert waits not in folder.run("why", first.id)[1]
    ledger.close()


def test_how_full_the_batch_is_that_a_unit_waits_for(folder, monkeypatch):
    first = build(folder.head.id)
    folder.store(first)
    ledger = Ledger(folder.path / "learn.db")
    ledger.assess("default", "weights", f"{first.id}:0", 1)
    ledger.close()

    async def look(*_):
        return Looked(scenarios={"default": {"parts": {"weights": {"pending": 3, "batch_size": 8}}}})

    with folder.serving(audit=Audit(folder.path / "learn.db")):
        monkeypatch.setattr(health, "_look", look)
        assert "(3 of 8 units are there)" in folder.run("why", first.id)[1]


def test_a_report_and_a_candidate_are_followed(folder, story, where):
    _, report, rival, release, _ = story
    with where():
        out = folder.run("why", report.id)[1]
        assert "releases it influenced: 1" in out
        assert "what is served now comes from it" in out
        out = folder.run("why", rival.id)[1]
        assert "rejected, from release" in out
        out = folder.run("why", release.id, "--units", "1")[1]
        assert "learnt from 1 unit itself, 1 with what it comes from" in out


def test_an_erased_record_and_a_lost_audit_are_said(folder, story, where):
    first, _, _, release, _ = story
    keep.forget(folder.path / "records.db", [first.id])
    with where():
        out = folder.run("why", first.id)[1]
        assert "erased on request" in out
        assert release.id[:10] in out
        (folder.path / "learn.db").unlink()
        out = folder.run("why", first.id)[1]
        assert "not known" in out
        assert release.id[:10] in out


def test_what_is_not_there_is_said(folder, story, where):
    with where():
        for name in ("0" * 32, "rep_none", "77", "nonsense"):
            code, out, err = folder.run("why", name)
            assert (code, out) == (1, "")
            assert "reef releases" in err or "give a receipt" in err


def test_an_ask_is_told(folder, story, where):
    life = Life(folder.path, folder.gateway.chain, folder.gateway.board)
    held = life.hold(text="Be brief.")
    queue = Queue(folder.gateway.board)
    queue.put("default", "harness", "proposal", {"mutations": [], "reason": "we are slow"}, actor="eve", id="ask_one")
    queue.tell("ask_one", "held", "it runs code", candidate=held.id)
    with where():
        code, out, err = folder.run("why", "ask_one")
        assert (code, err) == (0, "")
        for said in ("ask ask_one of default", "proposal by eve", "we are slow", "it runs code", held.id):
            assert said in out
