"""The budget of tries and what `retry-after` says."""

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.engines.retry import Budget, retry_after


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1_800_000_000.0

    monkeypatch.setattr("time.time", lambda: Clock.now)
    monkeypatch.setattr("time.monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30", 30.0), ("0.2", 0.2), (" 7 ", 7.0), ("0", None), ("-3", None), ("abc", None), ("", None)),
        *(("nan", None), ("inf", None), ("1e999", None)),
        *(("Wed, 21 Oct 2015 07:28:00 GMT", None), ("Wed, 99 Zzz", None)),
    ],
)
def test_seconds(text, seconds):
    """Case 19."""
    assert retry_after({"retry-after": text}) == seconds


def test_dates_and_nothing(clock):
    """Case 19."""
    assert retry_after({"retry-after": formatdate(clock.now + 5, usegmt=True)}) == 5.0
    assert retry_after({"retry-after": formatdate(clock.now - 5, usegmt=True)}) is None
    assert retry_after({}) is None


@given(st.text())
def test_no_text_is_too_strange(text):
    found = retry_after({"retry-after": text})
    assert found is None or found > 0


def test_waits_grow_and_end(clock):
    budget = Budget(3, 100.0)
    waits = [budget.wait() for _ in range(4)]
    assert waits[3] is None
    assert budget.tries == 4
    for place, wait in enumerate(waits[:3]):
        assert 0.25 * 2**place <= wait <= 0.5 * 2**place


def test_what_is_asked_is_kept_to_or_not_tried(clock):
    """case 19: one budget of time and tries."""
    budget = Budget(9, 10.0)
    assert budget.wait(6.0) == 6.0
    clock.now += 6.0
    assert budget.wait(4.5) is None
    assert budget.wait(4.0) == 4.0
    clock.now += 4.0
    assert budget.wait() is None
    assert Budget(0, 10.0).wait() is None
