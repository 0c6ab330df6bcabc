"""Rows to entries: records and reports as they were stored, byte for byte, in every form there ever was.

Knows: the tables, templates of literal bytes and blob keys, chains of prompts.
Does not know: transactions, which one gives to be consistent; or how rows are written.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from reef.core.errors import MissingError, StoreError
from reef.core.nouns import Choice, Event, Purpose, Record, Report, Status
from reef.records import Query, codec, pages
from reef.records.bodies import Bodies

COLUMNS = (
    "seq, id, scenario, release_id, session, owner, status, purpose, request, rendered, reply, answer_id, meta, tokens,"
    " parent, shared"
)
_BY_ID = f"SELECT {COLUMNS} FROM records WHERE id = ?"  # noqa: S608
Row = tuple[
    int,
    str,
    str,
    str,
    str | None,
    str | None,
    Status,
    Purpose,
    bytes,
    bytes | None,
    bytes | None,
    str | None,
    bytes,
    bytes | None,
    int | None,
    int,
]  # in the order of COLUMNS


@dataclass(frozen=True, slots=True)
class Group:
    """A session that its client named: how many records, and when the first and last of them came."""

    session: str
    last_seq: int
    count: int
    first_at: float | None
    last_at: float | None


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a record without reading its bodies."""

    release_id: str
    session: str | None
    purpose: Purpose


