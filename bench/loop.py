"""From a report to the first answer of the release that learnt from it, and what learning costs those who are served.

    python bench/loop.py [--updates 6] [--seconds 240] [--write]

Serves the embedded model with `reef serve`. (a) For batches of 8 and of 32 answers to addition prompts: the seconds
from sending the last report to the end of the first answer of the new release, and how the learner spent them. (b) The
times to the first token and to the end of a short streamed answer while the learner is idle, trains, and evaluates, in
turns in one run. Nothing begins after `--seconds`. `--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.swap import server
from reef.cli.preferences import PREFERENCES, Preference, Prompt

SIZES = (8, 32)
STAGES = ("waiting", "training", "gate", "activation")
PATIENCE = 180.0  # seconds one update may take


@dataclass
class Updates:
    """What became of the updates of one batch size. Seconds; one entry for each accepted update."""

    total: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*STAGES, "rest")})
    rejected: int = 0


class Pupil:
    """One scenario and a scripted user of it."""

    def __init__(self, client: httpx.AsyncClient, name: str, preference: Preference) -> None:
        self.client = client
        self.name = name
        self.preference = preference
        self._prompts = itertools.cycle(preference.train)
        self._seeds = itertools.count(1)

    async def create(self, **settings: Any) -> None:
        (await self.client.post("/reef/scenarios", json={"name": self.name, **settings})).raise_for_status()

    async def chat(self, prompt: Prompt) -> tuple[str, str, float]:
        """(receipt, release, score) of one answer."""
        body = {
            "model": "reef",
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": self.preference.max_tokens,
            "seed": next(self._seeds),
        }
        answer = await self.client.post("/v1/chat/completions", json=body, headers={"x-reef-scenario": self.name})
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        score = self.preference.check(prompt, choice["message"]["content"] or "", choice["finish_reason"])
        return answer.headers["x-reef-agent-record-id"], answer.headers["x-reef-release-id"], score

    async def teach(self, size: int) -> float:
        """Ask `size` questions at once and report on each answer; returns when the last report was sent."""
        said = await asyncio.gather(*(self.chat(next(self._prompts)) for _ in range(size)))
        sent = 0.0
        for receipt, _, score in said:
            sent = time.perf_counter()
            report = {"score": score, "references": [receipt]}
            (await self.client.post("/reef/report", json=report)).raise_for_status()
        return sent

    async def look(self) -> dict[str, Any]:
        """What is served and what the learner of the weights says; `part` is empty while it does not answer."""
        shown: dict[str, Any] = (await self.client.get("/reef/status")).json()["scenarios"][self.name]
        parts = (shown.get("learner") or {}).get("parts") or {}
        return shown | {"part": parts.get("weights") or {}}

    async def settled(self, step: int) -> dict[str, Any]:
        """Wait until the step was judged: published and activated, or turned down. Returns the learner's words."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            shown = await self.look()
            part, last = shown["part"], shown["part"].get("last") or {}
            if part.get("trained", 0) >= step and part.get("state") == "waiting":
                if not last or last["step"] < part.get("step", 0):  # without a gradient a step is no candidate
                    return shown
                if last["verdict"] != "accept" or last["timings"]["activation"] is not None:
                    return shown
            await asyncio.sleep(0.05)
        raise SystemExit(f"no update within {PATIENCE:.0f} s; the learner says {await self.look()}")


async def update(pupil: Pupil, size: int, number: int, seen: Updates | None = None) -> None:
    """One update of the pupil, its `number`-th from 1, measured into `seen`."""
    before = (await pupil.look())["release_id"]
    sent = await pupil.teach(size)
    judged = asyncio.create_task(pupil.settled(number * size))
    try:
        while not judged.done():
            served = (await pupil.client.get(f"/reef/scenarios/{pupil.name}")).json()["release_id"]
            if served != before and (await pupil.chat(next(pupil._prompts)))[1] != before:
                break
            await asyncio.sleep(0.02)
        spent = time.perf_counter() - sent
        last = (await judged)["part"].get("last") or {"verdict": "none"}
    finally:
        judged.cancel()
    if seen is None:
        return
    if last["verdict"] != "accept":
        seen.rejected += 1
        return
    seen.total.append(spent)
    for name in STAGES:
        seen.stages[name].append(last["timings"][name] or 0.0)
    seen.stages["rest"].append(spent - sum(last["timings"][name] or 0.0 for name in STAGES))


