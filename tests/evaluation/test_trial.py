"""One look: who is asked what, in which order, what is kept, what it costs, and what a crash costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from reef.core.errors import StoreError
from reef.core.nouns import Cost
from reef.engines.fake import FakeEngine, Fault
from reef.evaluation import Means, Price, Score, Sizes, Task
from reef.evaluation.ask import Asker, Question
from reef.evaluation.book import Book
from reef.evaluation.suite import Listed, Sources
from reef.evaluation.trial import Trial, exhausted
from reef.harness.apply import Applied

SIZES = Sizes(tasks=40, repeats=3)


class Word:
    """1 when the answer has the word. `heard` counts what it was asked to judge."""

    name = "word"

    def __init__(self, word="yes", key="1"):
        self.word, self.key, self.heard = word, key, 0

    async def score(self, task, text):
        self.heard += 1
        return Score(None, "I cannot say") if "unsure" in text else Score(float(self.word in text))


class Longer(Word):
    """The longer of two answers is the better one."""

    name = "longer"

    async def compare(self, task, ours, theirs):
        self.heard += 1
        return Score(0.5 if len(ours) == len(theirs) else float(len(ours) > len(theirs)))


def tasks(count, scorer=None, **how):
    scorer = scorer or Word()
    return [Task(f"t{n}", Question.of(f"question {n}", **({"temperature": 1.0} | how)), scorer) for n in range(count)]


@pytest.fixture
def book(tmp_path):
    found = Book(tmp_path / "gate.db")
    yield found
    found.close()


@pytest.fixture
def means(engine, book):
    def make(count=8, scorer=None, listed=None, **rest):
        suite = Sources("s", [Listed("suite", listed or tasks(count, scorer))], book)
        return replace(Means("s", engine, "base", book=book, suite=suite), **rest)

    return make


def asked(engine):
    """(release, question, seed) of each ask, in order."""
    found = []
    for ask in engine.asked:
        body = json.loads(ask.body)
        found.append((ask.release_id, body["messages"][-1]["content"], body["seed"]))
    return found


async def test_both_sides_get_the_same_tasks_and_seeds_in_turn(engine, release, means):
    trial = await Trial.open(means(8), release("c", "w1"), release("i"), sizes=SIZES)
    assert [task.id for task in trial.tasks] != sorted(task.id for task in trial.tasks)
    assert await trial.more(8)
    assert not await trial.more(8)
    calls = asked(engine)
    assert Counter(side for side, _, _ in calls) == {"c": 8, "i": 24}
    assert {ask.priority for ask in engine.asked} == {1}
    first = {}
    for side, question, seed in calls:
        first.setdefault(question, []).append((side, seed))
    for task in trial.tasks:
        sides = first[json.loads(task.question.messages)[0]["content"]]
        assert len({seed for side, seed in sides if side == "i"}) == 3
        assert sides[0][1] == sides[1][1], "the candidate and the incumbent's first answer have one seed"
        assert {sides[0][0], sides[1][0]} == {"c", "i"}
    begins = [first[json.loads(task.question.messages)[0]["content"]][0][0] for task in trial.tasks]
    assert begins in (["c", "i"] * 4, ["i", "c"] * 4), "which side goes first alternates"
    seeds = {seed for _, _, seed in calls}
    assert len(seeds) == 24, "no two tasks share a seed"


async def test_rows_are_scores_in_the_order_of_the_draw(engine, release, means):
    engine.says["c"] = lambda question: "yes"
    engine.says["i"] = lambda question: "yes" if question.endswith(("0", "1")) else "no"
    trial = await Trial.open(means(4), release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(2)
    await trial.more(9)
    right = {"t0": 1.0, "t1": 1.0, "t2": 0.0, "t3": 0.0}
    assert trial.rows == [(1.0, (right[task.id],) * 3) for task in trial.tasks]
    assert [result.id for result in trial.results] == [task.id for task in trial.tasks]
    assert (trial.missing, trial.unjudged, trial.candidate_failures) == (0, 0, 0)


async def test_the_incumbent_answers_once_while_it_stands(engine, release, means, book):
    for number, calls in ((1, 32), (2, 8), (3, 8)):
        engine.asked.clear()
        trial = await Trial.open(means(8), release(f"c{number}", f"w{number}"), release("i"), sizes=SIZES)
        await trial.more(8)
        assert len(engine.asked) == calls
        assert trial.cost.calls == calls
        assert len(trial.rows) == 8
    assert book.spent("s").calls == 48
    again = await Trial.open(means(8), release("c3", "w3"), release("i"), sizes=SIZES)
    await again.more(8)
    assert again.rows == trial.rows
    assert len(engine.asked) == 8


async def test_lucky_answers_are_not_met_again_after_a_release(engine, release, means):
    """The accepted candidate answers anew as the incumbent: other seeds, another order."""
    first = await Trial.open(means(30), release("c", "w1"), release("i"), sizes=SIZES)
    await first.more(30)
    before = asked(engine)
    engine.asked.clear()
    second = await Trial.open(means(30), release("d", "w2"), release("new", "w1"), sizes=SIZES)
    await second.more(30)
    assert second.draw.generation == first.draw.generation + 1
    assert [task.id for task in second.tasks] != [task.id for task in first.tasks]
    assert Counter(side for side, _, _ in asked(engine)) == {"d": 30, "new": 90}
    assert not {seed for _, _, seed in before} & {seed for _, _, seed in asked(engine)}


async def test_a_measurement_beside_the_decisions_moves_nothing(engine, release, means, book):
    made = means(12)
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=SIZES, limit=6)
    await trial.more(6)
    used = {task.id for task in trial.tasks}
    before, seeds = book.generation("s"), {seed for _, _, seed in asked(engine)}
    engine.asked.clear()
    fresh = await Trial.open(made, release("r", "w1"), release("i"), sizes=SIZES, avoid=used)
    await fresh.more(12)
    assert {task.id for task in fresh.tasks} == {f"t{n}" for n in range(12)} - used
    same = await Trial.open(made, release("r", "w1"), release("i"), sizes=SIZES, measure=True)
    await same.more(12)
    assert not seeds & {seed for _, _, seed in asked(engine)}
    assert book.generation("s") == before


async def test_one_answer_is_enough_at_temperature_0(engine, release, means):
    trial = await Trial.open(means(listed=tasks(4, temperature=0.0)), release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(4)
    assert len(engine.asked) == 8
    assert [len(theirs) for _, theirs in trial.rows] == [1] * 4


async def test_what_the_engine_fails_is_missing_and_asked_again_next_time(engine, release, means):
    engine.faults.extend([Fault("refuse")] * 3)
    trial = await Trial.open(means(1), release("c", "w1"), release("i"), sizes=replace(SIZES, repeats=1))
    engine.faults.clear()
    engine.broken.add("c")
    await trial.more(1)
    [result] = trial.results
    assert (trial.missing, trial.rows, result.row) == (1, [], None)
    assert "cannot be loaded" in result.missing
    assert Counter(side for side, _, _ in asked(engine)) == {"c": 3, "i": 1}, "two retries"
    engine.broken.clear()
    again = await Trial.open(means(1), release("c", "w1"), release("i"), sizes=replace(SIZES, repeats=1))
    await again.more(1)
    assert (again.missing, len(again.rows)) == (0, 1)
    assert Counter(side for side, _, _ in asked(engine)) == {"c": 4, "i": 1}, "what was answered is kept"


async def test_a_request_the_candidate_makes_impossible_is_its_worst_score(release, book):
    engine = FakeEngine(context=20, reply=lambda *_: "yes")
    suite = Sources("s", [Listed("suite", tasks(3))], book)
    rules = {"c": "word " * 30, "i": "Be kind."}
    made = Means("s", engine, "base", book=book, suite=suite, renders=lambda one: Applied(rules[one.id]))
    for _ in range(2):  # kept, like any score
        trial = await Trial.open(made, release("c"), release("i"), sizes=SIZES)
        await trial.more(3)
        assert trial.rows == [(0.0, (1.0, 1.0, 1.0))] * 3
        assert (trial.candidate_failures, trial.missing) == (3, 0)
    assert len(engine.asked) == 12


async def test_what_cannot_be_judged_is_neither_a_zero_nor_kept(engine, release, means):
    scorer = Word()
    engine.says["c"] = lambda question: "unsure" if question.endswith("0") else "yes"
    for heard in (8, 9):
        trial = await Trial.open(means(2, scorer), release("c", "w1"), release("i"), sizes=SIZES)
        await trial.more(2)
        assert (trial.unjudged, trial.missing, len(trial.rows)) == (1, 0, 1)
        assert [result.unjudged for result in trial.results if result.unjudged] == ["I cannot say"]
        assert scorer.heard == heard


async def test_a_scorer_that_compares_gives_each_side_what_it_won(engine, release, means):
    scorer = Longer()
    engine.says["c"] = lambda question: {"0": "a b c", "1": "a", "2": "a b"}[question[-1]]
    engine.says["i"] = lambda question: "a b"
    for calls in (6, 0):
        engine.asked.clear()
        trial = await Trial.open(means(3, scorer), release("c", "w1"), release("i"), sizes=SIZES)
        await trial.more(3)
        rows = dict(zip([task.id for task in trial.tasks], trial.rows, strict=True))
        assert rows == {"t0": (1.0, (0.0,)), "t1": (0.0, (1.0,)), "t2": (0.5, (0.5,))}
        assert len(engine.asked) == calls
    assert scorer.heard == 3


async def test_another_scorer_is_another_score(engine, release, means):
    for key, heard in (("1", 8), ("1", 0), ("2", 8)):
        scorer = Word(key=key)
        trial = await Trial.open(means(2, scorer), release("c", "w1"), release("i"), sizes=SIZES)
        await trial.more(2)
        assert scorer.heard == heard


async def test_cost_is_counted_with_the_scorers_own(engine, release, means, book):
    class Dear(Word):
        async def score(self, task, text):
            return Score(1.0, cost=Cost(2, 100, 10, 0.5, 0.25))

    made = means(2, Dear(), price=Price(1e6, 2e6))
    engine.says["c"] = engine.says["i"] = lambda question: "one two three"
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(2)
    assert trial.cost.calls == 8 + 16
    assert (trial.cost.prompt_tokens, trial.cost.output_tokens) == (8 * 2 + 800, 8 * 3 + 80)
    assert trial.cost.money == pytest.approx(8 * (2 + 2 * 3) + 8 * 0.25)
    assert book.spent("s") == trial.cost
    unpriced = await Trial.open(means(2), release("d", "w2"), release("i"), sizes=SIZES)
    await unpriced.more(2)
    assert unpriced.cost.money is None
    assert book.spent("s").money is None
    assert book.paid("s") == trial.cost.money


@pytest.mark.parametrize(
    ("cap", "said", "rows"),
    [
        ({"calls": 9}, "budget of 9 calls is used up (8 spent)", 2),
        ({"tokens": 40}, "budget of 40 tokens", 2),
        ({"money": 40.0}, "budget of 40 money", 2),
    ],
)
async def test_a_cap_ends_a_look_with_a_sentence(engine, release, means, cap, said, rows):
    told = []
    engine.says["c"] = engine.says["i"] = lambda question: "one two three"
    made = means(6, price=Price(1e6, 1e6), capped=lambda month, text: told.append((month, text)))
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=replace(SIZES, **cap))
    while await trial.more(1):
        pass
    assert said in trial.capped
    assert "begins anew on 1 " in trial.capped
    assert len(trial.rows) == rows
    assert told == [(told[0][0], trial.capped)]
    assert told[0][0][4] == "-"
    again = await Trial.open(made, release("c", "w1"), release("i"), sizes=replace(SIZES, **cap))
    while await again.more(1):
        pass
    assert bool(exhausted(made, replace(SIZES, **cap))) == (list(cap) != ["calls"]), "one call was left, of four"
    assert exhausted(made, SIZES) == exhausted(replace(made, book=None), replace(SIZES, **cap)) == ""
    assert again.rows == trial.rows, "what is kept costs nothing, so a cap does not keep it back"
    assert again.capped


async def test_without_a_suite_there_are_no_tasks(engine, release, book):
    trial = await Trial.open(Means("s", engine, "base", book=book), release("c"), release("i"), sizes=SIZES)
    assert not await trial.more(4)
    assert (trial.tasks, trial.draw.warning) == ((), "there is no suite")


async def test_without_a_book_the_askers_memory_serves(engine, release, book):
    suite = Sources("s", [Listed("suite", tasks(3, Longer()))], book)
    made, asker = Means("s", engine, "base", suite=suite), Asker(engine)
    for calls in (6, 3):
        engine.asked.clear()
        trial = await Trial.open(made, release(f"c{calls}", f"w{calls}"), release("i"), sizes=SIZES, asker=asker)
        await trial.more(3)
        assert len(engine.asked) == calls


async def test_a_book_that_cannot_be_written_ends_the_look(engine, release, means, book, monkeypatch):
    trial = await Trial.open(means(8), release("c", "w1"), release("i"), sizes=SIZES)

    def broken(*_):
        raise StoreError("gate.db cannot be written (full); check free space and permissions")

    monkeypatch.setattr(book, "keep", broken)
    with pytest.raises(StoreError, match="free space"):
        await trial.more(8)


LOOK = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from test_trial import FakeEngine, Book, Means, Sources, Listed, Trial, SIZES, tasks
from reef.core.nouns import Part, Release

def release(name, weights):
    part = Part("lora", {{"adapter_model.safetensors": (weights, 1)}})
    return Release(name, 1, "s", "publish", None, {{"weights": part}}, None, 0, None, None, None, {{}}, "t", "", 0.0)

async def main():
    engine, book = FakeEngine(reply=lambda *_: "yes"), Book({path!r})
    made = Means("s", engine, "base", book=book, suite=Sources("s", [Listed("suite", tasks(12))], book))
    trial = await Trial.open(made, release("c", "w1"), release("i", "w0"), sizes=SIZES)
    while await trial.more(4):
        pass
    print(json.dumps([len(engine.asked), book.spent("s").calls, trial.draw.uses, trial.rows]))

asyncio.run(main())
"""


