"""`reef serve` as a person runs it, over HTTP: the founding snippets, learning, and every process killed in turn."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from reef.cli import state
from reef.cli.main import main
from reef.records.sqlite import SqliteStore

FAKE = """
reef: {port: 0, engine: fake, recipe: sao, batch_size: 4}
gate: {policy: always}
training: {backend: fake}
"""
REAL = """
reef: {port: 0, recipe: sao, batch_size: 2}
gate: {policy: always}
"""
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def until(check, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


class Served:
    """A `reef serve` on a folder; `start` may be called again after it died."""

    def __init__(self, folder, config):
        self.folder = folder
        (folder / "reef.yaml").write_text(config)
        self.process = None

    def start(self, seconds=120.0):
        self.said = (self.folder / "said").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reef", "serve"], cwd=self.folder, stdout=self.said, stderr=self.said,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "REEF_URL": "", "REEF_TOKEN": ""},
        )  # fmt: skip
        address, token = self.folder / ".reef/run/address", self.folder / ".reef/token"
        until(
            lambda: self.process.poll() is not None or b"Ctrl-C stops" in (self.folder / "said").read_bytes(), seconds
        )
        assert self.process.poll() is None, (self.folder / "said").read_text()
        self.url, self.token = address.read_text().strip(), token.read_text().strip()
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
        )  # fmt: skip
        return self

    def children(self):
        """Role to process id, of the supervisor's own children."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
                words = entry.joinpath("cmdline").read_text().split("\0")
            except OSError:
                continue
            if parent == self.process.pid and "reef.cli.process" in words:
                role = words[words.index("reef.cli.process") + 1]
                found[f"{role}{sum(name.startswith(role) for name in found)}"] = int(entry.name)
        return found

    def resolves(self, receipt):
        answer = self.client.get(f"/reef/scenarios/default/records/{receipt}")
        assert answer.status_code == 200, (receipt, answer.text)
        return answer.json()

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        return None if self.process is None else self.process.returncode


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("served"), FAKE)
    yield made.start()
    made.stop()


class Load:
    """A few clients that ask, stream and report until told to stop; they remember every receipt they saw."""

    def __init__(self, served, clients=3, **body):
        self.seen, self.finished, self.refused = [], [], []
        self._served, self._body = served, {"messages": MESSAGES, **body}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, number):
        while not self._stop.is_set():
            try:
                body = {**self._body, "stream": number % 2 == 0}
                with self._served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    if answer.status_code == 200:
                        receipt = answer.headers["x-reef-agent-record-id"]
                        self.seen.append(receipt)
                        answer.read()
                        self.finished.append(receipt)
                        report = {"score": 1.0, "references": [receipt]}
                        self._served.client.post("/reef/report", json=report)
                    else:
                        self.refused.append(answer.status_code)
            except httpx.HTTPError:
                time.sleep(0.02)
            time.sleep(0.01)


def test_the_founding_snippets(served):
    client = httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {served.token}"})
    response = client.post("/v1/chat/completions", json={"model": "any", "messages": MESSAGES})
    receipt = response.headers["x-reef-agent-record-id"]
    assert re.fullmatch("[0-9a-f]{32}", receipt)
    assert response.json()["choices"][0]["message"]["content"]
    for body in ({"feedback": "wrong answer"}, {"score": 1.0}):
        answer = client.post("/reef/report", json={**body, "references": [receipt]})
        assert answer.status_code == 200
        assert answer.json()["agent_record_id"].startswith("rep_")
    assert served.resolves(receipt)["status"] == "complete"


def test_the_openai_client(served):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key=served.token)
    answer = client.chat.completions.create(model="m", messages=MESSAGES)
    pieces = list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert pieces[-1].choices[0].finish_reason == "stop"
    served.resolves(answer.id.removeprefix("chatcmpl-"))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.url + "/v1", api_key="wrong").models.list()


def test_reports_become_a_served_release_and_a_rollback_takes_it_back(served, monkeypatch, capsys):
    before = served.client.get("/reef/status").json()["scenarios"]["default"]
    for _ in range(4):
        receipt = served.client.post("/v1/chat/completions", json={"messages": MESSAGES}).headers[
            "x-reef-agent-record-id"
        ]
        served.client.post("/reef/report", json={"score": 1.0, "references": [receipt]})
    until(lambda: served.client.get("/reef/status").json()["scenarios"]["default"]["seq"] > before["seq"])

    def answered_by():
        answer = served.client.post("/v1/chat/completions", json={"messages": MESSAGES})
        return answer.headers["x-reef-release-id"]

    until(lambda: answered_by() != before["release_id"])  # another worker may follow a little later
    monkeypatch.chdir(served.folder)
    assert main(["rollback", "0"]) == 0
    assert served.client.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200
    for command in (["status"], ["scenarios"], ["releases"], ["records"], ["records", "--why-not-trained"]):
        assert main(command) == 0
        assert "release" in capsys.readouterr().out


