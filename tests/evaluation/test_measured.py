"""Policies that measure on a suite: what each asks for, decides and says. Fake engine, real suite, book and trial."""

import asyncio
import json
import math

import pytest

from reef.core.errors import ConfigError, EngineError
from reef.engines.fake import FakeEngine
from reef.evaluation import Means, Score, Sizes, Task
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.policies import AllOf, Better, Floor, NoWorse, Protected
from reef.evaluation.suite import Listed, Sources
from reef.harness.apply import Applied


class Sum:
    """1 for the right sum; an answer of "hm" cannot be judged."""

    name, key = "sum", "1"

    async def score(self, task, text):
        number = int(task.id[1:])
        return Score(None, "the judge was silent") if text == "hm" else Score(float(str(2 * number) in text))


def sums(count, protected=()):
    return [
        Task(f"t{n}", Question.of(f"{n}+{n}?", temperature=1.0), Sum(), protected=n in protected) for n in range(count)
    ]


class Sayings(dict):
    """What each release says to a sum; everything else is answered well."""

    def __init__(self, good):
        super().__init__()
        self.good, self.silent = good, set()

    def reply(self, release_id, body):
        question = body["messages"][-1]["content"]
        if question.endswith("?") and "+" in question and release_id in self:
            number = int(question.split("+")[0])
            said = self[release_id](number, body["seed"])
            return said if isinstance(said, str) else f"It is {2 * number if said else -1}"
        return "" if release_id in self.silent else self.good(question)


@pytest.fixture
def says(engine):
    found = Sayings(engine.good)
    engine._reply = found.reply
    return found


@pytest.fixture
def gate(engine):
    book = Book.memory()

    def make(policy=Better, count=48, protected=(), sizes=None, engine=engine, **options):
        suite = Sources("s", [Listed("sums", sums(count, protected))], book) if count else None
        return policy(Means("s", engine, "base", book=book, suite=suite), sizes or Sizes(), options)

    make.book = book
    return make


def right(share):
    """Right on this share of the tasks, spread over them, whatever the seed."""
    return lambda number, seed: (number * 7) % 20 < 20 * share


def asked(engine, name):
    return [ask for ask in engine.asked if ask.release_id == name and b"+" in ask.body and b"?" in ask.body]


# --- better -----------------------------------------------------------------------------------------------------------


async def test_better_says_what_it_saw(gate, says, release, engine):
    says |= {"i": right(0.3), "c": right(0.6)}
    found = await gate().evaluate(release("c", "w1"), release("i"), 1)
    assert (found.policy, found.verdict) == ("better", "accept")
    assert found.reason.startswith("Accepted: it scores 0.6")
    assert "the incumbent 0.3" in found.reason
    assert "on 48 tasks; better: chance of this if it is no better" in found.reason
    assert found.reason.endswith("(the first candidate since the last release).")
    assert found.suite.startswith("sums@")
    assert found.metrics["tasks"] == 48
    assert found.metrics["turn"] == 1
    assert found.metrics["candidate"] > found.metrics["incumbent"]
    assert found.cost.calls == len(engine.asked)
    assert found.cost.calls == gate.book.spent("s").calls
    json.dumps(dict(found.metrics), allow_nan=False)


async def test_equal_answers_are_undecided_and_count_as_candidates(gate, says, release):
    says |= {"i": right(0.5)} | {f"c{n}": right(0.5) for n in range(3)} | {"d": right(1.0)}
    policy = gate()
    turns = []
    for n in range(3):
        found = await policy.evaluate(release(f"c{n}", f"w{n + 1}"), release("i"), 1)
        assert found.verdict == "undecided"
        turns.append(found.metrics["turn"])
    assert turns == [1, 2, 3]
    again = await policy.evaluate(release("c0", "w1"), release("i"), 2)
    assert again.metrics["turn"] == 1
    assert "the first candidate" in again.reason
    better = await policy.evaluate(release("d", "w9"), release("i"), 1)
    assert (better.verdict, better.metrics["turn"]) == ("accept", 4)
    assert gate.book.budget("s") > 1.5, "a quick release leaves most of its budget to the next"
    after = await policy.evaluate(release("c1", "w2"), release("d", "w9"), 1)
    assert after.metrics["turn"] == 1


async def test_worse_is_rejected_after_a_chunk(gate, says, release):
    says |= {"i": right(1.0), "c": right(0.0)}
    found = await gate(count=192).evaluate(release("c", "w1"), release("i"), 1)
    assert (found.verdict, found.metrics["tasks"]) == ("reject", 16)
    assert "worse than the incumbent" in found.reason


