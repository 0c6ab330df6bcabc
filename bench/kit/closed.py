"""Closed loop: each connection asks again as soon as it is answered.

Knows: `wrk` with a script of ours (a C client, so that the machine's threads are left to the servers), and a client in
Python for machines without it. Does not know: what is asked.
wrk's p99 counts the requests that a slow answer kept from being asked, for every line alike.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kit.ask import WIDTH, Request, Wire, ok
from kit.lines import Line
from kit.server import Trouble, tool

_SCRIPT = """
local file = io.open("%(folder)s/before", "rb"); local before = file:read("*a"); file:close()
file = io.open("%(folder)s/after", "rb"); local after = file:read("*a"); file:close()
local number = %(start)d
function request()
  number = number + 1
  return before .. string.format("%%0%(width)d.0f", number) .. after
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\nBENCH {"answers": %%d, "seconds": %%f, "p50": %%f, "p99": %%f,' ..
    ' "refused": %%d, "broken": %%d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.status, e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: requests a second, milliseconds, and the microseconds of CPU that the line's servers used for each."""

    rate: float
    p50: float
    p99: float
    cpu: float


def load(line: Line, asked: Request, connections: int, seconds: int, client: str, folder: Path) -> Run:
    """One run over one line. Trouble when any answer was not a 200."""
    for patience in (1, 4, 16):  # a line with no answer at all in the time is given more
        before = line.server.cpu()
        if client == "wrk":
            answers, spent, p50, p99 = _wrk(line, asked, connections, seconds * patience, folder)
        else:
            answers, spent, p50, p99 = uvloop.run(_python(line, asked, connections, seconds * patience))
        if answers:
            return Run(answers / spent, p50, p99, (line.server.cpu() - before) / answers * 1e6)
    raise Trouble(f"{line.name}: no answer in {seconds * patience} s")


def warm(line: Line, asked: Request) -> None:
    """A few requests over each of 16 connections."""
    uvloop.run(_warm(line, asked))


async def _warm(line: Line, asked: Request) -> None:
    numbered = asked.numbered()

    async def talk() -> None:
        wire = await Wire.open(line.server.port)
        for _ in range(8):
            await wire.ask(next(numbered))
        wire.close()

    await asyncio.gather(*(talk() for _ in range(16)))


def _wrk(line: Line, asked: Request, connections: int, seconds: int, folder: Path) -> tuple[int, float, float, float]:
    (folder / "before").write_bytes(asked.before)
    (folder / "after").write_bytes(asked.after)
    script = folder / "ask.lua"
    start = int.from_bytes(os.urandom(5), "big")
    script.write_text(_SCRIPT % {"folder": folder, "start": start, "width": WIDTH})
    command = [tool("wrk"), "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
    out = subprocess.run(
        [*command, f"http://127.0.0.1:{line.server.port}/"], capture_output=True, text=True, check=False
    )
    _, found, last = out.stdout.rpartition("BENCH ")
    if not found:
        raise Trouble(f"{line.name}: wrk ended without figures: {out.stdout[-500:]}{out.stderr[-500:]}")
    figures = json.loads(last)
    if figures["refused"] or figures["broken"]:
        head, body = uvloop.run(_once(line, asked))
        said = b"\r\n".join((head, body)).decode(errors="replace")[:2000]
        raise Trouble(f"{line.name}: not every answer was a 200: {last.strip()}\nAsked once more it says:\n{said}")
    return figures["answers"], figures["seconds"], figures["p50"], figures["p99"]


async def _once(line: Line, asked: Request) -> tuple[bytes, bytes]:
    wire = await Wire.open(line.server.port)
    try:
        return await wire.ask(next(asked.numbered()))
    finally:
        wire.close()


async def _python(line: Line, asked: Request, connections: int, seconds: float) -> tuple[int, float, float, float]:
    wires = [await Wire.open(line.server.port) for _ in range(connections)]
    numbered, times = asked.numbered(), list[float]()
    begun = time.perf_counter()
    end = begun + seconds

    async def talk(wire: Wire) -> None:
        while (sent := time.perf_counter()) < end:
            head, _ = await wire.ask(next(numbered))
            if not ok(head):
                raise Trouble(f"{line.name}: {head.decode()}")
            times.append(time.perf_counter() - sent)
        wire.close()

    gc.disable()
    try:
        await asyncio.gather(*(talk(wire) for wire in wires))
    finally:
        gc.enable()
    times.sort()
    return len(times), time.perf_counter() - begun, 1e3 * times[len(times) // 2], 1e3 * times[int(len(times) * 0.99)]
