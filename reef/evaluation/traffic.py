"""Tasks made of live records: a scenario's held-out prompts, and failures that were promoted.

Knows: which record makes a task, and which scorer judges it. Does not know: how a record came to be.

- The records are read from the store each time, so what is forgotten there is no task any more.
- One task for each distinct prompt; its id is the prompt's key. Of a prompt's newest VOTES records in RECENT the check
  that most agree on judges (the newest of those that are level): what users want may change, and one of them may err.
- Records from before the last shift of what users want (see `book`) are no tasks.
- A task is judged as a report on the record says, `metadata: {"check": {"scorer": "number", "answer": 5}}` (the newest
  report that brings one that can be used; only scorers that run nothing and ask nobody), else against a report's
  demonstration by `gate.scorer` (exact, when that names none), else by `gate.scorer` alone. What none of these judges
  is no task.
- Requests with tools are passed over: their answers may be calls, which have no text to judge.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from reef.core.errors import ConfigError
from reef.core.nouns import Json, Record, Report
from reef.evaluation import Origin, Scorer, Task
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.scorers import reported
from reef.evaluation.suite import Judging
from reef.experience.holdout import Holdout, Prompt, read
from reef.records import Query
from reef.records.present import present

PAGE: Final = 200
SCAN: Final = 5000  # records looked through for held-out prompts, the newest
RECENT: Final = 1000  # of them are looked through for newer checks also when the tasks of a generation are chosen
VOTES: Final = 3
GOOD: Final = 4096  # checks remembered that were found to be usable
LONGEST: Final = 256  # tokens of an answer: a look must stay cheap
LARGEST: Final = 32 * 1024  # characters of a prompt, for the same reason
CHECKS: Final = 20  # checks that reports on a record bring, of which one may judge: each try may take a second


class Records(Protocol):
    """The part of the record store that is needed here."""

    async def find(self, query: Query) -> list[tuple[int, Record | Report]]: ...

    async def get(self, ids: Sequence[str]) -> list[Record | Report]: ...

    async def reports_on(self, receipt: str) -> list[Report]: ...


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes a task of a record, or None."""

    records: Records
    judging: Judging
    origin: Origin
    _bad: set[str] = field(default_factory=set)  # checks that were found to judge nothing
    _good: dict[str, Scorer] = field(default_factory=dict)

    async def make(self, record: Record, prompt: Prompt) -> Task | None:
        messages = json.dumps(list(prompt.messages), ensure_ascii=False)
        if prompt.tools or len(messages) > LARGEST or _continues(record):
            return None
        scorer = await self._scorer(await self.records.reports_on(record.id))
        if scorer is None:
            return None
        sampling = record.sampling
        question = Question(
            messages,
            min(LONGEST, (sampling.max_tokens if sampling else None) or LONGEST),
            sampling.temperature if sampling else 1.0,
        )
        return Task(prompt.key, question, scorer, self.origin, self.origin == "failure", record.id)

    async def _scorer(self, reports: Sequence[Report]) -> Scorer | None:
        """The newest check that can judge; what cannot (an import may have brought it) hides nothing."""
        for check in _checks(reports):
            key = json.dumps(check, sort_keys=True)
            if (scorer := self._good.get(key)) is not None:
                return scorer
            if key in self._bad:
                continue
            try:
                scorer = await reported(check)
            except ConfigError:
                self._bad.add(key)
                continue
            if len(self._good) >= GOOD:
                self._good.clear()
            self._good[key] = scorer
            return scorer
        return self._shown(_demonstrated(reports))

    def _shown(self, answer: str | None) -> Scorer | None:
        tries: list[tuple[str | None, str | None]] = [(None, None)]
        if answer is not None:  # the demonstration may be nothing that the default scorer can compare with
            tries = [(None, answer), (None, None)] if self.judging.default else [("exact", answer)]
        for given, compared in tries:
            with contextlib.suppress(ConfigError):
                return self.judging.scorer(given, compared, "request")
        return None