async def test_what_a_guard_rejects_is_not_asked_a_suite(gate, says, release, engine):
    says["c"] = right(1.0)
    says.silent.add("c")
    found = await gate().evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "reject"
    assert not asked(engine, "c")
    assert gate.book.turn("s", "another") == 1, "it used nothing of the error budget"


async def test_the_incumbent_answers_once(gate, says, release, engine):
    says |= {"i": right(0.5), "c": right(0.5), "d": right(0.5)}
    policy = gate(sizes=Sizes(repeats=3))
    first = await policy.evaluate(release("c", "w1"), release("i"), 1)
    before = len(asked(engine, "i"))
    assert before == 3 * first.metrics["tasks"]
    await policy.evaluate(release("d", "w2"), release("i"), 1)
    assert len(asked(engine, "i")) == before


@pytest.mark.parametrize(("policy", "options", "needed"), [(Better, {}, 16), (Floor, {"at": 0.95}, 125)])
async def test_a_suite_that_is_too_small_says_so_and_asks_nothing(gate, says, release, engine, policy, options, needed):
    """case 49"""
    says |= {"i": right(0.0), "c": right(1.0)}
    found = await gate(policy, count=12, **options).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "undecided"
    assert f"not enough evidence: 12 tasks can never show it, {needed} are needed" in found.reason
    assert "12 tasks can tell little" in found.reason
    assert not asked(engine, "c")


@pytest.mark.parametrize(("lost", "verdict"), [(4, "accept"), (6, "undecided")])
async def test_lost_answers_are_missing_not_zero(gate, says, release, engine, lost, verdict):
    class Losing(FakeEngine):
        async def answer(self, ask):
            body = ask.body.decode()
            if ask.release_id == "i" and any(f'"{n}+{n}?"' in body for n in range(lost)):
                raise EngineError("lost")
            async for item in FakeEngine.answer(self, ask):
                yield item

    says |= {"i": right(0.3), "c": right(0.6)}
    losing = Losing(reply=says.reply)
    found = await gate(engine=losing).evaluate(release("c", "w1"), release("i"), 1)
    assert (found.verdict, found.metrics["missing"]) == (verdict, lost)
    assert ("missing (lost)" in found.reason) == (verdict == "undecided")
    if verdict == "accept":
        assert f"on {48 - lost} tasks" in found.reason


async def test_a_judge_that_does_not_judge_releases_nothing(gate, says, release):
    says |= {"i": right(0.0), "c": lambda number, seed: "hm" if number % 4 == 0 else True}
    found = await gate().evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "undecided"
    assert "not judged (the judge was silent)" in found.reason


async def test_a_request_the_candidate_makes_impossible_is_a_zero_and_said(says, release):
    engine = FakeEngine(context=200, reply=says.reply)
    says |= {"i": right(0.0), "c": right(1.0)}
    long = [
        Task(f"t{n}", Question.of(f"{n}+{n}" + " or so" * (70 if n % 4 == 0 else 0) + "?", temperature=1.0), Sum())
        for n in range(48)
    ]
    book = Book.memory()
    renders = lambda one: Applied("Be exact. " * 30 if one.id == "c" else None)  # noqa: E731
    means = Means("s", engine, "base", book=book, suite=Sources("s", [Listed("sums", long)], book), renders=renders)
    found = await Better(means, Sizes(), {}).evaluate(release("c", rules="h"), release("i"), 1)
    failed = found.metrics["impossible"]
    assert failed > 2
    assert f"it makes {failed} requests impossible, which score 0" in found.reason
    assert found.metrics["candidate"] == pytest.approx(1 - failed / found.metrics["tasks"])
    assert found.metrics["missing"] == 0


async def test_the_months_cap_ends_a_look_undecided(gate, says, release):
    says |= {"i": right(0.4), "c": right(0.6)}
    found = await gate(sizes=Sizes(calls=100)).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "undecided"
    assert "budget of 100 calls is used up" in found.reason


# --- the others -------------------------------------------------------------------------------------------------------


async def test_no_worse_accepts_the_same_and_names_what_it_would_need(gate, says, release):
    says |= {"i": right(0.5), "c": right(0.5), "d": lambda number, seed: (number * 7 + seed) % 20 < 10}
    policy = gate(NoWorse, count=192)
    assert (await policy.evaluate(release("c", "w1"), release("i"), 1)).verdict == "accept"
    noisy = await policy.evaluate(release("d", "w2"), release("i"), 1)
    assert noisy.verdict in ("undecided", "reject")
    if noisy.verdict == "undecided":
        assert "tasks would be needed" in noisy.reason or "no number of tasks" in noisy.reason


