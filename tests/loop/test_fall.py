"""A release whose live scores sink long after it came: told, its failures kept, and something better served again."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from reef.core import failpoint
from reef.core.errors import MissingError
from reef.core.nouns import Act, Candidate, Evaluation, Record, Release, Verdict
from reef.loop.binding import Watching
from reef.loop.compare import Comparison
from reef.loop.watch import Vigil
from reef.records import Query
from reef.records.lookup import Source
from tests.loop.kit import NAME, World, report


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()


class Past:
    """Accepts the releases with these numbers; remembers what it was asked."""

    def __init__(self, *better: int) -> None:
        self.better = better
        self.asked: list[tuple[int, int]] = []

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        self.asked.append((candidate.seq, incumbent.seq))
        verdict: Verdict = "accept" if candidate.seq in self.better else "undecided"
        return Evaluation("better", verdict, "Accepted: 9 to 0.", candidate.id, incumbent.id)


class Ended(Exception):
    pass


class Crash(dict[str, int]):
    """Stands in for the armed failpoints: passing this one ends the work where it is."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point

    def __contains__(self, name: object) -> bool:
        if name == self.point:
            raise Ended
        return False


async def looked(watch: Vigil) -> dict[str, Any]:
    while await watch.look():
        pass
    return watch.shown()


def acts(world: World, *kinds: str) -> list[Act]:
    return [act for act in world.journal.after(0) if act.kind in kinds]


def vigil(world: World, past: Past | None = None, reports: int = 10) -> Vigil:
    return Vigil(world.tools, NAME, Watching(reports=reports), past)


async def chain(world: World) -> tuple[Release, Release, Release]:
    """Three releases, each liked; the last one's first ten reports are good too."""
    base = world.head
    await world.say(12, score=1.0)
    one = world.note()
    await world.say(12, score=1.0)
    two = world.note()
    await world.say(11, score=1.0)
    return base, one, two


async def test_a_fall_is_told_and_kept_as_tasks_but_alone_changes_nothing(world: World) -> None:
    _, _, two = await chain(world)
    watch = vigil(world)
    assert (await looked(watch))["state"] == "passed"
    await world.say(20, score=0.0)
    shown = await looked(watch)
    assert shown["fall"]["falls"] == 1
    assert world.head == two
    (alarm,) = acts(world, "alarm")
    assert (alarm.ref, alarm.actor, alarm.detail["fall"]) == (two.id, "watch", "fall 1")
    assert (
        "live scores on release 2 fell: mean 0.111 over the last 9 reports against 1 over its first 10" in alarm.reason
    )
    assert world.tools.book is not None
    assert len(world.tools.book.failures(NAME)) == 8
    page = await world.store.find(Query(NAME, purpose="live", limit=100))
    scored = [(entry.timing.received_at, seq) for seq, entry in page if isinstance(entry, Record)]
    assert sum(at >= world.tools.book.since(NAME) for at, _ in scored) in (19, 20), "since then users want other things"
    await world.say(60, score=0.0)  # what is usual now
    await looked(watch)
    assert len(acts(world, "alarm")) == 1


@pytest.mark.parametrize(("better", "target"), [((1,), 1), ((0,), 0), ((0, 1), 1)])
async def test_what_is_shown_to_be_better_is_served_again(world: World, better: tuple[int, ...], target: int) -> None:
    releases = await chain(world)
    past = Past(*better)
    watch = vigil(world, past)
    await looked(watch)
    await world.say(20, score=0.0)
    await looked(watch)
    assert (world.head.operation, world.head.base, world.head.actor) == ("rollback", releases[target].id, "watch")
    assert f"release {target} is better now: Accepted: 9 to 0." in world.head.reason
    assert past.asked[0] == (1, 2)
    serving = world.board.get(NAME)
    assert serving is not None
    assert serving.release_id == world.head.id


async def test_without_evidence_for_an_earlier_one_it_stays(world: World) -> None:
    _, _, two = await chain(world)
    past = Past()
    watch = vigil(world, past)
    await looked(watch)
    await world.say(20, score=0.0)
    shown = await looked(watch)
    assert past.asked == [(1, 2), (0, 2)]
    assert world.head == two
    assert shown["fall"]["last"] == "no earlier release that was measured is better now"


async def test_a_pin_holds_it(world: World) -> None:
    _, _, two = await chain(world)
    world.journal.pin(NAME, two.id, actor="ada", reason="demo")
    past = Past(0, 1)
    watch = vigil(world, past)
    await looked(watch)
    await world.say(20, score=0.0)
    await looked(watch)
    assert (world.head, past.asked, len(acts(world, "alarm"))) == (two, [], 1)


