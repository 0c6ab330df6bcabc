"""A record store that was lost: what comes after it is learnt from and told, whatever was read of the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from reef.cli import assemble, numbers
from reef.cli.process import Boot
from reef.config import Settings
from reef.records.journal import Journal
from tests.loop.kit import NAME, World


def prepare(folder: Path) -> None:
    """What `reef serve` does first on a state folder."""
    given = {"reef": {"engine": "fake", "recipe": "record", "default_scenario": NAME, "state_dir": str(folder)}}
    settings = Settings.model_validate(given)
    assemble.prepare(Boot(settings.model_dump(mode="json"), folder / "run", "http://x", None))


@pytest.mark.parametrize("lost", [["records.db"], ["records.db", "learn.db"]])
async def test_a_new_record_store_goes_on_above_what_was_read_of_the_old_one(tmp_path: Path, lost: list[str]) -> None:
    world = await World(tmp_path).open()
    await world.say(8)
    await world.settle()
    world.ledger.advance("", "webhook", 5000)
    head = world.head
    assert head.consumed["weights"].cursor > 4
    await world.close()
    for file in [file for name in lost for file in tmp_path.glob(f"{name}*")]:
        file.unlink()
    prepare(tmp_path)
    again = await World(tmp_path).open()
    again.made = 100
    receipts = await again.say(2, release=head.id)
    assert await again.settle() == 1
    assert set(again.head.consumed["weights"].units) == {f"{receipt}:0" for receipt in receipts}
    assert again.head.consumed["weights"].cursor > head.consumed["weights"].cursor
    act = Journal(again.board).tell(NAME, "trouble", "x", actor="me")
    assert act is not None
    assert (act > 4999) == ("learn.db" not in lost)
    await again.close()


async def test_nothing_moves_where_nothing_is_missing(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    await world.say(4)
    await world.settle()
    before = await world.store.events(NAME, 0, 100)
    numbers.keep_up(tmp_path, world.chain, world.board)
    await world.say(1)
    after = await world.store.events(NAME, 0, 100)
    assert after[: len(before)] == before
    assert after[len(before)].seq == before[-1].seq + 1
    await world.close()
