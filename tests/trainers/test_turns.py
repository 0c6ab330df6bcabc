"""Orders of several scenarios take turns, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from reef.core.wire import Progress, Step, Stepped
from reef.engines import Resolver
from reef.trainers import Ground
from reef.trainers.server import Server


async def test_a_busy_scenario_starves_nobody(
    tiny: Path, tmp_path: Path, order: Callable[..., Step], base: Resolver
) -> None:
    """One always has an order ready, the moment its last is done; three more come while its first is made. Each of them
    waits for one step of the busy one and no more."""
    trainer = Server(Ground(tiny, tmp_path, base))
    done: list[str] = []
    begun, enough = asyncio.Event(), asyncio.Event()

    async def ask(scenario: str, step: int) -> None:
        items = trainer.answer(order(step, scenario=scenario))
        assert isinstance(items, AsyncIterator)
        async for item in items:
            if isinstance(item, Progress):
                begun.set()
            if isinstance(item, Stepped):
                done.append(scenario)

    async def busy() -> None:
        step = 0
        while not enough.is_set():
            step += 1
            await ask("busy", step)

    async def quiet(scenario: str) -> None:
        await begun.wait()
        await ask(scenario, 1)

    others = ["one", "two", "three"]
    always = asyncio.create_task(busy())
    await asyncio.gather(*map(quiet, others))
    enough.set()
    await always
    assert done[:4] == ["busy", *others]
