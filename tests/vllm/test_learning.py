"""`reef serve` in front of a real vLLM learns: vLLM answers, the trainer here steps, releases are adapters."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.kit.served import served
from reef.releases.chain import GitChain
from tests.vllm.kit import NAME, Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CONFIG = """
reef:
  {{engine: gpu, model: smollm2-135m, recipe: sao, batch_size: 16, learning_rate: 2.0e-3, port: {port},
    state_dir: {state}}}
engines:
  gpu: {{kind: vllm, url: "%s", model: %s}}
gate: {{policy: always, evaluate_every: 1}}
"""
STEPS = 4
ASKED = 16  # answers for each step
PROMPT = "Say one word, any word you like."


def good(text: str) -> float:
    """Half of what the base says first begins like this."""
    return 1.0 if text.strip()[:1].upper() in "ABCDEFGHIJKLM" and text.strip() else 0.0


class Seat:
    def __init__(self, url: str, token: str) -> None:
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=300)

    def ask(self, number: int) -> tuple[str, str, float]:
        """A receipt, the release that answered, and what its answer is worth."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "seed": number}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        return answer.headers["x-reef-agent-record-id"], answer.headers["x-reef-release-id"], good(text)

    def ask_many(self, first: int, count: int) -> list[tuple[str, str, float]]:
        with ThreadPoolExecutor(8) as pool:
            return [*pool.map(self.ask, range(first, first + count))]

    def report(self, receipt: str, score: float) -> None:
        said = self.client.post("/reef/report", json={"score": score, "references": [receipt]})
        assert said.status_code in (200, 201, 202), said.text


def test_sao_learns_through_vllm(vllm: Vllm, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with served(state, CONFIG % (vllm.url, NAME)) as (url, token):
        seat, chain = Seat(url, token), GitChain(state / "releases.git")
        scores = []
        for step in range(STEPS):
            answers = seat.ask_many(1000 * step, ASKED)
            scores.append(sum(score for _, _, score in answers) / len(answers))
            for receipt, _, score in answers:
                seat.report(receipt, score)
            release = released(seat, chain, step + 1)
        last = seat.ask_many(100_000, 2 * ASKED)
        assert {served_by for _, served_by, _ in last} == {release}
        record = seat.client.get(f"/reef/scenarios/default/records/{last[0][0]}").json()
        assert not record.get("untrainable"), record
    scores.append(sum(score for _, _, score in last) / len(last))
    print("scores:", scores)
    assert scores[-1] > max(0.75, scores[0] + 0.15), scores
    assert any(card["id"] == release for card in vllm.get("/v1/models")["data"])


def released(seat: Seat, chain: GitChain, number: int) -> str:
    """The release of that number, once it is served."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        head = chain.head("default")
        served_now = seat.client.get("/reef/scenarios/default").json()["release_id"]
        if head is not None and head.seq >= number and served_now == head.id:
            time.sleep(0.3)  # both gateways follow
            return head.id
        time.sleep(0.2)
    raise AssertionError(f"release {number} did not come; {seat.client.get('/reef/scenarios/default').text}")
