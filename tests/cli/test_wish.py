"""What a scenario wants of its releases' harness: as configured, else as its recipe wishes; and it follows changes."""

from pathlib import Path

import pytest

from recipes.feedback_rules.recipe import FeedbackRules
from reef.cli import assemble, parts
from reef.cli.route import Scenarios, answering, check
from reef.config import Settings, load
from reef.core.errors import ConfigError
from reef.engines.fake import FakeEngine
from reef.harness.apply import Wish

FILE = """\
reef: {engine: fake, recipe: record}
training: {backend: fake}
harness: {tokens: 512}
scenarios:
  rules: {recipe: feedback_rules}
  off: {recipe: feedback_rules, harness: {apply: false}}
  on: {harness: {apply: true, skills: 0}}
  both: {recipes: [sao, {use: feedback_rules, max_rules: 2}]}
  odd: {recipe: "tests.cli.test_wish:Quiet"}
"""


class Quiet(FeedbackRules):
    applies = False


@pytest.fixture
def scenarios(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text(FILE)
    settings = load().settings
    Path(".reef").mkdir()
    boot = assemble.Boot(settings.model_dump(mode="json"), tmp_path / "run", "http://x", None)
    settings = Settings.model_validate(boot.settings)  # as every process has them
    chain, board = assemble.open_chain(Path(".reef")), assemble.open_board(Path(".reef"))
    chain.open()
    yield Scenarios(settings, board, {"fake": FakeEngine()}, answering(boot, settings)), board, settings
    board.close()


def test_configured_else_as_the_recipe_wishes(scenarios):
    made, _, settings = scenarios
    found = {name: made.wish(name) for name in ("default", *settings.scenarios)}
    assert found == {
        "default": Wish(False, 3, 512),
        "rules": Wish(True, 3, 512),
        "off": Wish(False, 3, 512),
        "on": Wish(True, 0, 512),
        "both": Wish(True, 3, 512),
        "odd": Wish(False, 3, 512),
    }
    for name, wish in found.items():  # what the learner measures with is what the gateway applies
        wanted = settings.scenario(name)
        recipe = {"rules": FeedbackRules(), "off": FeedbackRules(), "both": FeedbackRules(), "odd": Quiet()}.get(name)
        assert parts.wish(wanted, recipe) == wish


def test_changed_settings_are_followed(scenarios):
    made, board, _ = scenarios
    board.create_scenario("mine", {})
    made.renew()
    assert made.wish("mine") == Wish(False, 3, 512)
    board.swap_scenario("mine", {}, {"harness": {"apply": True, "tokens": 99}})
    made.renew()
    assert made.wish("mine") == Wish(True, 3, 99)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aply": True}, "harness.aply is not a setting; did you mean harness.apply?"),
        ({"apply": "sometimes"}, "harness.apply"),
        ({"skills": -1}, "harness.skills"),
        ({"tokens": 0}, "harness.tokens"),
    ],
)
def test_wrong_settings_name_the_key(scenarios, tmp_path, given, said):
    _, _, settings = scenarios
    with pytest.raises(ConfigError, match=said):
        check(settings, "mine", {"harness": given})
    Path("other.yaml").write_text(f"harness: {given!r}".replace("True", "true"))
    with pytest.raises(ConfigError, match=said):
        load(Path("other.yaml"))
