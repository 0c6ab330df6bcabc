"""Requests per second and latency of one gateway process, with an engine that costs next to nothing.

    .venv/bin/python bench/gateway.py [--seconds 3] [--repeat 3] [--write]

Rows: the fake engine alone (no HTTP); then through HTTP at 1 and 16 connections, answers stored durably and not
(`x-reef-capture: false`), whole and streamed. Figures are medians over repeats with (min, max). The client shares the
machine with the gateway, so compare rows and runs of one machine only. `--write` writes bench/gateway.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import uvloop

from reef.engines import Ask
from reef.engines.fake import FakeEngine
from reef.gateway.auth import Token, Tokens
from reef.gateway.context import Context
from reef.gateway.serve import run
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases import NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import Watch, ensure

TOKEN = "bench"
BODY = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France? Answer in a word."}]}


def serve(state: Path, sock: socket.socket) -> None:
    """The gateway's process."""

    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Context]:
        chain, board = GitChain(state / "releases.git"), Board(state / "records.db")
        chain.open()
        ensure("default", chain, board, NewPart("base", {"weights.json": b"{}"}), None)
        store = SqliteStore(state / "records.db", owner="gateway-0-bench")
        await store.start()
        engine = FakeEngine()
        yield Context(
            store=store,
            board=board,
            watch=Watch(board),
            chain=chain,
            engines={"fake": engine},
            engine_of=lambda name: ("fake", engine),
            tokens=Tokens([(TOKEN, Token("bench"))]),
            ensure_scenario=lambda name, settings: board.get(name),
        )
        await store.close()

    run(made, sock)


async def talk(port: int, request: bytes, end: float, times: list[float]) -> None:
    """One connection, one request after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        begun = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected answer: {head.decode()}")
        if b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        else:
            await reader.readuntil(b"0\r\n\r\n")
        times.append(time.perf_counter() - begun)
    writer.close()


async def measure(port: int, connections: int, seconds: float, *, durable: bool, stream: bool) -> tuple[float, ...]:
    """Requests a second, and p50 and p99 in milliseconds."""
    body = orjson.dumps(BODY | {"stream": stream})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"
        "accept: application/json\r\naccept-encoding: identity\r\nuser-agent: bench/1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        + ("" if durable else "x-reef-capture: false\r\n")
        + "\r\n"
    )
    request = head.encode() + body
    await asyncio.gather(*(talk(port, request, time.perf_counter() + 0.3, []) for _ in range(connections)))
    times: list[float] = []
    begun = time.perf_counter()
    await asyncio.gather(*(talk(port, request, begun + seconds, times) for _ in range(connections)))
    spent = time.perf_counter() - begun
    times.sort()
    return len(times) / spent, times[len(times) // 2] * 1000, times[int(len(times) * 0.99)] * 1000


async def alone(seconds: float) -> float:
    """Answers a second of the fake engine, asked directly."""
    engine, body, count = FakeEngine(), orjson.dumps(BODY), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        async for _ in engine.answer(Ask("0" * 32, "r" * 40, "chat", body, stream=False)):
            pass
        count += 1
    return count / seconds


def bench(seconds: float, repeat: int) -> dict[str, dict[str, list[float]]]:
    rows: dict[str, dict[str, list[float]]] = {}
    direct = sorted(uvloop.run(alone(min(seconds, 1.0))) for _ in range(repeat))
    rows["engine alone"] = {"per_second": _spread(direct)}
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="reef-bench-", dir=".") as folder:
        child = os.fork()
        if child == 0:
            try:
                serve(Path(folder), sock)
            finally:
                os._exit(0)
        sock.close()
        try:
            for stream, durable, connections in itertools.product((False, True), (False, True), (1, 16)):
                runs = [
                    uvloop.run(measure(port, connections, seconds, durable=durable, stream=stream))
                    for _ in range(repeat)
                ]
                kind, kept = "stream" if stream else "whole", "durable" if durable else "not stored"
                name = f"{kind}, {kept}, {connections}"
                per_second, p50, p99 = (_spread(sorted(column)) for column in zip(*runs, strict=True))
                rows[name] = {"per_second": per_second, "p50_ms": p50, "p99_ms": p99}
                print(f"{name:26} {per_second[0]:8.0f}/s  p50 {p50[0]:6.2f} ms  p99 {p99[0]:6.2f} ms", flush=True)
        finally:
            os.kill(child, 15)
            os.waitpid(child, 0)
    return rows


def _spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), values[0], values[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description="One gateway process over a fake engine.")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write bench/gateway.json")
    options = parser.parse_args()
    rows = bench(options.seconds, options.repeat)
    print(f"{'engine alone':26} {rows['engine alone']['per_second'][0]:8.0f}/s")
    if options.write:
        result = {
            "what": "median, min, max",
            "seconds": options.seconds,
            "repeat": options.repeat,
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "python": sys.version.split()[0],
            "rows": rows,
        }
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
