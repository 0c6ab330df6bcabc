"""The commands that read and roll back, on a real server with a fake engine, in its folder and elsewhere."""

import json
import os
import subprocess
import sys
import time

import httpx
import pytest

from reef.cli import options, show, state
from reef.cli.main import main
from reef.study import server as serving

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NOBODY = "http://127.0.0.1:9"
FAKE = ["--reef.engine", "fake", "--training.backend", "fake", "--reef.recipe", "record"]


class Running:
    """A server in a folder of its own, one answer with two reports, and one evaluation of the base."""

    def __init__(self, folder):
        self.folder = folder
        words = [sys.executable, "-m", "reef", "serve", *FAKE, "--reef.port", "0"]
        away = ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL")
        environment = {name: value for name, value in os.environ.items() if name not in away}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment)

    def fill(self):
        self.until(lambda: "Ctrl-C stops." in (self.folder / "log").read_text())
        self.url = (self.folder / ".reef" / "run" / "address").read_text().strip()
        token = state.read_token(self.folder / ".reef")
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {token}"}, timeout=20) as client:
            answer = client.post("/v1/chat/completions", json=ASK)
            self.receipt = answer.headers["x-reef-agent-record-id"]
            base = {"x-reef-release": answer.headers["x-reef-release-id"]}
            self.evaluated = client.post("/v1/chat/completions", json=ASK, headers=base).headers[
                "x-reef-agent-record-id"
            ]
            for body in ({"score": 0.25, "feedback": "too short"}, {"demonstration": "Hello there!"}):
                assert client.post("/reef/report", json={**body, "references": [self.receipt]}).is_success

    def until(self, true, within=60.0):
        end = time.monotonic() + within
        while not true():
            alive = time.monotonic() < end and self.process.poll() is None
            assert alive, (self.folder / "log").read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Running(tmp_path_factory.mktemp("server"))
    try:
        made.fill()
        yield made
    finally:
        serving.stop(made.process)


@pytest.fixture
def reef(server, monkeypatch, capsys):
    """Runs a command in the server's folder: its exit code, output and errors."""
    monkeypatch.chdir(server.folder)
    for name in ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL"):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        code = main([*words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_record_is_shown_with_its_reports_and_its_tokens_counted(server, reef):
    code, out, _ = reef("records", server.receipt)
    shown = json.loads(out)
    assert code == 0
    first, second = shown["reports"]
    assert (first["score"], first["feedback"], second["demonstration"]) == (0.25, "too short", "Hello there!")
    assert first["agent_record_id"].startswith("rep_")
    assert shown["choices"][0]["output_ids"] == "3 (--json lists them)"
    _, out, _ = reef("records", server.receipt, "--json")
    whole = json.loads(out)
    assert len(whole["choices"][0]["output_ids"]) == len(whole["choices"][0]["logprobs"]) == 3
    (line,) = (line for line in out.splitlines() if '"output_ids"' in line)
    assert json.loads("{" + line.strip().rstrip(",") + "}") == {"output_ids": whole["choices"][0]["output_ids"]}


def test_a_real_server_says_why_and_changes_settings(server, reef):
    code, out, err = reef("why", server.receipt)
    assert (code, err) == (0, "")
    assert "there from the beginning" in out
    assert "not known" not in out, "the learner's audit is there"
    assert json.loads(reef("candidates", "--json")[1]) == {"candidates": [], "known": True}
    token = state.read_token(server.folder / ".reef")
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {token}"}, timeout=20) as client:
        assert client.post("/reef/scenarios", json={"name": "shop"}).status_code == 201
        done = client.patch("/reef/scenarios/shop", json={"releases": {"mode": "review"}})
        assert done.status_code == 200, done.text
        for body in ({"gate": {"policy": "os:system"}}, {"gate": {"polcy": "always"}}, {"nonsense": 1}):
            assert client.patch("/reef/scenarios/shop", json=body).status_code == 400, body
        assert client.patch("/reef/scenarios/shop", json={"recipe": "record"}).json()["recipe"] == "record"
    assert reef("scenarios", "archive", "shop")[0] == 0


def test_lists_mark_what_was_an_evaluation(server, reef):
    _, out, _ = reef("records")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert "live" in lines[server.receipt]
    assert "evaluation" in lines[server.evaluated]


