"""Putting together: what a request may create, what a chain must fit, and commands on a folder without a server."""

import json
from pathlib import Path

import pytest

from reef.cli import assemble, bind
from reef.cli.main import main
from reef.cli.process import Boot
from reef.cli.route import Scenarios, answering, models
from reef.config import Settings, load
from reef.core.errors import ChainError, ConfigError, ModelError


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
    scenarios = Scenarios(settings, board, {}, {})
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


ROUTES = """
reef: {engine: up, recipe: record}
engines:
  up: {url: "http://127.0.0.1:9/v1", model: big, retries: 1, proxy: "http://127.0.0.1:8"}
  claude: {url: "http://127.0.0.1:9/v1", api: anthropic, speaks: [messages]}
  any: {url: "http://127.0.0.1:9/v1"}
scenarios: {tied: {engine: any}, named: {engine: any, model: own}}
models: {fast: any/org/small, smart: claude/opus}
"""


@pytest.fixture
def routed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def routed(text):
        Path("r.yaml").write_text(text)
        settings = load(Path("r.yaml"), environment={}).settings
        Path(".reef").mkdir(exist_ok=True)
        boot = Boot(settings.model_dump(mode="json"), tmp_path / "run", "http://x", None)
        assemble.prepare(boot)
        board = assemble.open_board(Path(".reef"))
        engines = assemble._engines(boot, settings)
        scenarios = Scenarios(settings, board, engines, answering(boot, settings))

        def route(scenario, model):
            found = scenarios.route(scenario, model)
            assert found.engine is engines[found.name]
            return found.name, found.model

        return route, engines, models(boot, settings), board

    return routed


def test_with_aliases_a_name_picks_the_engine(routed):
    route, engines, models, board = routed(ROUTES)
    assert engines["claude"].dialects == {"messages"}
    assert models == ("fast", "smart", "big"), "no engine's bare name, which is no model"
    for scenario in ("default", "tied"):
        assert route(scenario, "fast") == ("any", "org/small")
        assert route(scenario, "smart") == ("claude", "opus")
        assert route(scenario, "claude/haiku") == ("claude", "haiku")
    assert route("default", "big") == route("default", None) == ("up", None)
    assert route("tied", "whatever/x") == route("tied", None) == ("any", None)
    assert route("named", "whatever") == route("named", "own") == ("any", "own")
    for name in ("whatever", "nowhere/x", "claude/", "claude", ""):
        with pytest.raises(ModelError, match="there are fast, smart, big, and engine/model") as caught:
            route("default", name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    board.close()


def test_without_aliases_a_scenarios_engine_answers_any_name(routed):
    route, _, models, board = routed(ROUTES.replace("models: ", "# "))
    assert models == ("big",)
    for name in (None, "whatever", "claude/haiku", "fast"):
        assert route("default", name) == ("up", None)
        assert route("tied", name) == ("any", None)
        assert route("named", name) == ("any", "own")
    board.close()


def test_an_engine_that_only_an_alias_names_runs(routed):
    route, engines, _, board = routed(
        "reef: {engine: fake, recipe: record}\nmodels: {far: up/x}\nengines: {up: {url: 'http://127.0.0.1:9/v1'}}\n"
    )
    assert set(engines) == {"fake", "up"}
    assert route("default", "far") == ("up", "x")
    assert route("default", "fake") == ("fake", None)
    board.close()
    settings = load(Path("r.yaml"), [("models.small", "local/m")], environment={}).settings
    assert bind.local_engine(settings) is not None


def test_a_scenario_made_by_a_request_is_tied_to_its_engine_too(routed):
    route, _, _, board = routed(ROUTES)
    board.create_scenario("made", {"engine": "any"})
    board.create_scenario("loose", {})
    assert route("made", "whatever") == ("any", None)
    with pytest.raises(ModelError):
        route("loose", "whatever")
    board.close()


@pytest.mark.parametrize(
    ("engine", "key", "message"),
    [
        ("url: 'http://me:canary@h/v1'", "k", "r.yaml:3: engine up: an upstream's url must hold no credentials"),
        ("url: 'http://h/v1?canary=1'", "k", "r.yaml:3: engine up: an upstream's url is plain text that ends with"),
        ("url: http://h/v1", "sk-canary\nx", "r.yaml:3: engine up: an upstream's key has characters"),
        ("url: http://h/v1", "", "is read from SOME_KEY, which is not set"),
    ],
)
def test_what_is_wrong_with_an_upstream_is_said_at_the_start(tmp_path, monkeypatch, engine, key, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_KEY", key)
    Path("r.yaml").write_text(f"reef: {{engine: up}}\nengines:\n  up: {{{engine}, key_env: SOME_KEY}}\n")
    loaded = load(Path("r.yaml"), environment={})
    with pytest.raises(ConfigError) as caught:
        bind.check(loaded.settings, loaded.values, loaded.place)
    assert message in str(caught.value), str(caught.value)
    assert "canary" not in str(caught.value)


def test_a_webhook_whose_secret_is_not_set_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOK", "")
    Path("r.yaml").write_text("observability:\n  webhook: {url: 'http://h/', secret_env: HOOK}\n")
    loaded = load(Path("r.yaml"), environment={})
    with pytest.raises(ConfigError) as caught:
        bind.check(loaded.settings, loaded.values, loaded.place)
    assert str(caught.value) == "r.yaml:2: the secret of the webhook is read from HOOK, which is not set; export it"


def test_a_webhook_whose_secret_is_set_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("observability: {webhook: {url: 'http://h/in', secret_env: HOOK}}\n")
    loaded = load(Path("r.yaml"), environment={})
    bind.check(loaded.settings, loaded.values, loaded.place, keys=False)
    monkeypatch.setenv("HOOK", "s")
    bind.check(loaded.settings, loaded.values, loaded.place)


@pytest.mark.parametrize(
    ("recipe", "on_trouble", "lenient"),
    [
        ("record", None, True),
        ("feedback_rules", None, False),
        ("record", "refuse", False),
        ("feedback_rules", "serve", True),
    ],
)
def test_who_is_served_while_nothing_can_be_recorded(recipe, on_trouble, lenient, tmp_path):
    given = {"reef": {"engine": "fake", "recipe": recipe}, "records": {"on_trouble": on_trouble}}
    settings = Settings.model_validate(given)
    board = assemble.open_board(tmp_path)
    assert Scenarios(settings, board, {}, {"fake": "fake"}).lenient("default") is lenient
    board.close()
