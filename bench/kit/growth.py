"""Memory over many requests, and row parity: every 200 that was counted is a complete row and a receipt that resolves.

Knows: the gateway's process in the tree of `reef serve`, its database file, the route of one record.
Does not know: how a record is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import statistics
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kit.ask import Request, Wire, header, ok
from kit.lines import Line
from kit.server import Trouble

STEPS = 10  # readings of the memory
SAMPLE = 200  # receipts that are asked for


@dataclass(frozen=True, slots=True)
class Growth:
    """Megabytes before and after, kilobytes for each thousand requests, and the three counts that must agree."""

    before: float
    after: float
    slope: float
    answers: int
    rows: int
    receipts: int
    resolved: int
    sampled: int


def grow(line: Line, asked: Request, state: Path, requests: int, scenario: str = "default") -> Growth:
    """Warm up with a quarter, then ask `requests` times over 16 connections, reading the memory ten times."""
    _ask(line, asked, requests // 4)
    rows = _rows(state)
    sizes = [line.server.resident("process gateway") / 1e6]
    receipts: list[str] = []
    for _ in range(STEPS):
        receipts += _ask(line, asked, requests // STEPS)
        sizes.append(line.server.resident("process gateway") / 1e6)
    counts = [number * (requests // STEPS) / 1000 for number in range(STEPS + 1)]
    slope = statistics.linear_regression(counts, sizes).slope * 1000
    sample = random.sample(receipts, min(SAMPLE, len(receipts)))
    resolved = uvloop.run(_resolve(line, scenario, sample))
    stored = _rows(state) - rows
    return Growth(sizes[0], sizes[-1], slope, len(receipts), stored, len(set(receipts)), resolved, len(sample))


def _ask(line: Line, asked: Request, requests: int) -> list[str]:
    return uvloop.run(_receipts(line, asked, requests))


async def _receipts(line: Line, asked: Request, requests: int) -> list[str]:
    numbered, left, found = asked.numbered(), iter(range(requests)), list[str]()

    async def talk() -> None:
        wire = await Wire.open(line.server.port)
        for _ in left:
            head, _ = await wire.ask(next(numbered))
            if not ok(head):
                raise Trouble(f"{line.name}: {head.decode()}")
            found.append(header(head, "x-reef-agent-record-id") or "")
        wire.close()

    await asyncio.gather(*(talk() for _ in range(16)))
    return found


async def _resolve(line: Line, scenario: str, receipts: list[str]) -> int:
    wire, resolved = await Wire.open(line.server.port), 0
    secret = line.headers["authorization"]
    for receipt in receipts:
        path = f"/reef/scenarios/{scenario}/records/{receipt}"
        head, body = await wire.ask(f"GET {path} HTTP/1.1\r\nhost: bench\r\nauthorization: {secret}\r\n\r\n".encode())
        resolved += ok(head) and receipt.encode() in body
    wire.close()
    return resolved


def _rows(state: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{state / 'records.db'}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM records WHERE status = 'complete'").fetchone()[0])
