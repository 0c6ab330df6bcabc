"""`reef report`: what is sent, and what is wrong before anything is."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from reef.cli.main import main


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Address, and what was sent there as (headers, body)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REEF_TOKEN", raising=False)
    sent = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            sent.append((self.path, dict(self.headers.items()), body))
            answer = {"agent_record_id": "rep_1", "scenario": "default", "request_type": "report", "duplicate": False}
            records = {"records": 1 if body["session"] == "one" else 7} if "session" in body else {}
            made = json.dumps(answer | records).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", sent
    made.shutdown()


def test_a_session_or_receipts(server, capsys):
    url, sent = server
    assert main(["report", "--session", "ses_1", "--score", "1", "--url", url, "-s", "team"]) == 0
    path, headers, body = sent.pop()
    assert (path, body) == ("/reef/report", {"score": 1.0, "session": "ses_1"})
    assert headers["x-reef-scenario"] == "team"
    assert capsys.readouterr().out == "rep_1 in scenario default, on 7 records\n"
    assert main(["report", "--session", "one", "--score", "1", "--url", url]) == 0
    assert capsys.readouterr().out == "rep_1 in scenario default, on 1 record\n"
    sent.clear()
    assert main(["report", "a" * 32, "b" * 32, "--feedback", "good", "--url", url]) == 0
    _, headers, body = sent.pop()
    assert body == {"feedback": "good", "references": ["a" * 32, "b" * 32]}
    assert "x-reef-scenario" not in headers


@pytest.mark.parametrize("named", [[], ["a" * 32, "--session", "ses_1"]])
def test_one_of_the_two(server, capsys, named):
    url, sent = server
    assert main(["report", *named, "--score", "1", "--url", url]) == 2
    assert "--session ID; not both" in capsys.readouterr().err
    assert sent == []


def test_a_scenario_that_no_header_can_carry_is_refused_first(server, capsys):
    url, sent = server
    assert main(["report", "--session", "ses_1", "--score", "1", "--url", url, "-s", "é"]) == 2
    assert "a scenario's name is 1 to 63 of" in capsys.readouterr().err
    assert sent == []
