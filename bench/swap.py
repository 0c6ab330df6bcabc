"""Swaps and rollbacks under load: no failed or cut request, and what each adds to the gap between tokens.

    python bench/swap.py [--swaps 100] [--rollbacks 20] [--full 20] [--write] [--note TEXT]

Serves the embedded model with `reef serve` and streams from several clients all the while. A swap is what the learner
does: publish, let the engine load, flip the board. A rollback is `POST /reef/scenarios/{s}/rollback` to a release of
any age. First with LoRAs, then on a server of its own with full weights (`--full` swaps, a fifth as many rollbacks).
The control is the same load with neither, in turns in the same run. A gap is the time between two content chunks as a
client sees it. `--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from bench.kit.served import served
from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import align

CLIENTS = 4
TOKENS = 24
STRETCH = 10  # swaps or rollbacks in one stretch of load
CONFIG = "reef: {{port: {port}, state_dir: {state}}}\n"


@dataclass
class Seen:
    """What the clients of one arm saw, and how long each of its swaps or rollbacks took."""

    answers: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds
    seconds: list[float] = field(default_factory=list)
    receipts: dict[str, str] = field(default_factory=dict)  # of whole answers, to the release their header named

    def add(self, other: Seen) -> None:
        self.answers += other.answers
        self.failed += other.failed
        self.gaps += other.gaps
        self.seconds += other.seconds
        self.receipts |= other.receipts


@contextlib.contextmanager
def server(state: Path) -> Iterator[tuple[str, str]]:
    """A server of its own: address and token."""
    with served(state, CONFIG) as found:
        yield found


def lora(config: dict[str, Any], seed: int, rank: int = 8) -> NewPart:
    """A random LoRA on two attention projections, small enough to leave the model sane."""
    draw = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in wide.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = draw.normal(0, 0.02, (rank, hidden)).astype(np.float32)
            tensors[f"{where}.lora_B.weight"] = draw.normal(0, 0.002, (out, rank)).astype(np.float32)
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(wide), "bias": "none"}
    return NewPart(
        "lora",
        {
            "weights.json": b"{}",
            "adapter_config.json": json.dumps(adapter).encode(),
            "adapter_model.safetensors": save(tensors),
        },
        {"kind": "lora", "rank": rank, "alpha": rank},
    )


def full(base: Path, seed: int, place: Path) -> NewPart:
    """The base with its last norm a little louder: 269 MB of weights of its own."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] *= 1 + 0.01 * (seed + 1)
    file = place / f"full-{seed}.safetensors"
    save_file(tensors, file)
    return NewPart("full", {"weights.json": b"{}", "model.safetensors": file}, {"kind": "full"})


async def load(url: str, token: str, done: asyncio.Event, seen: Seen) -> None:
    """Stream answers from several clients until `done`."""
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60) as client:

        async def user(number: int) -> None:
            while not done.is_set():
                ask = {"role": "user", "content": f"Tell me a story about the number {number}."}
                body = {"model": "m", "messages": [ask], "stream": True, "max_tokens": TOKENS}
                try:
                    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                        ended, last = False, None
                        async for line in response.aiter_lines():
                            if line == "data: [DONE]":
                                ended = True
                            elif '"content":' in line and '"content":""' not in line:
                                now = time.perf_counter()
                                if last is not None:
                                    seen.gaps.append(now - last)
                                last = now
                        if response.status_code != 200 or not ended:
                            seen.failed.append(f"status {response.status_code}, ended {ended}")
                        else:
                            receipt = response.headers["x-reef-agent-record-id"]
                            seen.receipts[receipt] = response.headers["x-reef-release-id"]
                        seen.answers += 1
                except httpx.HTTPError as error:
                    seen.failed.append(repr(error))

        await asyncio.gather(*(user(number) for number in range(CLIENTS)))


Act = Callable[[], Awaitable[None]]


async def stretch(url: str, token: str, times: int, pause: float, act: Act | None) -> Seen:
    """Load for `times` pauses, with an act before each; None: the control."""
    seen, done = Seen(), asyncio.Event()
    users = asyncio.create_task(load(url, token, done, seen))
    await asyncio.sleep(0.5)
    for _ in range(times):
        if act is not None:
            began = time.perf_counter()
            await act()
            seen.seconds.append(time.perf_counter() - began)
        await asyncio.sleep(pause)
    done.set()
    await users
    return seen


