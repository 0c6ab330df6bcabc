"""candidates, promote, reject, pin and scenarios, the same on a server and on the state folder without one."""

import contextlib
import json

import pytest

from reef.cli import show, state
from reef.loop.audit import Audit
from tests.cli.kept import Folder
from tests.gateway.life import Life


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


@pytest.fixture
def life(folder):
    return Life(folder.path, folder.gateway.chain, folder.gateway.board)


@pytest.fixture(params=["server", "folder"])
def where(request, folder):
    """A context in which commands find a server, or none."""
    if request.param == "server":
        return lambda: folder.serving(audit=Audit(folder.path / "learn.db"))
    return contextlib.nullcontext


def test_candidates_are_listed_and_shown_with_what_they_change(folder, life, where):
    life.publish(text="Be kind.")
    rejected, held = life.reject(reason="worse by 4 points"), life.hold(text="Be \u202ebrief.")
    with where():
        code, out, _ = folder.run("candidates")
        assert code == 0
        assert f"`reef promote {held.id[:10]}`" in out
        assert "worse by 4 points" in out
        assert rejected.id[:10] not in folder.run("candidates", "--held")[1]
        code, out, _ = folder.run("candidates", held.id[:8])
        assert code == 0
        assert "+Be \\u{202e}brief." in out
        assert "passed length: answers are about as long" in out
        listed = json.loads(folder.run("candidates", "--json")[1])
        assert [item["candidate_id"] for item in listed["candidates"]][:2] == [held.id, rejected.id]
        assert json.loads(folder.run("candidates", held.id, "--json")[1])["diff"]["changed"] == ["rule"]


def test_a_candidate_is_promoted_and_a_retry_says_the_same(folder, life, where):
    held = life.hold()
    with where():
        code, out, err = folder.run("promote", held.id[:9], "--reason", "reads well")
        assert (code, err) == (0, "")
        assert out.startswith(f"default serves release 1 ({life.head.id[:10]}), which was candidate {held.id[:10]}")
        assert folder.run("promote", held.id)[:2] == (0, out)
        assert (life.head.operation, life.head.reason) == ("promote", "reads well")
        code, _, err = folder.run("reject", held.id)
        assert (code, "reef rollback" in err) == (1, True)
        shown = json.loads(folder.run("promote", held.id, "--json")[1])
        assert (shown["release_id"], shown["current"]) == (life.head.id, True)
    assert folder.gateway.board.get("default").release_id == life.head.id


def test_a_candidate_is_turned_down(folder, life, where):
    before, held = life.head.id, life.hold()
    with where():
        for _ in range(2):
            code, out, _ = folder.run("reject", held.id[:9], "--reason", "rude")
            assert (code, out) == (0, f"candidate {held.id[:10]} of default is turned down: rude\n")
        code, _, err = folder.run("promote", held.id)
        assert code == 1
        assert "turned down by" in err
        assert "force" in err
        assert life.head.id == before
        assert folder.run("promote", held.id, "--force")[0] == 0
    assert life.head.operation == "promote"


def test_a_candidate_of_another_scenario_is_found_by_its_id(folder, where):
    gateway = folder.gateway
    gateway.ensure("shop", {})
    life = Life(folder.path, gateway.chain, gateway.board, "shop")
    held = life.hold()
    with where():
        code, out, _ = folder.run("promote", held.id)
        assert (code, out[:20]) == (0, "shop serves release ")
        code, _, err = folder.run("reject", held.id)
        words = err.partition("to take it back: reef ")[2].split()
        assert (code, words[-2:]) == (1, ["-s", "shop"])
        assert folder.run(*words)[1].startswith("shop serves release 2 "), "the command that is named works"
    assert gateway.chain.head("default").seq == 0


def test_what_is_not_there_is_said_with_a_next_step(folder, life, where):
    life.hold()
    with where():
        for words in (("promote", "0" * 40), ("reject", "f" * 9), ("candidates", "0" * 12)):
            code, out, err = folder.run(*words)
            assert (code, out) == (1, "")
            assert "`reef candidates` lists them" in err
        code, _, err = folder.run("promote", life.head.id)
        assert (code, "reef rollback" in err) == (2, True)


