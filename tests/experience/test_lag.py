"""Staleness: the numbers of the design's own example, and what a rollback does to them."""

from __future__ import annotations

from typing import Any

import pytest

from reef.core.errors import MissingError
from reef.core.nouns import Choice, Record, Release, Report, Span, Timing, Unit
from reef.experience.lag import judge, lag


def release(name: str, step: int, base: str | None, operation: Any = "publish") -> Release:
    return Release(name, 0, "s", operation, base, {}, base, step, None, None, None, {}, "learner", "", 0.0)


CHAIN = {
    "base": release("base", 0, None, "create"),
    "r1": release("r1", 4, "base"),
    "r2": release("r2", 9, "r1"),
    "back": release("back", 4, "r1", "rollback"),  # the operator went back from r2 to r1
    "h": release("h", 9, "r2"),  # a harness release on r2: no optimizer step
}


def get(name: str) -> Release:
    try:
        return CHAIN[name]
    except KeyError:
        raise MissingError(f"no release {name}") from None


def unit(name: str, *origins: str) -> Unit:
    spans = tuple(Span(origin, at, at + 1) for at, origin in enumerate(origins))
    choices = (Choice(0, "", spans=spans),)
    record = Record(name, "s", origins[0], "live", "chat", "complete", b"", Timing(0.0), choices=choices)
    return Unit(f"{name}:0", record, 0, Report("rep", "s", (name,), 0.0), 1.0, None)


def test_the_designs_example() -> None:
    """Chain base(0), r1(4), r2(9); a line on r2 at step 11; the bound is 4."""
    units = [unit("a", "r2"), unit("b", "r1"), unit("c", "base")]
    assert judge(get, CHAIN["r2"], 11, units, 4) == {"a:0": 2, "b:0": "stale", "c:0": "stale"}
    assert [lag(get, CHAIN["r2"], 11, name) for name in ("r2", "r1", "base")] == [2, 7, 11]


def test_after_a_rollback_the_abandoned_release_is_foreign() -> None:
    """Back to r1, a new line at step 4: what r2 answered is dropped, what r1 answered has lag 0."""
    units = [unit("a", "r2"), unit("b", "r1"), unit("c", "back")]
    assert judge(get, CHAIN["back"], 4, units, 4) == {"a:0": "foreign", "b:0": 0, "c:0": 0}


def test_a_release_of_another_part_adds_no_lag() -> None:
    assert judge(get, CHAIN["h"], 11, [unit("a", "h"), unit("b", "r2")], 4) == {"a:0": 2, "b:0": 2}


@pytest.mark.parametrize("bound", [0, 4])
def test_the_bound_is_inclusive(bound: int) -> None:
    assert judge(get, CHAIN["r2"], 9 + bound, [unit("a", "r2")], bound) == {"a:0": bound}
    assert judge(get, CHAIN["r2"], 10 + bound, [unit("a", "r2")], bound) == {"a:0": "stale"}


def test_an_answer_of_two_releases_is_as_old_as_the_older_and_as_foreign_as_any() -> None:
    assert judge(get, CHAIN["r2"], 10, [unit("a", "r2", "r1")], 6) == {"a:0": 6}
    assert judge(get, CHAIN["back"], 4, [unit("a", "r1", "r2")], 6) == {"a:0": "foreign"}


def test_an_unknown_release_is_foreign() -> None:
    assert judge(get, CHAIN["r2"], 9, [unit("a", "nowhere")], 4) == {"a:0": "foreign"}
    assert lag(get, CHAIN["r2"], 9, "nowhere") is None
