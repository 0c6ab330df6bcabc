"""Several turns under one score, and answers judged by the next message: units over a real store and real sessions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.core.ids import new_report
from reef.core.nouns import Choice, Report, Sampling, Span
from reef.experience.holdout import Holdout
from reef.experience.pool import Pool
from reef.experience.sessions import Sessions
from reef.experience.units import SIGNALS, Drop
from tests.experience.talk import SCENARIO, START, World, chat

HELLO, GO_ON = chat("u1"), chat("u1", "a1", "u2")
THIRD = chat("u1", "a1", "u2", "a2", "u3")
FIRST, SECOND, LAST = (1, 2), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7)


async def turn(world: World, body: Any, said: str, prompt: tuple[int, ...], *output: int, **fields: Any) -> str:
    """An exchange with its tokens, sampled by one release."""
    release = fields.pop("release", "c0ffee" * 6 + "abcd")
    count = len(output)
    choice = Choice(
        0, said, "stop", output_ids=output, logprobs=tuple(-0.1 * (n + 1) for n in range(count)),
        spans=(Span(release, 0, count),),
    )  # fmt: skip
    given = {"prompt_ids": prompt, "sampling": Sampling()} | fields
    return await world.ask(body, choices=[choice], **given)


async def score(world: World, *receipts: str, **fields: Any) -> str:
    made = Report(new_report(), SCENARIO, receipts, START, **({"score": 0.5} | fields))
    await world.store.append(made)
    return made.id


def merging(world: World, settled: Any = None, cursor: int = 0, **more: Any) -> Pool:
    given: dict[str, Any] = {"sessions": world.sessions, "merges": True} | more
    return Pool(SCENARIO, "weights", SIGNALS["weights"], settled or (lambda _: None), cursor, **given)


def listening(world: World, settled: Any = None, cursor: int = 0, part: Any = "harness", **more: Any) -> Pool:
    given: dict[str, Any] = {"sessions": world.sessions, "patience": 900.0} | more
    return Pool(SCENARIO, part, {"next"}, settled or (lambda _: None), cursor, **given)


async def two(world: World, **fields: Any) -> tuple[str, str]:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4)
    return first, await turn(world, GO_ON, "a2", SECOND, 6, **fields)


# --- one score for several turns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
async def test_turns_that_follow_one_another_are_one_unit(world: World, backwards: bool) -> None:
    first, second = await two(world)
    told = await score(world, *((second, first) if backwards else (first, second)))
    pool = merging(world)
    await pool.read(world.store)
    (unit,) = pool.units()
    assert (unit.id, unit.turns, unit.report.id, unit.score) == (f"{second}:0", (f"{first}:0",), told, 0.5)
    assert unit.sample is not None
    assert unit.sample.tokens == (1, 2, 3, 4, 5, 6)
    assert (unit.sample.mask, unit.sample.prompt_length) == ((1, 1, 0, 1), 2)
    assert unit.sample.logprobs == (-0.1, -0.2, 0.0, -0.1)
    assert unit.sample.reward == 0.5
    assert pool.lost([unit]) == {"realigned_tokens": 0.0, "forked": 0.0, "separate": 0.0}
    assert dict(pool.merged) == {"units": 1, "turns": 2, "realigned_tokens": 0}


async def test_a_later_report_on_a_turn_is_a_duplicate_and_a_drop_is_that_of_all_turns(world: World) -> None:
    first, second = await two(world)
    told = await score(world, first, second)
    late = await score(world, first)
    pool = merging(world)
    await pool.read(world.store)
    assert pool.dropped == [Drop(f"{first}:0", late, "duplicate")]
    pool.acknowledge()
    pool.drop([Drop(f"{second}:0", told, "stale")])
    assert sorted(drop.unit for drop in pool.dropped) == sorted([f"{first}:0", f"{second}:0"])
    assert {drop.reason for drop in pool.dropped} == {"stale"}
    assert pool.ready == {}
    later = await score(world, first, second)
    await pool.read(world.store)
    assert [drop for drop in pool.dropped if drop.report == later] == [
        Drop(f"{first}:0", later, "duplicate"), Drop(f"{second}:0", later, "duplicate"),
    ]  # fmt: skip
    assert pool.low() == pool.cursor


async def test_a_rendered_anew_history_is_counted(world: World) -> None:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4)
    second = await turn(world, GO_ON, "a2", (1, 2, 9, 5), 6)
    await score(world, first, second)
    pool = merging(world)
    await pool.read(world.store)
    (unit,) = pool.units()
    assert unit.sample is not None
    assert unit.sample.mask == (0, 0, 1)
    assert pool.lost([unit]) == {"realigned_tokens": 2.0, "forked": 0.0, "separate": 0.0}
    assert pool.merged["realigned_tokens"] == 2


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("fork", {"prompt": (1, 77, 3, 4, 5)}),
        ("temperature", {"sampling": Sampling(temperature=0.5)}),
        ("grammar", {"sampling": Sampling(legal="{}")}),
        ("releases", {"release": "f" * 40}),
        ("order", {"body": chat("something else")}),
    ],
)
async def test_what_is_no_one_sequence_trains_apart_with_the_score(
    world: World, reason: str, fields: dict[str, Any]
) -> None:
    given = {"body": GO_ON, "prompt": SECOND} | fields
    first = await turn(world, HELLO, "a1", FIRST, 3, 4)
    second = await turn(world, given.pop("body"), "a2", given.pop("prompt"), 6, **given)
    await score(world, first, second)
    pool = merging(world)
    await pool.read(world.store)
    units = pool.units()
    assert [(unit.id, unit.turns, unit.score) for unit in units] == [(f"{first}:0", (), 0.5), (f"{second}:0", (), 0.5)]
    assert dict(pool.merged) == {f"separate: {reason}": 2}
    assert pool.lost(units) == {
        "realigned_tokens": 0.0, "forked": 2.0 * (reason == "fork"), "separate": 2.0,
    }  # fmt: skip


async def test_a_turn_without_exact_tokens_leaves_the_other_to_train(world: World) -> None:
    first, second = await two(world, untrainable="a tool was called")
    told = await score(world, first, second)
    pool = merging(world)
    await pool.read(world.store)
    assert [unit.id for unit in pool.units()] == [f"{first}:0"]
    assert pool.dropped == [Drop(f"{second}:0", told, "untrainable")]
    assert dict(pool.merged) == {"separate: tokens": 1}


async def test_an_earlier_report_on_one_turn_counts_and_the_rest_trains(world: World) -> None:
    first, second = await two(world)
    early = await score(world, first, score=0.0)
    told = await score(world, first, second)
    pool = merging(world)
    await pool.read(world.store)
    assert [(unit.id, unit.report.id) for unit in pool.units()] == [(f"{first}:0", early), (f"{second}:0", told)]
    assert pool.dropped == [Drop(f"{first}:0", told, "duplicate")]
    assert dict(pool.merged) == {"separate: counted": 1}


async def test_a_score_for_each_receipt_and_a_choice_stay_apart(world: World) -> None:
    """case 45: one report, several values."""
    first, second = await two(world)
    await score(world, first, second, per_receipt={first: 1.0, second: -1.0})
    pool = merging(world)
    await pool.read(world.store)
    assert [(unit.score, unit.turns) for unit in pool.units()] == [(1.0, ()), (-1.0, ())]
    assert pool.merged == {}
    named = merging(world)
    third = await turn(world, THIRD, "a3", LAST, 8)
    await score(world, second, third, choice=0)
    await named.read(world.store)
    assert all(unit.turns == () for unit in named.units())


async def test_a_recipe_that_does_not_merge_gets_a_unit_a_turn(world: World) -> None:
    first, second = await two(world)
    await score(world, first, second)
    pool = merging(world, merges=False)
    await pool.read(world.store)
    assert [unit.id for unit in pool.units()] == [f"{first}:0", f"{second}:0"]
    assert pool.lost(pool.units()) == {}


async def test_a_held_out_turn_is_never_within(world: World) -> None:
    first, second = await two(world)
    await score(world, first, second)
    held = Holdout(also=lambda side: True)
    pool = merging(world, holdout=held)
    await pool.read(world.store)
    assert pool.ready == {}
    assert {drop.reason for drop in pool.dropped} == {"held out"}


async def test_the_mark_waits_for_a_turn_that_is_still_open_and_reports_keep_their_order(world: World) -> None:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4)
    whole = World(world.store, world.sessions)
    second = await turn(whole, GO_ON, "", SECOND, 6, status="open", at=20.0)
    told = await score(world, first, second)
    late = await score(world, first, score=0.0)
    pool = merging(world)
    await pool.read(world.store)
    assert (pool.ready, pool.waiting, pool.waits(first), pool.waits(second)) == ({}, 2, True, True)
    low = pool.low()
    assert low < pool.cursor
    open_one = whole.records[second]
    closed = replace(open_one, status="complete", choices=(replace(open_one.choices[0], text="a2"),))
    await world.store.append(closed)
    await pool.read(world.store)
    assert [(unit.report.id, unit.turns) for unit in pool.units()] == [(told, (f"{first}:0",))]
    assert pool.dropped == [Drop(f"{first}:0", late, "duplicate")]
    again = merging(world, cursor=low)
    await again.read(world.store)
    assert again.units() == pool.units()


async def test_what_was_settled_stays_settled_after_a_restart(world: World) -> None:
    first, second = await two(world)
    told = await score(world, first, second)
    for winner in (told, ""):
        pool = merging(world, settled=dict.fromkeys((f"{first}:0", f"{second}:0"), winner).get)
        await pool.read(world.store)
        assert (pool.ready, pool.dropped) == ({}, [])


# --- the next message -------------------------------------------------------------------------------------------------


async def test_the_next_message_makes_a_unit_of_the_answer_before_it(world: World) -> None:
    first, second = await two(world)
    pool = listening(world, part="weights")
    await pool.read(world.store)
    (unit,) = pool.units()
    assert (unit.id, unit.record.id, unit.score, unit.turns) == (f"{first}:0", first, None, ())
    assert (unit.report.id, unit.report.references, unit.report.feedback) == (second, (first,), "u2")
    assert unit.report.metadata == {"role": "user"}
    assert unit.sample is not None
    assert unit.sample.tokens == (1, 2, 3, 4)
    assert unit.seq == pool.cursor
    assert pool.low() == unit.seq - 1
    pool.take([unit.id])
    assert pool.low() == pool.cursor


async def test_a_recipe_that_does_not_listen_hears_nothing(world: World) -> None:
    await two(world)
    pool = Pool(SCENARIO, "weights", SIGNALS["weights"], lambda _: None, sessions=world.sessions)
    await pool.read(world.store)
    assert (pool.ready, pool.dropped) == ({}, [])


async def test_a_message_that_comes_late_says_nothing(world: World) -> None:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4, at=0, took=2)
    second = await turn(world, GO_ON, "a2", SECOND, 6, at=103)
    pool = listening(world, patience=100)
    await pool.read(world.store)
    assert (pool.ready, pool.dropped) == ({}, [Drop(f"{first}:0", second, "late")])
    just = listening(world, patience=101)
    await just.read(world.store)
    assert list(just.ready) == [f"{first}:0"]


async def test_evaluation_traffic_and_side_calls_never_train(world: World) -> None:
    await turn(world, HELLO, "a1", FIRST, 3, 4, purpose="evaluation")
    await turn(world, GO_ON, "a2", SECOND, 6, purpose="evaluation")
    pool = listening(world)
    await pool.read(world.store)
    assert (pool.ready, pool.dropped) == ({}, [])


async def test_the_first_of_two_next_messages_counts(world: World) -> None:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4)
    second = await turn(world, GO_ON, "a2", SECOND, 6)
    other = await turn(world, chat("u1", "a1", "u2, said otherwise"), "a3", (1, 2, 3, 4, 8), 9)
    pool = listening(world)
    await pool.read(world.store)
    assert [(unit.id, unit.report.id) for unit in pool.units()] == [(f"{first}:0", second)]
    assert pool.dropped == [Drop(f"{first}:0", other, "duplicate")]


async def test_an_answer_that_cannot_train_is_dropped_for_weights_and_kept_for_the_harness(world: World) -> None:
    first = await turn(world, HELLO, "a1", FIRST, 3, 4, untrainable="a tool was called")
    second = await turn(world, GO_ON, "a2", SECOND, 6)
    weights, harness = listening(world, part="weights"), listening(world)
    await weights.read(world.store)
    await harness.read(world.store)
    assert (weights.ready, weights.dropped) == ({}, [Drop(f"{first}:0", second, "untrainable")])
    assert [unit.why for unit in harness.units()] == ["a tool was called"]


@pytest.mark.parametrize("seed", range(4))
async def test_a_pool_that_starts_again_finds_the_same_units(world: World, tmp_path: Path, seed: int) -> None:
    chance, named = random.Random(seed), seed % 2 == 0
    said: dict[str, list[str]] = {}
    for number in range(12):
        who = chance.choice("abc")
        history = said.setdefault(who, [f"hello from {who}"])
        answer = f"{who}{number}"
        await turn(world, chat(*history), answer, (1,) * (number + 1), 7, session=who if named else None)
        history += [answer, f"and then? {number}"]
    pool = listening(world)
    await pool.read(world.store)
    assert len(pool.ready) >= 6
    done: dict[str, str] = {}
    for unit in pool.units():
        if chance.random() < 0.4:
            done[unit.id] = unit.report.id
            pool.take([unit.id])
    fresh = Sessions(tmp_path / "again.db")
    again = listening(world, settled=done.get, cursor=pool.low(), sessions=fresh)
    await again.read(world.store)
    assert again.units() == pool.units()
    assert again.low() == pool.low()
    fresh.close()
