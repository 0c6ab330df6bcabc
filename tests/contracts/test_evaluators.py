"""What every gate keeps to: one verdict with a reason, measured beside live traffic. A new policy is one line."""

import json
import math
import re
from dataclasses import replace

import pytest

from reef import evaluation
from reef.core.errors import ConfigError, EngineError
from reef.core.load import load
from reef.core.nouns import Choice, Part, Record, Release, Timing
from reef.engines.fake import FakeEngine, Fault
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.suite import GENERAL, Listed, Sources
from reef.harness.apply import Applied

CHECKS = {
    "always": False, "guarded": True, "floor": True, "better": True, "no_worse": True, "protected": True,
    "all_of": True,
}  # fmt: skip
"""Each policy, and whether it looks at what the candidate says."""
SUITED = {"floor", "better", "no_worse", "protected", "all_of"}
OPTIONS = {"floor": {"at": 0.5}, "all_of": {"policies": ["better", "no_worse", "protected"]}}

ANSWERS = dict(
    zip(
        (json.loads(task.question.messages)[0]["content"] for task in GENERAL),
        ["It is Paris, I think.", "It is a clear blue.", "There are 12 of them.", "Cold is its opposite.",
         "Spanish is spoken there.", "Shakespeare wrote that play.", "The Pacific is the largest.",
         "Plants absorb carbon dioxide.", "Bonjour to all of you!", "Gold is written Au.", "The sun is right there.",
         "Leonardo painted her.", "Cairo lies in Egypt.", "A dragon woke one morning."],
        strict=True,
    )
)  # fmt: skip


def sane(question):
    return ANSWERS.get(question, f"Here is what I know of {question}")


def empty(question):
    return ""


def red(question):
    return "red"


def release(name, digest):
    parts = {"weights": Part("lora", {"adapter_model.safetensors": (digest, 1)})}
    return Release(name, 1, "a", "publish", None, parts, None, 0, None, None, None, {}, "test", "", 0.0)


BASE, HEAD, CANDIDATE = release("base", "w0"), release("head", "w1"), release("candidate", "w2")


class Right:
    """Judges a sum: 1 when the number after it is right."""

    name, key = "right", "1"

    async def score(self, task, text):
        return evaluation.Score(float(str(2 * int(task.id)) in text))


SUMS = [
    evaluation.Task(str(n), Question.of(f"What is {n} and {n}?", temperature=1.0), Right(), protected=n < 104)
    for n in range(100, 132)
]
"""A candidate that is told to gets them right."""


def make(name, engine, prompts=None, tasks=SUMS, **options):
    """A policy by its name, with a memory of its own."""
    book = Book.memory()
    suite = Sources("a", [Listed("sums", tasks)], book) if tasks else None
    means = evaluation.Means(
        "a", engine, "base", book=book, suite=suite, prompts=prompts, renders=lambda one: Applied()
    )
    return load(evaluation.POLICIES[name])(means, evaluation.Sizes(), OPTIONS.get(name, {}) | options)


class Told:
    """An engine whose releases answer as they are told, and the policy over it."""

    def __init__(self, name):
        self.says = {}
        self.engine = FakeEngine(reply=self._reply)
        self.policy = self.again(name)

    def again(self, name):
        return make(name, self.engine, self._prompts)

    def _reply(self, release_id, body):
        return self.says.get(release_id, sane)(body["messages"][-1]["content"])

    async def _prompts(self):
        blank = Record("0" * 32, "a", "base", "live", "chat", "complete", b"", Timing(0.0))
        made = []
        for number in range(8):
            body = {"messages": [{"role": "user", "content": f"Tell me about thing number {number}"}]}
            said = Choice(0, f"Thing number {number} is made of wood and iron.")
            made.append(replace(blank, id=f"{number:032x}", request=json.dumps(body).encode(), choices=(said,)))
        return made


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr("reef.evaluation.ask.PAUSE", 0.0)


@pytest.fixture(params=CHECKS)
def name(request):
    return request.param


@pytest.fixture
def gate(name):
    return Told(name)


