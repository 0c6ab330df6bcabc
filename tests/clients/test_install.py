"""Real clients, installed by the script that a real server gives, and the life of such an installation."""

import json
import os
import re
import subprocess
import threading
import time

import pytest

from reef.harness import agents
from reef.harness.tree import FILE, Entry, write
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from tests.clients.conftest import CLIENTS, TOKEN
from tests.clients.upstream import WORD

NPM = CLIENTS / "node/node_modules/.bin"
REACH = {"NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"}
CONFIG = {  # of whoever runs the tests: how npm's registry is reached, and what was fetched before
    **{name: value for name, value in os.environ.items() if name in REACH},
    "NPM_CONFIG_USERCONFIG": os.environ.get("NPM_CONFIG_USERCONFIG", os.path.expanduser("~/.npmrc")),
    "NPM_CONFIG_CACHE": os.environ.get("NPM_CONFIG_CACHE", os.path.expanduser("~/.npm")),
}


class Home:
    """A user's home and work folder, and what is run there."""

    def __init__(self, folder, served, scenario):
        self.served, self.scenario = served, scenario
        served.client.post("/reef/scenarios", json={"name": scenario})
        self.home, self.work = folder / "a home's", folder / "work"
        for made in (self.home, self.work):
            made.mkdir()
        self.file = self.work / "hello.txt"
        self.prompt = f"Write a greeting into {self.file} and tell me what came of it."

    def sh(self, line, **environment):
        """A line as a person types it, in bash."""
        path = f"{self.home}/.local/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
            env={
                "PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb", "NO_PROXY": "127.0.0.1",
                "TMPDIR": str(self.home.parent), "REEF_TOKEN": TOKEN, **CONFIG, **environment,
            },
        )  # fmt: skip
        said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        return done

    def install(self, agent, **environment):
        return self.sh(
            'curl -fsS -H "Authorization: Bearer $REEF_TOKEN" -H "x-reef-scenario: $SCENARIO" '
            f"'{self.served.url}/reef/harness/install?adapter={agent}' | bash",
            SCENARIO=self.scenario, **environment,
        )  # fmt: skip

    def task(self, agent):
        """One task that needs a tool, without a person; the records that came of it."""
        known = {record["agent_record_id"] for record in self.served.newest(self.scenario)}
        self.file.unlink(missing_ok=True)
        root = self.home / ".local/share/reef" / agent / "root"
        launch = agents.agent(agent).launch(root, self.prompt)
        words = " ".join(f"'{word}'" for word in launch.arguments)
        extra = {name: value for name, value in launch.environment.items() if value != str(root)}
        self.said = self.sh(f"reef-{agent} {words}", **extra)
        assert self.file.read_text() == WORD + "\n", self.said
        return [r for r in self.served.newest(self.scenario)[::-1] if r["agent_record_id"] not in known]

    def notice(self, agent):
        """What a start tells of a newer release. A server that is busy with other tests may be too slow for it once."""
        for _ in range(20):
            if told := self.sh(f"reef-{agent} --version").stderr:
                return told
        raise AssertionError("no notice")

    def reported(self, records):
        """The reports that quote one of these records, once each."""
        found = {}
        for record in records:
            for report in self.served.record(self.scenario, record["agent_record_id"])["reports"]:
                found[report["agent_record_id"]] = report
        return list(found.values())


def publish(served, scenario, reason, *entries):
    """A release, as the learner would make it."""
    chain, board = GitChain(served.folder / ".reef/releases.git"), Board(served.folder / ".reef/records.db")
    part = NewPart("tree", {FILE: write(entries)})
    release = chain.publish(scenario, Draft("publish", {"harness": part}, reason=reason), chain.head(scenario).id)
    board.flip(scenario, release.id)
    board.close()
    deadline = time.monotonic() + 20
    while True:  # each of its gateways follows within a moment
        seen = [served.client.get("/reef/harness?brief=true", headers={"x-reef-scenario": scenario}) for _ in range(8)]
        if {answer.json()["release_id"] for answer in seen} == {release.id}:
            return release
        assert time.monotonic() < deadline
        time.sleep(0.05)


RULE = Entry("greet", "rules", {"text": "Greet like a reef, with corals."})
SKILL = Entry("tests", "skill", {"name": "run-tests", "description": "After a change of code.", "text": "Run pytest."})


