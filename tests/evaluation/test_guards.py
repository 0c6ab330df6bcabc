import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ConfigError
from reef.core.nouns import Sampling
from reef.evaluation import guards
from reef.evaluation.ask import Reply
from reef.evaluation.guards import (
    Limits,
    drift,
    finite,
    fit,
    is_empty,
    is_loop,
    is_refusal,
    relevance,
    sampled,
    shape,
    suite,
    surprise,
)
from reef.evaluation.suite import GENERAL

VARIED = [f"This is answer number {n}, with a few words." for n in range(10)]


def failed(found):
    return {guard.name for guard in found if not guard.passed}


@pytest.mark.parametrize(
    ("text", "empty"),
    [("", True), (" \n", True), ("...", True), ("—", True), ("4", False), ("好", False), ("👍", False), ("x", False)],
)
def test_empty(text, empty):
    assert is_empty(text) is empty


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("A cat in a few words: Luna, Luna, Luna, Luna, Luna, Luna, Luna, Luna, Luna", True),
        ("I do not know. I do not know. I do not know. I do not know.", True),
        ("the cat sat on the mat and the dog sat on the cat", False),
        ("no no no", False),
        ("The capital of France is Paris.", False),
        ("", False),
    ],
)
def test_loop(text, loop):
    assert is_loop(text) is loop


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I’m sorry.", True),
        ("As an AI, I have no opinion.", True),
        ("I cannot answer this.", True),
        ("You can't see it from here.", False),
        ("Sorry is a word.", False),
    ],
)
def test_refusal(text, refusal):
    assert is_refusal(text) is refusal


def test_varied_answers_hold_and_each_collapse_fails_its_guard():
    limits = Limits()
    assert failed(shape(VARIED, VARIED, limits, live=False)) == set()
    assert "empty" in failed(shape(["", " ", *VARIED[:8]], VARIED, limits, live=False))
    assert failed(shape(["", *VARIED[:9]], VARIED, limits, live=False)) == set()
    assert "sameness" in failed(shape(["red"] * 10, VARIED, limits, live=False))
    assert "sameness" in failed(shape(["Red.", "red", "RED!", "red", " red", *VARIED[:5]], VARIED, limits, live=False))
    assert "repetition" in failed(shape(["so " * 12] * 3 + VARIED[:7], VARIED, limits, live=False))
    assert "refusal" in failed(shape([f"I can't say {n}." for n in range(10)], VARIED, limits, live=False))
    assert "length" in failed(shape(list("abcdefghij"), VARIED, limits, live=False))


def test_live_prompts_of_one_kind_may_have_few_answers_when_they_always_had():
    limits = Limits()
    yes = ["yes"] * 7 + ["no"]
    assert failed(shape(yes, VARIED[:8], limits, live=True)) == {"live_sameness"}
    assert failed(shape(yes, yes, limits, live=True)) == set()
    assert failed(shape([str(n) for n in range(8)], ["a long answer " * 40] * 8, limits, live=True)) == set()


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=14), st.lists(st.text(max_size=30), max_size=14), st.booleans()
)
def test_shape_is_always_measurable_and_honest(texts, reference, live):
    found = shape(texts, reference, Limits(), live=live)
    assert len(found) == 5
    for guard in found:
        assert math.isfinite(guard.value)
        assert math.isfinite(guard.limit)
        better = (
            guard.value >= guard.limit - 1e-9 if guard.name.endswith("length") else guard.value <= guard.limit + 1e-9
        )
        assert guard.passed == better
    if reference:
        assert failed(shape(reference, reference, Limits(), live=live)) == set()


def test_suite_counts_only_what_the_base_knows():
    right = [Reply(answer) for answer in ("Paris", "blue", "12", "cold", "Spanish", "Shakespeare", "Pacific", "carbon")]
    tasks = GENERAL[:8]
    half = right[:4] + [Reply("red")] * 4
    assert suite(tasks, half, right, Limits()).passed
    assert not suite(tasks, right[:3] + [Reply("red")] * 5, right, Limits()).passed
    assert suite(tasks, right[:2] + [Reply("red")] * 6, half, Limits()).passed
    blind = suite(tasks, right, [Reply("red")] * 8, Limits())
    assert (blind.passed, blind.value) == (True, None)


