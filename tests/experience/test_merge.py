"""Merging turns: the worked examples, and that nothing is ever trained that was not sampled behind that very prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Sample
from reef.experience.merge import Merged, merge


def turn(prompt: list[int], output: list[int], logprobs: list[float], **fields: object) -> Sample:
    made = Sample(
        tokens=(*prompt, *output), prompt_length=len(prompt), mask=(1,) * len(output), logprobs=tuple(logprobs),
        reward=1.0, record_id=f"r{len(prompt)}",
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


FIRST = turn([5, 6], [7, 8], [-0.1, -0.2])


@pytest.mark.parametrize(
    ("prompt", "tolerance", "tokens", "mask", "logprobs", "realigned"),
    [
        ([5, 6, 7, 8, 9], 0, [5, 6, 7, 8, 9, 10], [1, 1, 0, 1], [-0.1, -0.2, 0, -0.3], 0),
        ([5, 6, 7, 99, 9], 0, [5, 6, 7, 99, 9, 10], [0, 0, 0, 1], [0, 0, 0, -0.3], 2),
        ([5, 6, 99, 9], 0, [5, 6, 99, 9, 10], [0, 0, 1], [0, 0, -0.3], 2),
        ([5, 77, 7, 8, 9], 1, [5, 77, 7, 8, 9, 10], [0, 0, 0, 1], [0, 0, 0, -0.3], 2),
    ],
)
def test_the_worked_examples(
    prompt: list[int], tolerance: int, tokens: list[int], mask: list[int], logprobs: list[float], realigned: int
) -> None:
    merged = merge([FIRST, turn(prompt, [10], [-0.3])], tolerance)
    assert isinstance(merged, Merged)
    sample = merged.sample
    assert (list(sample.tokens), list(sample.mask), list(sample.logprobs)) == (tokens, mask, logprobs)
    assert (sample.prompt_length, merged.realigned) == (2, realigned)
    assert (sample.record_id, sample.reward) == (f"r{len(prompt)}", 1.0)


def test_a_changed_history_is_a_fork() -> None:
    assert merge([FIRST, turn([5, 77, 7, 8, 9], [10], [-0.3])]) == "fork"


def test_more_tokens_than_the_threshold_are_never_cut() -> None:
    later = turn([5, 6, 7, 99], [10], [-0.3])
    assert merge([FIRST, later], threshold=0) == "fork"
    assert isinstance(merge([FIRST, later], threshold=1), Merged)


def test_what_cannot_be_one_sequence() -> None:
    later = turn([5, 6, 7, 8, 9], [10], [-0.3])
    assert merge([FIRST, replace(later, temperature=0.5)]) == "temperature"
    assert merge([FIRST, replace(later, legal="{}")]) == "grammar"
    silent = replace(FIRST, mask=(0, 0))
    assert merge([silent, replace(later, mask=(0,))]) == "signal"


def test_one_turn_is_itself() -> None:
    assert merge([replace(FIRST, legal="{}")]) == Merged(replace(FIRST, legal="{}"), 0)


@st.composite
def sessions(draw: st.DrawFn) -> list[Sample]:
    """Turns whose prompts go on from what was before, now and then with some of it written differently."""
    tokens = st.integers(0, 2)
    prompt = draw(st.lists(tokens, min_size=1, max_size=4))
    turns: list[Sample] = []
    for number in range(draw(st.integers(1, 5))):
        output = draw(st.lists(tokens, min_size=1, max_size=4))
        logprobs = [-(number + 1) - place / 100 for place in range(len(output))]
        turns.append(turn(prompt, output, logprobs))
        prompt = [*prompt, *output]
        if draw(st.booleans()):
            prompt[draw(st.integers(0, len(prompt) - 1))] = 9
        prompt = prompt[: draw(st.integers(1, len(prompt)))] + draw(st.lists(tokens, max_size=3))
    return turns


@settings(max_examples=400, deadline=None)
@given(sessions(), st.integers(0, 3), st.sampled_from([0, 2, 1024]))
def test_what_trains_was_sampled_behind_exactly_that_prefix(
    turns: list[Sample], tolerance: int, threshold: int
) -> None:
    merged = merge(turns, tolerance, threshold)
    if isinstance(merged, str):
        assert merged == "fork"
        return
    sample = merged.sample
    assert sample.tokens == turns[-1].tokens
    assert len(sample.mask) == len(sample.logprobs) == len(sample.tokens) - sample.prompt_length
    left = 0
    for place, (trained, logprob) in enumerate(zip(sample.mask, sample.logprobs, strict=True), sample.prompt_length):
        if not trained:
            assert logprob == 0
            continue
        left += 1
        assert any(
            one.tokens[: place + 1] == sample.tokens[: place + 1]
            and place >= one.prompt_length
            and one.logprobs[place - one.prompt_length] == logprob
            for one in turns
        )
    assert left + merged.realigned == sum(sum(one.mask) for one in turns)
