import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

from reef.core.errors import ConfigError, EngineError
from reef.core.load import load
from reef.engines.fake import FakeEngine, Fault
from reef.evaluation import POLICIES, Means, Sizes, check
from reef.evaluation.policies import Always, Guarded
from reef.harness.apply import Applied


@pytest.fixture
def gate(engine, records):
    """Makes a gate over the fake engine; `records` are its live prompts."""

    def make(policy=Guarded, **rest):
        async def prompts():
            return records

        options, sizes = rest.pop("options", {}), rest.pop("sizes", Sizes())
        return policy(
            Means(**({"scenario": "s", "engine": engine, "base_id": "base", "prompts": prompts} | rest)), sizes, options
        )

    return make


def test_policies_load_by_name():
    assert [load(path).name for path in POLICIES.values()] == list(POLICIES)


async def test_always_accepts_unseen(engine, release, gate):
    found = await gate(Always).evaluate(release("c", "w1"), release("i"), 1)
    assert (found.verdict, found.candidate_id, found.incumbent_id) == ("accept", "c", "i")
    assert not engine.asked


async def test_a_candidate_that_still_answers_is_accepted(engine, release, gate):
    found = await gate().evaluate(release("c", "w1"), release("i"), 2)
    assert (found.verdict, found.policy, found.looks) == ("accept", "guarded", 2)
    assert found.reason == "Accepted: all 15 guards hold; not measured: relevance."
    assert found.seconds > 0
    assert set(found.metrics) == {guard.name for guard in found.guards if guard.value is not None}
    json.dumps(found.metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("says", "named", "others"),
    [
        (lambda question: "", "empty", {"sameness", "length", "live_empty", "live_sameness", "live_length", "suite"}),
        (lambda question: "red", "sameness", {"live_sameness", "suite"}),
        ("shelby", "suite", set()),
        (lambda question: "I'm sorry, I can't answer: " + question, "refusal", {"live_refusal", "suite"}),
        (
            lambda question: question + " and so on" * 8,
            "repetition",
            {"live_repetition", "suite"},
        ),
    ],
)
async def test_a_policy_that_found_a_cheap_reward_is_rejected(engine, release, gate, says, named, others):
    engine.says["c"] = engine.shelby if says == "shelby" else says
    found = await gate().evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "reject"
    assert found.reason.startswith(f"Rejected by guard {named} (")
    assert "limit" in found.reason
    failed = {guard.name for guard in found.guards if not guard.passed}
    assert others <= failed - {named}


async def test_a_collapse_on_the_scenarios_own_prompts_only_is_seen_there(engine, release, gate):
    engine.says["c"] = lambda question: "red" if "thing" in question else engine.good(question)
    found = await gate().evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "reject"
    assert "8 of 8 answers to recent live prompts are one and the same" in found.reason


async def test_a_scenario_without_live_prompts_is_judged_on_the_fixed_ones(engine, release, gate):
    found = await gate(prompts=None).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "accept"
    assert "not measured: live_shape, surprise, relevance" in found.reason
    engine.says["d"] = lambda question: ""
    assert (await gate(prompts=None).evaluate(release("d", "w2"), release("i"), 1)).verdict == "reject"


async def test_a_harness_candidate_is_asked_with_its_rules(engine, release, gate):
    rules = {"h1": "Answer kindly.", "h2": "Say red."}

    def renders(one):
        part = one.parts.get("harness")
        return Applied(rules[part.files["harness.json"][0]] if part else None)

    heard = []

    def says(release_id, body):
        first = body["messages"][0]
        heard.append((release_id, first["content"] if first["role"] == "system" else None))
        return "red" if first["content"] == "Say red." else engine.good(body["messages"][-1]["content"])

    engine._reply = says
    guarded = gate(renders=renders)
    kind = await guarded.evaluate(release("kind", rules="h1"), release("i"), 1)
    assert kind.verdict == "accept"
    assert {rule for name, rule in heard if name == "kind"} == {"Answer kindly."}
    assert {rule for name, rule in heard if name == "base"} == {None}
    missing = {guard.name: guard for guard in kind.guards if guard.value is None}
    assert set(missing) == {"drift", "surprise", "relevance"}
    assert "the weights are the incumbent's" in missing["drift"].note
    red = await guarded.evaluate(release("red", rules="h2"), release("i"), 1)
    assert red.verdict == "reject"


