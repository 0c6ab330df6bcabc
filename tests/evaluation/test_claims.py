"""The gate's decisions on simulated candidates: what `bench/gate.py` measures at length, each in a second or so."""

import random

import pytest

from reef.evaluation.budget import left, share
from reef.evaluation.claims import Above, Higher, Look, NoLower, Progress

ALPHA, CHUNK = 0.05, 16


def decide(claims, rows, least=16):
    """(verdict, tasks asked, words), chunk by chunk as a policy does it."""
    look = Look(claims, least)
    for start in range(0, len(rows), CHUNK):
        end = start + CHUNK
        if (verdict := look.take(rows[start:end], final=end >= len(rows))) is not None:
            return verdict, end, look.words(verdict)
    raise AssertionError("a final look has a verdict")


def incumbent(rng, tasks, p=0.3, repeats=3):
    return [tuple(float(rng.random() < p) for _ in range(repeats)) for _ in range(tasks)]


def candidate(rng, answers, p):
    return [(float(rng.random() < p), theirs) for theirs in answers]


def changed(rng, answers, p):
    """No better, but other tasks are passed: one in three has a chance of its own, with the same mean."""
    chances = [rng.choice((0.0, 2 * p)) if rng.random() < 1 / 3 else p for _ in answers]
    return [(float(rng.random() < chance), theirs) for chance, theirs in zip(chances, answers, strict=True)]


def test_of_2000_equal_candidates_almost_none_is_released():
    """case 49: ten lives of 200 candidates that are no better, each life against the same incumbent's answers. A life
    has a false release with a chance of at most 5%; more than three of ten would be a chance of 0.1%."""
    spoilt, releases = 0, 0
    for seed in range(10):
        rng = random.Random(seed)
        budget, turn, mine = 1.0, 0, 0
        answers = incumbent(rng, 48)
        for number in range(200):
            turn += 1
            rows = (changed if number % 2 else candidate)(rng, answers, 0.3)
            if decide([Higher(ALPHA * budget * share(turn), 48)], rows)[0] == "accept":
                budget, turn, mine = left(budget, turn), 0, mine + 1
                answers = incumbent(rng, 48)
        spoilt, releases = spoilt + (mine > 0), releases + mine
    assert spoilt <= 3
    assert releases <= 4


def test_equal_candidates_are_seldom_called_better_at_the_plain_level():
    """The same decisions with all of 5% for each candidate: of 200, more than 20 have a chance of 0.1%; and some are
    there, or the test could not fail."""
    rng = random.Random(49)
    accepted = sum(
        decide([Higher(ALPHA, 96)], candidate(rng, incumbent(rng, 96), 0.3))[0] == "accept" for _ in range(200)
    )
    assert 1 <= accepted <= 20


def test_twenty_points_are_found_though_200_candidates_failed_before():
    """Power 0.8 at least: fewer than 11 of 20 would be a chance of 0.3%."""
    rng = random.Random(200)
    found = [decide([Higher(ALPHA * share(200), 192)], candidate(rng, incumbent(rng, 192), 0.5))[0] for _ in range(20)]
    assert found.count("accept") >= 11
    assert "reject" not in found


def test_a_clear_winner_needs_few_tasks_and_a_loser_too():
    winner, loser = [(1.0, (0.0, 0.0, 0.0))] * 192, [(0.0, (1.0, 1.0, 1.0))] * 192
    verdict, asked, words = decide([Higher(ALPHA * share(1), 192)], winner)
    assert (verdict, asked) == ("accept", 16)
    assert words.startswith("better: the evidence is")
    verdict, asked, words = decide([Higher(ALPHA * share(1), 192)], loser)
    assert (verdict, asked) == ("reject", 16)
    assert words.startswith("worse than the incumbent")


def test_equal_answers_end_a_look_undecided_before_all_are_asked():
    verdict, asked, words = decide([Higher(ALPHA * share(10), 192)], [(0.5, (0.5, 0.5, 0.5))] * 192)
    assert verdict == "undecided"
    assert asked < 192
    assert "no hope" in words


def test_giving_up_costs_no_power():
    """Of candidates that would pass at the end, giving up early loses hardly any."""
    rng = random.Random(8)
    limit = ALPHA * share(30)
    for lift in (0.1, 0.2):
        looks = [candidate(rng, incumbent(rng, 96), 0.3 + lift) for _ in range(30)]
        patient = 0
        for rows in looks:
            look = Look([Higher(limit, 96)], 16)
            patient += look.take(rows, final=True) == "accept"
        hasty = sum(decide([Higher(limit, 96)], rows)[0] == "accept" for rows in looks)
        assert patient - hasty <= 2