def test_drift_is_k3_over_tokens_of_the_base():
    base = [[-1.0, -2.0], [-0.5]]
    assert drift(base, base, Limits()).value == 0
    ratios = [-0.5, 0.5, -1.0]
    ours = [[-1.5, -1.5], [-1.5]]
    assert drift(ours, base, Limits()).value == pytest.approx(sum(math.exp(r) - 1 - r for r in ratios) / 3)
    assert not drift([[-9.0, -9.0], [-9.0]], base, Limits()).passed
    assert drift([], [], Limits()).value is None


def test_surprise_counts_each_answer_once():
    ours = [[-0.1], [-1.0] * 9, [-1.0], [-1.0]]
    base = [[-8.1], [-1.0] * 9, [-1.0], [-1.0]]
    assert surprise(ours, base, Limits()).value == pytest.approx(2.0)
    assert not surprise([[-0.0]] * 4, [[-12.0]] * 4, Limits()).passed
    few = surprise([[-0.1], []], [[-9.0], []], Limits())
    assert (few.passed, few.value) == (True, None)


def test_relevance_asks_whether_varied_answers_belong_to_their_prompts():
    texts = ["Rain is water.", "Salt is white.", "Bread is food.", "Chess is a game."]
    own = [[-1.0, -1.0]] * 4
    usual = fit(own, [[-3.0, -3.0]] * 4)
    assert usual == 2.0
    apart = relevance(texts, own, [[-3.0, -2.0]] * 4, usual, Limits())
    assert (apart.passed, apart.value, apart.limit) == (True, 1.5, 1.0)
    unrelated = relevance(texts, own, [[-1.1, -1.0]] * 4, usual, Limits())
    assert not unrelated.passed
    assert unrelated.value == pytest.approx(0.05)
    for few in (["yes", "no", "yes", "no"], texts[:3]):
        found = relevance(few, own[: len(few)], [[-3.0, -3.0]] * len(few), usual, Limits())
        assert (found.passed, found.value) == (True, None)


def test_relevance_is_measured_beside_the_bases_own():
    """Prompts that look alike: the base's answers fit theirs by 0.4 only, so 0.3 is no reason to reject."""
    texts = ["2+3 = 5", "4+4 = 8", "1+6 = 7", "9+2 = 11"]
    own, others = [[-1.0, -1.0]] * 4, [[-1.3, -1.3]] * 4
    assert relevance(texts, own, others, 0.4, Limits()).passed
    assert not relevance(texts, own, others, 1.0, Limits()).passed
    for usual in (None, 0.0, 0.09):  # never measured, or the prompts cannot be told apart
        found = relevance(texts, own, own, usual, Limits())
        assert (found.passed, found.value) == (True, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_fails_and_never_leaves_as_one(bad):
    assert not finite([[-1.0, bad]]).passed
    assert finite([[-1.0]]).passed
    assert finite([]).value is None
    for found in (drift([[bad]], [[-1.0]], Limits()), surprise([[-1.0]] * 4, [[bad]] * 4, Limits())):
        assert math.isfinite(found.value)
        assert not found.passed


def test_options_become_limits_or_name_the_wrong_key():
    assert Limits.of({}) == Limits()
    assert Limits.of({"drift": 1, "live": 4}) == Limits(drift=1, live=4)
    for wrong in ({"drfit": 1}, {"drift": "big"}, {"drift": -1}, {"drift": math.nan}, {"live": 1.5}, {"empty": True}):
        with pytest.raises(ConfigError) as caught:
            Limits.of(wrong)
        assert caught.value.param == f"gate.options.{next(iter(wrong))}"


def test_live_prompts_are_distinct_finished_and_few(records, monkeypatch):
    records = [replace(records[0], request=b"{"), replace(records[0], request=b"[]"), records[0], records[0], *records]
    found = sampled(records, 5)
    assert [json.loads(question.messages)[0]["content"][-1] for question, _ in found] == list("01234")
    assert [question.seed for question, _ in found] == [0, 1, 2, 3, 4]
    assert found[2][1].startswith("Thing number 2")
    formed = Sampling(legal='{"choice":["yes","no"]}')  # a free answer to such a prompt says nothing about it
    wrong = {"purpose": "evaluation", "dialect": "messages", "status": "open", "choices": (), "sampling": formed}
    for name, value in wrong.items():
        assert sampled([replace(records[-1], **{name: value})], 5) == []
    monkeypatch.setattr(guards, "LIVE_BYTES", 150)
    assert len(sampled(records, 5)) == 2
