"""One episode: what the agent finds in its room, how it is scored, and whose failure is whose."""

import asyncio
import json
import os

import pytest

from reef.core.errors import ConfigError, StoreError
from reef.core.nouns import Usage
from reef.harness.agents import agent
from reef.harness.clients import Clients
from reef.harness.episode import Job, flaw
from reef.harness.room import Limits
from reef.harness.tree import Entry
from tests.harness.fakes import AGENT, RECEIPT, SMALL, Fake, Gateway, installed, job, rooms

ASK = """
import http.client
def ask(path="/v1/chat/completions"):
    line = http.client.HTTPConnection("127.0.0.1", 8900, timeout=5)
    line.request("POST", path, "{}", {"authorization": "Bearer " + os.environ["REEF_TOKEN"]})
    return line.getresponse().status
"""
SAY = "import json, os\ndef say(what): open(os.environ['ROOT'] + '/said', 'w').write(json.dumps(what))\n"


async def run(made, program, entries=(), **rest):
    return await made.of("s", "m").run(job(SAY + ASK + program, **rest), entries, "release-1")


async def test_the_tree_the_files_and_the_token_are_there(tmp_path):
    asked, ended = [], []
    made = rooms(tmp_path, token=lambda *of: asked.append(of) or "reef_secret", ended=ended.append)
    program = "say([open('a/b.txt').read(), open(os.environ['ROOT'] + '/RULES.md').read(), dict(os.environ), "
    program += "json.load(open(os.environ['ROOT'] + '/door.json')), os.getcwd()])"
    rules = (Entry("r", "rules", {"text": "Be kind."}),)
    outcome = await run(made, program, rules, files={"a/b.txt": "é"})
    text, rule, environment, door, here = json.loads(outcome.trajectory.final)
    assert (text, here) == ("é", "/room/work")
    assert "Be kind." in rule
    assert door == {"url": "http://127.0.0.1:8900", "scenario": "s", "model": "m"}
    assert environment["REEF_TOKEN"] == "reef_secret"
    assert environment["HOME"] == "/room/home"
    known = {"PATH", "HOME", "TMPDIR", "LANG", "TERM", "USER", "SHELL", "NO_PROXY", "ROOT", "REEF_TOKEN"}
    assert set(environment) - {"LC_CTYPE", "PWD"} == known | {"REEF_SESSION"}
    ((scenario, release, seconds),) = asked
    assert (scenario, release) == ("s", "release-1")
    assert 10.0 < seconds < 120.0
    assert ended == ["reef_secret"]
    assert (outcome.score, outcome.fault, outcome.trouble) == (None, None, None)


@pytest.mark.parametrize(
    ("program", "score"), [("open('done', 'w').close()", 1.0), ("pass", 0.0), ("os.mkdir('done')", 0.0)]
)
async def test_the_check_is_the_score(program, score, tmp_path):
    outcome = await run(rooms(tmp_path), program, check="echo looked; test -f done")
    assert (outcome.score, outcome.said, outcome.fault) == (score, "looked\n", None)


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "open('exam.py', 'w').write('pass')",
        "os.symlink('/usr/bin/true', 'exam.py')",
        "os.makedirs('exam.py/deep')",
        "os.mkdir('tests'); os.chmod('tests', 0)",
        "os.symlink('/room/home', 'tests')",
        "open('tests', 'w').close()",
        "os.chmod('.', 0)",
        "os.rename('/room/work', '/room/other'); os.symlink('/room/home', '/room/work')",
    ],
)
async def test_hidden_files_come_after_the_agent_whatever_it_left(program, tmp_path):
    hidden = {"exam.py": "print('the exam')", "tests/deep/exam.py": "print('and more')"}
    outcome = await run(rooms(tmp_path), program, check="PYTHON exam.py && PYTHON tests/deep/exam.py", hidden=hidden)
    assert (outcome.score, outcome.said) == (1.0, "the exam\nand more\n")


async def test_the_check_has_no_token_and_a_home_of_its_own(tmp_path):
    program = "open(os.environ['HOME'] + '/.profile', 'w').write('exit 0')"
    outcome = await run(rooms(tmp_path), program, check='test -z "$REEF_TOKEN" -a ! -e "$HOME/.profile"')
    assert outcome.score == 1.0, outcome.said


async def test_a_check_that_does_not_end_is_no_pass(tmp_path):
    made = rooms(tmp_path, limits=Limits(memory=256, disk=16, processes=32, check=0.3))
    outcome = await run(made, "pass", check="echo here; sleep 60")
    assert (outcome.score, outcome.fault) == (0.0, None)
    assert "here" in outcome.said
    assert "the check was not done within 0.3 s" in outcome.said


