"""Real episodes: pi in a room, answered by a real Reef with a scripted provider."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from reef.core.nouns import Usage
from reef.harness.clients import Clients
from reef.harness.episode import Job, Rooms
from reef.harness.tree import Entry
from reef.records.board import Board
from reef.records.tokens import TokenTable
from tests.clients.conftest import CLIENTS, ROOT, TOKEN, Served
from tests.clients.upstream import KEY, WORD, Turn, Upstream

FILE = "/room/work/hello.txt"
PROMPT = f"Write a greeting into {FILE} and tell me what came of it."
CHECK = f"grep -qx '{WORD}' hello.txt"


def release(served, scenario="native"):
    return served.client.get("/reef/status").json()["scenarios"][scenario]["release_id"]


@pytest.fixture
def rooms(served, tmp_path):
    board = Board(served.folder / ".reef/records.db")
    yield Rooms(served.url, TokenTable(board).episode, tmp_path / "rooms", Clients(CLIENTS / "node"))
    board.close()


async def work(rooms, served, agent, scenario="native", **rest):
    job = Job(agent, PROMPT, seconds=90.0, **{"check": CHECK} | rest)
    tree = (Entry("kind", "rules", {"text": "Be kind to everybody."}),)
    return await rooms.of(scenario, "reef-model").run(job, tree, release(served, scenario))


@pytest.mark.parametrize("agent", ["pi", "opencode", "codex", "claude"])
async def test_an_agent_works_in_its_room(served, begin, rooms, agent):
    flow = begin("native")
    outcome = await work(rooms, served, agent)
    assert (outcome.score, outcome.fault, outcome.trouble) == (1.0, None, None), outcome
    flow.end().check()
    assert {record["purpose"] for record in flow.records} == {"evaluation"}
    assert {record["release_id"] for record in flow.records} == {release(served)}
    assert all(record["tags"]["token"].startswith("episode.") for record in flow.records)
    assert any("Be kind to everybody." in seen.body.decode() for seen in flow.seen)
    assert outcome.calls == len(flow.records)
    assert "The tool returned:" in outcome.trajectory.final
    assert [call.name for move in outcome.trajectory.moves for call in move.calls]
    assert outcome.usage == Usage(240, outcome.usage.completion_tokens)
    for secret in (KEY, TOKEN):
        assert secret not in repr(outcome)


async def test_a_check_that_fails_is_a_score_of_0(served, rooms):
    outcome = await work(rooms, served, "pi", check="echo not yet; test -f other.txt", hidden={"x": "1"})
    assert (outcome.score, outcome.said, outcome.fault, outcome.trouble) == (0.0, "not yet\n", None, None)


async def test_experience_never_sees_an_episode(served, rooms):
    before = served.client.get("/reef/status").json()["scenarios"]["native"]
    await work(rooms, served, "pi")
    listed = served.newest("native")
    assert listed[0]["purpose"] == "evaluation"
    after = served.client.get("/reef/status").json()["scenarios"]["native"]
    assert before["release_id"] == after["release_id"]


def test_a_look_that_was_killed_goes_on(served, upstreams, tmp_path):
    """Both sides in turn; after kill -9 what was done is not done again, and nothing is left running."""
    tasks = tmp_path / "work.jsonl"
    lines = [{"agent": "pi", "prompt": f"{PROMPT} Number {n}.", "check": CHECK, "seconds": 60} for n in range(4)]
    tasks.write_text("".join(json.dumps(one) + "\n" for one in lines))
    words = [sys.executable, "tests/clients/looking.py", served.url, served.folder / ".reef", tmp_path]
    words += [release(served), tasks]

    def look(until=None):
        runner = subprocess.Popen(
            list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        said = []
        for line in runner.stdout:
            said.append(line.strip())
            if line.strip() == until:
                runner.send_signal(signal.SIGKILL)
        runner.wait()
        return said

    seen = len(upstreams["native"].seen)
    killed = look("episodes 3 of 8")
    assert killed[-1] == "episodes 3 of 8"
    time.sleep(1.0)  # what was on its way to the provider arrives
    first = firsts(upstreams["native"].seen[seen:])
    between = len(upstreams["native"].seen)
    said = look()
    second = firsts(upstreams["native"].seen[between:])
    assert said[0] == "episodes 3 of 8"
    found = json.loads(said[-1])
    assert found["missing"] == []
    assert found["rows"] == {f"line {n}": [1.0, 1.0] for n in range(1, 5)}
    assert len(set(first) | set(second)) == 8
    assert len(second) == len(set(second)) == 5
    assert len(set(first) & set(second)) <= 1, "at most what was in work is done again"
    order = first[:3] + second
    sides = [side for side, _ in order]
    assert sides in (
        ["candidate", "incumbent", "incumbent", "candidate"] * 2,
        ["incumbent", "candidate", "candidate", "incumbent"] * 2,
    )
    assert [task for _, task in order[::2]] == [task for _, task in order[1::2]]


RULE = "Always write the file with your own tool."
LEARNS = """
reef: {{port: 0, engine: up, token: "{token}", recipe: feedback_rules}}
engines: {{up: {{kind: upstream, url: "{url}", key_env: UPSTREAM_KEY, model: up-1}}}}
gate: {{policy: better, suite: work.jsonl, tasks: 8, least: 7, alpha: 0.4}}
harness: {{clients: "{clients}", parallel: 2}}
training: {{backend: fake}}
"""


def careless(body):
    """A model that writes nothing unless a rule in its system prompt says so."""
    return Turn("I thought about it.") if "number" in str(body).lower() and RULE not in str(body) else None


def test_a_rule_is_released_because_agents_did_better_with_it(tmp_path):
    """The whole way: a report, a proposal, real episodes of both sides, a release; with a kill -9 of all of it between,
    after which it goes on where it was."""
    lines = [{"agent": "pi", "prompt": f"{PROMPT} Number {n}.", "check": CHECK, "seconds": 90} for n in range(8)]
    (tmp_path / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with Upstream({"chat"}, careless) as upstream:
        config = LEARNS.format(token=TOKEN, url=upstream.url, clients=CLIENTS / "node")
        made = Served(tmp_path, config)
        before = release(made, "default")
        body = {"model": "m", "messages": [{"role": "user", "content": "Number 1, please."}]}
        receipt = made.client.post("/v1/chat/completions", json=body).headers["x-reef-agent-record-id"]
        made.report(receipt, score=0.0, feedback=RULE)
        shown = follow(made, lambda part: (part["progress"] or ["", 0])[1] >= 3)
        made.process.kill()
        made.process.wait()
        made.client.close()
        done = shown[-1][2]
        made = Served(tmp_path, config)
        try:
            more = follow(made, lambda part: release(made, "default") != before)
            found = made.client.get("/reef/scenarios/default/releases").json()["releases"][0]
            records = [one for one in made.newest("default") if one["purpose"] == "evaluation"]
        finally:
            made.stop()
    assert {one[:2] for one in shown + more if one[0] == "evaluating"} == {("evaluating", "episodes")}
    assert {one[3] for one in shown + more if one[0] == "evaluating"} == {16}
    assert min(one[2] for one in more if one[0] == "evaluating") >= done
    evaluation = found["evaluation"]
    assert "it scores 1.00, the incumbent 0.00 on" in evaluation["reason"]
    tokens = {one["tags"]["token"] for one in records}
    assert 14 <= len(tokens) <= 16 + 2, "what was done is not done again, but for what was in work"
    episodes = [one.body.decode() for one in upstream.seen if f"into {FILE}" in one.body.decode()]
    assert {RULE in text for text in episodes} == {True, False}
    assert KEY not in "".join(episodes)


def follow(made, until):
    """What the status said of the harness part until it is so."""
    seen, deadline = [], time.monotonic() + 240
    while True:
        learner = made.client.get("/reef/status").json()["scenarios"]["default"]["learner"] or {}  # it may not answer
        part = learner.get("parts", {}).get("harness")
        if part is not None:
            if part["state"] == "evaluating" and part["progress"]:
                seen.append((part["state"], *part["progress"]))
            assert (part["last"] or {}).get("verdict") in (None, "accept"), part
            if until(part):
                return seen
        assert time.monotonic() < deadline, (part, made.logs()[-3000:])
        time.sleep(0.2)


def firsts(seen):
    """(side, task) of each episode, in order of their first requests."""
    found = []
    for one in seen:
        text = one.body.decode()
        side = "candidate" if "You are the candidate." in text else "incumbent"
        task = text.split("Number ")[1][:1]
        if (side, task) not in found:
            found.append((side, task))
    return found
