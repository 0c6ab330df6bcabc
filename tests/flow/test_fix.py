"""Corrections are learnt at once: what `/fix` in `reef chat` reports, on a real server with the real model."""

import asyncio
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served

CONFIG = """
reef: {{recipe: sft, port: {port}, state_dir: {state}}}
gate: {{policy: always}}
"""
FIXES = {
    "What is my cat called?": "Your cat is called Coral.",
}


@pytest.mark.model
@pytest.mark.timeout(700)
async def test_each_correction_is_the_next_answer(tmp_path: Path) -> None:
    """With the recipe's own settings, whatever the gate would say of the one step."""
    with served(tmp_path / "run" / "state", CONFIG) as (url, token):
        head = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as client:

            async def ask(asked: str) -> tuple[str, str]:
                body = {"model": "m", "max_tokens": 16, "temperature": 0}
                answer = await client.post(
                    "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": asked}]}
                )
                return answer.headers["x-reef-agent-record-id"], answer.json()["choices"][0]["message"]["content"]

            async def decided(number: int) -> str:
                """The verdict on the step of that number; a machine with other work may take minutes."""
                for _ in range(2000):
                    shown = (await client.get("/reef/status")).json()["scenarios"]["default"].get("learner") or {}
                    part = (shown.get("parts") or {}).get("weights") or {}
                    page = (await client.get("/reef/scenarios/default/releases")).json()["releases"]
                    last = part.get("last") or {}
                    if part.get("trained") == number and last.get("verdict") == "reject":
                        return str(last["reason"])
                    if len(page) == number + 1 and page[0]["current"]:
                        return "served"
                    await asyncio.sleep(0.1)
                raise AssertionError(f"not decided in time: {shown}")

            for number, (asked, right) in enumerate(FIXES.items(), 1):
                receipt, before = await ask(asked)  # no exact tokens: a demonstration needs none
                assert before.strip() != right
                report = {"references": [receipt], "demonstration": right}
                (await client.post("/reef/report", json=report)).raise_for_status()
                assert await decided(number) == "served"
                _, after = await ask(asked)
                assert after.strip() == right