@pytest.mark.parametrize("failpoint", ["book.in_use:1", "book.in_keep:1", "book.in_keep:17", "book.after_keep:30"])
def test_a_look_that_was_killed_goes_on_where_it_was(tmp_path, failpoint):
    """Nothing that was kept is asked or charged again, and it is one use of the suite."""
    path = tmp_path / "gate.db"
    code = LOOK.format(tests=str(Path(__file__).parent), path=str(path))

    def look(**environment):
        return subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
        )

    assert look(REEF_FAILPOINT=failpoint).returncode == -signal.SIGKILL
    book = Book(path)
    kept, charged = len(book.scores("s", _key(book))) if book.spent("s").calls else 0, book.spent("s").calls
    total = book._read("SELECT count(*) FROM scores")[0][0]
    book.close()
    done = look()
    assert done.returncode == 0, done.stderr
    calls, spent, uses, rows = json.loads(done.stdout)
    assert calls == 48 - total
    assert kept <= total
    assert spent == charged + calls
    assert uses == 1
    assert rows == [[1.0, [1.0] * 3]] * 12


def _key(book):
    return book._read("SELECT side FROM scores LIMIT 1")[0][0]


async def test_a_task_is_asked_again_with_seeds_of_its_own(engine, release, means):
    trial = await Trial.open(means(2), release("c", "w1"), release("i"), sizes=replace(SIZES, calls=8 + 8 + 8))
    await trial.more(2)
    seeds = {seed for _, _, seed in asked(engine)}
    engine.asked.clear()
    engine.says["c"] = lambda question: "yes"
    [task, _] = trial.tasks
    assert await trial.repeat(task, 4) == ([1.0] * 4, [0.0] * 4)
    calls = asked(engine)
    assert Counter(side for side, _, _ in calls) == {"c": 4, "i": 4}
    assert len({seed for _, _, seed in calls}) == 4
    assert not seeds & {seed for _, _, seed in calls}
    assert await trial.repeat(task, 8) == ([1.0] * 8, [0.0] * 8)
    assert len(asked(engine)) == 16, "the first four were kept"
    assert await trial.repeat(task, 9) is None
    assert "calls is used up" in trial.capped
    roomy = await Trial.open(means(2), release("c", "w1"), release("i"), sizes=SIZES)
    engine.broken.add("i")
    assert await roomy.repeat(task, 9) is None
    engine.broken.clear()
    assert await roomy.repeat(task, 9) == ([1.0] * 9, [0.0] * 9)
    assert len(roomy.results) == 0
