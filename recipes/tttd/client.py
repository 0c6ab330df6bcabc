"""A search's view of a running server, over HTTP alone.

Knows: the public contract: chat, reports, the status page. Does not know: what is asked, or how it is learnt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from reef.core.errors import InputError, TrainError, WireError
from reef.study import door

if TYPE_CHECKING:
    import httpx

LOOK: Final = 0.25  # seconds between two looks at the learner
STALLED: Final = 900.0  # seconds without any change after which it is given up
BUSY: Final = ("training", "evaluating", "publishing")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    receipt: str
    release_id: str


class Client:
    """Of one scenario, which need not exist yet."""

    def __init__(self, client: httpx.AsyncClient, scenario: str, *, abreast: int = 32) -> None:
        self.scenario = scenario
        self._client = client
        self._abreast = asyncio.Semaphore(abreast)

    async def create(self) -> None:
        """The scenario, if it is not there. InputError when its recipe is another one."""
        await door.send(self._client, "POST", "/reef/scenarios", json={"name": self.scenario}, good=(409,))
        recipe = str((await self._status()).get("recipe"))
        if "tttd" not in recipe and "DiscoverRecipe" not in recipe:
            raise InputError(f"the scenario {self.scenario} learns with {recipe}; serve with recipe: tttd")

    async def ask(self, messages: str, *, seed: int, max_tokens: int, **body: Any) -> Answer:
        """One recorded answer to a single user message."""
        sent = {
            "model": "reef",
            "messages": [{"role": "user", "content": messages}],
            "max_tokens": max_tokens,
            "seed": seed,
            **body,
        }
        headers = {"x-reef-scenario": self.scenario}
        async with self._abreast:
            answer = await door.send(self._client, "POST", "/v1/chat/completions", json=sent, headers=headers)
        text = answer.json()["choices"][0]["message"].get("content") or ""
        head = answer.headers
        return Answer(text, head.get("x-reef-agent-record-id", ""), head.get("x-reef-release-id", ""))

    async def report(self, receipt: str, score: float | None = None, **fields: Any) -> None:
        """Feedback on one answer, under an id that the same report has again."""
        body: dict[str, Any] = {"references": [receipt], "score": score, **fields}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        async with self._abreast:
            await door.send(
                self._client, "POST", "/reef/report", json={**body, "agent_record_id": f"rep_{digest[:32]}"}
            )

    async def learnt(self) -> Mapping[str, Any]:
        """Wait until the learner came to rest twice (a look that goes on now may have begun before the last report) and
        what it made is served; its words of the weights. TrainError when it cannot go on."""
        least: int | None = None
        words, changed = "", time.monotonic()
        while True:
            shown = await self._status()
            part = ((shown.get("learner") or {}).get("parts") or {}).get("weights") or {}
            if part.get("state") == "blocked":
                raise TrainError(f"the learner cannot go on: {part.get('error')}")
            if part:
                rests = int(part.get("rests") or 0)
                least = rests if least is None else min(least, rests)  # fewer: it was restarted
                if rests >= least + 2 and part.get("state") not in (*BUSY, "failed") and not shown.get("behind"):
                    return dict(part)
            said = json.dumps([part.get(name) for name in ("state", "step", "pending", "trained", "progress", "error")])
            words, changed = (words, changed) if said == words else (said, time.monotonic())
            if time.monotonic() - changed > STALLED:
                last = part.get("error") or "it says nothing"
                raise WireError(
                    f"the learner did nothing for {STALLED / 60:.0f} minutes ({last}); see the server's logs"
                )
            await asyncio.sleep(LOOK)

    async def _status(self) -> dict[str, Any]:
        answer = await door.send(self._client, "GET", "/reef/status")
        return dict(answer.json()["scenarios"].get(self.scenario) or {})