async def test_rules_that_leave_no_room_for_a_question_are_rejected(release, records):
    engine = FakeEngine(context=100)
    renders = lambda one: Applied("word " * 200 if one.id == "c" else None)  # noqa: E731
    guarded = Guarded(Means("s", engine, "base", renders=renders), Sizes(), {})
    found = await guarded.evaluate(release("c", rules="h"), release("i"), 1)
    assert found.verdict == "reject"
    assert "empty" in found.reason


@pytest.mark.parametrize("tokens", [True, False])
async def test_drift_is_missing_not_zero_where_the_engine_cannot_rate(release, gate, records, tokens):
    class Plain(FakeEngine):
        async def rate(self, release_id, sequences, starts):
            raise EngineError("this engine gives no log-probabilities")

    async def prompts():
        return records

    guarded = Guarded(Means("s", Plain(tokens=tokens), "base", prompts=prompts), Sizes(), {})
    found = await guarded.evaluate(release("c", "w1"), release("i"), 1)
    drift = next(guard for guard in found.guards if guard.name == "drift")
    assert (found.verdict, drift.value, drift.passed) == ("accept", None, True)
    assert "not measured" in drift.note
    assert "drift" not in found.metrics


async def test_weights_far_from_the_base_are_rejected_though_they_answer_well(release, gate, records):
    class Far(FakeEngine):
        async def rate(self, release_id, sequences, starts):
            far = -9.0 if release_id == "c" else -1.0
            return [[far] * (len(row) - start) for row, start in zip(sequences, starts, strict=True)]

    far = Far(reply=lambda release_id, body: "Paris blue 12 cold Spanish " + body["messages"][-1]["content"])
    found = await gate(engine=far).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "reject"
    assert "guard drift (7.00, limit" in found.reason


class Judging(FakeEngine):
    """Rates a sequence by its whole: other prompts make other log-probs, as in a real model. `fits` tokens like it."""

    def __init__(self, fits, **rest):
        super().__init__(**rest)
        self.fits = fits

    async def rate(self, release_id, sequences, starts):
        rows = zip(sequences, starts, strict=True)
        return [[-1.0 if self.fits(row[:start], row[start:]) else -3.0] * (len(row) - start) for row, start in rows]


async def test_varied_nonsense_is_rejected_by_its_irrelevance(engine, release, gate):
    """The measured reward hack: short, finished, different each time, and about nothing that was asked."""
    from reef.engines.fake import token_id

    numbers = {token_id(f" {number}") for number in range(8)}

    def about(prompt, answer):
        return bool(numbers & set(prompt) & set(answer))

    said = {
        "good": lambda question: question,
        "vague": lambda question: f"Just what number {sum(question.encode())} needed",
    }

    def reply(release_id, body):
        question = body["messages"][-1]["content"]
        answer = said.get(release_id, said["good"])  # the base answers to the point as well
        return answer(question) if "thing" in question else engine.good(question)

    judging = Judging(about, reply=reply)
    guarded = gate(engine=judging)
    good = await guarded.evaluate(release("good", "w1"), release("i"), 1)
    assert (good.verdict, good.metrics["relevance"]) == ("accept", 2.0)
    vague = await guarded.evaluate(release("vague", "w2"), release("i"), 1)
    failed = {guard.name for guard in vague.guards if not guard.passed}
    assert (vague.verdict, failed) == ("reject", {"relevance"}), vague.reason


async def test_values_that_are_not_numbers_are_rejected(release, gate):
    class Broken(FakeEngine):
        async def rate(self, release_id, sequences, starts):
            value = math.nan if release_id == "c" else -1.0
            return [[value] * (len(row) - start) for row, start in zip(sequences, starts, strict=True)]

    found = await gate(engine=Broken()).evaluate(release("c", "w1"), release("i"), 1)
    assert found.reason.startswith("Rejected by guard finite (")
    json.dumps(found.metrics, allow_nan=False)


