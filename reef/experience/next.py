"""The message that follows an answer, as a report on it.

Knows: whose words count, and what such a report looks like. Does not know: how an answer and its request were found.

- Whatever came since the answer joins in order: the results of several tools, and a user's words behind them. Whoever
  speaks last counts as the speaker.
- What an agent's program puts into a user's turn (`<system-reminder>`) is nobody's word on the answer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from reef.core.nouns import Record, Report
from reef.experience.transcript import trailing

if TYPE_CHECKING:
    from reef.experience.sessions import Pair

_REMINDER = re.compile(r"\s*<system-reminder>.*</system-reminder>\s*", re.DOTALL)


def words(record: Record) -> tuple[Literal["user", "tool"], str] | None:
    """Who speaks last in a request, and what was said since the answer before; None when nobody said a word."""
    spoken: list[tuple[Literal["user", "tool"], str]] = []
    for said in trailing(record):
        texts = [part for part in said.parts if isinstance(part, str)]
        if said.role == "tool":
            spoken.append(("tool", "\n\n".join(texts)))
        elif said.role == "user" and (left := [text for text in texts if not _REMINDER.fullmatch(text)]):
            spoken.append(("user", "\n\n".join(left)))
    return (spoken[-1][0], "\n\n".join(text for _, text in spoken)) if spoken else None


def report_of(pair: Pair, scenario: str, created_at: float) -> Report:
    """The report that a next message amounts to; see `nouns.Unit`. Its id is the receipt of the request. An answer that
    stands for itself (signal `answer`) is a pair of it with itself, and its report says nothing."""
    if pair.request == pair.answer:
        return Report(pair.request, scenario, (pair.answer,), created_at)
    told = {"role": pair.role}
    return Report(
        pair.request, scenario, (pair.answer,), created_at, feedback=pair.text, choice=pair.choice, metadata=told
    )
