"""100 swaps under load: no failed or cut request, and what a swap adds to the gap between tokens.

    python bench/swap.py [--swaps 100] [--write]

Serves the embedded model with `reef serve`, publishes random LoRAs as the learner does (chain, then board), and streams
from several clients all the while; the control is the same load without a swap, in turns in the same run. A gap is the
time between two content chunks as a client sees it. `--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save

from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import align

CLIENTS = 4
TOKENS = 24


@dataclass
class Seen:
    """What the clients of one arm saw."""

    answers: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds
    releases: set[str] = field(default_factory=set)


@contextlib.contextmanager
def server(state: Path) -> Iterator[tuple[str, str]]:
    """A server of its own: address and token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "reef", "serve", "--reef.port", str(port), "--reef.state_dir", str(state)]
    with (state.parent / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit((state.parent / "serve.log").read_text())
                time.sleep(0.1)
            yield url, (state / "token").read_text().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def lora(config: dict, seed: int, rank: int = 8) -> NewPart:
    """A random LoRA on every attention projection, small enough to leave the model sane."""
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
                        seen.releases.add(response.headers.get("x-reef-release-id", ""))
                        seen.answers += 1
                except httpx.HTTPError as error:
                    seen.failed.append(repr(error))

        await asyncio.gather(*(user(number) for number in range(CLIENTS)))


async def arm(url: str, token: str, swaps: int, pause: float, swap) -> Seen:
    """One stretch under load with so many swaps, `pause` seconds apart (0 swaps: a control as long as 10)."""
    seen, done = Seen(), asyncio.Event()
    users = asyncio.create_task(load(url, token, done, seen))
    await asyncio.sleep(0.5)
    for _ in range(swaps or 10):
        if swaps:
            await asyncio.to_thread(swap)
        await asyncio.sleep(pause)
    done.set()
    await users
    return seen


async def measure(state: Path, url: str, token: str, swaps: int, pause: float = 0.25) -> tuple[Seen, Seen]:
    """(with swaps, without), in alternating stretches of ten swaps."""
    from reef.engines.local.folder import prepare

    config = json.loads((prepare("smollm2-135m").path / "config.json").read_text())
    chain, board = GitChain(state / "releases.git"), Board(state / "records.db")
    loras = [lora(config, seed) for seed in range(4)]
    numbers = iter(range(10**6))

    def swap() -> None:
        head = chain.head("default")
        number = next(numbers)
        draft = Draft("publish", {"weights": loras[number % 4]}, base=head.id, actor="bench", reason=f"swap {number}")
        chain.publish("default", draft, head.id)
        align("default", chain, board)

    with_swaps, control = Seen(), Seen()
    for start in range(0, swaps, 10):
        for total, count in ((with_swaps, min(10, swaps - start)), (control, 0)):
            part = await arm(url, token, count, pause, swap)
            total.answers += part.answers
            total.failed += part.failed
            total.gaps += part.gaps
            total.releases |= part.releases
    board.close()
    return with_swaps, control


def milliseconds(gaps: list[float]) -> dict[str, float]:
    cut = statistics.quantiles(gaps, n=100)
    return {"p50": round(1000 * cut[49], 1), "p99": round(1000 * cut[98], 1), "max": round(1000 * max(gaps), 1)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--swaps", type=int, default=100)
    arguments.add_argument("--write", action="store_true", help="store the figures as the baseline")
    args = arguments.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.mkdir()
        with server(state) as (url, token):
            swapped, control = asyncio.run(measure(state, url, token, args.swaps))
    figures = {
        "swaps": args.swaps,
        "answers": swapped.answers + control.answers,
        "failed": swapped.failed + control.failed,
        "releases that answered": len(swapped.releases | control.releases),
        "gap ms, with swaps": milliseconds(swapped.gaps),
        "gap ms, without": milliseconds(control.gaps),
    }
    print(json.dumps(figures, indent=2))
    if args.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
