"""What counts as a row, and what the evidence says of it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.nouns import Report
from reef.evaluation.evidence import Evidence
from reef.loop.compare import LEAST, REPEATS, Comparison
from reef.records.lookup import Source


class Log:
    """Feeds a comparison of release `new` with release `old`, one report after the other."""

    def __init__(self, **options: Any) -> None:
        self.comparison = Comparison("new", ["old"], **options)
        self.count = 0

    def say(self, release: str, *scores: float | None, session: str | None = None, purpose: Any = "live") -> None:
        for score in scores:
            self.count += 1
            receipt = f"record {self.count}"
            self.quote(score, {receipt: Source(release, session, purpose)})

    def quote(self, score: float | None, sources: dict[str, Source], **fields: Any) -> None:
        self.count += 1
        self.comparison.add(Report(f"report {self.count}", "s", tuple(sources), 0.0, score=score, **fields), sources)


def test_two_values_are_compared_like_the_gates_own_scores() -> None:
    log, plain = Log(reports=4), Evidence(-1)
    log.say("old", 0.0, 1.0, 1.0, 1.0)  # the newest first, and as many as last for four rows
    for score, theirs in ((0.0, [1.0]), (0.0, [1.0]), (1.0, [1.0]), (1.0, [0.0])):
        log.say("new", score)
        plain.add(score, theirs)
        assert log.comparison.value == pytest.approx(plain.value)
    assert log.comparison.over


def test_plenty_of_old_scores_make_rows_of_three() -> None:
    log, plain = Log(reports=10), Evidence(-1)
    log.say("old", *[1.0] * 50)
    log.say("new", 0.0)
    plain.add(0.0, [1.0] * REPEATS)
    assert log.comparison.value == pytest.approx(plain.value)
    log.say("new", *[0.0] * 8)
    assert log.comparison.alarmed
    rows = log.comparison.rows
    log.say("new", 0.0)
    assert log.comparison.rows == rows  # it is over


def test_six_rows_of_the_worst_kind_are_not_enough_and_seven_are() -> None:
    log = Log(reports=300)
    log.say("old", *[1.0] * LEAST)
    log.say("new", *[0.0] * (LEAST - 1))
    assert not log.comparison.alarmed
    log.say("new", 0.0)
    assert log.comparison.alarmed


def test_nothing_is_used_twice_and_without_old_scores_there_is_no_row() -> None:
    log = Log()
    log.say("new", 0.0, 0.0)
    log.say("old", 1.0)
    log.say("new", 0.0, 0.0)
    assert (log.comparison.rows, log.comparison.new, log.comparison.old) == (1, [0.0] * 4, [1.0])


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_does_not_count(score: float | None) -> None:
    log = Log()
    log.say("old", 1.0, score)
    log.say("new", score)
    assert (log.comparison.rows, len(log.comparison.old)) == (0, 1)


def test_other_traffic_does_not_count() -> None:
    log = Log()
    log.say("old", 1.0)
    log.say("new", 0.0, purpose="evaluation")
    log.say("another", 0.0)
    assert (log.comparison.rows, log.comparison.new) == (0, [])


def test_a_record_counts_once_and_a_session_once_on_each_side() -> None:
    log = Log()
    log.say("old", *[1.0] * 5, session="ada")
    assert len(log.comparison.old) == 1
    log.say("old", *[1.0] * 5)
    for _ in range(5):
        log.quote(0.0, {"the same": Source("new", None, "live")})
    log.say("new", *[0.0] * 5, session="ada")
    assert log.comparison.new == [0.0, 0.0]


def test_a_report_on_many_records_is_one_row_with_their_mean() -> None:
    log = Log()
    log.say("old", 1.0, 1.0)
    sources = {f"turn {turn}": Source("new", "ada", "live") for turn in range(4)}
    log.quote(1.0, sources, per_receipt={"turn 3": 0.0})
    assert (log.comparison.rows, log.comparison.new) == (1, [0.75])
    assert [score for _, score in log.comparison.receipts] == [1.0, 1.0, 1.0, 0.0]


def test_one_absurd_score_does_not_blind_it() -> None:
    log = Log()
    log.say("old", *[1.0] * 99, 1e300)
    log.say("new", *[-1.0] * 20)
    assert log.comparison.alarmed


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_the_scale_of_scores_plays_no_part(seed: int, stretch: float, shift: float) -> None:
    draw = random.Random(seed)
    logs = Log(), Log()
    for _ in range(40):
        release, score = draw.choice(["old", "new"]), draw.randrange(5)
        logs[0].say(release, score)
        logs[1].say(release, score * stretch + shift)
    assert logs[0].comparison.value == pytest.approx(logs[1].comparison.value)


def test_false_alarms_are_rare_and_real_ones_come_soon() -> None:
    """1,000 releases that are no worse, at the alpha of 5%; then 100 that lost 30 points."""
    draw, false, slow = random.Random(7), 0, 0
    for _ in range(1000):
        log = Log(reports=60)
        chance = draw.choice([0.3, 0.5, 0.8])
        log.say("old", *[float(draw.random() < chance) for _ in range(100)])
        log.say("new", *[float(draw.random() < chance) for _ in range(60)])
        false += log.comparison.alarmed
    for _ in range(100):
        log = Log()
        log.say("old", *[float(draw.random() < 0.7) for _ in range(300)])
        log.say("new", *[float(draw.random() < 0.4) for _ in range(100)])
        slow += not log.comparison.alarmed
    assert false <= 50
    assert slow <= 5
