"""One report on one record, as units: one for each choice it speaks of.

Knows: which report fields are a signal, how a sample is built from what was recorded, and why one cannot be.
Does not know: the event log, staleness, or which units were used.

- A unit's id is `<receipt>:<choice>`. A report without a choice speaks of every choice of the answer.
- A report on several answers makes units of each of them; each is judged alone.
- A sample holds the recorded ids and log-probs, never text tokenised again; without them it is None, with the reason.
- Only live records are experience. A zero or negative score is a score; a missing one is no signal.
- A report that was made of the next message (see `next`) is a signal by itself; the pool makes its units.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import orjson

from reef.core.nouns import Choice, PartName, Record, Report, Sample, Unit

Signal = Literal["score", "feedback", "demonstration", "metrics", "next", "answer"]
"""`next`: the message that follows an answer; `answer`: the answer itself, which nobody needs to report on."""
Reason = Literal["duplicate", "stale", "foreign", "untrainable", "choice", "held out", "late", "side", "unjudged"]

SIGNALS: dict[PartName, frozenset[Signal]] = {"weights": frozenset({"score"}), "harness": frozenset({"feedback"})}
"""What makes a report worth a unit, unless the recipe names its own `signals`: any one of these is enough."""


COLDEST, LOWEST = 1e-4, -1e4
"""Temperature and log-prob of an imported answer: beyond them a loss would no longer be a number."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A unit that a report will never train, and why. `report` tells apart two reports on one unit."""

    unit: str
    report: str
    reason: str  # a `Reason`, or a recipe's own word (its `discard`)


def join(seq: int, report: Report, record: Record, part: PartName, signals: Collection[Signal]) -> list[Unit | Drop]:
    """The units a report (at `seq` in the log) makes of a closed record; empty when it says nothing for this part."""
    if record.purpose != "live" or not _speaks(report, record.id, signals):
        return []
    return make(seq, report, record, part, shown="demonstration" in signals and report.demonstration is not None)


def make(seq: int, report: Report, record: Record, part: PartName, *, shown: bool = False) -> list[Unit | Drop]:
    """The units of a report that is a signal. `shown`: it brings a demonstration."""
    known = {choice.index: choice for choice in record.choices}
    chosen = [report.choice] if report.choice is not None else sorted(known) or [0]
    score = report.score_of(record.id)
    made: list[Unit | Drop] = []
    for index in chosen:
        name = f"{record.id}:{index}"
        if known and index not in known:
            made.append(Drop(name, report.id, "choice"))
            continue
        sample, why = build(record, known.get(index), score)
        if part == "weights" and sample is None and not shown:  # a demonstration trains without the answer's tokens
            made.append(Drop(name, report.id, "untrainable"))
            continue
        made.append(Unit(name, record, index, report, score, sample, why, seq=seq))
    return made


def build(record: Record, choice: Choice | None, reward: float | None) -> tuple[Sample | None, str | None]:
    """The sample of one choice, or None and a sentence that says why it cannot train on policy."""
    if record.untrainable is not None:
        return None, record.untrainable
    if record.status != "complete":
        return None, f"the answer did not end properly ({record.status})"
    if choice is None or choice.output_ids is None or choice.logprobs is None or record.prompt_ids is None:
        return None, "the engine gave no sampled tokens; use one that does (the local engine)"
    if record.sampling is None or not record.sampling.plain:
        return None, "sampling was not plain; use temperature > 0, top_p 1 and no top_k"
    if not choice.output_ids:
        return None, "no token was sampled"
    if len(choice.output_ids) != len(choice.logprobs) or not all(map(math.isfinite, choice.logprobs)):
        return None, "the recorded log-probs do not fit the sampled tokens"
    if record.sampling.temperature < COLDEST or any(one < LOWEST for one in choice.logprobs):
        return None, f"no sampler has a temperature below {COLDEST} or log-probs below {LOWEST:.0f}"
    if record.sampling.legal is not None and not _form(record.sampling.legal):
        return None, "its form (`sampling.legal`) is not a JSON object"
    return (
        Sample(
            tokens=record.prompt_ids + choice.output_ids,
            prompt_length=len(record.prompt_ids),
            mask=(1,) * len(choice.output_ids),
            logprobs=choice.logprobs,
            reward=reward,
            record_id=record.id,
            choice=choice.index,
            temperature=record.sampling.temperature,
            legal=record.sampling.legal,
        ),
        None,
    )


def _form(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False


def origins(unit: Unit) -> set[str]:
    """The releases whose weights sampled this unit's tokens: one, unless the engine changed weights in the middle."""
    for choice in unit.record.choices:
        if choice.index == unit.choice and choice.spans:
            return {span.release_id for span in choice.spans}
    return {unit.record.release_id}


def _speaks(report: Report, receipt: str, signals: Collection[Signal]) -> bool:
    score = report.score_of(receipt)
    return (
        ("score" in signals and score is not None and math.isfinite(score))
        or ("feedback" in signals and report.feedback is not None)
        or ("demonstration" in signals and report.demonstration is not None)
        or ("metrics" in signals and bool(report.metrics))
    )
