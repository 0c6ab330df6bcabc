"""One report on one record: which units, which samples, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reef.core.nouns import Choice, Record, Report, Sampling, Span, Timing, Unit
from reef.experience.units import Drop, build, join, origins

WEIGHTS, HARNESS = frozenset({"score"}), frozenset({"feedback"})
RECEIPT = "0" * 32


def choice(index: int = 0, **fields: Any) -> Choice:
    return replace(Choice(index, "ab", "stop", output_ids=(7, 8), logprobs=(-0.1, -0.2)), **fields)


def record(**fields: Any) -> Record:
    made = Record(
        RECEIPT, "s", "r1", "live", "chat", "complete", b"{}", Timing(0.0),
        choices=(choice(),), prompt_ids=(1, 2, 3), sampling=Sampling(temperature=0.7),
    )  # fmt: skip
    return replace(made, **fields)


def report(**fields: Any) -> Report:
    return replace(Report("rep_1", "s", (RECEIPT,), 0.0), **fields)


def one(made: list[Unit | Drop]) -> Unit:
    assert len(made) == 1
    assert isinstance(made[0], Unit)
    return made[0]


def test_a_sample_is_exactly_what_was_recorded() -> None:
    """case 43: the tokens that were sampled, which a tokenizer need not make of the text again."""
    unit = one(join(9, report(score=-1.0), record(), "weights", WEIGHTS))
    assert (unit.id, unit.score, unit.seq, unit.why) == (f"{RECEIPT}:0", -1.0, 9, None)
    sample = unit.sample
    assert sample is not None
    assert (sample.tokens, sample.prompt_length) == ((1, 2, 3, 7, 8), 3)
    assert (sample.mask, sample.logprobs) == ((1, 1), (-0.1, -0.2))
    assert (sample.reward, sample.temperature, sample.record_id) == (-1.0, 0.7, RECEIPT)
    assert sample.legal is None


def test_a_sample_of_a_limited_answer_carries_what_limited_it() -> None:
    limited = record(sampling=Sampling(legal='{"regex":"ab"}'))
    sample, why = build(limited, limited.choices[0], 1.0)
    assert why is None
    assert sample is not None
    assert sample.legal == '{"regex":"ab"}'


@pytest.mark.parametrize("score", [0.0, -3.5])
def test_zero_and_negative_scores_are_scores(score: float) -> None:
    assert one(join(1, report(score=score), record(), "weights", WEIGHTS)).score == score


def test_per_receipt_scores_come_before_the_reports_own() -> None:
    given = report(score=1.0, per_receipt={RECEIPT: 0.25})
    assert one(join(1, given, record(), "weights", WEIGHTS)).score == 0.25
    other = report(per_receipt={"f" * 32: 0.25})
    assert join(1, other, record(), "weights", WEIGHTS) == []


def test_a_report_on_three_answers_keeps_three_scores() -> None:
    """case 45: rewards of an interaction's steps do not collapse to the last one."""
    names = tuple(f"{number:032x}" for number in range(3))
    given = report(references=names, per_receipt=dict(zip(names, (0.0, 1.0, 0.5), strict=True)))
    units = [one(join(1, given, record(id=name), "weights", WEIGHTS)) for name in names]
    assert [(unit.id, unit.score, unit.sample and unit.sample.reward) for unit in units] == [
        (f"{names[0]}:0", 0.0, 0.0),
        (f"{names[1]}:0", 1.0, 1.0),
        (f"{names[2]}:0", 0.5, 0.5),
    ]


def test_without_a_choice_a_report_speaks_of_every_choice() -> None:
    made = join(1, report(score=1.0), record(choices=(choice(0), choice(1, output_ids=(9, 9)))), "weights", WEIGHTS)
    assert [unit.id for unit in made if isinstance(unit, Unit)] == [f"{RECEIPT}:0", f"{RECEIPT}:1"]
    second = made[1]
    assert isinstance(second, Unit)
    assert second.sample is not None
    assert second.sample.tokens == (1, 2, 3, 9, 9)


