"""Putting together: what a request may create, what a chain must fit, and commands on a folder without a server."""

import json
from pathlib import Path

import pytest

from reef.cli import assemble, bind
from reef.cli.main import main
from reef.cli.process import Boot
from reef.config import load
from reef.core.errors import ChainError, ConfigError


@pytest.fixture
def boot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text(
        "reef: {engine: fake, recipe: feedback_rules}\n"
        "training: {backend: fake}\nscenarios: {fixed: {recipe: record}}\n"
    )
    settings = load().settings
    (tmp_path / ".reef").mkdir()
    return Boot(settings.model_dump(mode="json"), tmp_path / "run", "http://x", None)


def open_all(boot):
    settings = assemble._settings(boot)
    chain = assemble.open_chain(Path(".reef"))
    return settings, chain, assemble.open_board(Path(".reef"))


def test_prepare_makes_every_scenario_once(boot):
    for _ in range(2):
        assert assemble.prepare(boot) is None
        _, chain, board = open_all(boot)
        assert set(board.all()) == {"default", "fixed"}
        assert chain.head("default").seq == 0
        assert chain.head("fixed").recipe == "record"
        assert board.get("default").release_id == chain.head("default").id
        board.close()


def test_a_boot_document_survives(boot):
    assert Boot.decode(boot.encode()) == boot


def test_a_request_creates_a_scenario_with_checked_settings(boot):
    assemble.prepare(boot)
    settings, chain, board = open_all(boot)

    def create(name, created):
        return assemble._create(boot, settings, chain, board, name, created)

    assert create("mine", {"batch_size": 3, "gate": {"policy": "always"}}).release_id == chain.head("mine").id
    assert assemble._bound(settings, "mine", board.scenarios()["mine"]).recipes["harness"].batch_size == 3
    for wrong, message in (
        ({"bacth_size": 3}, "the request: "),
        ({"gate": {"polcy": "x"}}, "did you mean gate.policy"),
        ({"gate": {"policy": "better"}}, "suite"),
        ({"recipe": "os:system"}, "a request cannot load code"),
        ({"gate": {"policy": "os:system"}}, "a request cannot load code"),
        ({"gate": {"policy": "better", "suite": "/etc/passwd"}}, "a request cannot name files"),
        ({"engine": "nowhere"}, "there is no engine 'nowhere'"),
        ({"engine": "local"}, "the engine local of scenario other does not run on this server; there is fake"),
        ({"training": {"backend": "local"}}, "training.backend: a server has one trainer"),
        ({"training": {"options": {"delay": 9.0}}}, "training.options: a server has one trainer"),
        ({"port": 1}, "port is not a setting"),
    ):
        with pytest.raises(ConfigError) as error:
            create("other", wrong)
        assert message in str(error.value), str(error.value)
        assert "other" not in board.scenarios()
    board.close()


def test_a_creation_cut_short_is_finished_at_the_next_start(boot):
    assemble.prepare(boot)
    _, chain, board = open_all(boot)
    board.create_scenario("half", {"batch_size": 3})  # what a crash before the first release leaves
    assemble.prepare(boot)
    assert board.get("half").release_id == chain.head("half").id
    assert board.scenarios()["half"] == {"batch_size": 3}
    board.close()


def test_a_creation_cut_short_is_finished_by_the_next_request(boot):
    assemble.prepare(boot)
    settings, chain, board = open_all(boot)
    board.create_scenario("half", {"recipe": "record"})
    board.create_scenario("other", {"recipe": "record"})
    assemble._create(boot, settings, chain, board, "half", {})
    assert (chain.head("half").recipe, board.scenarios()["half"]) == ("record", {"recipe": "record"})
    assemble._create(boot, settings, chain, board, "other", {"batch_size": 3})  # created again, with settings
    assert (chain.head("other").recipe, board.scenarios()["other"]) == ("feedback_rules", {"batch_size": 3})
    assemble._create(boot, settings, chain, board, "other", {"batch_size": 4})
    assert board.scenarios()["other"] == {"batch_size": 3}, "one that is there keeps its settings"
    board.close()


def test_one_bad_scenario_never_stops_a_start(boot, caplog, monkeypatch):
    assemble.prepare(boot)
    settings, chain, board = open_all(boot)
    board.create_scenario("gone", {"engine": "local"})  # made when the server ran another engine
    board.create_scenario("odd", {"no_such_key": 1})
    board.create_scenario("full", {})
    board.create_scenario("good", {})
    publish = chain.publish

    def refuse(self, name, draft, expected):
        if name == "full":
            raise ChainError("no space left")
        return publish(name, draft, expected)

    with monkeypatch.context() as patched:
        patched.setattr(type(chain), "publish", refuse)
        assemble.prepare(boot)
    assert set(board.all()) == {"default", "fixed", "good"}
    for name in ("gone", "odd", "full"):
        assert f"the scenario {name} is not ready" in caplog.text
    scenarios = assemble._Scenarios(settings, board)
    assert (scenarios.recipe("good"), scenarios.recipe("gone")) == ("feedback_rules", None)
    assemble.prepare(boot)
    assert set(board.all()) == {"default", "fixed", "good", "full"}
    board.close()


def test_a_default_scenario_that_cannot_be_made_stops_a_start(boot, monkeypatch):
    def refuse(*_):
        raise ChainError("no space left")

    monkeypatch.setattr("reef.releases.chain.GitChain.publish", refuse)
    with pytest.raises(ChainError):
        assemble.prepare(boot)


def test_a_chain_of_another_model_is_refused(boot):
    assemble.prepare(boot)
    _, chain, board = open_all(boot)
    other = Boot(
        {**boot.settings, "reef": {**boot.settings["reef"], "engine": "local"}},
        boot.run,
        "",
        {"name": "m", "digest": "d"},
    )
    with pytest.raises(ConfigError, match=r"belong to the model fake, not to m; .*--reef.state_dir"):
        assemble._fits(other, assemble._settings(other), chain, "default", {})
    board.close()


def test_releases_and_rollback_without_a_server(boot, capsys):
    assemble.prepare(boot)
    assert main(["releases", "--json", "--reef.port", "1"]) == 0
    (release,) = json.loads(capsys.readouterr().out)["releases"]
    assert (release["seq"], release["current"]) == (0, True)
    _, chain, board = open_all(boot)
    from reef.releases import Draft, NewPart

    part = NewPart("tree", {"harness.json": b'{"entries":[]}'})
    later = chain.publish(
        "default", Draft("publish", {"harness": part}, recipe="feedback_rules"), release["release_id"]
    )
    board.flip("default", later.id)
    assert main(["rollback", "0", "--reason", "because", "--json", "--reef.port", "1"]) == 0
    head = json.loads(capsys.readouterr().out)
    assert (head["seq"], head["operation"], head["base"], head["reason"]) == (
        2,
        "rollback",
        release["release_id"],
        "because",
    )
    assert board.get("default").release_id == head["release_id"]
    board.close()
    assert main(["rollback", "9", "--reef.port", "1"]) == 1
    assert "no release number 9" in capsys.readouterr().err
    assert main(["releases", "-s", "gone", "--reef.port", "1"]) == 1
    assert "no scenario 'gone'" in capsys.readouterr().err


def test_every_shipped_example_loads():
    root = Path(__file__).parents[2]
    files = list(root.glob("recipes/*/examples/*/serve.yaml"))
    assert files
    for file in files:
        loaded = load(file, environment={})
        assert bind.check(loaded.settings, loaded.values, loaded.place)
