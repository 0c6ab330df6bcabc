"""Installed clients, connected: as `reef-AGENT` by the server's script, or by settings printed for their own files."""

import json
import os
import sys

import pytest

from reef.cli.connect import _HOMES
from reef.harness import agents
from tests.clients.conftest import ROOT
from tests.clients.test_install import NPM, RULE, Home, publish

REEF = f"PYTHONPATH={ROOT} {sys.executable} -m reef"


@pytest.fixture
def home(tmp_path, served):
    return Home(tmp_path, served, f"connect-{os.urandom(3).hex()}")


def connect(home, agent, *more):
    arguments = " ".join((agent, "--url", home.served.url, "-s", home.scenario, *more))
    return home.sh(f"{REEF} connect {arguments}", PATH=f"{NPM}:{os.environ['PATH']}").stdout


def test_an_installed_pi_is_set_up_used_and_left_as_it_was(home):
    said = connect(home, "pi")
    assert f"{NPM}/pi is pi 0.74.2, the version that Reef is tested with" in said
    records = home.task("pi")
    assert records
    assert {record["scenario"] for record in records} == {home.scenario}
    assert not (home.home / ".local/share/reef/pi/client").exists()  # nothing was installed beside it
    assert "already current" in connect(home, "pi")
    home.sh("reef-pi uninstall")
    assert not (home.home / ".local/bin/reef-pi").exists()
    assert (NPM / "pi").exists()


@pytest.mark.parametrize("agent", sorted(_HOMES))
def test_printed_settings_work_in_the_clients_own_files(home, agent):
    made = home.served.client.patch(f"/reef/scenarios/{home.scenario}", json={"harness": {"apply": True}})
    assert made.status_code == 200, made.text
    publish(home.served, home.scenario, "a rule", RULE)
    said = connect(home, agent, "--print")
    root = home.home / _HOMES[agent].removeprefix("~/")
    for block in said.split("\n\n# ")[1:]:
        name, _, text = block.partition("\n")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    launch = agents.agent(agent).launch(root, home.prompt)
    words = " ".join(f"'{word}'" for word in launch.arguments)
    variable = agents.agent(agent).client.root
    own = (variable, "XDG_CONFIG_HOME")  # a person's own root is found without them
    environment = {name: value for name, value in launch.environment.items() if name not in own}
    home.sh(f"'{NPM / agents.agent(agent).client.program}' {words}", **environment)
    assert home.file.exists()
    records = home.served.newest(home.scenario)
    assert records
    for record in records:  # without a tree of ours in its files, the rule is in its requests
        assert record["tags"]["harness"] == RULE.id
        assert RULE.config["text"] in str(home.served.record(home.scenario, record["agent_record_id"])["rendered"])


def test_claude_codes_stop_hook_scores_the_turn(home):
    """As docs/signals.md writes it, in a project's own settings."""
    connect(home, "claude")
    hook = {"type": "command", "command": "reef-claude hook stop --check 'test -f hello.txt'", "timeout": 600}
    place = home.work / ".claude" / "settings.json"
    place.parent.mkdir()
    place.write_text(json.dumps({"hooks": {"Stop": [{"hooks": [hook]}]}}))
    records = home.task("claude")
    (report,) = home.reported(records)
    assert report["score"] == 1.0
    assert set(report["references"]) <= {record["agent_record_id"] for record in records}