class Traffic:
    """The scenario's held-out prompts, newest first. `trained` says of a record whether it was trained on before its
    prompt was held out."""

    name = "traffic"
    fixed = False

    def __init__(
        self,
        scenario: str,
        records: Records,
        holdout: Holdout,
        judging: Judging,
        trained: Callable[[Record], bool] = lambda _: False,
        since: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._since = since
        self._scenario, self._records, self._holdout, self._trained = scenario, records, holdout, trained
        self._maker = Maker(records, judging, "traffic")

    async def tasks(self, want: int, pinned: Mapping[str, str | None], avoid: Collection[str]) -> Sequence[Task]:
        found: dict[str, list[Task]] = {}  # by prompt, of the newest records first
        sides: dict[str, str] = {}  # of the tasks found
        spoilt: set[str] = set()
        seen: set[str] = set()
        since = self._since()

        async def take(record: Record) -> None:
            prompt = None if record.id in seen or record.timing.received_at < since else read(record)
            seen.add(record.id)
            if prompt is None or prompt.side in spoilt or not self._holdout.takes(prompt):
                return
            votes = found.get(prompt.key, [])
            if self._trained(record):
                spoilt.add(prompt.side)
                for name in [name for name in found if sides[name] == prompt.side]:
                    del found[name]
            elif len(votes) < VOTES and (task := await self._maker.make(record, prompt)) is not None:
                found[prompt.key], sides[prompt.key] = [*votes, task], prompt.side

        def enough(times: int) -> bool:
            return sum(name not in avoid for name in found) >= times * want

        async def recall() -> None:
            if not found.keys() >= pinned.keys():
                for record in await known(self._records, [name for name in pinned.values() if name is not None]):
                    await take(record)

        before, scanned, recalled = None, 0, False
        while scanned < SCAN and (page := await self._records.find(self._query(before))):
            before, scanned = page[-1][0], scanned + len(page)
            for _, entry in page:
                if isinstance(entry, Record):
                    await take(entry)
            if scanned < RECENT:
                continue
            if not recalled:
                await recall()
                recalled = True
            if enough(1 if pinned else 2):  # twice as many: to choose those that were not asked before
                break
        if not recalled:
            await recall()
        return [_agreed(votes) for votes in found.values()]

    def _query(self, before: int | None) -> Query:
        return Query(self._scenario, status="complete", purpose="live", limit=PAGE, before=before)


class Failures:
    """Promoted failures, the newest first. They are `protected`: what passes once may not fail again."""

    name = "failures"
    fixed = False

    def __init__(self, scenario: str, records: Records, book: Book, judging: Judging) -> None:
        self._scenario, self._records, self._book = scenario, records, book
        self._maker = Maker(records, judging, "failure")

    async def tasks(self, want: int, pinned: Mapping[str, str | None], avoid: Collection[str]) -> Sequence[Task]:
        found: dict[str, Task] = {}
        promoted = [one.receipt for one in self._book.failures(self._scenario)]
        since = self._book.since(self._scenario)
        for record in await known(self._records, promoted[: 4 * want]):
            if record.scenario != self._scenario or record.timing.received_at < since:
                continue
            if (prompt := read(record)) is not None and prompt.key not in found:
                task = await self._maker.make(record, prompt)
                if task is not None:
                    found[prompt.key] = task
        return list(found.values())


def _agreed(votes: Sequence[Task]) -> Task:
    """The task whose scorer most of a prompt's newest records agree on; the newest of those that are level."""
    counts = Counter(task.scorer.key for task in votes)
    return max(votes, key=lambda task: counts[task.scorer.key])  # the first of the highest


async def known(records: Records, receipts: Sequence[str]) -> list[Record]:
    """The records with these receipts, in order; those that were forgotten are left out."""
    return [record for record in await present(records.get, receipts) if isinstance(record, Record)]


def _checks(reports: Sequence[Report]) -> list[Json]:
    """What reports say of how to judge, the newest first."""
    said = [report.metadata for report in reversed(reports) if isinstance(report.metadata, dict)]
    return [metadata["check"] for metadata in said if metadata.get("check") is not None][:CHECKS]


def _demonstrated(reports: Sequence[Report]) -> str | None:
    """The newest demonstration's text."""
    return next((text for report in reversed(reports) if (text := _text(report.demonstration)) is not None), None)


def _text(demonstration: Json) -> str | None:
    content = demonstration.get("content") if isinstance(demonstration, dict) else demonstration
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content.strip() or None if isinstance(content, str) else None


def _continues(record: Record) -> bool:
    """A request that says its earlier turns by their id only: what was asked is not all in it."""
    if record.dialect != "responses":
        return False
    try:
        body = json.loads(record.request)
    except ValueError:
        return True
    return not isinstance(body, dict) or bool(body.get("previous_response_id") or body.get("conversation"))