class Lookup:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._bodies = Bodies(connection)

    def get(self, ids: Sequence[str]) -> list[Record | Report]:
        found: list[Record | Report] = []
        for name in ids:
            if (record := self.record(name)) is not None:
                found.append(record)
                continue
            row = self._db.execute("SELECT body FROM reports WHERE id = ?", (name,)).fetchone()
            if row is None:
                raise MissingError(f"no record or report {name}; check the receipt and that it is of this server")
            found.append(codec.decode(codec.unpack(row[0]), Report))
        return found

    def record(self, name: str) -> Record | None:
        row = self._db.execute(_BY_ID, (name,)).fetchone()
        return None if row is None else self._record(row)

    def exchanges(self, ids: Sequence[str]) -> list[Record]:
        """Those of these records that are here: what was asked and answered, without `rendered`, `reply` and tokens."""
        self._bodies.begin()
        query = (
            "SELECT scenario, release_id, session, status, purpose, request, answer_id, meta FROM records WHERE id = ?"
        )
        found = []
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            if row is None:
                continue
            scenario, release_id, session, status, purpose, request, answer_id, meta = row
            bare = codec.unpack_meta(meta, status, purpose)
            found.append(
                dataclasses.replace(
                    bare,
                    id=name,
                    scenario=scenario,
                    release_id=release_id,
                    session=session,
                    request=self._bodies.join(request),
                    answer_id=bare.answer_id if answer_id is None else answer_id,
                )
            )
        return found

    def known(self, ids: Sequence[str]) -> list[str]:
        """Those of these ids that are records or reports here."""
        query = "SELECT 1 FROM records WHERE id = ?1 UNION ALL SELECT 1 FROM reports WHERE id = ?1"
        return [name for name in ids if self._db.execute(query, (name,)).fetchone()]

    def sources(self, ids: Sequence[str]) -> dict[str, Source]:
        """Who answered each of these records, and for whom. Those that are not here are left out."""
        query = "SELECT release_id, session, purpose FROM records WHERE id = ?"
        rows = {name: self._db.execute(query, (name,)).fetchone() for name in ids}
        return {name: Source(*row) for name, row in rows.items() if row is not None}

    def erased(self, ids: Sequence[str]) -> list[str]:
        """Those of these ids that were erased on request."""
        return [name for name in ids if self._db.execute("SELECT 1 FROM erased WHERE id = ?", (name,)).fetchone()]

    def sessions(self, scenario: str, before: int | None, limit: int) -> list[Group]:
        """Sessions by their newest record, the newest first; `before` is the `last_seq` to page on."""
        rows = self._db.execute(
            "SELECT session, max(seq), count(*) FROM records WHERE scenario = ? AND session IS NOT NULL"
            " GROUP BY session HAVING max(seq) < ? ORDER BY max(seq) DESC LIMIT ?",
            (scenario, before or 2**63 - 1, limit),
        ).fetchall()
        times = "SELECT min(received_at), max(received_at) FROM records WHERE scenario = ? AND session = ?"
        return [
            Group(name, seq, count, *self._db.execute(times, (scenario, name)).fetchone()) for name, seq, count in rows
        ]

    def session(self, scenario: str, name: str, after: int, limit: int) -> list[tuple[int, Record]]:
        """A page of one session's records, the oldest first."""
        sql, values = pages.select(Query(scenario, session=name, limit=limit), COLUMNS, after=after)
        return [(row[0], self._record(row)) for row in self._db.execute(sql, values).fetchall()]

    def quotable(self, scenario: str, name: str, tokens: Sequence[str | None], limit: int) -> list[str]:
        """Ids of a session's live records that are complete or still answered and were asked for with one of these
        tokens (None: with none of the table): the newest `limit`, the oldest first."""
        query = (
            "SELECT id, status, purpose, meta FROM records WHERE scenario = ? AND session = ? AND purpose = 'live'"
            " AND status IN ('open', 'complete') ORDER BY seq DESC"
        )
        found: list[str] = []
        for receipt, status, purpose, meta in self._db.execute(query, (scenario, name)):
            if codec.unpack_meta(meta, status, purpose).tags.get("token") in tokens:
                found.append(receipt)
            if len(found) == limit:
                break
        return found[::-1]

    def events(self, scenario: str, after: int, limit: int) -> list[Event]:
        query = "SELECT seq, kind, ref, scenario FROM events WHERE scenario = ? AND seq > ? ORDER BY seq LIMIT ?"
        return [Event(*row) for row in self._db.execute(query, (scenario, after, limit))]

    def find(self, query: Query) -> list[tuple[int, Record | Report]]:
        sql, values = pages.select(query, "seq, body" if query.kind == "report" else COLUMNS)
        rows = self._db.execute(sql, values).fetchall()
        if query.kind == "report":
            return [(seq, codec.decode(codec.unpack(data), Report)) for seq, data in rows]
        return [(row[0], self._record(row)) for row in rows]

    def reports_on(self, receipt: str) -> list[Report]:
        query = "SELECT body FROM reports JOIN quotes ON report = reports.seq JOIN records ON record = records.seq"
        rows = self._db.execute(query + " WHERE records.id = ? ORDER BY reports.seq", (receipt,))
        return [codec.decode(codec.unpack(row[0]), Report) for row in rows]

    def open_records(self) -> list[tuple[str, str | None]]:
        """Id and owner of every record that is not closed yet."""
        return self._db.execute("SELECT id, owner FROM records WHERE status = 'open' ORDER BY seq").fetchall()

    def sequence(self, seq: int) -> tuple[tuple[int, ...], int]:
        """A record's prompt and first answer as one sequence, and how many records its prompt is spread over."""
        links: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # suffix, answer, tokens of the record before
        at: int | None = seq
        while at is not None:
            query = "SELECT tokens, parent, shared FROM records WHERE seq = ?"
            row = self._db.execute(query, (at,)).fetchone()
            if row is None or row[0] is None:
                raise StoreError(f"record {at} has lost its tokens: the record store is damaged; restore a backup")
            suffix, answers = codec.unpack_tokens(row[0])
            links.append((suffix, answers[0][0] if answers else (), row[2]))
            at = row[1]
        whole: tuple[int, ...] = ()
        for suffix, answer, length in reversed(links):
            whole = whole[:length] + suffix + answer
        return whole, len(links) - 1

    def _record(self, row: Row) -> Record:
        _, name, scenario, release_id, session, owner, status, purpose, request = row[:9]
        rendered, reply, answer_id, meta, tokens, parent, shared = row[9:]
        bare = codec.unpack_meta(meta, status, purpose)
        prompt, choices = bare.prompt_ids, bare.choices
        if tokens is not None:
            suffix, answers = codec.unpack_tokens(tokens)
            if prompt is not None:
                prompt = self._prefix(parent, shared) + suffix
            choices = tuple(_fill(choice, *answer) for choice, answer in zip(choices, answers, strict=True))
        return dataclasses.replace(
            bare,
            id=name,
            scenario=scenario,
            release_id=release_id,
            session=session,
            owner=owner,
            request=self._join(request),
            rendered=None if rendered is None else self._join(rendered),
            reply=None if reply is None else self._join(reply),
            answer_id=bare.answer_id if answer_id is None else answer_id,
            prompt_ids=prompt,
            choices=choices,
        )

    def _join(self, template: bytes) -> bytes:
        parts: list[bytes] = []
        key = 0
        for part in msgspec.msgpack.decode(codec.unpack(template), type=list[bytes | int]):
            if isinstance(part, bytes):
                parts.append(part)
                continue
            key += part
            row = self._db.execute("SELECT data FROM blobs WHERE key = ?", (key,)).fetchone()
            if row is None:
                raise StoreError(f"blob {key} is missing: the record store is damaged; restore a backup")
            parts.append(codec.unpack(row[0]))
        return b"".join(parts)

    def _prefix(self, parent: int | None, length: int) -> tuple[int, ...]:
        return () if parent is None else self.sequence(parent)[0][:length]


def _fill(choice: Choice, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Choice:
    return dataclasses.replace(
        choice,
        output_ids=None if choice.output_ids is None else ids,
        logprobs=None if choice.logprobs is None else logprobs,
    )
