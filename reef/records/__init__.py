"""The event log and the blobs it points to: what happened, in order, exactly, and durable.

Knows: records, reports, events, content-addressed bytes, and the `serving` board that gateways follow.
Does not know: what a recipe makes of a record, or how a release is made.

- An `append` that returned is on disk: it survives `kill -9` and power loss.
- Order is the event's sequence number, taken inside the committing transaction; time is only data.
- Same id and same content: stored once, answered as a duplicate. Same id and other content: ConflictError.
- A record is `open` or closed; closing happens once. `recover` closes what a dead process left open as `interrupted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reef.core.nouns import Event, PartName, Record, Report

STORES = {"sqlite": "reef.records.sqlite:SqliteStore"}


@dataclass(frozen=True, slots=True)
class Stored:
    seq: int  # the event's place in the log
    duplicate: bool  # it was already there, with the same content


@dataclass(frozen=True, slots=True)
class Query:
    """Newest first. `before` is an event sequence to page on; None filters match everything.

    since, until: unix seconds of arrival, the second exclusive. tag: a name and its value. low, high: a record with a
    report whose score for it is within both, a report whose own score is. answer_id: the provider's id of the answer.
    """

    scenario: str
    kind: str = "record"  # record | report
    before: int | None = None
    limit: int = 50
    session: str | None = None
    release_id: str | None = None
    status: str | None = None
    purpose: str | None = None
    since: float | None = None
    until: float | None = None
    tag: tuple[str, str] | None = None
    low: float | None = None
    high: float | None = None
    answer_id: str | None = None


class RecordStore(Protocol):
    async def append(self, entry: Record | Report) -> Stored:
        """Store an entry and its event, durably, before returning.

        A Record with status `open` is opened; any other status closes the open one of that id, or, when there is none,
        stores the whole exchange at once. A Report needs all its references to be known records of its scenario
        (MissingError names the first that is not). StoreError when the store cannot write.
        """

    async def append_all(self, entries: Sequence[Record | Report]) -> list[Stored]:
        """Store finished records and reports in one transaction: all of them, in order, or none (the first error).

        They come from elsewhere, so they never close a record that is open here: that is a ConflictError.
        """

    async def get(self, ids: Sequence[str]) -> list[Record | Report]:
        """The entries with these ids, in that order. MissingError names the first that is unknown."""

    async def events(self, scenario: str, after: int, limit: int) -> list[Event]:
        """Events of one scenario with seq > after, in order."""

    async def find(self, query: Query) -> list[tuple[int, Record | Report]]:
        """A page of entries with their event's sequence number, newest first."""

    async def close(self) -> None:
        """Finish what was accepted, then release the files."""


__all__ = ["STORES", "Event", "PartName", "Query", "Record", "RecordStore", "Report", "Stored"]