class Operator:
    """Who swaps and rolls back on a running server."""

    def __init__(self, state: Path, parts: Sequence[NewPart], engine: LocalEngine, client: httpx.AsyncClient) -> None:
        self.chain, self.board = GitChain(state / "releases.git"), Board(state / "records.db")
        self._parts, self._engine, self._client = parts, engine, client
        self._made, self._random = 0, random.Random(0)

    async def swap(self) -> None:
        head = await asyncio.to_thread(self.chain.head, "default")
        assert head is not None
        part = self._parts[self._made % len(self._parts)]
        draft = Draft("publish", {"weights": part}, base=head.id, actor="bench", reason=f"swap {self._made}")
        made = await asyncio.to_thread(self.chain.publish, "default", draft, head.id)
        await self._engine.load(made.id)
        await asyncio.to_thread(align, "default", self.chain, self.board)
        self._made += 1

    async def rollback(self) -> None:
        releases = await asyncio.to_thread(self.chain.history, "default", 10_000)
        wanted = self._random.choice(releases[1:])
        done = await self._client.post("/reef/scenarios/default/rollback", json={"release_id": wanted.id})
        done.raise_for_status()


@contextlib.asynccontextmanager
async def operator(state: Path, url: str, token: str, parts: Sequence[NewPart]) -> AsyncIterator[Operator]:
    engine = LocalEngine(state / "run" / "engine.sock", model="m")
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60) as client:
        made = Operator(state, parts, engine, client)
        try:
            yield made
        finally:
            made.board.close()
            await engine.close()


async def measure(
    state: Path, url: str, token: str, *, kind: str = "lora", swaps: int, rollbacks: int, pause: float = 0.25
) -> tuple[Seen, Seen, Seen]:
    """(with swaps, with rollbacks, with neither), in alternating stretches."""
    base = prepare("smollm2-135m").path
    config = json.loads((base / "config.json").read_text())
    parts = [lora(config, seed) if kind == "lora" else full(base, seed, state.parent) for seed in range(4)]
    swapped, rolled, control = Seen(), Seen(), Seen()
    async with operator(state, url, token, parts) as person:
        for start in range(0, max(swaps, rollbacks), STRETCH):
            for total, count, act in ((swapped, swaps, person.swap), (rolled, rollbacks, person.rollback)):
                if (times := min(STRETCH, count - start)) > 0:
                    total.add(await stretch(url, token, times, pause, act))
            control.add(await stretch(url, token, STRETCH, pause, None))
    return swapped, rolled, control


def milliseconds(seconds: list[float]) -> dict[str, float]:
    cut = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return {"p50": round(1000 * cut[49], 1), "p99": round(1000 * cut[98], 1), "max": round(1000 * max(seconds), 1)}


def run(kind: str, swaps: int, rollbacks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        with server(state) as (url, token):
            found = asyncio.run(measure(state, url, token, kind=kind, swaps=swaps, rollbacks=rollbacks))
    swapped, rolled, control = found
    return {
        "swaps": swaps,
        "rollbacks": rollbacks,
        "answers": sum(seen.answers for seen in found),
        "failed": [each for seen in found for each in seen.failed],
        "releases that answered": len({release for seen in found for release in seen.receipts.values()}),
        "swap ms": milliseconds(swapped.seconds),
        "rollback ms": milliseconds(rolled.seconds),
        "gap ms, with swaps": milliseconds(swapped.gaps),
        "gap ms, with rollbacks": milliseconds(rolled.gaps),
        "gap ms, with neither": milliseconds(control.gaps),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--swaps", type=int, default=100)
    arguments.add_argument("--rollbacks", type=int, default=20)
    arguments.add_argument("--full", type=int, default=20, help="swaps with full weights; 0: leave them out")
    arguments.add_argument("--note", default="", help="what else the machine did, kept with the figures")
    arguments.add_argument("--write", action="store_true", help="store the figures as the baseline")
    args = arguments.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    figures: dict[str, Any] = {"note": args.note} if args.note else {}
    figures["lora"] = run("lora", args.swaps, args.rollbacks)
    if args.full:
        figures["full"] = run("full", args.full, max(1, args.full // 5))
    print(json.dumps(figures, indent=2))
    if args.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
