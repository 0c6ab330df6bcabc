"""Command-line agents, each in a home of its own: a task that needs a tool, and what it leaves here and there.

pi and opencode speak whichever dialect they are set to, codex responses only, Claude Code messages only.
"""

import contextlib
import json
import os
import sqlite3
import subprocess

import pytest

from tests.clients.conftest import CLIENTS, SCENARIOS, TOKEN, Served
from tests.clients.upstream import WORD

NPM = CLIENTS / "node/node_modules/.bin"
HOOK = """
import { appendFileSync } from "node:fs";
export default function (pi: any) {
  pi.on("after_provider_response", (event: any) => {
    appendFileSync(process.env.RECEIPTS!, event.headers["x-reef-agent-record-id"] + "\\n");
  });
}
"""
EMBEDDED = f"""
reef: {{port: 0, token: "{TOKEN}", recipe: record}}
"""
CODEX = """
model = "reef-model"
model_provider = "reef"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.reef]
name = "reef"
base_url = "{url}/v1"
env_key = "REEF_TOKEN"
wire_api = "responses"
http_headers = {{ "x-reef-scenario" = "{scenario}" }}
request_max_retries = 0
stream_max_retries = 0
"""


class Home:
    """A throw-away home, a work folder, and a client run in it."""

    def __init__(self, folder, served):
        self.folder, self.served = folder, served
        self.home, self.work = folder / "home", folder / "work"
        for made in (self.home, self.work):
            made.mkdir()
        self.file = self.work / "hello.txt"
        self.prompt = f"Write a greeting into {self.file} and tell me what came of it."

    def run(self, *words, **environment):
        done = subprocess.run(
            words, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
            env={
                "PATH": f"{NPM}:{os.environ['PATH']}", "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb",
                "NO_PROXY": "127.0.0.1", "TMPDIR": str(self.folder), "REEF_TOKEN": TOKEN, **environment,
            },
        )  # fmt: skip
        self.said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.out, self.code = done.stdout, done.returncode
        return self

    def pi(self, scenario, api="openai-completions", prompt=None):
        base = self.served.url + ("" if api == "anthropic-messages" else "/v1")
        tree = self.home / "pi"
        (tree / "extensions").mkdir(parents=True)
        (tree / "extensions/receipts.ts").write_text(HOOK)
        settings = {"defaultProvider": "reef", "defaultModel": "reef-model"}
        settings["compaction"] = {"enabled": False}  # its reserve is more than a small model's whole context
        (tree / "settings.json").write_text(json.dumps(settings))
        provider = {
            "baseUrl": base, "api": api, "apiKey": "REEF_TOKEN",
            "models": [{"id": "reef-model", "contextWindow": 8192, "maxTokens": 40}],
            "headers": {"x-reef-scenario": scenario, "x-reef-tag-agent": "pi"},
        }  # fmt: skip
        (tree / "models.json").write_text(json.dumps({"providers": {"reef": provider}}))
        self.receipts = self.folder / "receipts"
        return self.run(
            "pi", "-p", prompt or self.prompt,
            PI_CODING_AGENT_DIR=str(tree), PI_OFFLINE="1", PI_SKIP_VERSION_CHECK="1", PI_TELEMETRY="0",
            RECEIPTS=str(self.receipts),
        )  # fmt: skip

    def opencode(self, scenario, package):
        provider = {
            "npm": package,
            "options": {
                "baseURL": self.served.url + "/v1", "apiKey": "{env:REEF_TOKEN}",
                "headers": {"x-reef-scenario": scenario},
            },
            "models": {"reef-model": {"limit": {"context": 128000, "output": 4096}}},
        }  # fmt: skip
        model = "reef/reef-model"
        config = {"provider": {"reef": provider}, "model": model, "small_model": model, "share": "disabled"}
        return self.run(
            "opencode", "run", self.prompt,
            OPENCODE_CONFIG_CONTENT=json.dumps(config), OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1", OPENCODE_PURE="1",
        )  # fmt: skip

    def codex(self, scenario, prompt=None):
        tree = self.home / "codex"
        tree.mkdir()
        (tree / "config.toml").write_text(CODEX.format(url=self.served.url, scenario=scenario))
        return self.run(
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            prompt or self.prompt,
            CODEX_HOME=str(tree),
        )  # fmt: skip

    def claude(self, scenario, prompt=None):
        return self.run(
            "claude", "-p", prompt or self.prompt, "--model", "reef-model", "--permission-mode", "acceptEdits",
            ANTHROPIC_BASE_URL=f"{self.served.url}/s/{scenario}", ANTHROPIC_AUTH_TOKEN=TOKEN,
            CLAUDE_CONFIG_DIR=str(self.home / "claude"), CLAUDE_CODE_MAX_RETRIES="1",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1", DISABLE_TELEMETRY="1",
            DISABLE_ERROR_REPORTING="1",
        )  # fmt: skip

    def transcript(self, pattern):
        """The lines of the one transcript below the home."""
        (path,) = self.home.glob(pattern)
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def home(tmp_path, served):
    return Home(tmp_path, served)