def adds(question):
    """A sane answer, and the right one to the suite's sums."""
    asked = re.match(r"What is (\d+) and", question)
    return f"That makes {2 * int(asked[1])}." if asked else sane(question)


def test_every_policy_is_here():
    assert CHECKS.keys() == evaluation.POLICIES.keys()


@pytest.mark.parametrize("said", [sane, adds, empty, red])
async def test_a_look_is_a_verdict_with_a_reason(gate, name, said):
    gate.says["candidate"] = said
    found = await gate.policy.evaluate(CANDIDATE, HEAD, 3)
    assert (found.candidate_id, found.incumbent_id, found.looks, found.policy) == ("candidate", "head", 3, name)
    spelled = {"accept": "Accepted", "reject": "Rejected", "undecided": "Undecided"}[found.verdict]
    assert found.reason.startswith(spelled)
    assert found.reason.endswith(".")
    assert found.seconds >= 0
    assert all(math.isfinite(value) for value in found.metrics.values())
    for guard in found.guards:
        assert guard.note
        assert guard.value is None or math.isfinite(guard.value)
    failed = [guard.name for guard in found.guards if not guard.passed]
    assert found.verdict == "reject" or not failed
    assert (found.suite is None) == (name not in SUITED or bool(failed)), "what it was measured on is on record"
    assert found.cost is None or found.cost.calls <= len(gate.engine.asked)


async def test_a_candidate_that_is_sane_and_better_is_accepted(gate):
    gate.says["candidate"] = adds
    assert (await gate.policy.evaluate(CANDIDATE, HEAD, 1)).verdict == "accept"


@pytest.mark.parametrize("said", [empty, red])
async def test_a_collapse_is_rejected_by_all_who_look(gate, name, said):
    gate.says["candidate"] = said
    found = await gate.policy.evaluate(CANDIDATE, HEAD, 1)
    assert found.verdict == ("reject" if CHECKS[name] else "accept")


async def test_the_same_look_ends_the_same(gate, name):
    for said in (adds, sane, red):
        gate.says["candidate"] = said
        fresh = [await gate.again(name).evaluate(CANDIDATE, HEAD, 1) for _ in range(2)]
        assert fresh[0] == replace(fresh[1], seconds=fresh[0].seconds, cost=fresh[0].cost)


async def test_it_asks_behind_live_traffic_and_nobody_else(gate, name):
    await gate.policy.evaluate(CANDIDATE, HEAD, 1)
    assert bool(gate.engine.asked) == CHECKS[name]
    assert all(ask.priority > 0 for ask in gate.engine.asked)
    assert {ask.release_id for ask in gate.engine.asked} <= {"candidate", "head", "base"}


async def test_an_engine_that_cannot_answer_now_is_no_verdict(gate, name):
    if not CHECKS[name]:
        assert (await gate.policy.evaluate(CANDIDATE, HEAD, 1)).verdict == "accept"
        return
    gate.engine.faults.extend(Fault("refuse") for _ in range(1000))
    with pytest.raises(EngineError):
        await gate.policy.evaluate(CANDIDATE, HEAD, 1)
    gate.engine.faults.clear()
    gate.says["candidate"] = adds
    assert (await gate.policy.evaluate(CANDIDATE, HEAD, 1)).verdict == "accept", "the failure left nothing behind"


async def test_a_candidate_that_cannot_be_loaded_is_rejected(gate, name):
    gate.engine.broken.add("candidate")
    found = await gate.policy.evaluate(CANDIDATE, HEAD, 1)
    assert found.verdict == ("reject" if CHECKS[name] else "accept")
    assert not CHECKS[name] or "load" in found.reason


def test_a_policy_that_needs_a_suite_says_so(name):
    if name in SUITED:
        with pytest.raises(ConfigError, match="suite"):
            make(name, None, tasks=())
    else:
        make(name, None, tasks=())


def test_an_option_that_does_not_exist_is_named(name):
    if CHECKS[name]:
        with pytest.raises(ConfigError, match="dritf"):
            make(name, None, dritf=1.0)
