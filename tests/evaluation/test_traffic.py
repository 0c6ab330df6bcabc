"""Tasks made of live records: which, judged by what, and gone when the record is."""

from __future__ import annotations

import json

import pytest

from reef.core.nouns import Choice, Record, Report, Sampling, Timing
from reef.evaluation.book import Book
from reef.evaluation.scorers import Reach, Regex
from reef.evaluation.suite import Judging, Sources
from reef.evaluation.traffic import Failures, Traffic
from reef.experience.holdout import Holdout, read
from reef.records import erase
from reef.records.sqlite import SqliteStore

EXACT = {"use": "exact", "answer": "yes"}
ALL = Holdout(1.0)


def record(number, words=None, **fields):
    body = fields.pop("body", None) or {"messages": [{"role": "user", "content": words or f"question {number}"}]}
    given = {"purpose": "live", "dialect": "chat", "status": "complete", "scenario": "s"} | fields
    raw = json.dumps(body).encode()
    choices = (Choice(0, "an answer", "stop"),)
    return Record(f"{number:032x}", release_id="r", request=raw, timing=Timing(float(number)), choices=choices, **given)


def report(number, receipt, **fields):
    return Report(f"rep_{number:032x}", "s", (f"{receipt:032x}",), 0.0, **fields)


@pytest.fixture
async def store(tmp_path):
    found = SqliteStore(tmp_path / "records.db", owner="test")
    await found.start()
    yield found
    await found.close()


@pytest.fixture
def book():
    found = Book.memory()
    yield found
    found.close()


def traffic(store, default=EXACT, holdout=ALL, **rest):
    return Traffic("s", store, holdout, Judging(default, Reach()), **rest)


async def test_one_task_for_each_prompt_the_newest_record_of_it(store):
    await store.append(record(1, "a", sampling=Sampling(0.3, max_tokens=40)))
    await store.append(record(2, "b"))
    await store.append(record(3, " a ", sampling=Sampling(0.7, max_tokens=4000)))
    found = await traffic(store).tasks(9, {}, ())
    assert [task.receipt for task in found] == [f"{3:032x}", f"{2:032x}"]
    assert [(task.question.temperature, task.question.max_tokens) for task in found] == [(0.7, 256), (1.0, 256)]
    assert [task.id for task in found] == [read(record(3, "a")).key, read(record(2, "b")).key]
    assert {task.origin for task in found} == {"traffic"}


async def test_only_live_whole_plain_records_make_tasks(store):
    await store.append(record(1, "a"))
    for number, wrong in enumerate(
        [
            {"purpose": "evaluation"},
            {"status": "failed"},
            {"scenario": "other"},
            {"dialect": "embeddings", "body": {"input": "x"}},
            {"body": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}},
            {"body": {"messages": [{"role": "user", "content": "x" * 40000}]}},
            {"dialect": "responses", "body": {"input": "x", "previous_response_id": "resp_1"}},
        ],
        2,
    ):
        await store.append(record(number, **wrong))
    assert [task.receipt for task in await traffic(store).tasks(9, {}, ())] == [f"{1:032x}"]


async def test_requests_of_every_dialect_make_tasks(store):
    messages = {"model": "m", "max_tokens": 9, "system": "Brief.", "messages": [{"role": "user", "content": "a"}]}
    await store.append(record(1, dialect="messages", body=messages))
    await store.append(record(2, dialect="responses", body={"instructions": "Brief.", "input": "b"}))
    found = await traffic(store).tasks(9, {}, ())
    said = [[(turn["role"], turn["content"]) for turn in json.loads(task.question.messages)] for task in found]
    assert said == [[("system", "Brief."), ("user", "b")], [("system", "Brief."), ("user", "a")]]


async def score(task, text):
    return (await task.scorer.score(task, text)).value


async def test_a_report_brings_the_check_and_the_newest_wins(store):
    await store.append(record(1))
    await store.append(report(1, 1, score=1.0, metadata={"check": {"scorer": "exact", "answer": "old"}}))
    await store.append(
        report(2, 1, score=1.0, metadata={"check": {"scorer": {"use": "number", "tolerance": 1}, "answer": 5}})
    )
    await store.append(report(3, 1, demonstration="shown", metadata={"other": 1}))
    [task] = await traffic(store, {}).tasks(9, {}, ())
    assert (task.scorer.name, await score(task, "it is 6"), await score(task, "7")) == ("number", 1, 0)


