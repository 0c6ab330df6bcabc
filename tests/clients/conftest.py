"""A real `reef serve` between real clients and a scripted provider, and what every flow must leave behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.clients.upstream import KEY, Upstream

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients"
TOKEN = "the-client-s-token-for-reef"
SCENARIOS = ("native", "chatty")
"""`native`: a provider that speaks all dialects. `chatty`: one that speaks chat only, so that Reef translates."""

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
DERIVED = ("chatcmpl-", "resp_", "msg_")
"""What stands before the receipt in the ids of answers that Reef makes."""

CONFIG = """
reef: {{port: 0, engine: native, token: "{token}", default_scenario: native}}
engines:
  native: {{kind: upstream, url: "{native}", key_env: UPSTREAM_KEY, speaks: [chat, responses, messages, count_tokens]}}
  chatty: {{kind: upstream, url: "{chatty}", key_env: UPSTREAM_KEY, speaks: [chat]}}
scenarios:
  native: {{engine: native}}
  chatty: {{engine: chatty}}
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("clients")


class Served:
    """A `reef serve` on a folder of its own, and its doors for reading."""

    def __init__(self, folder, config):
        (folder / "reef.yaml").write_text(config)
        self.folder, self.said = folder, folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "reef", "serve"], cwd=folder, stdout=said, stderr=said,
                env={**os.environ, "PYTHONPATH": str(ROOT), "REEF_URL": "", "REEF_TOKEN": "", "UPSTREAM_KEY": KEY},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while b"Ctrl-C stops" not in self.said.read_bytes():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)
        self.url = (folder / ".reef/run/address").read_text().strip()
        self.client = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)

    def stop(self):
        self.client.close()
        self.process.terminate()
        assert self.process.wait(60) == 0

    def record(self, scenario, receipt):
        return json.loads(self.raw(scenario, receipt))

    def raw(self, scenario, receipt):
        answer = self.client.get(f"/reef/scenarios/{scenario}/records/{receipt}")
        assert answer.status_code == 200, (receipt, answer.text)
        return answer.content

    def newest(self, scenario):
        """The records of a scenario, newest first."""
        return self.client.get(f"/reef/scenarios/{scenario}/records", params={"limit": 500}).json()["records"]

    def report(self, receipt, **body):
        answer = self.client.post("/reef/report", json={**body, "references": [receipt]})
        assert answer.status_code == 200, answer.text
        return answer.json()["agent_record_id"]

    def logs(self):
        return "".join(path.read_text() for path in sorted((self.folder / ".reef/logs").iterdir()))


class Flow:
    """What clients did in one scenario between `begin` and `end`: what the provider saw, and what Reef recorded."""

    def __init__(self, served, upstream, scenario):
        self.served, self.upstream, self.scenario = served, upstream, scenario
        self._seen = len(upstream.seen)
        self._known = {item["agent_record_id"] for item in served.newest(scenario)}

    def end(self):
        new = [item["agent_record_id"] for item in self.served.newest(self.scenario)]
        self.seen = self.upstream.seen[self._seen :]
        self.raw = {id_: self.served.raw(self.scenario, id_) for id_ in reversed(new) if id_ not in self._known}
        self.records = [json.loads(data) for data in self.raw.values()]
        return self

    def check(self):
        """Every request that reached the provider, but for counted tokens, has one whole record, and no others are."""
        asked = {seen.id: seen for seen in self.seen if not seen.path.endswith("count_tokens")}
        assert asked
        assert sorted(record["upstream_id"] for record in self.records) == sorted(asked)
        for record in self.records:
            assert (record["status"], record["error"]) == ("complete", None)
            assert record["choices"][0]["finish_reason"] in ("stop", "tool_calls")
            assert record["client"]
            assert record["model_answered"] == "up-1"
            seen = asked[record["upstream_id"]]
            if seen.path == PATHS[record["dialect"]]:
                assert record["request"] == seen.json
                assert seen.body in self.raw[record["agent_record_id"]]
        for seen in self.seen:
            assert TOKEN not in json.dumps(seen.headers) + seen.body.decode()
        return self

    def find(self, found):
        """The record of a receipt, or of the id that its answer had at the client."""
        for record in self.records:
            receipt = record["agent_record_id"]
            if found in (receipt, record.get("answer_id"), *(f"{kind}{receipt}" for kind in DERIVED)):
                return record
        raise AssertionError(f"no record for {found!r} among {[r['agent_record_id'] for r in self.records]}")

    def scored(self, found):
        """Report a score by what the client found, and see it at the record."""
        report = self.served.report(found, score=1.0)
        record = self.served.record(self.scenario, self.find(found)["agent_record_id"])
        assert report in [item["agent_record_id"] for item in record["reports"]]


@pytest.fixture(scope="session", autouse=True)
def installed():
    ready = (CLIENTS / ".ready").exists()
    assert ready, (
        "the clients are not installed: run `make clients`, or leave these tests out with -m 'not clients and not soak'"
    )


@pytest.fixture(scope="session")
def upstreams():
    with Upstream({"chat", "responses", "messages"}) as native, Upstream({"chat"}) as chatty:
        yield {"native": native, "chatty": chatty}


@pytest.fixture(scope="session")
def served(upstreams, tmp_path_factory):
    urls = {name: upstream.url for name, upstream in upstreams.items()}
    made = Served(tmp_path_factory.mktemp("reef"), CONFIG.format(token=TOKEN, **urls))
    yield made
    made.stop()


@pytest.fixture
def begin(served, upstreams):
    """`begin(scenario)` starts watching a flow."""
    return lambda scenario: Flow(served, upstreams[scenario], scenario)