@pytest.mark.timeout(900)
def test_pi_from_the_registry(tmp_path, served, upstreams):
    """The whole life: installed with npm, a task, a report, an update with its notice, back, away."""
    home = Home(tmp_path, served, "install-life")
    done = home.install("pi")
    assert "installed @earendil-works/pi-coding-agent 0.74.2" in done.stdout
    assert "already current" in home.install("pi").stdout
    records = home.task("pi")
    assert [record["status"] for record in records] == ["complete", "complete"]
    (session,) = {record["session"] for record in records}
    assert re.fullmatch(r"[0-9a-f-]{36}", session)
    assert home.said.stderr == ""
    home.sh('reef-pi report --score 0.25 --feedback "it\'s fine"')
    (report,) = home.reported(records)
    assert (report["score"], report["feedback"]) == (0.25, "it's fine")
    assert set(report["references"]) == {record["agent_record_id"] for record in records}

    publish(served, home.scenario, "greetings were dull", RULE, SKILL)
    assert "release 1 is out (you have 0): added rules greet, skill tests. Why: greetings were dull." in home.notice(
        "pi"
    )
    home.task("pi")
    assert "corals" not in upstreams["native"].seen[-1].body.decode()
    assert "run-tests/SKILL.md" in home.sh("reef-pi update").stdout
    (first, *_) = home.task("pi")
    assert home.said.stderr == ""
    sent = json.dumps(served.record(home.scenario, first["agent_record_id"])["request"])
    assert "with corals" in sent
    assert "run-tests" in sent

    home.sh("reef-pi doctor")
    home.sh("reef-pi --check 'test -f hello.txt' --version")
    home.sh("reef-pi rollback")
    home.task("pi")
    assert "corals" not in upstreams["native"].seen[-1].body.decode()
    for path in home.home.rglob("*"):
        if path.is_file() and "node_modules" not in path.parts:
            assert TOKEN.encode() not in path.read_bytes(), path
    done = home.sh("reef-pi uninstall")
    left = [path for path in (home.home / ".local").rglob("*") if path.is_file()]
    assert left
    assert all("/root/" in str(path) for path in left), left
    assert ".jsonl" in done.stdout
    assert not (home.home / ".local/bin/reef-pi").exists()


@pytest.mark.parametrize("agent", ["pi", "opencode", "codex", "claude"])
def test_a_client_that_is_there_already(tmp_path, served, agent):
    home = Home(tmp_path, served, f"install-{agent}")
    home.install(agent, REEF_CLIENT=str(NPM / agents.agent(agent).client.program))
    publish(served, home.scenario, "greetings were dull", RULE)
    home.sh(f"reef-{agent} update")
    records = home.task(agent)
    assert home.said.stderr.count("is out") == 0
    assert any(
        "with corals" in json.dumps(served.record(home.scenario, r["agent_record_id"])["request"]) for r in records
    )
    home.sh(f"reef-{agent} report --score 1")
    (report,) = home.reported(records)
    turns = [
        r["agent_record_id"]
        for r in records
        if served.record(home.scenario, r["agent_record_id"])["request"].get("tools")
    ]
    assert set(turns) <= set(report["references"])
    publish(served, home.scenario, "more of it", RULE, SKILL)
    told = f"release 2 is out (you have 1): added skill tests. Why: more of it. To take it: reef-{agent} update"
    assert told in home.notice(agent)
    home.sh(f"reef-{agent} update")
    home.sh(f"reef-{agent} rollback")
    home.task(agent)
    assert "changed:" in home.sh(f"reef-{agent} status").stdout
    home.sh(f"reef-{agent} uninstall --all")
    assert [path for path in (home.home / ".local/share/reef").rglob("*") if path.is_file()] == []


def test_two_runs_at_once_each_with_its_own_check(tmp_path, served):
    """The one that began first ends last, and fails its check."""
    home = Home(tmp_path, served, "install-crossing")
    home.install("pi", REEF_CLIENT=str(NPM / "pi"))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = threading.Thread(
        target=lambda: home.sh(f"reef-pi --check 'cat {gate}; exit 1' -p 'Say slow.' || test $? = 1")
    )
    slow.start()
    home.sh("reef-pi --check true -p 'Say quick.'")
    gate.write_text("now\n")
    slow.join()
    found = {}
    for record in served.newest(home.scenario):
        whole = served.record(home.scenario, record["agent_record_id"])
        word = "slow" if "Say slow." in json.dumps(whole["request"]) else "quick"
        found.setdefault(word, set()).update(report["score"] for report in whole["reports"])
    assert found == {"slow": {0.0}, "quick": {1.0}}


def test_a_forwarded_host_reaches_the_files(tmp_path, served):
    """Behind a proxy on the same machine: what is installed talks to the outer address."""
    home = Home(tmp_path, served, "install-forwarded")
    told = "-H 'x-forwarded-proto: http' -H 'x-forwarded-host: localhost:1' -H \"Authorization: Bearer $REEF_TOKEN\""
    home.sh(f"curl -fsS {told} '{served.url}/reef/harness/install?adapter=pi' | bash", REEF_CLIENT=str(NPM / "pi"))
    models = (home.home / ".local/share/reef/pi/root/models.json").read_text()
    assert "http://localhost:1/v1" in models
    assert served.url not in models