async def test_of_a_prompts_newest_records_the_majority_says_how_it_is_judged(store):
    """Users change their minds, and one of them may err: the same prompt asked again, with other checks."""
    source, pinned, judged = traffic(store, {}), {}, ""
    for number, answer in enumerate("aababb", 1):
        await store.append(record(number, "the same"))
        check = {"scorer": "exact", "answer": answer}
        await store.append(report(number, number, score=1.0, metadata={"check": check}))
        [task] = await source.tasks(9, pinned, ())
        pinned.setdefault(task.id, task.receipt)
        judged += "a" if await score(task, "a") else "b"
    assert judged == "aaaabb"
    assert list(pinned) == [task.id], "it is the same task all the while"


@pytest.mark.parametrize("wrong", [5, {"scorer": "nmber", "answer": 5}, {"scorer": "regex", "answer": "("}, {}])
async def test_a_check_that_cannot_be_read_hides_no_older_one(store, wrong):
    await store.append(record(1))
    await store.append(report(1, 1, score=1.0, metadata={"check": {"scorer": "number", "answer": 5}}))
    await store.append(report(2, 1, score=1.0, metadata={"check": wrong}))
    [task] = await traffic(store, {}).tasks(9, {}, ())
    assert (task.scorer.name, await score(task, "5"), await score(task, "7")) == ("number", 1, 0)


async def test_a_demonstration_is_what_the_default_scorer_compares_with(store):
    await store.append(record(1))
    await store.append(
        report(1, 1, demonstration={"role": "assistant", "content": [{"type": "text", "text": " Rome "}]})
    )
    [task] = await traffic(store, {}).tasks(9, {}, ())
    assert (task.scorer.name, await score(task, "Rome"), await score(task, "in Rome")) == ("exact", 1, 0)
    [task] = await traffic(store, {"use": "contains"}).tasks(9, {}, ())
    assert (task.scorer.name, await score(task, "in rome")) == ("contains", 1)
    assert await traffic(store, {"use": "number"}).tasks(9, {}, ()) == [], "Rome is no number"
    [task] = await traffic(store, {"use": "number", "answer": 4}).tasks(9, {}, ())
    assert (task.scorer.name, await score(task, "4")) == ("number", 1), "then the default as it is written"


async def test_what_nothing_judges_is_no_task(store):
    await store.append(record(1))
    await store.append(report(1, 1, score=1.0))
    assert await traffic(store, {}).tasks(9, {}, ()) == []
    assert await traffic(store, {"use": "exact"}).tasks(9, {}, ()) == [], "it wants an answer"
    assert len(await traffic(store).tasks(9, {}, ())) == 1


@pytest.mark.parametrize(
    "check",
    [
        {"scorer": {"use": "code", "call": "os:system"}, "answer": 1},
        {"scorer": {"use": "judge", "engine": "local"}},
        {"scorer": "tests", "answer": "import os"},
        {"scorer": "unheard of"},
        {"scorer": {"use": ["exact"]}},
        {"scorer": 7},
        {"scorer": {}},
        {"scorer": "regex", "answer": "("},
        {"scorer": "schema", "answer": [1]},
        {"scorer": None, "answer": None},
    ],
)
async def test_a_report_cannot_run_code_or_ask_others_and_a_wrong_check_is_no_task(store, check):
    await store.append(record(1))
    await store.append(report(1, 1, score=1.0, metadata={"check": check}))
    assert len(await traffic(store, {}).tasks(9, {}, ())) == 0


async def test_a_prompt_that_trained_before_it_was_held_out_is_no_task(store):
    for number, words in enumerate(["a", "b", "a", "c", "d", "d"], 1):
        await store.append(record(number, words))
    source = traffic(store, trained=lambda one: one.id in (f"{3:032x}", f"{4:032x}", f"{5:032x}"))
    found = await source.tasks(9, {}, ())
    assert [task.receipt for task in found] == [f"{2:032x}"], "no other record of the same prompt stands for it"


async def test_only_held_out_prompts(store):
    some = Holdout(0.4)
    records = [record(number) for number in range(1, 30)]
    for one in records:
        await store.append(one)
    found = {task.receipt for task in await traffic(store, holdout=some).tasks(99, {}, ())}
    assert found == {one.id for one in records if some.holds(one)}
    assert 0 < len(found) < 29


