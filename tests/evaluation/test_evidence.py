import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.evaluation.evidence import (
    Evidence,
    Wager,
    above,
    averaged,
    chance,
    differences,
    fisher,
    gain,
    mcnemar,
    msprt,
    quantile,
    standard_error,
    student,
    tail,
)
from reef.evaluation.scorers import graded

A = [1, 1, 0, 1, -1, 1, 1, 0]
B = [0.2, -0.1, 0.3, 0, 0.4, 0.1, 0.2, -0.2, 0.3, 0.1]


def pairs(differences):
    """Rows with one incumbent score that have these differences."""
    return [(max(d, 0.0), (max(-d, 0.0),)) for d in differences]


def counted(wins, losses):
    return [(1.0, (0.0,))] * wins + [(0.0, (1.0,))] * losses


scores = st.sampled_from([k / 12 for k in range(13)])
row = st.tuples(scores, st.lists(scores, min_size=1, max_size=3).map(tuple))


# --- worked numbers ---------------------------------------------------------------------------------------------------


def test_eight_wins_and_losses():
    mean, _, _ = gain(A)
    assert mean == 0.5
    assert standard_error(A) == pytest.approx(0.267261, abs=1e-6)
    assert tail(pairs(A)) == 28 / 256 == 0.109375
    assert tail(pairs(A)) == mcnemar(5, 1)
    assert student(mean / standard_error(A), 7) == pytest.approx(0.0518, abs=5e-5)


def test_ten_graded_differences():
    mean, lower, _ = gain(B, level=0.9)  # the lower end of a two-sided 90% interval is a one-sided 95% bound
    assert mean == pytest.approx(0.13)
    assert standard_error(B) == pytest.approx(0.059722, abs=1e-6)
    assert lower == pytest.approx(0.0205, abs=5e-5)
    assert tail(pairs(B)) == pytest.approx(0.04297, abs=5e-6)


@pytest.mark.parametrize("value", [-1.0, -0.25, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [2, 16, 192])
def test_equal_differences_are_no_certainty(value, n):
    """Other tasks may differ: a share that n tasks miss with a chance of 2.5% is allowed for, at either end."""
    mean, lower, upper = gain([value] * n)
    assert mean == pytest.approx(value)
    assert -1 <= lower <= value <= upper <= 1
    unseen = (upper - lower) / 2
    assert (1 - unseen) ** n == pytest.approx(0.025)
    assert (value - lower, upper - value) == pytest.approx((unseen * (1 + value), unseen * (1 - value)))


def test_sixteen_equal_differences():
    assert gain([0.0] * 16) == pytest.approx((0.0, -0.2059, 0.2059), abs=5e-5)
    nearly = gain([0.0] * 15 + [1e-6])
    assert nearly[2] - nearly[1] > 0.4, "a difference that no test sees is none"


@pytest.mark.parametrize(("wins", "losses", "p"), [(8, 2, 0.0547), (10, 2, 0.0193), (15, 5, 0.0207), (20, 10, 0.0494)])
def test_wins_and_losses(wins, losses, p):
    assert round(mcnemar(wins, losses), 4) == p
    assert tail(counted(wins, losses)) == pytest.approx(mcnemar(wins, losses), rel=1e-12)


def test_the_fewest_wins_that_suffice():
    fewest = [next(wins for wins in range(40) if mcnemar(wins, losses) <= 0.05) for losses in range(9)]
    assert fewest == [5, 7, 9, 10, 12, 13, 15, 16, 18]


def test_a_fixed_stake():
    wager = Wager(stake=0.25)
    path = [wager.add(difference) for difference in A]
    assert path == pytest.approx([1.25, 1.5625, 1.5625, 1.9531, 1.4648, 1.8311, 2.2888, 2.2888], abs=5e-5)
    assert wager.best < 20


def mixture(wins, losses):
    """2 * integral over p in (1/2, 1) of (2p)^wins (2(1 - p))^losses in closed form: a beta function and a tail."""
    n = wins + losses
    below = sum(math.comb(n + 1, k) for k in range(wins + 1)) / 2 ** (n + 1)
    return 2.0 ** (n + 1) * below / ((n + 1) * math.comb(n, wins))


@pytest.mark.parametrize(
    ("wins", "losses", "worked"),
    [(5, 1, 2.857), (8, 2, 4.002), (10, 1, 30.93), (12, 2, 23.92), (15, 3, 33.74),
     (4, 0, 6.2), (5, 0, 10.5), (6, 0, 18.14), (7, 0, 31.88), (8, 0, 56.78)],
)  # fmt: skip
def test_evidence_is_the_mixture_of_sign_tests(wins, losses, worked):
    assert mixture(wins, losses) == pytest.approx(worked, rel=1e-3)
    found = Evidence()
    for one in counted(wins, losses):
        found.add(*one)
    assert found.value == pytest.approx(worked, rel=0.005)  # 32 odds in place of the integral


@pytest.mark.parametrize(("n", "total", "worked"), [(50, 15, 16.367), (100, 30, 993.65)])
def test_the_normal_mixture(n, total, worked):
    assert msprt(total, n, 0.5, 0.04) == pytest.approx(worked, rel=1e-4)


def test_no_difference_is_no_evidence_and_no_tasks_neither():
    for rows in ([], [(0.5, (0.5, 0.5))] * 20, [(0.0, (0.0,))] * 20):
        assert (tail(rows), chance(rows)) == (1.0, 1.0)
        found = Evidence()
        for one in rows:
            found.add(*one)
        assert found.value == 1.0
    assert above([], 0.5) == 1.0
    assert gain([]) == (0.0, -1.0, 1.0)
    assert graded(math.nan).value is None  # missing, and never a 0


def test_equal_policies_are_seldom_called_better():
    """An A/A test: 200 gates of 5%, of which more than 16 would be surprising (the upper 2.5% of the binomial)."""
    rng = random.Random(14)
    accepts = 0
    for _ in range(200):
        rows = [(float(rng.random() < 0.3), [float(rng.random() < 0.3) for _ in range(3)]) for _ in range(48)]
        accepts += chance(rows) <= 0.05
    assert accepts <= 16


# --- properties -------------------------------------------------------------------------------------------------------


@given(st.lists(row, max_size=5))
@settings(max_examples=150, deadline=None)
def test_the_tail_is_what_going_through_all_of_it_gives(rows):
    seen = sum(Fraction(round(12 * ours)) for ours, _ in rows)
    whole = list(itertools.product(*([ours, *theirs] for ours, theirs in rows)))
    high = sum(sum(Fraction(round(12 * one)) for one in picked) >= seen for picked in whole)
    assert tail(rows) == pytest.approx(high / len(whole), abs=1e-12)


@given(st.lists(st.sampled_from(B + A), max_size=8))
@settings(max_examples=50, deadline=None)
def test_of_differences_it_is_the_sign_flip_test(found):
    seen = sum(round(60 * d) for d in found)
    flips = itertools.product((1, -1), repeat=len(found))
    high = sum(sum(s * round(60 * d) for s, d in zip(signs, found, strict=True)) >= seen for signs in flips)
    assert tail(pairs(found)) == pytest.approx(high / 2 ** len(found), abs=1e-12)


@given(row, row, st.sampled_from([1, -1]))
@settings(max_examples=150, deadline=None)
def test_evidence_does_not_grow_on_average(first, second, sign):
    """Whatever came before: over all places the candidate's score could have had in its row, the mean factor is 1."""
    before = Evidence(sign)
    before.add(*first)
    everything = [second[0], *second[1]]
    after = []
    for place, ours in enumerate(everything):
        one = Evidence(sign)
        one.add(*first)
        one.add(ours, [*everything[:place], *everything[place + 1 :]])
        after.append(one.value)
    assert math.fsum(after) / len(after) == pytest.approx(before.value, rel=1e-9)


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.8])
def test_equal_seeds_only_make_it_more_careful(repeats, p):
    """The same model at the same seed gives the incumbent's first answer again: then evidence shrinks on average."""
    for sign in (1, -1):
        mean = 0.0
        for theirs in itertools.product((0.0, 1.0), repeat=repeats):
            weight = math.prod(p if one else 1 - p for one in theirs)
            found = Evidence(sign)
            found.add(theirs[0], theirs)
            mean += weight * found.value
        assert mean <= 1 + 1e-9


