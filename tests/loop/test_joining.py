"""The learner joins sessions by itself, also where nothing learns, and lets go of what the store no longer has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reef.core.errors import StoreError
from reef.experience.sessions import Sessions
from reef.records import keep
from tests.loop.kit import NAME, World, record
from tests.loop.test_learner import House, until


async def test_it_joins_and_tidies(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    world.recipes = {}
    sessions = Sessions(tmp_path / "sessions.db")
    world.tools = replace(world.tools, sessions=sessions)
    made = [record(number, world.head.id) for number in range(2)]
    await world.store.append_all(made)
    async with House(world, tmp_path / "one"):
        await until(lambda: sessions.place(made[1].id) is not None)
    keep.forget(tmp_path / "records.db", [made[0].id])
    async with House(world, tmp_path / "two"):
        await until(lambda: sessions.place(made[0].id) is None)
    assert sessions.place(made[1].id) is not None
    sessions.close()
    await world.close()


async def test_trouble_in_joining_is_in_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await World(tmp_path).open()
    world.board.create_scenario(NAME, {})
    world.recipes = {}
    sessions = Sessions(tmp_path / "sessions.db")
    world.tools = replace(world.tools, sessions=sessions)

    async def broken(*_: object) -> None:
        raise StoreError("sessions.db cannot be read")

    monkeypatch.setattr(sessions, "read", broken)
    async with House(world, tmp_path / "one") as house:
        await until(lambda: house.learner.look(NAME).get(NAME, {}).get("error"))
        assert house.learner.look()[NAME]["error"] == "sessions: sessions.db cannot be read"
    sessions.close()
    await world.close()