@pytest.mark.parametrize("point", ["loop.after_fall", "book.in_shift", "loop.after_shift", "loop.after_past"])
async def test_after_a_crash_the_same_is_done_and_told_once(
    world: World, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, one, _ = await chain(world)
    await world.say(20, score=0.0)
    monkeypatch.setattr(failpoint, "_armed", Crash(point))
    with pytest.raises(Ended):
        await looked(vigil(world, Past(1)))
    monkeypatch.setattr(failpoint, "_armed", {})
    await looked(vigil(world, Past(1)))
    assert (world.head.operation, world.head.base) == ("rollback", one.id)
    assert len(acts(world, "alarm")) == 1


class Broken(Past):
    """Cannot measure the releases with these numbers; accepts the others that it is to accept."""

    def __init__(self, broken: set[int], *better: int) -> None:
        super().__init__(*better)
        self.broken = broken

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        made = await super().evaluate(candidate, incumbent, look)
        if candidate.seq in self.broken:
            raise MissingError(f"the files of release {candidate.seq} were removed")
        return made


@pytest.mark.parametrize(("broken", "better"), [({0, 1}, None), ({1}, 0)])
async def test_a_past_that_cannot_be_measured_is_told_and_does_not_stop_the_watch(
    world: World, broken: set[int], better: int | None
) -> None:
    _, _, two = await chain(world)
    watch = vigil(world, Broken(broken, *([] if better is None else [better])))
    await looked(watch)
    await world.say(20, score=0.0)
    for _ in range(2):  # the learner rests and looks again
        with pytest.raises(MissingError):
            await looked(watch)
    shown = await looked(watch)
    assert len(acts(world, "alarm")) == 1
    if better is not None:  # the other one was measured
        assert (world.head.operation, acts(world, "trouble")) == ("rollback", [])
        return
    assert world.head == two
    assert shown["fall"]["falls"] == 1
    (trouble,) = acts(world, "trouble")
    assert trouble.reason == shown["fall"]["last"]
    assert trouble.reason.startswith("earlier releases could not be measured: release 1: the files of release 1 were")
    await world.say(30, score=-1.0)  # it goes on: the next fall is seen, too
    with pytest.raises(MissingError):
        await looked(watch)
    assert len(acts(world, "alarm")) == 2


def life(number: int, rates: Sequence[float], length: int) -> list[bool]:
    """Whether each stretch raised an alarm; the first rate is that of the scores that say what is usual."""
    draw, alarms = random.Random(number), []
    comparison = Comparison("r", (), reports=length, first=length)
    for place, rate in enumerate(rates):
        for at in range(length):
            receipt = f"{place}-{at}"
            one = report(place * length + at, receipt, score=float(draw.random() < rate))
            comparison.add(one, {receipt: Source("r", None, "live")})
        if place:
            alarms.append(comparison.alarmed)
            comparison = comparison.again()
    return alarms


def test_scores_that_stay_as_they_were_are_a_fall_in_one_life_of_twenty_at_most() -> None:
    """Also where the first scores were luck: each of 30 stretches is compared with the same ones."""
    lives = [life(number, [0.6] * 31, 40) for number in range(200)]
    assert sum(any(alarms) for alarms in lives) <= 10


def test_a_fall_late_in_a_life_is_found_within_three_stretches() -> None:
    found = [life(number, [0.7] * 10 + [0.35] * 3, 100) for number in range(20)]
    assert sum(any(alarms[9:]) for alarms in found) >= 19
    assert sum(any(alarms[:9]) for alarms in found) <= 1


async def test_a_slow_decline_is_seen_against_the_beginning(world: World) -> None:
    await chain(world)
    watch, draw = vigil(world, reports=20), random.Random(1)
    for rate in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        for _ in range(20):
            await world.say(1, score=float(draw.random() < rate))
    assert (await looked(watch))["fall"]["falls"] == 1


async def test_what_a_rollback_brought_is_watched_for_falls(world: World) -> None:
    base, _, _ = await chain(world)
    watch = vigil(world, Past(0))
    await looked(watch)
    await world.say(20, score=0.0)
    await looked(watch)
    assert world.head.base == base.id
    await world.say(10, score=1.0)
    await world.say(20, score=0.0)
    shown = await looked(watch)
    assert (shown["state"], shown["fall"]["falls"]) == ("idle", 1)
    assert len(acts(world, "alarm")) == 2