def test_an_incumbent_that_never_varies_does_not_make_luck_look_like_proof():
    """A changed candidate that wins as many tasks as it loses: rows alone would find it better again and again."""
    rng = random.Random(3)
    careless = careful = 0
    for _ in range(300):
        rows = []
        for _ in range(100):
            theirs = float(rng.random() < 0.5)
            ours = float(rng.random() < 0.5) if rng.random() < 0.6 else theirs
            rows.append((ours, (theirs,) * 3))
        careless += tail(rows) <= 0.01
        careful += chance(rows) <= 0.01
    assert careful <= 9  # of 300 at 1%: more has a chance of 0.1%
    assert careless > 12


@given(st.integers(1, 60), st.floats(-6, 6))
@settings(deadline=None)
def test_student_is_a_chance_and_symmetric(freedom, t):
    assert 0 <= student(t, freedom) <= 1
    assert student(t, freedom) + student(-t, freedom) == pytest.approx(1)


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(6.313752, 1, 0.05), (2.919986, 2, 0.05), (1.833113, 9, 0.05), (2.262157, 9, 0.025), (1.646379, 1000, 0.05)],
)
def test_student_as_in_the_tables(t, freedom, p):
    assert student(t, freedom) == pytest.approx(p, rel=1e-4)
    assert quantile(p, freedom) == pytest.approx(t, rel=1e-4)


def test_above_is_the_binomial_and_never_less_for_graded_scores():
    assert above([1.0] * 8 + [0.0] * 2, 0.5) == pytest.approx(56 / 1024)
    assert above([1.0] * 5, 0.9) == pytest.approx(0.9**5)
    assert above([0.999] * 5, 0.9) >= 0.9**5
    assert above([0.5, 0.4], 0.5) == 1.0


def test_fisher_as_counted_by_hand():
    assert fisher(0, 4, 4, 4) == 1 / 70
    assert fisher(0, 8, 8, 8) == 1 / 12870
    assert fisher(4, 4, 4, 4) == 1.0


@given(st.lists(row, max_size=30))
@settings(max_examples=50, deadline=None)
def test_averages_keep_the_differences(rows):
    assert differences(averaged(rows)) == pytest.approx(differences(rows))
    assert 0 <= chance(rows) <= 1


def test_a_wager_cannot_lose_everything():
    wager = Wager(bound=-0.05)
    for score in [1.0] * 50 + [-1.0] * 50:
        assert wager.add(score) > 0


def test_a_wager_seldom_wins_where_nothing_is_to_be_won():
    rng = random.Random(5)
    won = 0
    for _ in range(200):
        wager = Wager()
        for _ in range(100):
            wager.add(rng.choice([1.0, -1.0, 0.0]))
        won += wager.best >= 20
    assert won <= 19  # of 200 at most 10 are expected; more than 19 has a chance of 0.3%
