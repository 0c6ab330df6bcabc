"""Which side a prompt is on: always the same one, whatever else a request says, and never both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Choice, Event, Record, Report, Sampling, Timing
from reef.evaluation.book import Book
from reef.evaluation.scorers import Reach
from reef.evaluation.suite import Judging, Sources
from reef.evaluation.traffic import Traffic
from reef.experience.holdout import Holdout, fraction, read
from reef.experience.pool import Pool
from reef.experience.units import SIGNALS
from reef.records.sqlite import SqliteStore


def record(number: int, body: object, dialect: str = "chat", purpose: str = "live") -> Record:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    choices = (Choice(0, "an answer", "stop", output_ids=(1,), logprobs=(-1.0,)),)
    return Record(
        f"{number:032x}", "s", "r", purpose, dialect, "complete", raw, Timing(float(number)),  # type: ignore[arg-type]
        choices=choices, prompt_ids=(1,), sampling=Sampling(),
    )  # fmt: skip


def chat(*said: tuple[str, object], **rest: object) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in said], **rest}


def side(body: object, dialect: str = "chat") -> str:
    prompt = read(record(1, body, dialect))
    assert prompt is not None
    return prompt.side


def key(body: object, dialect: str = "chat") -> str:
    prompt = read(record(1, body, dialect))
    assert prompt is not None
    return prompt.key


PLAIN = chat(("user", "What is  2+3?"))


def test_what_is_not_the_prompt_plays_no_part() -> None:
    for other in (
        chat(("user", "What is 2+3?"), temperature=0.2, model="m", stream=True, max_tokens=5),
        chat(("user", " What is\n2+3? ")),
        chat(("user", [{"type": "text", "text": "What is 2+3?"}])),
    ):
        assert (key(other), side(other)) == (key(PLAIN), side(PLAIN))
    assert key(chat(("user", "café"))) == key(chat(("user", "cafe\u0301")))
    for other in (chat(("user", "what is 2+3?")), chat(("user", "What is 2+4?")), chat(("assistant", "What is 2+3?"))):
        assert key(other) != key(PLAIN)


def test_every_dialect_says_the_same_prompt() -> None:
    asked = chat(("system", "Be brief."), ("user", "What is 2+3?"))
    messages = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [{"role": "user", "content": "What is 2+3?"}]}  # fmt: skip  # noqa: E501
    responses = {"model": "m", "instructions": "Be brief.", "input": "What is 2+3?"}
    assert key(asked) == key(messages, "messages") == key(responses, "responses")
    assert side(asked) == side(messages, "messages") == side(responses, "responses") == side(PLAIN)


def test_a_question_stays_on_its_side_whatever_surrounds_it() -> None:
    """A system prompt with today's date, and another answer before the last turn, are no other question."""
    turns = [("user", "Tell me a number"), ("assistant", "7"), ("user", "Double it")]
    whole = chat(*turns)
    for other in (
        chat(("system", "Today is Monday"), *turns),
        chat(("developer", "Today is Tuesday"), *turns),
        chat(turns[0], ("assistant", "8"), turns[2]),
    ):
        assert side(other) == side(whole)
        assert key(other) != key(whole)
    assert side(chat(*turns[:1])) != side(whole)
    assert side(chat(("system", "only this"))) != side(chat(("system", "only that")))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", {"messages": []}, {"messages": "a"}, {"input": "embedded"}, b"\xff"]
)
def test_what_has_no_prompt_has_no_side(body: object) -> None:
    assert read(record(1, body)) is None
    assert not Holdout(0.99).holds(record(1, body))
    assert read(record(1, {"input": "a"}, "embeddings")) is None


@settings(deadline=None, max_examples=40)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda a: st.lists(a) | st.dictionaries(st.sampled_from(["role", "content", "text", "type", "tool_calls"]), a)))  # fmt: skip  # noqa: E501
def test_no_message_breaks_the_reading(message: object) -> None:
    body = {"messages": [message, {"role": "user", "content": "x"}]}
    assert side(body) == side(body)


@settings(max_examples=30)
@given(st.floats(0.02, 0.9), st.integers(0, 10**9))
def test_the_share_is_the_share(share: float, seed: int) -> None:
    sides = [side(chat(("user", f"question {seed} {n}"))) for n in range(400)]
    held = sum(fraction(one) < share for one in sides) / 400
    assert abs(held - share) < 5 * (share * (1 - share) / 400) ** 0.5 + 0.01


