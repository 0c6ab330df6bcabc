"""Which of default, file, environment and command line wins, the shorthands, and errors with their place."""

import json
from pathlib import Path

import pytest

from reef.config import load
from reef.config.settings import Settings
from reef.core.errors import ConfigError


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("r.yaml").write_text(text)
        return Path("r.yaml")

    return write


def refused(message, file=None, overrides=(), model=None, environment=None):
    with pytest.raises(ConfigError) as error:
        load(file, overrides, model=model, environment=environment or {})
    assert message in str(error.value), str(error.value)
    return str(error.value)


def sources(loaded):
    return {row.key: row.source for row in loaded.rows()}


def test_nothing_is_the_working_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(environment={})
    scenario = loaded.settings.scenario("default")
    assert (loaded.settings.reef.host, loaded.settings.reef.port) == ("127.0.0.1", 8900)
    assert (scenario.engine, scenario.recipes[0].recipe, scenario.gate.policy) == ("local", "sao", "guarded")
    assert set(sources(loaded).values()) == {"default"}


def test_reef_yaml_is_found(write, tmp_path):
    write("reef: {port: 8905}").rename(tmp_path / "reef.yaml")
    assert load(environment={}).settings.reef.port == 8905


def test_later_wins_and_is_remembered(write):
    file = write("reef:\n  port: 8901\n  host: localhost\n  model: ${M}\n  token: a\ngate:\n  patience: 5\n")
    loaded = load(file, [("reef.port", "8902"), ("gate.policy", "always")], environment={"M": "m", "REEF_TOKEN": "t"})
    assert loaded.settings.reef.port == 8902
    assert loaded.settings.reef.token == "t"
    assert loaded.settings.gate.model_dump(include={"policy", "patience"}) == {"policy": "always", "patience": 5}
    found = sources(loaded)
    assert found["reef.port"] == found["gate.policy"] == "command line"
    assert found["reef.host"] == "r.yaml:3"
    assert found["reef.model"] == "environment M (r.yaml:4)"
    assert found["reef.token"] == "environment REEF_TOKEN"
    assert found["gate.evaluate_every"] == "default"


def test_the_founding_example(write):
    file = write("reef: {recipe: recipes.sao.recipe:SAORecipe, batch_size: 1, max_staleness: 18}")
    (use,) = load(file, environment={}).settings.scenario("default").recipes
    assert (use.recipe, use.fields) == ("recipes.sao.recipe:SAORecipe", {"batch_size": 1, "max_staleness": 18})