def done(home, flow):
    """The task is done, and each request has its record; those of the main line, oldest first."""
    assert home.code == 0, home.said
    assert home.file.read_text() == WORD + "\n", home.said
    assert "The tool returned:" in home.out, home.said
    flow.end().check()
    first, last = flow.records
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert last["choices"][0]["text"].strip() == home.out.strip()
    for record in flow.records:
        flow.scored(record["agent_record_id"])
    return flow.records


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi(home, begin, scenario, api):
    flow = begin(scenario)
    records = done(home.pi(scenario, api), flow)
    assert home.receipts.read_text().split() == [record["agent_record_id"] for record in records]
    lines = home.transcript("pi/sessions/*/*.jsonl")
    said = [line["message"] for line in lines if line.get("message", {}).get("role") == "assistant"]
    assert [flow.find(message["responseId"]) for message in said] == records
    assert all(message["usage"]["input"] > 0 for message in said)
    session = lines[0]["id"] if api == "openai-responses" else None  # pi names its session in responses only
    for record in records:
        assert record["session"] == session
        assert record["tags"] == {"agent": "pi"}


PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}


@pytest.mark.parametrize(("scenario", "dialect"), [("native", "chat"), ("chatty", "responses"), ("chatty", "messages")])
def test_opencode(home, begin, scenario, dialect):
    """It asks for a title beside the first turn, without tools and in the same session, and shows no headers."""
    flow = begin(scenario)
    home.opencode(scenario, PACKAGES[dialect])
    assert home.code == 0, home.said
    assert home.file.read_text() == WORD + "\n", home.said
    assert "The tool returned:" in home.out, home.said
    flow.end().check()
    titles = [record for record in flow.records if not record["request"].get("tools")]
    turns = [record for record in flow.records if record not in titles]
    assert (len(titles), len(turns)) == (1, 2)
    assert [record["choices"][0]["finish_reason"] for record in turns] == ["tool_calls", "stop"]
    assert {record["dialect"] for record in flow.records} == {dialect}
    (session,) = {record["session"] for record in flow.records}
    with contextlib.closing(sqlite3.connect(home.home / ".local/share/opencode/opencode.db")) as kept:
        assert kept.execute("SELECT id FROM session").fetchall() == [(session,)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_codex(home, begin, scenario):
    flow = begin(scenario)
    records = done(home.codex(scenario), flow)
    lines = home.transcript("codex/sessions/*/*/*/*.jsonl")
    (meta,) = [line["payload"] for line in lines if line["type"] == "session_meta"]
    ids = [line["payload"]["response_id"] for line in lines if line["type"] == "token_usage_record"]
    assert [flow.find(id_) for id_ in ids] == records
    for record in records:
        assert record["session"] == meta["id"]
        assert record["tags"]["thread-id"] == meta["id"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_claude_code(home, begin, scenario):
    flow = begin(scenario)
    records = done(home.claude(scenario), flow)
    lines = home.transcript("claude/projects/*/*.jsonl")
    said = [line for line in lines if line["type"] == "assistant"]
    assert [line["requestId"] for line in said] == [record["agent_record_id"] for record in records]
    assert [flow.find(line["message"]["id"]) for line in said] == records
    for record in records:
        assert record["session"] == said[0]["sessionId"]
        assert record["tags"] == {}
    if scenario == "native":
        for seen in flow.seen:
            assert seen.query == "beta=true"
            assert seen.headers["anthropic-version"]
            assert "claude-code" in seen.headers["anthropic-beta"]


def test_claude_code_with_an_agent_below_it(home, begin):
    flow = begin("native")
    home.claude("native", f"Delegate: {home.prompt}")
    assert home.code == 0, home.said
    assert home.file.read_text() == WORD + "\n", home.said
    flow.end().check()
    lines = home.transcript("claude/projects/*/*/subagents/agent-*.jsonl")
    below = {"agent-id": lines[0]["agentId"]}
    assert [record["tags"] for record in flow.records] == [{}, below, below, {}]
    assert {record["session"] for record in flow.records} == {lines[0]["sessionId"]}
    inner = [line["requestId"] for line in lines if line["type"] == "assistant"]
    assert inner == [record["agent_record_id"] for record in flow.records[1:3]]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_counted_tokens_leave_no_record(home, begin, scenario):
    flow = begin(scenario)
    home.claude(scenario, "/context")
    assert home.code == 0, home.said
    assert flow.end().records == []
    assert scenario == "chatty" or [seen for seen in flow.seen if seen.path.endswith("count_tokens")]


def test_nothing_was_logged_as_wrong(served):
    for path in ("/", "/api/hello"):
        assert served.client.head(path, headers={"authorization": ""}).status_code == 200
    lines = [json.loads(line) for line in served.logs().splitlines() if line.startswith("{")]
    assert lines
    assert [line for line in lines if line["level"] == "ERROR" or line["logger"] == "reef.gateway.auth"] == []
    assert TOKEN not in served.logs()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A server with the embedded model, which has 8,192 tokens of context."""
    made = Served(tmp_path_factory.mktemp("embedded"), EMBEDDED)
    yield made
    made.stop()


@pytest.mark.model
def test_pi_on_the_embedded_model(tmp_path, embedded):
    known = embedded.newest("default")
    home = Home(tmp_path, embedded).pi("default", prompt="Say hello.")
    assert home.code == 0, home.said
    records = [
        record for record in embedded.newest("default")[::-1] if record not in known
    ]  # one, unless the model thought of calling a tool
    receipts = [record["agent_record_id"] for record in records]
    assert home.receipts.read_text().split() == receipts
    assert {record["status"] for record in records} == {"complete"}
    assert records[-1]["choices"][0]["text"].strip() == home.out.strip()
    said = [line["message"] for line in home.transcript("pi/sessions/*/*.jsonl") if line["type"] == "message"]
    ids = [message["responseId"] for message in said if message["role"] == "assistant"]
    assert ids == [f"chatcmpl-{receipt}" for receipt in receipts]


ROOM = {"pi": "8192", "codex": "ran out of room in the model's context window", "claude": "8192"}
"""How a client says that a prompt is too long: in Reef's words, or, where it knows the error's code, in its own."""


@pytest.mark.model
@pytest.mark.parametrize("agent", ROOM)
def test_a_prompt_that_is_too_long_is_said_so(tmp_path, embedded, agent):
    home = Home(tmp_path, embedded)
    getattr(home, agent)("default", prompt="word " * 12000)
    assert home.code == 1, home.said
    assert ROOM[agent] in home.said.replace(",", ""), home.said
    (record, *_) = embedded.newest("default")
    assert record["status"] == "rejected"
    assert "8192" in record["error"]