def test_each_process_is_killed_under_load_and_no_receipt_is_lost(served):
    before = served.children()
    assert {"gateway0", "gateway1", "learner0"} <= before.keys()
    with Load(served) as load:
        for role in ("gateway0", "learner0", "gateway1"):
            served_so_far = len(load.finished)
            until(lambda: len(load.finished) > served_so_far + 3)  # noqa: B023 (called at once)
            os.kill(before[role], signal.SIGKILL)
            until(lambda: before[role] not in served.children().values() and len(served.children()) >= 3)  # noqa: B023
        until(lambda: served.client.get("/reef/status").json()["learner"]["alive"])
    for receipt in load.seen:
        served.resolves(receipt)
    until(lambda: all(served.resolves(receipt)["status"] != "open" for receipt in load.seen))
    for receipt in load.finished:
        assert served.resolves(receipt)["status"] == "complete"


def test_a_killed_supervisor_takes_its_children_along_and_a_new_one_goes_on(served):
    with Load(served) as load:
        until(lambda: len(load.finished) > 3)
        pids = served.children().values()
        began = time.monotonic()
        served.process.kill()
        until(lambda: not any(running(pid) for pid in pids), 2.0)
        assert time.monotonic() - began < 2.0
        served.process.wait()
    served.start()
    for receipt in load.seen:
        served.resolves(receipt)
    until(lambda: all(served.resolves(receipt)["status"] != "open" for receipt in load.seen))
    assert "shown once" not in (served.folder / "said").read_text()
    for log in (served.folder / ".reef/logs").iterdir():
        assert served.token not in log.read_text()


async def test_a_stop_lets_answers_end(served):
    with Load(served) as load:
        until(lambda: len(load.finished) > 3)
        assert served.stop() == 0
    store = SqliteStore(served.folder / ".reef/records.db", owner="test")
    await store.start()
    assert {record.status for record in await store.get(load.seen)} == {"complete"}
    await store.close()


def niceness(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[16])


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_run_starts_a_server_and_its_driver(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "method" / "examples" / "method"
    folder.mkdir(parents=True)
    (folder / "serve.yaml").write_text(FAKE)
    (folder / "run.py").write_text(
        "import os, sys, httpx\n"
        "client = httpx.Client(base_url=os.environ['REEF_URL'], headers={'x-api-key': os.environ['REEF_TOKEN']})\n"
        f"answer = client.post('/v1/chat/completions', json={{'messages': {MESSAGES!r}}})\n"
        "print('driver', sys.argv[1:], answer.status_code, flush=True)\n"
        "sys.exit(3)\n"
    )
    assert main(["run", "method", "--", "--reef.like", "this"]) == 3
    said = capfd.readouterr().out
    assert "driver ['--reef.like', 'this'] 200" in said
    assert said.rstrip().endswith("stopped")
    assert not state.held(tmp_path / ".reef")


@pytest.mark.model
def test_the_real_engine_and_trainer_are_killed_and_come_back(tmp_path):
    served = Served(tmp_path, REAL)
    try:
        served.start()
        began = time.monotonic()
        assert served.stop() == 0
        served.start()
        print(f"second start, with the stop before it: {time.monotonic() - began:.1f} s")
        assert {"engine0", "learner0", "gateway0", "gateway1"} <= served.children().keys()
        assert "trainer0" not in served.children()  # not before the first batch
        with Load(served, clients=2, max_tokens=8) as load:
            until(lambda: "trainer0" in served.children(), 60)
            until(lambda: niceness(served.children()["trainer0"]) == 19, 60)
            for role in ("trainer0", "engine0"):
                pid = until(lambda: served.children().get(role), 60)  # noqa: B023 (called at once)
                os.kill(pid, signal.SIGKILL)
                until(lambda: served.children().get(role, pid) != pid, 60)  # noqa: B023
            answered = len(load.finished)
            until(lambda: len(load.finished) > answered + 2, 90)
            until(lambda: served.client.get("/reef/status").json()["scenarios"]["default"]["seq"] > 0, 120)
        for receipt in load.seen:
            served.resolves(receipt)
    finally:
        served.stop()