def test_settings_survive_json(write):
    file = write("reef: {batch_size: 1, rate: 0.5}\nscenarios: {a: {batch_size: 2, gate: {policy: always}}}")
    settings = load(file, environment={}).settings
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again == settings
    assert again.scenario("a") == settings.scenario("a")
    assert json.loads(settings.model_dump_json())["reef"]["recipe_fields"] == {"batch_size": 1, "rate": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reef:\n  port: 1\ngaet: {}\n", "r.yaml:3: gaet is not a setting; did you mean gate?"),
        ("gate:\n  polcy: always\n", "r.yaml:2: gate.polcy is not a setting; did you mean gate.policy?"),
        ("port: 1\n", "r.yaml:1: port is not a setting; did you mean reef.port?"),
        ("reef:\n  port: high\n", "r.yaml:2: reef.port: input should be a valid integer"),
        ("reef:\n  port: 70000\n", "r.yaml:2: reef.port: input should be less than or equal to 65535"),
        ("reef:\n  host: 0.0.0.0\n  auth: none\n", "r.yaml:3: reef: auth: none is allowed on loopback only"),
        ("reef:\n  public_url: reef.example.org\n", "r.yaml:2: reef.public_url: write it as https://host or"),
        ("reef:\n  public_url: https://a/$(id)\n", "r.yaml:2: reef.public_url: write it as https://host or"),
        ("gate:\n  policy: better\n", "r.yaml:2: gate: policy better compares scores on a suite"),
        ("reef:\n  engine: up\n", "reef.engine is 'up'"),
        ("engines:\n  up:\n    kind: upstream\n", "r.yaml:2: engines.up: an upstream engine needs url"),
        (
            "engines:\n  up: {url: http://x, modle: y}\n",
            "r.yaml:2: engines.up.modle is not a setting; did you mean engines.up.model?",
        ),
        ("reef:\n  recipe: a\n  recipes: [b]\n", "not both"),
        ("reef:\n  recipes: [b]\n  batch_size: 1\n", "recipes: [{use: …, batch_size: …}]"),
        ("reef:\n  recipes: [{batch: 1}]\n", "{use: name or path, fields…}"),
        ("scenarios:\n  Big Name: {}\n", "a scenario's name is"),
        (
            "scenarios:\n  a:\n    gate:\n      polcy: x\n",
            "r.yaml:4: scenarios.a.gate.polcy is not a setting; did you mean",
        ),
        ("scenarios:\n  a:\n    gate:\n      policy: better\n", "r.yaml:4: scenarios.a.gate: policy better"),
        ("scenarios:\n  a:\n    engine: upp\nengines: {up: {url: http://x}}\n", "did you mean up?"),
        ("models: {fast: nowhere/x}\n", "write engine/model"),
        ("models: {fast: upp/x}\nengines: {up: {url: http://x}}\n", "under engines:; did you mean up?"),
        ("models: {fast: local}\n", "models.fast is 'local'; write engine/model"),
        ("engines:\n  up: {url: http://x, speaks: [chat, mail]}\n", "r.yaml:2: engines.up.speaks"),
        ("engines:\n  up: {url: http://x, api: google}\n", "r.yaml:2: engines.up.api"),
        ("engines:\n  up: {url: http://x, retries: -1}\n", "r.yaml:2: engines.up.retries"),
        (
            "engines:\n  up: {url: http://x, proxy: 'socks5://me:canary@h'}\n",
            "r.yaml:2: engines.up: proxy is an HTTP",
        ),
        ("reef: 3\n", "r.yaml:1: reef:"),
        ("reef:\n  token: [secret-canary]\n", "reef.token"),
    ],
)
def test_errors_name_place_and_nearest(write, text, message):
    assert "canary" not in refused(message, write(text))


def test_every_fault_is_named_at_once(write):
    text = refused("gate.polcy", write("gate: {polcy: a}\nlimits: {bodi_bytes: 1}\n"))
    assert len(text.splitlines()) == 2


def test_with_faults_the_rest_is_read_and_the_wrong_keys_are_collected(write):
    file = write(
        "reef: {port: high, model: m}\ngaet: {}\nscenarios:\n  a: {gate: {polcy: x}}\n  b: {gate: {plicy: x}}\n"
    )
    faults = []
    loaded = load(file, environment={}, faults=faults)
    assert (loaded.settings.reef.port, loaded.settings.reef.model) == (8900, "m")
    lines = [line for fault in faults for line in fault.message.splitlines()]
    assert [line[:9] for line in lines] == ["r.yaml:1:", "r.yaml:2:", "r.yaml:4:", "r.yaml:5:"]
    for text in ("reef: {recipe: [sao]}", "reef: {host: 0.0.0.0, auth: none}"):
        with pytest.raises(ConfigError):
            load(write(text), environment={}, faults=[])


def test_command_line_errors(write):
    refused("command line: gate.polcy is not a setting", overrides=[("gate.polcy", "x")])
    refused("reef.port is a single value", write("reef: {port: 1}"), [("reef.port.x", "1")])
    refused("no such file", Path("gone.yaml"))


def test_unset_values_fall_back(write):
    settings = load(write("reef:\n  token: ${NOPE:-}\ngate:\nengines:\n"), environment={}).settings
    assert settings.reef.token == ""
    assert settings.gate.policy == "guarded"


def test_a_token_of_digits_is_text(write):
    assert load(write("reef: {token: 0123}"), environment={}).settings.reef.token == "0123"