def test_a_scenario_is_pinned_and_let_go(folder, life, where):
    base, top = life.head.id, life.publish().id
    with where():
        code, out, _ = folder.run("pin", "--reason", "release week")
        assert (code, out) == (0, f"default is pinned to release 1 ({top[:10]}); --off lets it go\n")
        code, out, _ = folder.run("pin", "0", "--json")
        assert (code, json.loads(out)["base"]) == (0, base)
        code, _, err = folder.run("rollback", "1")
        assert (code, "reef pin --off -s default" in err) == (1, True)
        assert folder.run("pin", "--off")[1].startswith("default is not pinned any more")
        assert folder.run("pin", "--off")[1] == "nothing changed: default was not pinned\n"
        assert folder.run("pin", "0", "--off")[0] == 2
        assert folder.run("pin", "77")[0] == 1


@pytest.mark.parametrize("words", [("promote", "0" * 40), ("reject", "0" * 40), ("pin",)])
def test_without_a_server_the_folder_is_locked_meanwhile(folder, words):
    lock = state.claim(folder.path)
    try:
        code, _, err = folder.run(*words)
        assert code == 1
        assert "in use by the server" in err or "no server" in err
    finally:
        lock.release()


def test_scenarios_are_archived_and_restored(folder):
    with folder.serving():
        folder.gateway.ensure("shop", {})
        code, out, _ = folder.run("scenarios", "archive", "shop", "--reason", "moved")
        assert (code, out.split(";")[0]) == (0, "shop is archived")
        assert "shop" not in folder.run("scenarios")[1]
        code, out, _ = folder.run("scenarios", "restore", "shop")
        assert (code, out[:12]) == (0, "shop is back")
        assert folder.run("scenarios", "archive", "default")[0] == 1
        assert folder.run("scenarios", "archive")[0] == 2


def test_releases_with_all_show_what_was_turned_down(folder, life, where):
    life.reject(reason="worse by 4 points")
    life.publish()
    with where():
        assert "worse by 4" not in folder.run("releases")[1]
        lines = folder.run("releases", "--all")[1].splitlines()
        order = [word for line in lines for word in ("publish", "rejected", "create") if f" {word} " in line]
        assert order == ["publish", "rejected", "create"]


def test_releases_with_all_do_not_call_held_what_was_decided(folder, life, where):
    promoted, rejected, waiting = (life.hold() for _ in range(3))
    with where():
        assert folder.run("promote", promoted.id)[0] == 0
        assert folder.run("reject", rejected.id)[0] == 0
        lines = folder.run("releases", "--all")[1].splitlines()
        said = [(line.split()[0], line.split()[1]) for line in lines if " held " in line or " rejected " in line]
        assert sorted(said) == sorted([(rejected.id[:10], "rejected"), (waiting.id[:10], "held")])


def test_releases_show_why_a_harness_was_changed_and_what_the_gate_said(folder, life, where):
    held = life.hold(text="Be brief.")
    with where():
        assert folder.run("promote", held.id, "--reason", "users shout")[0] == 0
        (line,) = [line for line in folder.run("releases")[1].splitlines() if " promote " in line]
        assert "users shout" in line
        assert line.index("users shout") < line.index(folder.head.evaluation.reason)


def test_the_status_says_what_waits_and_what_is_pinned(folder, life):
    life.hold()
    with folder.serving(audit=Audit(folder.path / "learn.db")):
        folder.run("pin", "--reason", "release week")
        out = folder.run("status")[1]
        assert "default: pinned to release" in out
        assert "release week" in out
        assert "default: 1 held for a person" in out
        assert "`reef candidates -s default` lists what waits" in out


def test_the_status_says_what_did_not_train():
    parts = {"weights": {"dropped": {"stale": 2, "held out": 1}}, "harness": {"dropped": {}}}
    assert show._beside("a", {"seq": 0, "learner": {"parts": parts}}) == [
        "weights: what did not train: 1 held out, 2 stale"
    ]


def test_a_guard_that_was_not_measured_is_not_said_to_be_passed():
    said = {"name": "drift", "passed": True, "value": None, "limit": 1.0, "note": "not measured: no tokens"}
    assert show.guard(said) == "drift: not measured: no tokens"
    assert show.guard(said | {"value": 0.2, "note": "0.2 nats"}) == "passed drift: 0.2 nats"
    assert show.guard(said | {"passed": False, "note": "n"}) == "FAILED drift: n"
