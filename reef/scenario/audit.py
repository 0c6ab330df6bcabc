"""What the learner wrote down, as others may ask for it: the fate of each unit, and what the gate said of each step.

Knows: the shape of it. Does not know: where it is kept (the learner's room does; assembly hands a reader in).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from reef.core.errors import StoreError
from reef.core.nouns import Evaluation, Json, PartName

FATES: Final[Mapping[str, str]] = {
    "duplicate": "an earlier report on this answer counted",
    "stale": "the answer was too many steps old when its turn came",
    "foreign": "the release that answered is no ancestor of what is trained now",
    "untrainable": "the answer has no exact tokens to train on (the record says why)",
    "choice": "the answer has no such choice",
    "failed": "training on its batch failed again and again",
    "held out": "its prompt is held out, to measure releases on",
    "late": "the next message came too late to say anything of this answer",
    "side": "it is a side call of its client (a title, a summary, a count of tokens)",
    "unjudged": "the recipe's judge made nothing of it",
    "no edit": "the recipe proposed no edit for its batch",
    "refused": "the edit that its batch led to was refused",
}
"""Why a unit did not train, by its fate. A recipe's own reasons (`discard`) speak for themselves."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one unit by one report: `trained` in a line's step, or why it was not."""

    part: PartName
    unit: str  # <receipt>:<choice>
    report: str  # empty: not known which
    fate: str
    line: str | None
    step: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """One audit row: what was said of a line's step, by whom, and what came of it."""

    part: PartName
    line: str
    step: int
    look: int
    verdict: str  # accept | reject | undecided | hold
    reason: str
    candidate: str | None
    release: str | None
    evaluation: Evaluation | None
    actor: str
    at: float
    number: int = 0


class Audit(Protocol):
    """Blocking. Every call raises StoreError when the audit is missing or cannot be read."""

    def fates(self, scenario: str, receipt: str) -> list[Fate]:
        """What became of each unit of one record, for each part and report; what counted before duplicates."""

    def assessed(self, scenario: str, receipt: str) -> list[tuple[PartName, str, Json]]:
        """What was made of each unit of one record that is not settled yet: part, unit, assessment."""

    def where(self, receipt: str) -> list[str]:
        """The scenarios that wrote down a fate of this record."""

    def about(self, scenario: str, ids: Sequence[str]) -> list[Ruling]:
        """The rows that speak of these candidates or releases, newest first."""

    def of_line(self, scenario: str, part: PartName, line: str) -> list[Ruling]:
        """The rows of one line, newest first."""

    def newest(self, scenario: str, limit: int, verdicts: Sequence[str] = ()) -> list[Ruling]:
        """The newest rows, with one of these verdicts if any are given."""

    def between(
        self, scenario: str, first: tuple[str, float], last: tuple[str, float], limit: int
    ) -> tuple[int, list[Ruling]]:
        """What was turned down between two releases (id and time of each): how many, and the newest of them."""

    def overrule(self, scenario: str, candidate: str, actor: str, reason: str) -> None:
        """Turn a held candidate down. MissingError when no candidate of that id is held."""

    def deciding(self) -> AbstractContextManager[None]:
        """Held while a person's decision is carried out, so that one excludes the other, in every process."""


class Absent:
    """An audit where none is kept: every question is answered with StoreError."""

    def fates(self, scenario: str, receipt: str) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def assessed(self, scenario: str, receipt: str) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def where(self, receipt: str) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def about(self, scenario: str, ids: Sequence[str]) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def of_line(self, scenario: str, part: PartName, line: str) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def newest(self, scenario: str, limit: int, verdicts: Sequence[str] = ()) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def between(self, scenario: str, first: tuple[str, float], last: tuple[str, float], limit: int) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def overrule(self, scenario: str, candidate: str, actor: str, reason: str) -> NoReturn:
        raise StoreError("no learner keeps an audit here")

    def deciding(self) -> AbstractContextManager[None]:
        return nullcontext()
