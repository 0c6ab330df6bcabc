"""Estimates by hand, and the whole measure on an engine whose log-probs are known."""

import math

import pytest

from reef.core.errors import EngineError
from reef.engines.fake import FakeEngine
from reef.study import drift


def test_estimates_by_hand():
    """Two answers, three tokens, gaps 0.5, -0.5 and 1."""
    k1, k3 = drift.estimates([[-1.0, -2.0], [-0.5]], [[-1.5, -1.5], [-1.5]])
    assert k1 == pytest.approx((0.5 - 0.5 + 1.0) / 3)
    # k3 is r - 1 - ln r with r = exp(-gap)
    by_hand = [math.exp(-gap) - 1 + gap for gap in (0.5, -0.5, 1.0)]
    assert k3 == pytest.approx(sum(by_hand) / 3)
    assert min(by_hand) > 0


def test_nothing_to_measure_is_an_error():
    with pytest.raises(EngineError, match="every answer was empty"):
        drift.estimates([[], []], [[], []])


def test_perplexity_by_hand():
    assert drift.perplexity([[math.log(0.5)], [math.log(0.125)]]) == pytest.approx(4.0)


def test_scores_are_shares_of_right_answers():
    right = ["Tokyo", "It is Berlin.", "seven", "Down.", "Small", "night", "H2O", "French", "German", "A cat", "EARTH"]
    right.append("Shakespeare")
    assert drift.score(right) == 1.0
    assert drift.score(["unearthed" if text == "EARTH" else text for text in right]) == pytest.approx(11 / 12)
    assert drift.score([""] * 12) == 0.0


async def test_a_release_beside_itself_has_not_moved():
    found = await drift.measure(FakeEngine(), "a" * 40, "a" * 40)
    assert found["kl"] == found["kl_k3"] == found["kl_back_k3"] == 0.0
    assert found["perplexity_before"] == found["perplexity_after"] > 1
    assert found["guard_before"] == found["guard_after"]


async def test_another_release_has_and_the_text_is_the_same_for_both():
    found = await drift.measure(FakeEngine(), "a" * 40, "b" * 40)
    assert found["kl_k3"] > 0
    assert found["kl_back_k3"] > 0
    assert found["perplexity_before"] != found["perplexity_after"]


async def test_only_the_paragraphs_are_rated():
    engine = FakeEngine()
    sequences, starts = await drift._text(engine, "a" * 40)
    assert [len(tokens) - start for tokens, start in zip(sequences, starts, strict=True)] == [
        len(text.split()) for text in drift.TEXT
    ]


async def test_questions_are_scored_by_what_is_said():
    def reply(release, body):
        return "Tokyo, 7 small cats at night, French and German" if release.startswith("b") else "no idea"

    found = await drift.measure(FakeEngine(reply=reply), "a" * 40, "b" * 40)
    assert found["guard_before"] == 0.0
    assert found["guard_after"] == pytest.approx(7 / 12)


async def test_an_engine_without_tokens_is_an_error():
    with pytest.raises(EngineError, match="gives no tokens"):
        await drift.measure(FakeEngine(tokens=False), "a" * 40, "b" * 40)
