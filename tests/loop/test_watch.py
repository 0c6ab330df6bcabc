"""The watch over real records, chain and board: alarms, going back, and what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.core.nouns import Act, Release
from reef.loop import failures
from reef.loop.binding import Watching
from reef.loop.watch import WINDOW, Vigil
from reef.records import RecordStore, keep
from reef.scenario.serving import promote, rollback
from tests.loop.kit import NAME, World, report


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()


def vigil(world: World, **rule: Any) -> Vigil:
    return Vigil(world.tools, NAME, Watching(**rule))


async def looked(watch: Vigil) -> str:
    """Look until nothing is left to do; returns the state."""
    while await watch.look():
        pass
    return str(watch.shown()["state"])


def acts(world: World, *kinds: str) -> list[Act]:
    return [act for act in world.journal.after(0) if act.kind in kinds]


def serving(world: World) -> str:
    now = world.board.get(NAME)
    assert now is not None
    return now.release_id


async def bad(world: World, count: int = 12) -> tuple[Release, Release]:
    """A release that users liked, and one on it that they do not."""
    before = world.head
    await world.say(20, score=1.0)
    release = world.note()
    await world.say(count, score=0.0)
    return before, release


async def test_a_worse_release_is_taken_back_and_people_are_told(world: World) -> None:
    before, release = await bad(world)
    watch = vigil(world)
    await looked(watch)
    head = world.head
    assert (head.operation, head.base, head.actor) == ("rollback", before.id, "watch")
    assert head.parts == before.parts
    assert serving(world) == head.id
    alarm, back = acts(world, "alarm", "rollback")
    assert (alarm.ref, alarm.actor, back.ref, back.actor) == (release.id, "watch", head.id, "watch")
    assert alarm.reason == back.reason == head.reason
    assert "release 1 are worse than on release 0: mean score 0 over 7 reports against 1 over 20" in alarm.reason
    assert alarm.detail["evidence"] >= alarm.detail["alarm_at"] == pytest.approx(20)
    assert watch.shown()["state"] == "idle"  # what a rollback brought is not watched
    await world.say(40, score=-1.0)
    assert await looked(watch) == "idle"
    assert world.head == head


async def test_the_same_is_decided_again_from_the_log_and_told_once(world: World) -> None:
    await bad(world, 4)
    first = vigil(world)
    assert await looked(first) == "watching"
    half = first.shown()
    again = vigil(world)
    assert await looked(again) == "watching"
    assert again.shown() == half
    await world.say(8, score=0.0)
    await looked(again)
    await looked(first)
    await looked(vigil(world))
    assert [act.kind for act in acts(world, "alarm", "rollback")] == ["alarm", "rollback"]
    assert [one.operation for one in world.chain.history(NAME)] == ["rollback", "publish", "create"]


async def test_a_release_that_is_as_good_stays(world: World) -> None:
    await world.say(30, score=1.0)
    release = world.note()
    watch = vigil(world, reports=10)
    await world.say(11, score=1.0)
    assert await looked(watch) == "passed"
    await world.say(40, score=0.0)
    assert await looked(watch) == "passed"  # it is over; what comes later is a fall: see test_fall
    assert world.head == release
    assert acts(world, "rollback") == []


async def test_what_a_person_promoted_is_watched_too(world: World) -> None:
    base = world.head
    await world.say(20, score=1.0)
    world.options = {"mode": "review"}
    await world.settle()
    (held,) = world.ledger.looks(NAME)
    assert held.candidate is not None
    release = promote(NAME, held.candidate, world.chain, world.board, actor="ada", reason="looks fine")
    await world.say(12, score=0.0, release=release.id)
    await looked(vigil(world))
    assert (world.head.operation, world.head.base) == ("rollback", base.id)


async def test_learning_starts_again_from_where_it_went_back_to(world: World) -> None:
    base = world.head
    await world.say(20, score=1.0)
    await world.settle()
    middle = world.head
    await world.say(20, score=1.0)
    last = world.note("Be rude.")
    await world.say(12, score=0.0)
    await looked(vigil(world))
    back = world.head
    assert (back.operation, back.base, back.step) == ("rollback", middle.id, middle.step)
    for _ in range(3):
        await world.settle()
        await world.say(2, score=1.0)
    await world.settle()
    assert world.head.operation == "publish"
    assert world.head.step > middle.step
    first = next(one for one in world.chain.history(NAME)[::-1] if one.seq == back.seq + 1)
    assert (first.parent, first.line) == (back.id, f"{back.id[:12]}-1")
    assert world.works["weights"].error is None
    assert base.id != last.id


async def test_tell_only_tells_and_off_does_not_even_look(world: World) -> None:
    _, release = await bad(world)
    assert await looked(vigil(world, action="off")) == "idle"
    assert acts(world, "alarm") == []
    told = vigil(world, action="tell")
    assert await looked(told) == "alarm"
    assert await looked(vigil(world, action="tell")) == "alarm"
    assert len(acts(world, "alarm")) == 1
    assert world.head == release
    assert "worse" in told.shown()["reason"]


async def test_a_pinned_scenario_stays_and_people_are_told(world: World) -> None:
    _, release = await bad(world)
    world.journal.pin(NAME, release.id, actor="ada", reason="a demonstration")
    await looked(vigil(world))
    (alarm,) = acts(world, "alarm")
    assert "nothing is done, because ada pinned" in alarm.reason
    assert world.head == release


async def test_somebody_who_is_quicker_wins(world: World) -> None:
    """The head moved, the board did not yet: the watch does not undo what it does not know."""
    _, release = await bad(world)
    watch = vigil(world)
    serve = world.board.flip
    other = world.note("Somebody else's.")
    serve(NAME, release.id)
    await looked(watch)
    assert world.head == other
    assert [act.ref for act in acts(world, "alarm")] == [release.id]


async def test_without_reports_on_the_release_before_it_is_blind_and_says_so(world: World) -> None:
    await world.say(5, score=1.0)
    world.note()
    await world.say(30, score=0.0)
    watch = vigil(world)
    assert await looked(watch) == "blind"
    assert "cannot be watched: only 5 scored reports on release 0" in watch.shown()["reason"]
    assert acts(world, "alarm") == []


async def test_reports_on_the_old_release_that_come_late_are_used(world: World) -> None:
    before = world.head
    world.note()
    await world.say(20, score=1.0, release=before.id)
    await world.say(12, score=0.0)
    await looked(vigil(world))
    assert (world.head.operation, world.head.base) == ("rollback", before.id)


async def test_after_a_rollback_reports_on_what_came_back_count_for_it(world: World) -> None:
    before, _ = await bad(world)
    watch = vigil(world)
    await looked(watch)
    back = world.head
    again = world.note("Worse still.")
    await world.say(12, score=0.0)
    await looked(watch)  # nobody reported on the rollback itself, but on the same parts before it
    assert (world.head.operation, world.head.base) == ("rollback", back.id)
    assert world.head.parts == before.parts
    assert [act.detail["release"] for act in acts(world, "alarm")] == [1, again.seq]


async def test_old_reports_and_forgotten_records_do_not_count(world: World) -> None:
    """Reports from long before the release say what users wanted then; an erased record says nothing any more."""
    before, past = world.head, world.head.created_at - WINDOW - 100
    for number in range(500, 520):
        (receipt,) = await world.say(1, score=None)
        await world.store.append(report(number, receipt, score=1.0, created_at=past))
    gone = await world.say(20, score=1.0)
    world.note()
    await world.say(30, score=0.0)
    await asyncio.to_thread(keep.forget, world.store._path, gone)
    watch = vigil(world)
    assert await looked(watch) == "blind"
    assert before.seq == 0


async def test_a_session_cannot_decide_alone(world: World) -> None:
    await world.say(30, score=1.0)
    release = world.note()
    await world.say(30, score=0.0, session="mallory")
    assert await looked(vigil(world)) == "watching"
    assert world.head == release


async def test_failing_records_become_tasks(world: World) -> None:
    book = world.book
    await world.say(20, score=1.0)
    world.note()
    good = await world.say(2, score=1.0)
    low = await world.say(12, score=0.0)
    await looked(vigil(world, action="tell"))
    await looked(vigil(world, action="tell"))
    made = book.failures(NAME)
    assert {one.receipt for one in made} <= set(low)
    assert len(made) >= 7
    assert {one.actor for one in made} == {"watch"}
    assert made[0].reason == "scored 0 on release 1; 1 was usual before it"
    assert not {one.receipt for one in made} & set(good)


async def test_a_report_may_ask_for_a_task_and_the_oldest_make_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "KEPT", 3)
    book = world.book
    book.promote(NAME, "f" * 32, "side", actor="ada", reason="by hand")
    wanted = []
    for _ in range(5):
        wanted += await world.say(1, metadata={"promote": True})
    await world.say(1, metadata={"promote": "yes"})
    await world.say(1, metadata=None)
    assert not await failures.asked(world.tools, NAME)
    assert not await failures.asked(world.tools, NAME)
    made = book.failures(NAME)
    assert {one.receipt for one in made if one.actor == "report"} == set(wanted[-3:])
    assert [one.receipt for one in made if one.actor == "ada"] == ["f" * 32]
    book.demote(NAME, wanted[-1])
    await failures.asked(world.tools, NAME)
    left = {one.receipt for one in book.failures(NAME)}
    assert wanted[-1] not in left  # read once: what a person took back stays out


async def test_going_back_by_hand_is_not_undone(world: World) -> None:
    _, release = await bad(world)
    watch = vigil(world)
    await looked(watch)
    head = rollback(NAME, release.id, world.chain, world.board, actor="ada", reason="I want it")
    await world.say(40, score=0.0)
    assert await looked(watch) == "idle"
    assert world.head == head


class Plain:
    """A record store of somebody else's: the five methods, and nothing quicker."""

    def __init__(self, inner: RecordStore) -> None:
        self.append, self.append_all, self.close = inner.append, inner.append_all, inner.close
        self.get, self.events, self.find = inner.get, inner.events, inner.find


async def test_any_record_store_will_do(world: World) -> None:
    before, _ = await bad(world)
    world.tools = replace(world.tools, store=Plain(world.store))
    await looked(vigil(world))
    assert (world.head.operation, world.head.base) == ("rollback", before.id)