def test_no_hope_when_nothing_can_be_gained():
    progress = Progress(192, 1e-4, 0.2)
    for _ in range(96):
        progress.add(-0.1)
    assert progress.hopeless
    progress = Progress(192, 1e-4, 0.2)
    for _ in range(96):
        progress.add(0.15)
    assert not progress.hopeless


@pytest.mark.parametrize(
    ("claim", "needs"),
    [
        (Higher(0.0018, 192), 10),
        (Higher(0.00009, 192), 14),
        (Above(0.0018, 192, 0.5), 10),
        (Above(0.0018, 192, 0.95), 126),
    ],
)
def test_fewer_tasks_than_needed_can_show_nothing(claim, needs):
    assert claim.needs == needs
    rows = [(1.0, (0.0,))] * (needs - 1)
    look = Look([claim], least=2)
    assert look.needs == needs
    assert look.take(rows, final=True) == "undecided"
    assert Look([type(claim)(0.0018, 192, 0.5) if isinstance(claim, Above) else Higher(0.0018, 192)], 2).take(
        [(1.0, (0.0,))] * 14, final=True
    ) == "accept"  # fmt: skip


def test_too_few_answers_are_no_evidence():
    look = Look([Higher(0.01, 192)], least=16)
    assert look.take([(1.0, (0.0,))] * 15, final=True) == "undecided"
    assert look.words("undecided") == "not enough evidence: 15 tasks were answered and judged, 16 are needed"


# --- no worse, and a floor --------------------------------------------------------------------------------------------


def test_no_worse_says_how_many_tasks_it_would_need():
    rng = random.Random(2)
    rows = candidate(rng, incumbent(rng, 192, 0.5), 0.5)
    verdict, _, words = decide([NoLower(ALPHA * share(1), 192, 0.05)], rows)
    assert verdict == "undecided"
    needed = int(words.split("about ")[1].split(" ")[0])
    assert 192 < needed < 20000


def test_no_worse_accepts_the_same_answers_and_what_is_better():
    same = [(1.0, (1.0,)), (0.0, (0.0,))] * 96
    assert decide([NoLower(ALPHA * share(1), 192, 0.05)], same)[0] == "accept"
    rng = random.Random(3)
    better = candidate(rng, incumbent(rng, 192), 0.6)
    assert decide([NoLower(ALPHA * share(100), 192, 0.05)], better)[0] == "accept"


def test_no_worse_is_seldom_wrong_at_its_margin():
    """Exactly `margin` worse, in the way that is hardest to see: a task in twenty fails. Of 300 at 5%, more than 28
    would be a chance of 0.1%."""
    rng = random.Random(4)
    wrong = 0
    for _ in range(300):
        rows = [(0.0 if rng.random() < 0.05 else 1.0, (1.0, 1.0, 1.0)) for _ in range(96)]
        wrong += decide([NoLower(0.05, 96, 0.05)], rows)[0] == "accept"
    assert wrong <= 28


def test_no_worse_rejects_what_is_clearly_worse():
    rng = random.Random(5)
    verdict, _, words = decide([NoLower(0.01, 192, 0.05)], candidate(rng, incumbent(rng, 192, 0.8), 0.3))
    assert verdict == "reject"
    assert "worse by more than 5 points" in words


def test_a_floor_is_of_the_candidate_alone():
    rng = random.Random(6)
    for p, verdict in ((0.9, "accept"), (0.3, "reject")):
        assert decide([Above(0.01, 96, 0.6)], candidate(rng, incumbent(rng, 96, 1.0), p))[0] == verdict
    wrong = sum(
        decide([Above(0.05, 96, 0.6)], candidate(rng, incumbent(rng, 96, 0.0), 0.6))[0] == "accept" for _ in range(200)
    )
    assert wrong <= 20  # of 200 at 5%: more has a chance of 0.1%


def test_all_claims_must_hold_and_one_that_fails_ends_the_look():
    worse = [(0.0, (1.0,))] * 96
    assert decide([Higher(0.01, 96), Above(0.01, 96, 0.5)], worse)[:2] == ("reject", 16)
    better = [(1.0, (0.0,))] * 96
    verdict, _, words = decide([Higher(0.01, 96), NoLower(0.01, 96, 0.05), Above(0.01, 96, 0.5)], better)
    assert verdict == "accept"
    assert words.count(";") == 2