async def test_a_full_disk_leaves_no_room_for_the_check(tmp_path):
    program = "f = open('x', 'wb')\ntry:\n    while f.write(bytes(2**16)): f.flush()\nexcept OSError: os._exit(0)"
    outcome = await run(rooms(tmp_path), program, check="true", hidden={"exam": "x" * 10_000})
    assert (outcome.score, outcome.trouble) == (0.0, None)
    assert "left no room for the check" in outcome.said


async def test_calls_and_what_they_cost_are_counted(tmp_path):
    asked = []

    async def usage(receipts):
        asked.append(list(receipts))
        return Usage(7, 3)

    async with Gateway() as gateway:
        outcome = await run(rooms(tmp_path, gateway.address, usage=usage), "say([ask(), ask(), ask('/reef/report')])")
    assert json.loads(outcome.trajectory.final) == [200, 200, 403]
    assert (outcome.calls, outcome.usage) == (2, Usage(7, 3))
    assert asked == [[RECEIPT, RECEIPT]]
    assert len(gateway.seen) == 2
    assert "bearer reef_secret" in gateway.seen[0][0].lower()


async def test_asking_without_end_is_a_fault(tmp_path):
    async with Gateway() as gateway:
        outcome = await run(rooms(tmp_path, gateway.address), "say([ask() for _ in range(9)])", check="true")
    assert (outcome.score, outcome.fault) == (0.0, "fake asked more than 5 times")
    assert len(gateway.seen) == 5


@pytest.mark.parametrize(
    ("status", "program", "score", "trouble"),
    [
        (503, "ask()", None, "Reef answered 503"),  # it did not pass, and Reef was away: who knows
        (503, "assert ask() == 200", None, "Reef answered 503"),
        (503, "ask(); open('done', 'w').close()", 1.0, None),  # it passed all the same
        (400, "assert ask() == 200", 0.0, None),  # what it asked was wrong
        (200, "ask()", 0.0, None),
    ],
)
async def test_whose_failure_it_is(status, program, score, trouble, tmp_path):
    async with Gateway(status) as gateway:
        outcome = await run(rooms(tmp_path, gateway.address), program, check="test -f done")
    assert (outcome.score, outcome.trouble) == (score, trouble)


@pytest.mark.parametrize(
    ("program", "trouble"),
    [("ask(); say('done')", None), ("ask()", "Reef answered 503"), ("ask(); 1 / 0", "Reef answered 503")],
)
async def test_last_words_tell_that_an_agent_got_over_it(program, trouble, tmp_path):
    async with Gateway(503) as gateway:
        outcome = await run(rooms(tmp_path, gateway.address), program)
    assert (outcome.trouble, outcome.score, outcome.fault) == (trouble, None, None)


async def test_a_gateway_that_is_away_is_trouble(tmp_path):
    outcome = await run(rooms(tmp_path), "assert ask() == 200", check="true")
    assert "cannot be reached" in outcome.trouble
    assert outcome.fault is None


async def test_a_tree_that_cannot_be_installed_is_its_own_fault(tmp_path):
    outside = (Entry("c", "command", {"name": "c", "description": "d", "text": "t"}),)  # the fake puts it outside
    outcome = await run(rooms(tmp_path), "pass", outside, check="true")
    assert (outcome.score, outcome.trouble) == (0.0, None)
    assert "cannot be installed" in outcome.fault
    large = (Entry("r", "rules", {"text": "x" * 1000}),)
    tiny = Limits(memory=256, disk=1, processes=32)
    outcome = await run(rooms(tmp_path / "b", limits=tiny), "pass", large, files={"a": "x" * 2**21}, check="true")
    assert (outcome.score, outcome.trouble) == (0.0, None)
    assert "cannot be written" in outcome.fault


async def test_an_adapter_with_a_fault_of_its_own_breaks_nothing(tmp_path, caplog):
    made, broken = rooms(tmp_path).of("s"), Job("tests.harness.fakes:Broken", "pass", check="true", seconds=10.0)
    outcome = await made.run(broken, (), "r")
    assert (outcome.score, outcome.trajectory, outcome.trouble) == (1.0, None, None)
    assert "cannot be read" in caplog.text
    outcome = await made.run(broken, (Entry("r", "rules", {"text": "x"}),), "r")
    assert outcome.fault == "the tree cannot be installed for fake: 'r'"


async def test_a_store_that_is_away_costs_no_episode(tmp_path):
    async def usage(receipts):
        raise StoreError("away")

    outcome = await run(rooms(tmp_path, usage=usage), "pass", check="true")
    assert (outcome.score, outcome.usage, outcome.trouble) == (1.0, Usage(0, 0), None)


