"""Entries to rows and back, on one connection, inside a transaction that somebody else begins and commits.

Knows: the tables, the rules for duplicates and conflicts, how bodies are cut into blobs and prompts into suffixes.
Does not know: threads, batches, or when a commit happens; what it remembers of a transaction counts once `settle` ran.

- Every check comes before the first write, so an entry that is refused leaves nothing behind in a shared transaction.
- A blob's or parent's row is never changed once it is there; templates and prompts only refer backwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zstandard

from reef.core.errors import ConflictError, InputError, MissingError, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Choice, Event, Record, Report
from reef.records import Query, Stored, body, codec
from reef.records.prompts import Key, Prompts, Sequel, as_bytes

COLUMNS = "seq, id, scenario, release_id, session, owner, request, rendered, meta, tokens, parent, shared"
_BY_ID = f"SELECT {COLUMNS} FROM records WHERE id = ?"  # noqa: S608
REMEMBERED = 50_000  # blob keys kept in memory
Row = tuple[
    int, str, str, str, str | None, str | None, bytes, bytes | None, bytes, bytes | None, int | None, int
]  # in the order of COLUMNS


@dataclass(frozen=True, slots=True)
class _Ready:
    columns: tuple[bytes, bytes | None, int | None, int]  # meta, tokens, parent, shared
    prompt: bytes | None = None
    depth: int = 0


def _asked(record: Record) -> bytes:
    return codec.digest(record.scenario.encode("utf-8", "surrogatepass"), record.request)


class Rows:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._fresh: dict[bytes, int] = {}
        self._prompts = Prompts()
        self._sequels: list[tuple[Key, Sequel]] = []

    # --- writing ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The transaction was committed: what it taught about blobs and prompts counts from now on."""
        self._keys.update(self._fresh)
        while len(self._keys) > REMEMBERED:
            self._keys.popitem(last=False)
        for key, sequel in self._sequels:
            self._prompts.remember(key, sequel)
        self._fresh = {}
        self._sequels = []

    def put(self, entry: Record | Report) -> Stored:
        """Store one entry. ConflictError and MissingError leave no trace."""
        if isinstance(entry, Report):
            return self._report(entry)
        if entry.status == "open":
            return self._open(entry)
        return self._close(entry)

    def _open(self, record: Record) -> Stored:
        digest = codec.content(record)
        found = self._db.execute("SELECT seq, opening FROM records WHERE id = ?", (record.id,)).fetchone()
        if found is not None:
            if found[1] != digest:
                raise ConflictError(f"record {record.id} is already stored with other content; use a fresh receipt")
            return Stored(found[0], duplicate=True)
        asked = _asked(record)
        ready = self._prepare(record)
        seq = self._event(record.scenario, "opened", record.id)
        self._insert(seq, record, ready, opening=digest, asked=asked)
        return Stored(seq, duplicate=False)

    def _close(self, record: Record) -> Stored:
        digest = codec.content(record)
        query = "SELECT seq, status, closed, digest, asked FROM records WHERE id = ?"
        found = self._db.execute(query, (record.id,)).fetchone()
        if found is None:
            ready = self._prepare(record)
            seq = self._event(record.scenario, "closed", record.id)
            self._insert(seq, record, ready, digest=digest, closed=seq)
            self._remember(seq, record, ready)
            return Stored(seq, duplicate=False)
        opened, status, closed, before, asked = found
        if status != "open":
            if before != digest:
                raise ConflictError(f"record {record.id} is already closed with other content; use a fresh receipt")
            return Stored(closed, duplicate=True)
        if asked != _asked(record):
            raise ConflictError(f"record {record.id} was opened for another request; use a fresh receipt")
        ready = self._prepare(record)
        seq = self._event(record.scenario, "closed", record.id)
        rendered = None if record.rendered is None else self._template(record.rendered)
        named = (record.status, record.purpose, record.release_id, record.session, record.owner)
        self._db.execute(
            "UPDATE records SET status=?, purpose=?, release_id=?, session=?, owner=?, closed=?, digest=?, asked=NULL,"
            " rendered=?, meta=?, tokens=?, parent=?, shared=? WHERE seq=?",
            (*named, seq, digest, rendered, *ready.columns, opened),
        )
        self._remember(opened, record, ready)
        return Stored(seq, duplicate=False)

    def _report(self, report: Report) -> Stored:
        digest = codec.content(report)
        found = self._db.execute("SELECT seq, digest FROM reports WHERE id = ?", (report.id,)).fetchone()
        if found is not None:
            if found[1] != digest:
                raise ConflictError(f"report {report.id} is already stored with other content; use a fresh id")
            return Stored(found[0], duplicate=True)
        quoted = []
        for reference in report.references:
            row = self._db.execute("SELECT seq, scenario FROM records WHERE id = ?", (reference,)).fetchone()
            if row is None or row[1] != report.scenario:
                raise MissingError(f"no record {reference} in scenario {report.scenario}", param="references")
            quoted.append(row[0])
        whole = codec.pack(codec.encode(report))
        seq = self._event(report.scenario, "report", report.id)
        self._db.execute("INSERT INTO reports VALUES (?, ?, ?, ?, ?)", (seq, report.id, report.scenario, digest, whole))
        self._db.executemany("INSERT OR IGNORE INTO quotes VALUES (?, ?)", [(record, seq) for record in quoted])
        return Stored(seq, duplicate=False)

    def _event(self, scenario: str, kind: str, ref: str) -> int:
        cursor = self._db.execute("INSERT INTO events (scenario, kind, ref) VALUES (?, ?, ?)", (scenario, kind, ref))
        assert cursor.lastrowid is not None
        failpoint("records.half_stored")
        return cursor.lastrowid

    def _insert(
        self,
        seq: int,
        record: Record,
        ready: _Ready,
        *,
        opening: bytes | None = None,
        asked: bytes | None = None,
        digest: bytes | None = None,
        closed: int | None = None,
    ) -> None:
        request = self._template(record.request)
        rendered = None if record.rendered is None else self._template(record.rendered)
        named = (record.scenario, record.status, record.purpose, record.release_id, record.session, record.owner)
        self._db.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (seq, record.id, *named, closed, opening, asked, digest, request, rendered, *ready.columns),
        )

    def _template(self, whole: bytes) -> bytes:
        """The body as literal bytes and, as steps from one to the next, blob keys. Joined again it is the body."""
        parts: list[bytes | int] = []
        cursor = last = 0
        for start, end in body.cuts(whole):
            if start > cursor:
                parts.append(whole[cursor:start])
            key = self._blob(whole[start:end])
            parts.append(key - last)
            last, cursor = key, end
        if cursor < len(whole):
            parts.append(whole[cursor:])
        return codec.pack(msgspec.msgpack.encode(parts))

    def _blob(self, data: bytes) -> int:
        name = hashlib.blake2b(data, digest_size=24).digest()
        key = self._keys.get(name) or self._fresh.get(name)
        if key is None:
            row = self._db.execute("SELECT key FROM blobs WHERE hash = ?", (name,)).fetchone()
            if row is None:
                packed = codec.pack(data)
                key = self._db.execute("INSERT INTO blobs (hash, data) VALUES (?, ?)", (name, packed)).lastrowid
                assert key is not None
            else:
                key = int(row[0])
            self._fresh[name] = key
        return key

    def _prepare(self, record: Record) -> _Ready:
        """Everything of a row that may be refused: encoded fields, tokens, and the parent its prompt begins with."""
        meta = codec.pack(codec.encode(codec.strip(record)))
        sampled = any(choice.output_ids is not None or choice.logprobs is not None for choice in record.choices)
        if record.prompt_ids is None and not sampled:
            return _Ready((meta, None, None, 0))
        try:
            ids = as_bytes(record.prompt_ids or ())
        except (OverflowError, TypeError):
            raise InputError("token ids are integers from 0 to 2**64 - 1") from None
        key = (record.scenario, record.session)
        if record.session is not None and not self._prompts.known(key):
            self._revive(key)
        parent, length = self._prompts.parent(key, ids) or (None, 0)
        tokens = codec.pack_tokens((record.prompt_ids or ())[length:], record.choices)
        columns = (meta, tokens, parent.seq if parent else None, length)
        return _Ready(columns, ids, parent.depth + 1 if parent else 0)

    def _remember(self, seq: int, record: Record, ready: _Ready) -> None:
        """Only a closed record may become a parent: its tokens never change again."""
        if ready.prompt is not None:
            answer = record.choices[0].output_ids if record.choices else None
            sequel = Sequel(seq, ready.prompt + as_bytes(answer or ()), ready.depth)
            self._sequels.append(((record.scenario, record.session), sequel))

    def _revive(self, key: Key) -> None:
        """Learn the last record of a session that another process wrote, or this one before a restart."""
        query = (
            "SELECT seq FROM records WHERE scenario = ? AND session = ? AND tokens IS NOT NULL AND status != 'open'"
            " ORDER BY seq DESC LIMIT 1"
        )
        row = self._db.execute(query, key).fetchone()
        if row is None:
            return
        try:
            ids, depth = self._sequence(row[0])
        except (StoreError, zstandard.ZstdError, msgspec.DecodeError):  # damage behind us must not stop new records
            return
        self._prompts.remember(key, Sequel(row[0], as_bytes(ids), depth))

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, ids: Sequence[str]) -> list[Record | Report]:
        found: list[Record | Report] = []
        for name in ids:
            row = self._db.execute(_BY_ID, (name,)).fetchone()
            if row is not None:
                found.append(self._record(row))
                continue
            row = self._db.execute("SELECT body FROM reports WHERE id = ?", (name,)).fetchone()
            if row is None:
                raise MissingError(f"no record or report {name}; check the receipt and that it is of this server")
            found.append(codec.decode(codec.unpack(row[0]), Report))
        return found

    def events(self, scenario: str, after: int, limit: int) -> list[Event]:
        query = "SELECT seq, kind, ref, scenario FROM events WHERE scenario = ? AND seq > ? ORDER BY seq LIMIT ?"
        return [Event(*row) for row in self._db.execute(query, (scenario, after, limit))]

    def find(self, query: Query) -> list[tuple[int, Record | Report]]:
        where: list[str] = ["scenario = ?"]
        values: list[str | int] = [query.scenario]
        if query.before is not None:
            where.append("seq < ?")
            values.append(query.before)
        for column in ("session", "release_id", "status", "purpose"):
            if (value := getattr(query, column)) is not None:
                where.append(f"{column} = ?")
                values.append(value)
        table, columns = ("reports", "seq, body") if query.kind == "report" else ("records", COLUMNS)
        sql = f"SELECT {columns} FROM {table} WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        rows = self._db.execute(sql, (*values, query.limit)).fetchall()
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

    def _record(self, row: Row) -> Record:
        _, name, scenario, release_id, session, owner, request, rendered, meta, tokens, parent, shared = row
        bare = codec.decode(codec.unpack(meta), Record)
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
        return () if parent is None else self._sequence(parent)[0][:length]

    def _sequence(self, seq: int) -> tuple[tuple[int, ...], int]:
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


def _fill(choice: Choice, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Choice:
    return dataclasses.replace(
        choice,
        output_ids=None if choice.output_ids is None else ids,
        logprobs=None if choice.logprobs is None else logprobs,
    )