def test_reports_are_listed(server, reef):
    code, out, _ = reef("records", "--reports")
    assert code == 0
    rows = [line for line in out.splitlines() if server.receipt in line]
    assert len(rows) == 2
    assert "Hello there!" in rows[0]
    assert "0.25" in rows[1]
    assert "too short" in rows[1]
    assert len(json.loads(reef("records", "--reports", "--json", "-n", "1")[1])["reports"]) == 1


def test_sessions_are_listed_and_one_is_a_tree(server, reef):
    token = state.read_token(server.folder / ".reef")
    headers = {"authorization": f"Bearer {token}", "x-session-id": "ses_1"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as client:

        def ask(*messages):
            answer = client.post("/v1/chat/completions", json={**ASK, "messages": list(messages)})
            return answer.headers["x-reef-agent-record-id"], answer.json()["choices"][0]["message"]

        (one, said), more = ask(*ASK["messages"]), {"role": "user", "content": "go on"}
        two, _ = ask(*ASK["messages"], said, more)
        three, _ = ask(*ASK["messages"], said, {"role": "user", "content": "no, back"})

    def places():
        found = json.loads(reef("sessions", "ses_1", "--json")[1])["records"]
        return [item["place"] and item["place"]["parent"] for item in found]

    server.until(lambda: places() == [None, one, one])
    code, out, err = reef("sessions")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows if row and row[0] == "ses_1"] == ["3"]
    assert [row[1] for row in rows if row and row[0] == server.receipt] == ["1"]
    code, out, err = reef("sessions", "ses_1")
    lines = out.splitlines()
    assert (code, err, lines[0].strip()) == (0, "", "ses_1  3 records")
    assert [next(i for i in (one, two, three) if i in line) for line in lines[1:]] == [one, two, three]
    assert lines[1].index(one) < lines[2].index(two) == lines[3].index(three)
    assert "segment 1" in lines[3]
    assert "the history was edited" in lines[3]
    code, _, err = reef("sessions", "nobody")
    assert (code, err.strip()) == (1, "reef: scenario 'default' has no session 'nobody'")


def test_rolling_back_to_what_is_served_says_so(reef):
    before = len(json.loads(reef("releases", "--json")[1])["releases"])
    code, out, _ = reef("rollback", "0")
    assert (code, out[:50]) == (0, "nothing changed: default serves release 0 (" + out[43:50])
    assert out.endswith(") already\n")
    assert len(json.loads(reef("releases", "--json")[1])["releases"]) == before


@pytest.mark.parametrize("words", [("releases",), ("rollback", "0")])
@pytest.mark.parametrize("how", ["flag", "environment"])
def test_an_address_that_does_not_answer_is_not_replaced_by_this_folder(reef, monkeypatch, words, how):
    if how == "environment":
        monkeypatch.setenv("REEF_URL", NOBODY)
    code, out, err = reef(*words, *(("--url", NOBODY) if how == "flag" else ()))
    assert (code, out) == (1, "")
    assert err.startswith(f"reef: no server answers on {NOBODY}; check --url")
    assert "holds no releases" not in err


@pytest.mark.parametrize("words", [("status",), ("chat",)])
def test_elsewhere_the_way_to_a_token_is_named(server, reef, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", Lines("hello\n"))
    code, _, err = reef(*words, "--reef.port", server.url.rpartition(":")[2])
    assert code == 1
    assert "give the token with --token or REEF_TOKEN, or name the server's file with -c FILE, or cd to its" in err


class Lines:
    """Piped standard input."""

    def __init__(self, *lines):
        self._lines = lines

    def __iter__(self):
        return iter(self._lines)

    def isatty(self):
        return False


def test_an_unknown_scenario_names_the_command(reef):
    for words in (("releases",), ("records",), ("records", "--reports"), ("rollback", "0")):
        code, _, err = reef(*words, "-s", "nope")
        assert (code, err) == (
            1,
            "reef: no scenario 'nope'; `reef scenarios` lists them, POST /reef/scenarios makes one\n",
        )


def test_the_banner_names_the_program_as_it_is_started_here(server, reef):
    said = (server.folder / "log").read_text()
    for command in ("chat", "records"):
        assert f"  {options.program()} {command} " in said


def test_status_shows_figures_of_the_last_step():
    figures = {f"m{number}": number / 3 for number in range(9)}
    item = {"learner": {"parts": {"weights": {"metrics": {"kept": 0.4375, **figures}}, "harness": {"metrics": {}}}}}
    assert show._beside("a", item) == [
        "weights: last step: kept 0.4375, m0 0, m1 0.3333, m2 0.6667, m3 1, m4 1.333",
    ]