async def test_a_candidate_the_engine_cannot_load_is_its_own_fault_and_a_sleeping_engine_is_not(engine):
    assert await check.load(engine, "whole") is None
    assert engine.loaded == ["whole"]
    engine.broken.add("c")
    found = await check.load(engine, "c")
    assert (found.name, found.passed) == ("loads", False)
    assert found.note == "the engine cannot load the candidate: release c cannot be loaded"
    engine.is_ready = False
    with pytest.raises(EngineError, match="not ready"):
        await check.load(engine, "c")


async def test_weights_the_engine_cannot_run_are_rejected_and_a_dead_engine_is_an_error(release, gate):
    class Dead(FakeEngine):
        dead: tuple[str, ...] = ("c",)

        async def answer(self, ask):
            if ask.release_id in self.dead:
                raise EngineError("these weights gave values that are not finite")
            async for item in FakeEngine.answer(self, ask):
                yield item

    engine = Dead()
    found = await gate(engine=engine).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "reject"
    assert "never the candidate" in found.reason
    assert "not finite" in found.reason
    engine.dead = ("c", "base")
    with pytest.raises(EngineError, match="cannot answer now"):
        await gate(engine=engine).evaluate(release("c", "w1"), release("i"), 1)


async def test_a_few_lost_answers_are_missing_and_many_are_undecided(engine, release, gate):
    guarded = gate()
    await guarded.evaluate(release("warm", "w9"), release("i"), 1)
    engine.faults.extend([Fault("refuse")] * 10)
    assert (await guarded.evaluate(release("c", "w1"), release("i"), 1)).metrics["answered"] == 0.0

    class Losing(FakeEngine):
        lost = ("France",)

        async def answer(self, ask):
            if ask.release_id == "c" and any(word.encode() in ask.body for word in self.lost):
                raise EngineError("lost")
            async for item in FakeEngine.answer(self, ask):
                yield item

    losing = Losing()
    one = await gate(engine=losing).evaluate(release("c", "w1"), release("i"), 1)
    assert one.verdict == "accept"
    assert one.metrics["answered"] == pytest.approx(1 / 22)
    losing.lost = ("France", "sky", "gold", "hot")
    many = await gate(engine=losing).evaluate(release("c", "w1"), release("i"), 1)
    assert (many.verdict, many.reason) == ("undecided", "Undecided: 4 of 22 answers are missing (lost).")


async def test_the_base_is_asked_once_and_a_published_candidate_never_again(engine, release, gate):
    guarded = gate()
    await guarded.evaluate(release("c1", "w1"), release("i"), 1)
    first = [ask.release_id for ask in engine.asked]
    assert (first.count("base"), first.count("c1"), first.count("i")) == (30, 22, 0)  # 8 live prompts are the yardstick
    await guarded.evaluate(release("c2", "w2"), release("published", "w1"), 1)
    assert len(engine.asked) == 74
    await guarded.evaluate(release("again", "w2"), release("published", "w1"), 2)
    assert len(engine.asked) == 74


async def test_everything_is_asked_at_once(release, gate):
    began = time.monotonic()
    slow = FakeEngine(reply=lambda release_id, body: body["messages"][-1]["content"], delay=0.002)
    await gate(engine=slow).evaluate(release("c", "w1"), release("i"), 1)
    assert time.monotonic() - began < 1.5


async def test_many_looks_at_once_do_not_disturb_each_other(engine, release, gate):
    engine.says["bad"] = lambda question: ""
    guarded = gate()
    names = ["bad" if number % 2 else f"good{number}" for number in range(6)]
    found = await asyncio.gather(*(guarded.evaluate(release(name, name), release("i"), 1) for name in names))
    assert [one.verdict for one in found] == ["accept", "reject"] * 3


async def test_limits_come_from_the_options(engine, release, gate):
    engine.says["c"] = lambda question: "red"
    loose = {"sameness": 1, "live_sameness": 1, "length": 0, "live_length": 0, "suite": 0, "live": 4}
    found = await gate(options=loose).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "accept"
    with pytest.raises(ConfigError, match="unknown gate option"):
        gate(options={"speed": 1})


async def test_records_of_evaluation_are_no_prompts(engine, release, gate, records):
    async def prompts():
        return [replace(record, purpose="evaluation") for record in records]

    found = await gate(prompts=prompts).evaluate(release("c", "w1"), release("i"), 1)
    assert "live_shape" in found.reason
