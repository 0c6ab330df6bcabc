"""A whole server: users hate a release, it is taken back, and whoever listens is told, over a kill of the learner."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from reef.harness import tree
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import align, tell
from tests.flow.test_serve import MESSAGES, Served, until

CONFIG = """
reef: {{port: 0, engine: fake, recipe: record}}
observability:
  webhook: {{url: "http://127.0.0.1:{port}/", kinds: [alarm, rollback], secret_env: HOOK_SECRET}}
"""


class Receiver(http.server.ThreadingHTTPServer):
    """Takes what is signed; the first message it refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        self.acts: list[dict[str, Any]] = []
        self.refused = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Take(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        signed = "sha256=" + hmac.new(b"word", body, hashlib.sha256).hexdigest()
        if self.server.refused == 0 or self.headers["x-reef-signature"] != signed:
            self.server.refused += 1
            self.send_response(500)
        else:
            self.server.acts.append(json.loads(body))
            self.send_response(204)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def publish(state: Path) -> str:
    """Rules from elsewhere, served at once."""
    chain, board = GitChain(state / "releases.git"), Board(state / "records.db")
    head = chain.head("default")
    assert head is not None
    data = tree.write((tree.Entry("rude", "rules", {"text": "Be rude."}),))
    draft = Draft(
        "publish", {"harness": NewPart("tree", {tree.FILE: data})}, base=head.id, actor="ada", reason="try it"
    )
    made = chain.publish("default", draft, head.id)
    align("default", chain, board)
    tell(made, board)
    board.close()
    return made.id


def judge(served: Any, count: int, score: float) -> None:
    """So many answers, each with a report."""
    for _ in range(count):
        answer = served.client.post("/v1/chat/completions", json={"model": "x", "messages": MESSAGES})
        assert answer.status_code == 200, answer.text
        report = {"references": [answer.headers["x-reef-agent-record-id"]], "score": score}
        assert served.client.post("/reef/report", json=report).status_code == 200


def test_a_release_that_users_hate_is_taken_back_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", "word")
    receiver = Receiver()
    served = Served(tmp_path, CONFIG.format(port=receiver.server_port))
    try:
        served.start()
        until(lambda: served.client.get("/reef/status").json()["learner"].get("webhook"))
        before = served.client.get("/reef/scenarios/default").json()["release_id"]
        judge(served, 12, 1.0)
        bad = publish(tmp_path / ".reef")
        until(lambda: served.client.get("/reef/scenarios/default").json()["release_id"] == bad)
        judge(served, 4, 0.0)
        os.kill(served.children()["learner0"], signal.SIGKILL)
        judge(served, 6, 0.0)
        head = until(
            lambda: next(
                (one for one in served.client.get("/reef/scenarios/default/releases").json()["releases"]
                 if one["operation"] == "rollback"), None
            )
        )  # fmt: skip
        assert (head["actor"], head["base"]) == ("watch", before)
        until(lambda: len(receiver.acts) >= 2)
        assert receiver.refused == 1
        assert [(act["kind"], act["ref"]) for act in receiver.acts] == [
            ("alarm", bad),
            ("rollback", head["release_id"]),
        ]
        with served.client.stream("GET", "/reef/events?after=0") as stream:
            told = []
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line[6:])["kind"])
                    if told[-1] == "rollback":
                        break
        assert told == ["create", "release", "alarm", "rollback"]
        logs = "".join(path.read_text() for path in (tmp_path / ".reef/logs").glob("*.log"))
        assert "worse than on release 0" in logs
        assert '"word"' not in logs
    finally:
        served.stop()
        receiver.shutdown()