def test_model_shorthands(write, tmp_path):
    openai = load(model="openai/gpt-4o", environment={}).settings
    assert openai.scenario("default").recipes[0].recipe == "record"
    assert openai.engine("openai").model_dump() == {
        "kind": "upstream",
        "url": "https://api.openai.com/v1",
        "urls": (),
        "api": "openai",
        "key_env": "OPENAI_API_KEY",
        "model": "gpt-4o",
        "speaks": (),
        "retries": 2,
        "retry_seconds": 10.0,
        "connect": 10.0,
        "idle": 300.0,
        "connections": 0,
        "proxy": None,
        "trust_env": False,
        "options": {},
    }
    anthropic = load(model="anthropic/claude-x", environment={}).settings.engine("anthropic")
    assert (anthropic.api, anthropic.url) == ("anthropic", "https://api.anthropic.com/v1")
    assert (anthropic.key_env, anthropic.model) == ("ANTHROPIC_API_KEY", "claude-x")
    assert load(model="ollama/qwen3", environment={}).settings.engine("ollama").model == "qwen3"
    assert load(model="Org/Hub-Id", environment={}).settings.reef.model == "Org/Hub-Id"
    (tmp_path / "openai" / "mine").mkdir(parents=True)
    assert load(model="openai/mine", environment={}).settings.reef.engine == "local"
    up = write("reef: {engine: up}\nengines: {up: {url: http://127.0.0.1:1/v1}}")
    assert load(up, model="gpt-x", environment={}).settings.engine("up").model == "gpt-x"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:9101/v1", "http://127.0.0.1:9101/v1"),
        ("http://127.0.0.1:9101", "http://127.0.0.1:9101/v1"),
        ("https://h/", "https://h/v1"),
        ("https://h/api/v4", "https://h/api/v4"),
    ],
)
def test_a_providers_address_is_a_model(given, url):
    loaded = load(model=given, environment={})
    engine = loaded.settings.engine("upstream")
    assert (loaded.settings.reef.engine, engine.url, engine.model, engine.key_env) == ("upstream", url, None, None)
    assert sources(loaded)["engines.upstream.url"] == "command line"
    environment = {
        "REEF_UPSTREAM_URL": "http://other/v1",
        "REEF_UPSTREAM_API_KEY": "canary",
        "REEF_UPSTREAM_MODEL": "m",
    }
    engine = load(model=given, environment=environment).settings.engine("upstream")
    assert (engine.url, engine.model, engine.key_env) == (url, "m", "REEF_UPSTREAM_API_KEY")
    assert load(environment={"REEF_UPSTREAM_URL": given}).settings.engine("upstream").url == url


def test_an_address_that_is_none():
    refused("command line: a provider's address begins with http:// or https://", model="ftp://h/v1")
    refused("environment REEF_UPSTREAM_URL: a provider's", environment={"REEF_UPSTREAM_URL": "127.0.0.1:9101"})


def test_upstream_from_the_environment():
    environment = {"REEF_UPSTREAM_URL": "http://h/v1", "REEF_UPSTREAM_MODEL": "m", "REEF_UPSTREAM_API_KEY": "sk-canary"}
    loaded = load(environment=environment)
    assert loaded.settings.reef.engine == "upstream"
    assert loaded.settings.engine("upstream").key_env == "REEF_UPSTREAM_API_KEY"
    assert "canary" not in repr(loaded.rows())
    refused("REEF_UPSTREAM_URL", environment={"REEF_UPSTREAM_MODEL": "m"})


def test_secrets_are_masked(write):
    loaded = load(write("reef: {token: canary}\nengines: {u: {url: 'http://me:canary@h/v1'}}"), environment={})
    assert "canary" not in repr(loaded.rows())
    assert "http://***@h/v1" in repr(loaded.rows())


def test_scenarios_inherit(write):
    settings = load(
        write(
            "reef: {recipe: sao, batch_size: 4}\ngate: {patience: 5}\n"
            "scenarios:\n  more: {max_staleness: 9, gate: {policy: always}}\n  other: {recipe: record}\n"
        ),
        environment={},
    ).settings
    more, other = settings.scenario("more"), settings.scenario("other")
    assert more.recipes[0].fields == {"batch_size": 4, "max_staleness": 9}
    assert (more.gate.policy, more.gate.patience) == ("always", 5)
    assert (other.recipes[0].recipe, other.recipes[0].fields) == ("record", {})
    assert settings.scenario("new", {"batch_size": 8}).recipes[0].fields == {"batch_size": 8}