async def test_a_floor_asks_nothing_of_the_incumbents_quality(gate, says, release):
    says |= {"i": right(1.0), "c": right(0.9), "d": right(0.2)}
    policy = gate(Floor, count=96, at=0.6)
    assert (await policy.evaluate(release("c", "w1"), release("i"), 1)).verdict == "accept"
    low = await policy.evaluate(release("d", "w2"), release("i"), 1)
    assert (low.verdict, "below 0.6" in low.reason) == ("reject", True)


async def test_a_protected_task_may_not_go_from_pass_to_fail(gate, says, release):
    says |= {"i": right(1.0), "c": lambda number, seed: number != 5, "d": lambda number, seed: number not in (6, 7)}
    policy = gate(Protected, count=20, protected={5, 9})
    broken = await policy.evaluate(release("c", "w1"), release("i"), 1)
    assert broken.verdict == "reject"
    assert "the protected task t5 went from pass to fail: it passes 0 of 8 answers, the incumbent 8" in broken.reason
    others = await policy.evaluate(release("d", "w2"), release("i"), 1)
    assert others.verdict == "accept"
    assert "none of 2 protected tasks went from pass to fail" in others.reason


async def test_noise_on_a_protected_task_is_no_failure(gate, says, release):
    says |= {name: lambda number, seed: seed % 5 > 0 for name in ("i", "c0", "c1", "c2")}
    policy = gate(Protected, count=30, protected=set(range(30)))
    for n in range(3):
        found = await policy.evaluate(release(f"c{n}", f"w{n}1"), release("i"), 1)
        assert found.verdict == "accept", found.reason
        assert found.metrics["suspected"] > 0


async def test_named_tasks_are_protected_and_must_be_there(gate, says, release):
    says |= {"i": right(1.0), "c": lambda number, seed: number != 3}
    named = await gate(Protected, count=20, tasks=["t3"]).evaluate(release("c", "w1"), release("i"), 1)
    assert named.verdict == "reject"
    absent = await gate(Protected, count=20, tasks=["zz"]).evaluate(release("c", "w1"), release("i"), 1)
    assert (absent.verdict, "the suite has no task zz" in absent.reason) == ("undecided", True)
    none = await gate(Protected, count=20).evaluate(release("c", "w1"), release("i"), 1)
    assert "the suite has no protected task" in none.reason


async def test_a_protected_task_that_cannot_be_judged_releases_nothing(gate, says, release):
    says |= {"i": right(1.0), "c": lambda number, seed: "hm" if number == 5 else True}
    found = await gate(Protected, count=30, protected={5}).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "undecided"
    assert "the protected task t5 was not measured (the judge was silent)" in found.reason


async def test_a_protected_task_that_nothing_can_be_judged_on_holds_nobody_up(gate, says, release):
    """Its check came with a report, and takes for ever on whatever is said: nothing was passed that could be lost."""
    for name in "icd":
        says[name] = lambda number, seed: "hm" if number == 5 else True
    found = await gate(Protected, count=30, protected={5, 6}).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "accept", found.reason
    alone = await gate(Protected, count=30, protected={5}).evaluate(release("d", "w2"), release("i"), 1)
    assert (alone.verdict, "no protected task could be judged" in alone.reason) == ("undecided", True)


async def test_a_suspect_that_may_not_be_asked_again_releases_nothing(gate, says, release):
    says |= {"i": right(1.0), "c": lambda number, seed: number != 5}
    policy = gate(Protected, count=16, protected={5}, sizes=Sizes(calls=36 + 16 * 4 + 7))
    found = await policy.evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "undecided", "eight answers more are needed, the month allows seven"
    assert "budget of" in found.reason
    assert gate.book.spent("s").calls == 36 + 16 * 4


