import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.evaluation.budget import MOST, left, share


def test_the_shares_sum_to_one_and_no_more():
    total = Fraction(0)
    for turn in range(1, 300 * 2**6 + 1):
        total += Fraction(share(turn))
    rest = Fraction(1, 10) / 2**6  # of the 10% for later candidates, what the stretches to come have
    assert float(total + rest) == pytest.approx(1.0, abs=1e-12)
    assert total + rest <= 1 + Fraction(1, 10**12)


@given(st.integers(1, 10**9))
@settings(deadline=None)
def test_it_never_ends_and_never_grows(turn):
    assert 0 < share(turn + 1) <= share(turn)


def test_the_first_and_the_hundredth():
    assert share(1) == pytest.approx(0.035 + 0.55 / 300)
    assert share(100) == pytest.approx(0.55 / 300, rel=1e-3)
    assert share(300) > 100 * 6 / (3.1416 * 300) ** 2  # where the usual schedule has almost nothing left
    with pytest.raises(ValueError):
        share(0)


@given(st.lists(st.integers(1, 400), max_size=30))
@settings(max_examples=40, deadline=None)
def test_a_life_never_gives_out_more_than_one_for_each_release_and_one(releases):
    budget, spent = 1.0, 0.0
    for turn in releases:
        spent += budget * sum(share(k) for k in range(1, turn + 1))
        budget = left(budget, turn)
        assert 1 <= budget <= MOST
    spent += budget  # all of what the last era may still give out
    assert spent <= len(releases) + 1 + 1e-9


def test_a_quick_release_leaves_most_of_its_budget():
    assert left(1.0, 1) == pytest.approx(2 - share(1))
    assert left(1.0, 10**5) == pytest.approx(1.0, abs=1e-3)
    assert left(MOST, 1) == MOST


def test_lives_without_anything_better_stay_within_the_budget():
    """Candidates whose p-values are uniform, the worst that an exact test can do: 5% of lives have a false release."""
    rng = random.Random(7)
    spoilt = sum(any(rng.random() <= 0.05 * share(turn) for turn in range(1, 301)) for _ in range(1000))
    assert spoilt <= 68  # of 1000 at 4.5%: more has a chance of 0.1%