def test_a_larger_share_holds_what_a_smaller_one_held() -> None:
    records = [record(n, chat(("user", f"question {n}"))) for n in range(300)]
    few, many = Holdout(0.1), Holdout(0.3)
    assert 0 < sum(map(few.holds, records)) < sum(map(many.holds, records))
    assert all(many.holds(one) for one in records if few.holds(one))
    assert not any(map(Holdout().holds, records))


def test_the_split_is_the_same_in_every_version() -> None:
    """Changing it would put prompts that trained into suites: these two values are for good."""
    prompt = read(record(1, PLAIN))
    assert prompt is not None
    assert (prompt.key, prompt.side) == SPLIT
    assert fraction("8" + "0" * 31) == 0.5


SPLIT = ("4451af20f6727c74864f7440933b3e53", "4451af20f6727c74864f7440933b3e53")


def pool(holdout: Holdout | None) -> Pool:
    return Pool("s", "weights", SIGNALS["weights"], {}.get, 0, holdout)


def feed(into: Pool, records: list[Record]) -> None:
    reports = [Report(f"rep_{n}", "s", (one.id,), 0.0, score=1.0) for n, one in enumerate(records)]
    into.feed([Event(n, "report", report.id, "s") for n, report in enumerate(reports, 1)], [*records, *reports])


def test_held_out_prompts_are_dropped_with_their_reason() -> None:
    records = [record(n, chat(("user", f"question {n}"))) for n in range(40)]
    open_, held = pool(None), pool(Holdout(0.3))
    feed(open_, records)
    feed(held, records)
    assert len(open_.ready) == 40
    dropped = {drop.unit for drop in held.dropped}
    assert {drop.reason for drop in held.dropped} == {"held out"}
    assert dropped | set(held.ready) == set(open_.ready)
    assert dropped == {f"{one.id}:0" for one in records if Holdout(0.3).holds(one)}
    again = Report("rep_again", "s", (next(iter(dropped))[:32],), 0.0, score=0.0)
    held.feed([Event(99, "report", again.id, "s")], [*records, again])
    assert held.dropped[-1].reason == "duplicate"


def test_a_promoted_failures_prompt_trains_no_more() -> None:
    records = [record(n, chat(("user", f"question {n % 4}"))) for n in range(8)]
    book = Book.memory()
    prompt = read(records[1])
    assert prompt is not None
    book.promote("s", records[1].id, prompt.side, actor="watch")
    held = pool(Holdout(0.0, lambda name: book.failed("s", name)))
    feed(held, records)
    assert {drop.unit for drop in held.dropped} == {f"{records[n].id}:0" for n in (1, 5)}
    later = read(records[2])
    assert later is not None
    book.promote("s", records[2].id, later.side, actor="watch")
    assert {unit.record.id for unit in held.units()} == {records[n].id for n in (0, 3, 4, 7)}, "ready, and too late"
    assert {drop.unit for drop in held.dropped} == {f"{records[n].id}:0" for n in (1, 5, 2, 6)}
    book.close()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.sampled_from(["", "Today is Monday."])), max_size=40))
async def test_no_prompt_is_both_measured_on_and_trained_on(asked: list[tuple[int, bool, str]]) -> None:
    """case 49: the set that steers never selects."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "records.db", owner="test")
        await store.start()
        for number, (question, spaced, system) in enumerate(asked):
            words = f"question   {question}" if spaced else f"question {question}"
            body = chat(*([("system", system)] if system else []), ("user", words))
            await store.append(record(number, body))
            await store.append(Report(f"rep_{number:032x}", "s", (f"{number:032x}",), 0.0, score=1.0))
        holdout, book = Holdout(0.3), Book.memory()
        trained = pool(holdout)
        await trained.read(store)
        judging = Judging({"use": "exact", "answer": "x"}, Reach())
        draw = await Sources("s", [Traffic("s", store, holdout, judging)], book).draw(100)
        measured = {side({"messages": json.loads(task.question.messages)}) for task in draw.tasks}
        learnt = {side(json.loads(unit.record.request)) for unit in trained.units()}
        assert not measured & learnt
        assert len(measured | learnt) == len({question for question, _, _ in asked})
        await store.close()
        book.close()