async def test_so_many_at_once_and_no_more(tmp_path):
    """Three episodes on two places: the third begins when one of the first has ended."""
    began = []
    made = rooms(tmp_path, width=2, token=lambda *of: began.append(of[1]) or "t")
    wait = "import time\ntime.sleep(1.0)"

    async def one(name):
        outcome = await made.of(name).run(job(wait), (), name)
        return name, outcome, len(began)

    ended = await asyncio.gather(*(one(name) for name in "abc"))
    assert [outcome.fault for _, outcome, _ in ended] == [None] * 3
    assert (sorted(began[:2]), began[2:]) == (["a", "b"], ["c"])
    assert min(seen for _, _, seen in ended) == 2


async def test_rooms_that_run_together_do_not_share_limits_or_ports(tmp_path):
    async with Gateway() as gateway:
        made = rooms(tmp_path, gateway.address, width=4)
        program = "import time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(1); os._exit(0)\nsay(ask())"
        found = await asyncio.gather(*(run(made, program) for _ in range(4)))
    assert [one.trajectory.final for one in found] == ["200"] * 4


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / "rooms" / "left").mkdir(parents=True)
    rooms(tmp_path)
    assert not (tmp_path / "rooms").exists()


def test_jobs_are_equal_by_content():
    one, other = Job("pi", "p", {"a": "1", "b": "2"}), Job("pi", "p", {"b": "2", "a": "1"})
    assert (one == other, hash(one) == hash(other), one.key == other.key) == (True, True, True)
    assert Job("pi", "p", {"a": "1"}) != one
    assert len({one, other, Job("pi", "p")}) == 2


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "", ".", "a/./b", "a\0b", "a/" * 20 + "b", "x" * 501])
def test_paths_that_a_file_cannot_have(path):
    assert flaw(path) is not None


def test_where_clients_are(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"npm install --prefix \S+/data/reef/fake/client/1\.0\.0 fake@1\.0\.0"):
        Clients().find(Fake())
    installed(tmp_path / "data/reef/fake/client/1.0.0")
    found = Clients().find(Fake())
    assert found.program == "/opt/client/node_modules/.bin/fake"
    assert found.reads[0] == (tmp_path / "data/reef/fake/client/1.0.0/node_modules", "/opt/client/node_modules")
    with pytest.raises(ConfigError, match=r"harness\.clients"):
        Clients(tmp_path / "elsewhere").find(Fake())
    for place in ("own/fake/client/1.0.0", "own2/fake", "own3"):
        installed(tmp_path / place)
        assert Clients(tmp_path / place.split("/")[0]).find(Fake()).program == found.program


def test_a_client_that_needs_another_node(tmp_path, monkeypatch):
    installed(tmp_path)
    program, node = tmp_path / "node_modules/.bin/fake", tmp_path / "bin/node"
    program.write_text("#!/usr/bin/env node\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match=r"needs Node, which PATH does not have; install Node 20\.6"):
        Clients(tmp_path).find(Fake())
    node.parent.mkdir()
    node.write_text("#!/bin/sh\necho v18.19.1\n")
    node.chmod(0o755)
    with pytest.raises(ConfigError, match=r"needs Node 20\.6 or newer, and \S+ is 18\.19\.1"):
        Clients(tmp_path).find(Fake())
    own = tmp_path / "node_modules/node/bin/node"  # npm's own package of Node goes first
    own.parent.mkdir(parents=True)
    own.touch()
    assert Clients(tmp_path).find(Fake()).path[-1] == "/opt/client/node_modules/node/bin"


async def test_a_client_that_path_has(tmp_path, monkeypatch):
    installed(tmp_path / "lib")
    (tmp_path / "bin").mkdir()
    os.symlink(tmp_path / "lib/node_modules/.bin/fake", tmp_path / "bin/fake")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    outcome = await run(rooms(tmp_path, clients=Clients()), "say(1)")
    assert outcome.trajectory.final == "1"
    (tmp_path / "bin/fake").unlink()
    (tmp_path / "bin/fake").write_text((tmp_path / "lib/node_modules/.bin/fake").read_text())
    (tmp_path / "bin/fake").chmod(0o755)
    outcome = await run(rooms(tmp_path / "b", clients=Clients()), "say(2)")
    assert outcome.trajectory.final == "2"


async def test_a_client_that_is_missing_is_trouble(tmp_path):
    outcome = await rooms(tmp_path, clients=Clients(tmp_path / "none")).of("s").run(job("pass"), (), "r")
    assert "not installed" in outcome.trouble


def test_the_fake_is_an_agent():
    assert agent(AGENT).name == "fake"
    assert SMALL.calls == 5