async def measure_updates(
    client: httpx.AsyncClient, updates: int, until: float, sizes: tuple[int, ...] = SIZES
) -> dict[int, Updates]:
    """So many updates of each batch size, in turns. One more of each comes first, unmeasured: it loads torch."""
    pupils = {size: Pupil(client, f"batch-{size}", PREFERENCES["addition"]) for size in sizes}
    seen = {size: Updates() for size in sizes}
    for size, pupil in pupils.items():
        await pupil.create(batch_size=size)
        await update(pupil, size, 1)
    for number in range(2, updates + 2):
        for size, pupil in pupils.items():
            if time.monotonic() < until:
                await update(pupil, size, number, seen[size])
    return seen


async def answer_times(client: httpx.AsyncClient, seed: int) -> tuple[float, float]:
    """Seconds from sending a short streamed request to its first content and to its end. It is not recorded."""
    body = {
        "model": "reef",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
        "max_tokens": 8,
        "seed": seed,
    }
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-reef-capture": "false"}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if first is None and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - began
    ended = time.perf_counter() - began
    return ended if first is None else first, ended


Times = dict[str, list[tuple[float, float]]]


async def measure_answers(client: httpx.AsyncClient, rounds: int, until: float) -> Times:
    """`answer_times` while the learner is idle, trains and evaluates: one probe after another, in rounds.

    Each round teaches a batch of 32 and probes until it was judged, then as many probes with the learner idle. A probe
    counts where the learner was in one and the same state before and after it.
    """
    pupil = Pupil(client, "probed", PREFERENCES["addition"])
    await pupil.create(batch_size=32)
    await update(pupil, 32, 1)
    state, seeds = "waiting", itertools.count()

    async def follow() -> None:
        nonlocal state
        while True:
            with contextlib.suppress(httpx.HTTPError):
                state = (await pupil.look())["part"].get("state", "")
            await asyncio.sleep(0.03)

    times: Times = {"idle": [], "training": [], "evaluating": []}
    names = {"waiting": "idle", "training": "training", "evaluating": "evaluating"}

    async def probe() -> str:
        before = state
        spent = await answer_times(client, next(seeds))
        if before == state and state in names:
            times[names[state]].append(spent)
        return state

    follower = asyncio.create_task(follow())
    try:
        for number in range(2, rounds + 2):
            if time.monotonic() > until:
                break
            await pupil.teach(32)
            judged, probes = asyncio.create_task(pupil.settled(32 * number)), 0
            while not judged.done():
                probes += await probe() != "waiting"
            await judged
            for _ in range(max(10, probes)):
                await probe()
    finally:
        follower.cancel()
    return times


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Median and range, in seconds; empty without a value."""
    if not values:
        return {}
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def milliseconds(times: list[float]) -> dict[str, float]:
    if len(times) < 2:
        return {"count": len(times)}
    cut = statistics.quantiles(times, n=100, method="inclusive")
    return {"count": len(times), "p50": round(1000 * cut[49], 1), "p99": round(1000 * cut[98], 1)}


async def measure(url: str, token: str, updates: int, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        found = await measure_updates(client, updates, began + 0.65 * seconds)
        times = await measure_answers(client, updates, began + seconds)
    figures: dict[str, Any] = {}
    for size, seen in found.items():
        figures[f"report to first answer s, batch {size}"] = {
            "accepted": len(seen.total),
            "rejected": seen.rejected,
            "total": spread(seen.total),
            **{name: spread(values) for name, values in seen.stages.items()},
        }
    for place, name in enumerate(("first token ms", "last of 8 tokens ms")):
        figures[name] = {state: milliseconds([pair[place] for pair in pairs]) for state, pairs in times.items()}
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--updates", type=int, default=6, help="of each batch size, and rounds of probes")
    arguments.add_argument("--seconds", type=float, default=240.0, help="nothing new begins after so long")
    arguments.add_argument("--write", action="store_true", help="store the figures as the baseline")
    args = arguments.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    load = round(os.getloadavg()[0], 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.mkdir()
        with server(state) as (url, token):
            ready = time.monotonic()
            figures = asyncio.run(measure(url, token, args.updates, args.seconds))
    figures = {
        "updates": args.updates,
        "machine's load at the start": load,
        "start s": round(ready - began, 1),
        "all s": round(time.monotonic() - began, 1),
        **figures,
    }
    print(json.dumps(figures, indent=2))
    if args.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
