"""Open loop: requests leave at fixed moments, whatever the server does; latency counts from the planned moment.

Knows: connections kept open and reused.
Does not know: what is asked. A request that finds every connection busy opens another.
"""

from __future__ import annotations

import asyncio
import gc
import time

import uvloop

from kit.alarm import Alarm
from kit.ask import Request, Wire, ok
from kit.lines import Line
from kit.server import Trouble

READY = 8  # connections opened beforehand


def pace(line: Line, asked: Request, rate: int, seconds: float) -> list[float]:
    """The latencies in milliseconds, ascending. Trouble when any answer was not a 200."""
    return uvloop.run(_pace(line, asked, rate, seconds))


async def _pace(line: Line, asked: Request, rate: int, seconds: float) -> list[float]:
    free = [await Wire.open(line.server.port) for _ in range(READY)]
    numbered, times, alarm = asked.numbered(), list[float](), Alarm()

    async def one(planned: int) -> None:
        wire = free.pop() if free else await Wire.open(line.server.port)
        head, _ = await wire.ask(next(numbered))
        times.append((time.monotonic_ns() - planned) / 1e6)
        if not ok(head):
            raise Trouble(f"{line.name}: {head.decode()}")
        free.append(wire)

    for _ in range(READY):  # every connection, and the gateway's own to the upstream, is warm
        await one(time.monotonic_ns())
        free.insert(0, free.pop())
    times.clear()
    gc.disable()
    try:
        begun = time.monotonic_ns() + 10_000_000
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * seconds)):
                planned = begun + number * 10**9 // rate
                await alarm.until(planned)
                group.create_task(one(planned))
    finally:
        gc.enable()
        alarm.close()
    for wire in free:
        wire.close()
    return sorted(times)
