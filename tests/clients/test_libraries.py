"""Python clients as applications use them: a task with one tool call, whole and streamed, and a score on its receipt.

Each script in `python/` runs once against both scenarios in an environment of its own; each of its flows is a test.
"""

import functools
import json
import subprocess

import pytest

from tests.clients.conftest import CLIENTS, ROOT, SCENARIOS, TOKEN, Flow
from tests.clients.upstream import FAULTS, WORD

FLOWS = {
    "chat": ("whole", "streamed", "helped"),
    "responses": ("whole", "streamed", "helped"),
    "messages": ("whole", "streamed", "helped", "plain", "counted"),
    "router": ("openai_whole", "openai_streamed", "anthropic_whole", "anthropic_streamed"),
    "chain": (
        "chat_whole", "chat_streamed", "responses_whole", "responses_streamed", "anthropic_whole", "anthropic_streamed",
    ),
    "typed": (
        "chat_whole", "chat_streamed", "responses_whole", "responses_streamed", "anthropic_whole", "anthropic_streamed",
    ),
    "smol": ("whole", "streamed"),
    "protocol": ("whole",),
}  # fmt: skip


def call(served, script, scenarios, folder):
    """Run a script; its flows by (scenario, name)."""
    done = subprocess.run(
        [CLIENTS / "venv/bin/python", ROOT / "tests/clients/python" / f"{script}.py"],
        cwd=folder, capture_output=True, text=True, timeout=200,
        env={
            "PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "NO_PROXY": "127.0.0.1",
            "REEF_URL": served.url, "REEF_TOKEN": TOKEN, "SCENARIOS": ",".join(scenarios), "OUT": str(folder / "out"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return {(line["scenario"], line["flow"]): line for line in lines}


@pytest.fixture(scope="module")
def ran(served, upstreams, tmp_path_factory):
    """`ran(script)`: what its flows printed, and what each scenario saw and recorded meanwhile."""

    @functools.cache
    def run(script):
        flows = {name: Flow(served, upstreams[name], name) for name in SCENARIOS}
        lines = call(served, script, SCENARIOS, tmp_path_factory.mktemp(script))
        return lines, {name: flow.end() for name, flow in flows.items()}

    return run


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("script", "flow"), [(name, flow) for name, flows in FLOWS.items() for flow in flows])
def test_a_task_with_a_tool(ran, script, flow, scenario):
    """`helped` asks for two calls whose fragments take turns (case 5); streams are cut inside characters (case 6)."""
    lines, watched = ran(script)
    line = lines[scenario, flow]
    assert "error" not in line, line["error"]
    if flow == "counted":
        assert not line["receipts"]
        return
    turns = 1 if flow == "plain" else 2
    assert WORD in line["answer"]
    assert len(line["receipts"]) == turns
    records = [watched[scenario].find(found) for found in line["receipts"]]
    assert len({record["agent_record_id"] for record in records}) == turns
    assert line["answer"] == (records[-1]["choices"][0]["text"] or line["answer"])
    if turns == 2:
        calls = [tool["function"] for tool in records[0]["choices"][0]["message"]["tool_calls"]]
        keys = ["colour", "shape"] if flow == "helped" else ["colour"]
        assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [("lookup", {"key": key}) for key in keys]
    for found in line["receipts"]:
        watched[scenario].scored(found)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("script", FLOWS)
def test_one_record_for_each_request_that_reached_the_provider(ran, script, scenario):
    ran(script)[1][scenario].check()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_breaks_off_is_an_error_at_the_client(ran, dialect, fault, scenario):
    """And the receipt that the client has by then is that of an interrupted record (case 15)."""
    lines, watched = ran("broken")
    line = lines[scenario, f"{dialect}_{fault}"]
    assert "error" not in line, line["error"]
    if dialect == "responses" and fault == "event":  # this package hands the event on
        assert line["answer"] in ("silent after error", "silent after response.failed")
    else:
        assert not line["answer"].startswith("silent")
    (record,) = map(watched[scenario].find, line["receipts"])
    assert record["status"] == "interrupted"
    assert record["error"]


IMPORTED = [
    {
        "agent_record_id": "sample-1",
        "request_type": "inference",
        "payload": {
            "messages": [{"role": "user", "content": "2+2?"}],
            "response": {"choices": [{"message": {"role": "assistant", "content": "4"}}]},
        },
    },
    {"agent_record_id": "score-1", "request_type": "report", "payload": {"references": ["sample-1"], "score": 1}},
]


def test_records_are_imported_once(served, tmp_path):
    """reef-client's importer, and again without its progress: all is acknowledged, nothing is there twice."""
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in IMPORTED))
    for number in range(2):
        done = subprocess.run(
            [
                CLIENTS / "venv/bin/python", "-m", "reef_client", "import", "old.jsonl",
                "--url", served.url, "--scenario", "imported", "--progress", f"progress-{number}", "--retries", "0",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "REEF_TOKEN": TOKEN},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "2 records acknowledged" in done.stdout
    (record,) = served.newest("imported")
    assert record["choices"][0]["text"] == "4"
    reports = served.client.get("/reef/scenarios/imported/reports").json()["reports"]
    assert [report["score"] for report in reports] == [1.0]


def test_a_conversation_goes_on_from_what_reef_recorded(served, upstreams, tmp_path):
    lines = call(served, "responses", ["chatty"], tmp_path)
    line = lines["chatty", "continued"]
    assert "error" not in line, line["error"]
    assert WORD in line["answer"]
