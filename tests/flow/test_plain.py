"""A plain application on the embedded model: one correction in words, and its next answers are better.

Twenty-four questions that ask for nothing but an answer, each twice, 24 tokens, temperature 1. An answer counts
when it has ended by itself and has three words or more. Nothing is trained: the release differs by one rule, which is
put into the requests. (Seeds are fixed, but what is sampled beside others is not the same to the last bit.)
"""

import asyncio
import math
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served
from reef.cli.preferences import QUESTIONS, SUBJECTS

pytestmark = pytest.mark.model
RULE = "Answer in one short sentence."
CONFIG = "reef: {{port: {port}, state_dir: {state}, recipe: feedback_rules, workers: 1}}\n"
ASKED = [question.format(subject) for subject in SUBJECTS.split()[:6] for question in QUESTIONS for _ in range(2)]


class Application:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def ask(self, place: int, headers: dict[str, str]) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": ASKED[place]}]}
        body |= {"max_tokens": 24, "temperature": 1, "seed": place}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def all(self, release: str | None = None, **headers: str) -> list[bool]:
        """Of each answer, whether it counts."""
        found = []
        for answer in await asyncio.gather(*(self.ask(place, headers) for place in range(len(ASKED)))):
            assert release in (None, answer.headers["x-reef-release-id"])
            (choice,) = answer.json()["choices"]
            found.append(choice["finish_reason"] == "stop" and len(choice["message"]["content"].split()) >= 3)
        return found

    async def released(self) -> dict[str, object]:
        """The release with the rule, once the gate let it in and it is served."""
        for _ in range(1200):
            page = (await self.client.get("/reef/scenarios/default/releases")).json()["releases"]
            served = (await self.client.get("/reef/scenarios/default")).json()["release_id"]
            if page[0]["seq"] == 1 and served == page[0]["release_id"]:
                return page[0]
            await asyncio.sleep(0.2)
        raise AssertionError((await self.client.get("/reef/status")).text)


def chance(wins: int, losses: int) -> float:
    """Of so many wins or more among these pairs when both are alike (McNemar's exact test, one side)."""
    pairs = wins + losses
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs


@pytest.mark.timeout(900)
async def test_the_served_score_rises_through_a_harness_release(tmp_path: Path) -> None:
    with served(tmp_path / "run" / "state", CONFIG) as (url, token):
        head = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=300) as client:
            application = Application(client)
            before = await application.all()
            receipt = (await application.ask(0, {})).headers["x-reef-agent-record-id"]
            told = await client.post("/reef/report", json={"references": [receipt], "feedback": RULE})
            assert told.status_code == 200, told.text
            release = await application.released()
            after = await application.all(str(release["release_id"]))
            off = await application.all(str(release["release_id"]), **{"x-reef-harness": "off"})
            (newest,) = (await client.get("/reef/scenarios/default/records?limit=1")).json()["records"]
    wins = sum(new and not old for old, new in zip(before, after, strict=True))
    losses = sum(old and not new for old, new in zip(before, after, strict=True))
    arms = {"before": before, "after": after, "off": off}
    rates = {name: round(sum(arm) / len(arm), 3) for name, arm in arms.items()}
    print(rates, f"{wins} wins, {losses} losses, chance {chance(wins, losses):.2g}", release["reason"], sep="\n")
    assert rates["before"] <= 0.05
    assert rates["after"] >= rates["before"] + 0.1
    assert chance(wins, losses) < 0.01
    assert rates["off"] <= 0.05  # the same release without its rule
    assert "harness" not in newest["tags"]