def test_a_suite_lies_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    file = Path("sub/r.yaml")
    file.write_text("gate: {policy: better, suite: s.jsonl}")
    assert load(file, environment={}).settings.gate.suite == "sub/s.jsonl"
    assert load(file, [("gate.suite", "x")], environment={}).settings.gate.suite == "x"
    file.write_text(
        "gate:\n  suite: [s.jsonl, traffic, failures, 'tasks.mine:give', /abs/t.jsonl]\n"
        "scenarios:\n  a: {gate: {suite: ../up.jsonl}}\n  b: {gate: {suite: [traffic, b.jsonl]}}\n  c: {}\n"
    )
    settings = load(file, environment={}).settings
    whole = ("sub/s.jsonl", "traffic", "failures", "tasks.mine:give", "/abs/t.jsonl")
    assert settings.gate.suite == settings.scenario("c").gate.suite == whole
    assert settings.scenario("a").gate.suite == "sub/../up.jsonl"
    assert settings.scenario("b").gate.suite == ("traffic", "sub/b.jsonl")
    for odd in ("{a: 1}", "[[a]]", "true"):
        file.write_text(f"gate: {{suite: {odd}}}")
        refused("sub/r.yaml:1: gate.suite", file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gate: {policy: floor}", "policy floor compares scores on a suite"),
        ("gate: {suite: traffic, holdout: 0}", "r.yaml:1: gate: holdout is 0, and the suite is traffic"),
        ("gate: {suite: [a, a]}", "suite names the same source twice"),
        ("gate: {least: 20, tasks: 16}", "least is 20, more than the 16 tasks"),
        ("gate: {holdout: 1}", "gate.holdout: input should be less than 1"),
        ("gate:\n  tsaks: 1", "r.yaml:2: gate.tsaks is not a setting; did you mean gate.tasks?"),
        ("gate: {repeats: 0}", "gate.repeats"),
        ("gate: {money: -1}", "gate.money"),
        ("gate: {alpha: 0.5}", "gate.alpha"),
        (
            "prices:\n  m: {promt: 1, output: 2}",
            "r.yaml:2: prices.m.promt is not a setting; did you mean prices.m.prompt?",
        ),
        ("prices: {m: {prompt: 1}}", "r.yaml:1: prices.m needs output"),
        ("prices: {m: {prompt: -1, output: 2}}", "prices.m.prompt"),
        ("price: {}", "did you mean prices?"),
        ("releases:\n  watch:\n    actoin: tell", "r.yaml:3: releases.watch.actoin is not a setting; did you mean"),
        ("releases: {watch: {action: maybe}}", "releases.watch.action"),
        ("scenarios: {a: {releases: {watch: {alfa: 1}}}}", "scenarios.a.releases.watch.alfa is not a setting; did you"),
        (
            "observability: {webhook: {url: ftp://h}}",
            "observability.webhook.url: must be http://host/… or https://host/…",
        ),
        ("observability: {webhook: {url: 'https://'}}", "observability.webhook.url: must be http://host/…"),
        ("observability: {webhook: {url: 'http://h:port/'}}", "observability.webhook.url: must be http://host/…"),
        ("observability: {webhook: {url: 'http://me:canary@h'}}", "observability.webhook.url: must not hold"),
        ("observability: {webhook: {url: 'http://h', kinds: [relaese]}}", "observability.webhook.kinds"),
    ],
)
def test_errors_of_the_gate_and_what_follows_it(write, text, message):
    refused(message, write(text + "\n"))


def test_a_scenario_changes_one_key_of_the_watch(write):
    file = write("releases: {watch: {reports: 50}}\nscenarios: {a: {releases: {watch: {action: off}}}, b: {}}")
    settings = load(file, environment={}).settings
    found = [settings.scenario(name).releases.watch for name in "ab"]
    assert [(watch.action, watch.reports) for watch in found] == [("off", 50), ("rollback", 50)]