def test_a_choice_selects_one_and_a_wrong_one_is_said() -> None:
    two = record(choices=(choice(0), choice(1)))
    assert one(join(1, report(score=1.0, choice=1), two, "weights", WEIGHTS)).choice == 1
    assert join(1, report(score=1.0, choice=2), two, "weights", WEIGHTS) == [Drop(f"{RECEIPT}:2", "rep_1", "choice")]


@pytest.mark.parametrize("purpose", ["evaluation", "probe", "self"])
def test_only_live_records_are_experience(purpose: Any) -> None:
    assert join(1, report(score=1.0, feedback="x"), record(purpose=purpose), "weights", WEIGHTS) == []


def test_a_report_without_the_parts_signal_says_nothing() -> None:
    assert join(1, report(feedback="be brief"), record(), "weights", WEIGHTS) == []
    assert join(1, report(score=1.0), record(), "harness", HARNESS) == []
    assert one(join(1, report(feedback="be brief"), record(), "harness", HARNESS)).score is None
    assert join(1, report(score=float("nan")), record(), "weights", WEIGHTS) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"untrainable": "a tool was called"}, "a tool was called"),
        ({"status": "aborted"}, "the answer did not end properly (aborted)"),
        ({"prompt_ids": None}, "the engine gave no sampled tokens"),
        ({"choices": (choice(output_ids=None),)}, "the engine gave no sampled tokens"),
        ({"choices": (choice(logprobs=None),)}, "the engine gave no sampled tokens"),
        ({"choices": ()}, "the engine gave no sampled tokens"),
        ({"sampling": None}, "sampling was not plain"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling was not plain"),
        ({"sampling": Sampling(top_p=0.9)}, "sampling was not plain"),
        ({"sampling": Sampling(top_k=40)}, "sampling was not plain"),
        ({"choices": (choice(output_ids=(), logprobs=()),)}, "no token was sampled"),
        ({"choices": (choice(logprobs=(-0.1,)),)}, "the recorded log-probs do not fit"),
        ({"choices": (choice(logprobs=(-0.1, float("-inf"))),)}, "the recorded log-probs do not fit"),
        ({"choices": (choice(logprobs=(-0.1, -1e308)),)}, "no sampler has a temperature below"),
        ({"sampling": Sampling(temperature=1e-300)}, "no sampler has a temperature below"),
        ({"sampling": Sampling(legal="null")}, "its form"),
        ({"sampling": Sampling(legal="[]")}, "its form"),
        ({"sampling": Sampling(legal="{")}, "its form"),
    ],
)
def test_what_cannot_train_on_policy_says_why(fields: dict[str, Any], why: str) -> None:
    """case 43: tokens and log-probs that do not fit are left out, with the reason, and counted."""
    broken = record(**fields)
    sample, said = build(broken, broken.choices[0] if broken.choices else None, 1.0)
    assert sample is None
    assert said is not None
    assert said.startswith(why)
    assert join(1, report(score=1.0), broken, "weights", WEIGHTS) == [Drop(f"{RECEIPT}:0", "rep_1", "untrainable")]
    unit = one(join(1, report(feedback="no"), broken, "harness", HARNESS))  # a harness learns from it all the same
    assert unit.why == said


def test_a_demonstration_trains_without_sampled_tokens() -> None:
    shown = report(demonstration="do it like this")
    unit = one(join(1, shown, record(prompt_ids=None), "weights", frozenset({"demonstration"})))
    assert unit.sample is None
    assert join(1, shown, record(), "weights", WEIGHTS) == []


def test_origins_are_the_releases_of_the_tokens() -> None:
    spans = (Span("r1", 0, 1), Span("r2", 1, 2))
    unit = one(join(1, report(score=1.0), record(choices=(choice(spans=spans),)), "weights", WEIGHTS))
    assert origins(unit) == {"r1", "r2"}
    assert origins(one(join(1, report(score=1.0), record(), "weights", WEIGHTS))) == {"r1"}