async def test_a_generations_tasks_are_found_again_by_their_receipts(store, book, monkeypatch):
    monkeypatch.setattr("reef.evaluation.traffic.PAGE", 2)
    monkeypatch.setattr("reef.evaluation.traffic.SCAN", 4)
    await store.append(record(1))
    suite = Sources("s", [traffic(store)], book)
    book.use("s", "r", "c")
    await suite.draw(5)
    for number in range(2, 12):
        await store.append(record(number))
    drawn = [int(task.receipt, 16) for task in (await suite.draw(5)).tasks]
    assert drawn[0] == 1, "though ten newer ones came"
    assert sorted(drawn[1:]) == [8, 9, 10, 11]


async def test_what_is_forgotten_is_a_task_no_more(store, book, tmp_path):
    for number in (1, 2):
        await store.append(record(number))
        book.promote("s", f"{number:032x}", read(record(number)).side, actor="me")
    sources = [Failures("s", store, book, Judging(EXACT, Reach())), traffic(store)]
    suites = [Sources("s", [source], book) for source in sources]
    book.use("s", "r", "c")
    for suite in suites:
        assert len((await suite.draw(9)).tasks) == 2
    with erase.Store(tmp_path / "records.db") as rows:
        erase.remove(rows, [f"{1:032x}"], forever=True)
    for suite in suites:
        assert [task.receipt for task in (await suite.draw(9)).tasks] == [f"{2:032x}"]


async def test_promoted_failures_are_protected_tasks_the_newest_first(store, book):
    for number in range(1, 5):
        await store.append(record(number, "same" if number < 3 else None))
    await store.append(record(9, scenario="other"))
    for number in (1, 2, 3, 9, 77):
        book.promote("s", f"{number:032x}", "p", actor="watch")
    found = await Failures("s", store, book, Judging(EXACT, Reach())).tasks(9, {}, ())
    assert {task.receipt for task in found} in ({f"{1:032x}", f"{3:032x}"}, {f"{2:032x}", f"{3:032x}"})
    assert {(task.origin, task.protected) for task in found} == {("failure", True)}
    book.demote("s", f"{3:032x}")
    assert len(await Failures("s", store, book, Judging(EXACT, Reach())).tasks(9, {}, ())) == 1


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ({"scorer": "regex", "answer": "(?i)" + "[a-\U0010ffff]" * 3000}, "compiling it is most of a minute"),
        ({"scorer": "regex", "answer": "(?="}, "no pattern, as the first answer shows"),
        ({"scorer": "schema", "answer": {"$ref": "http://127.0.0.1:9/schema"}}, "nothing is fetched"),
        ({"scorer": "schema", "answer": {"properties": {f"p{n}": {"pattern": "a"} for n in range(9000)}}}, "huge"),
    ],
)
async def test_a_check_that_takes_for_ever_or_judges_nothing_is_no_task(store, check, why, monkeypatch):
    monkeypatch.setattr(Regex, "check", lambda self: pytest.fail("a stranger's pattern was compiled here"))
    await store.append(record(1))
    await store.append(report(1, 1, score=1.0, metadata={"check": check}))
    assert await traffic(store, {}).tasks(9, {}, ()) == [], why


async def test_what_was_said_before_a_shift_judges_nothing(store, book):
    for number in (1, 2, 3):  # received at 1, 2 and 3 seconds
        await store.append(record(number, f"q{number}"))
        book.promote("s", f"{number:032x}", f"side {number}", actor="test")
    sources = [traffic(store, since=lambda: book.since("s")), Failures("s", store, book, Judging(EXACT, Reach()))]
    suite = Sources("s", sources, book)
    book.use("s", "incumbent", "candidate")
    before = await suite.draw(9)
    assert len({task.receipt for task in before.tasks}) == 3
    book.shift("s", 2.0)
    book.shift("s", 2.0)
    book.shift("s", 1.5)  # nothing goes back
    after = await suite.draw(9)
    assert {task.receipt for task in after.tasks} == {f"{2:032x}", f"{3:032x}"}
    assert after.generation == before.generation + 1
    assert book.since("other") == 0.0
