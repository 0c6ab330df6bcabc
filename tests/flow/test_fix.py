"""A correction is learnt at once: what `/fix` in `reef chat` reports, on a real server with the real model."""

import asyncio
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served

CONFIG = """
reef: {{recipe: sft, batch_size: 1, epochs: 8, learning_rate: 1.0e-3, port: {port}, state_dir: {state}}}
"""
ASKED = "What is my cat called?"


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_one_correction_is_the_next_answer(tmp_path: Path) -> None:
    with served(tmp_path / "run" / "state", CONFIG) as (url, token):
        head = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as client:

            async def ask(temperature: float) -> tuple[str, str]:
                body = {"model": "m", "max_tokens": 16, "temperature": temperature, "seed": 1}
                answer = await client.post(
                    "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": ASKED}]}
                )
                return answer.headers["x-reef-agent-record-id"], answer.json()["choices"][0]["message"]["content"]

            receipt, before = await ask(0)  # no exact tokens: a demonstration needs none
            assert "Coral" not in before
            report = {"references": [receipt], "demonstration": "Your cat is called Coral."}
            (await client.post("/reef/report", json=report)).raise_for_status()
            for _ in range(600):
                page = (await client.get("/reef/scenarios/default/releases")).json()["releases"]
                if page[0]["operation"] == "publish" and page[0]["current"]:
                    break
                await asyncio.sleep(0.1)
            _, after = await ask(0)
    assert after.strip() == "Your cat is called Coral."