async def test_all_of_shares_the_answers(gate, says, release, engine):
    says |= {"i": lambda n, seed: n == 5, "c": right(1.0), "d": lambda number, seed: number != 5}
    listed = ["better", {"policy": "no_worse", "margin": 0.1}, {"policy": "floor", "at": 0.4}, "protected", "guarded"]
    policy = gate(AllOf, protected={5}, policies=listed)
    good = await policy.evaluate(release("c", "w1"), release("i"), 1)
    assert (good.policy, good.verdict) == ("all_of", "accept"), good.reason
    for words in ("better: ", "not worse by 10 points", "above 0.4", "none of 1 protected tasks"):
        assert words in good.reason
    assert len(asked(engine, "c")) == good.metrics["tasks"], "each task was asked once for all of them"
    bad = await policy.evaluate(release("d", "w2"), release("i"), 1)
    assert bad.verdict == "reject"
    assert "the protected task t5" in bad.reason


@pytest.mark.parametrize(
    ("policy", "options", "match"),
    [
        (AllOf, {}, "list of policies"),
        (AllOf, {"policies": "better"}, "list of policies"),
        (AllOf, {"policies": ["bettr"]}, "bettr"),
        (AllOf, {"policies": [{"policy": "floor"}]}, "at is missing"),
        (AllOf, {"policies": [{"policy": "better", "margin": 1}]}, "no option 'margin'"),
        (AllOf, {"policies": [3]}, "no policy"),
        (NoWorse, {"margin": 0}, "margin must be"),
        (NoWorse, {"margin": True}, "margin must be"),
        (Floor, {}, "at is missing"),
        (Floor, {"at": 1.5}, "at must be"),
        (Protected, {"tasks": "t1"}, "list of task ids"),
        (Better, {"margin": 0.1}, "unknown gate option"),
    ],
)
def test_options_that_make_no_sense_are_named(gate, policy, options, match):
    with pytest.raises(ConfigError, match=match):
        gate(policy, **options)


@pytest.mark.parametrize("policy", [Better, NoWorse, Protected])
def test_a_policy_that_needs_a_suite_says_so(gate, policy):
    with pytest.raises(ConfigError, match=r"gate\.suite"):
        gate(policy, count=0)


# --- the gain, measured again -----------------------------------------------------------------------------------------


async def test_the_gain_is_measured_on_tasks_the_decision_did_not_see(gate, says, release, engine):
    """case 49: what was accepted looked good, for one reason or another, on the tasks that accepted it."""
    says |= {"i": right(0.3), "c": right(0.6)}
    policy = gate(count=96, sizes=Sizes(tasks=48))
    accepted = await policy.evaluate(release("c", "w1"), release("i"), 1)
    assert accepted.verdict == "accept"
    seen = {ask.body for ask in asked(engine, "c")}
    engine.asked.clear()
    says["released"] = says["c"]
    found = await policy.remeasure(release("released", "w1"), release("i"))
    assert found.fresh
    assert found.tasks == 48
    assert found.lower <= found.mean <= found.upper
    words = [json.loads(ask.body)["messages"][-1]["content"] for ask in asked(engine, "i")]
    assert not {json.loads(body)["messages"][-1]["content"] for body in seen} & set(words)


async def test_without_other_tasks_the_same_ones_are_asked_with_other_seeds(gate, says, release, engine):
    says |= {"i": right(0.3), "c": right(0.6), "released": right(0.6)}
    policy = gate(count=48)
    await policy.evaluate(release("c", "w1"), release("i"), 1)
    seeds = {json.loads(ask.body)["seed"] for ask in engine.asked}
    engine.asked.clear()
    found = await policy.remeasure(release("released", "w1"), release("i"))
    assert (found.fresh, found.tasks) == (False, 48)
    assert found.mean == pytest.approx(0.3, abs=0.05)
    assert not seeds & {json.loads(ask.body)["seed"] for ask in engine.asked}
    assert gate.book.turn("s", "next") == 1, "measuring again used nothing of the error budget"


async def test_a_candidate_pays_for_itself_while_an_old_release_is_measured(gate, says, release, engine):
    says |= {"i": right(0.3), "c": right(0.6), "new": right(0.6), "old": right(0.3)}
    policy = gate(count=48)
    look = policy.evaluate(release("c", "w1"), release("i"), 1)
    found, _ = await asyncio.gather(look, policy.remeasure(release("new", "w2"), release("old", "w3")))
    own = [ask for ask in engine.asked if ask.release_id in ("i", "c", "base")]
    assert len(own) < len(engine.asked)
    assert found.cost.calls == len(own)
    assert gate.book.spent("s").calls == len(engine.asked)


async def test_a_gain_needs_enough_tasks(gate, says, release):
    says |= {"i": right(0.2), "released": right(0.9)}
    assert await gate(count=8).remeasure(release("released", "w1"), release("i")) is None
    assert math.isclose(gate.book.budget("s"), 1.0)
