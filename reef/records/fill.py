"""What rows of an older schema lack of the columns that came later, made from what they have.

Knows: packed bodies of every form. Does not know: when it runs, which is once, inside the migration's transaction.
A row that cannot be read stays as it is: damage must not stop a server from starting.
"""

from __future__ import annotations

import sqlite3

import msgspec
import zstandard

from reef.core.errors import StoreError
from reef.core.nouns import Report
from reef.records import codec

_DAMAGE = (StoreError, zstandard.ZstdError, msgspec.DecodeError, UnicodeEncodeError, ValueError)


def times_tags_and_scores(db: sqlite3.Connection) -> None:
    """Arrival and tags of records; time and scores of reports: what queries filter by since the second schema."""
    for seq, scenario, status, purpose, meta in db.execute("SELECT seq, scenario, status, purpose, meta FROM records"):
        try:
            record = codec.unpack_meta(meta, status, purpose)
            tags = [(scenario, name, value, seq) for name, value in record.tags.items()]
            db.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?, ?, ?)", tags)
        except _DAMAGE:
            continue
        db.execute("UPDATE records SET received_at = ? WHERE seq = ?", (record.timing.received_at, seq))
    for seq, body in db.execute("SELECT seq, body FROM reports"):
        try:
            report = codec.decode(codec.unpack(body), Report)
        except _DAMAGE:
            continue
        db.execute("UPDATE reports SET created_at = ?, score = ? WHERE seq = ?", (report.created_at, report.score, seq))
        quoted = "SELECT record, id FROM quotes JOIN records ON records.seq = record WHERE report = ?"
        for record_seq, name in db.execute(quoted, (seq,)).fetchall():
            where = (report.score_of(name), record_seq, seq)
            db.execute("UPDATE quotes SET score = ? WHERE record = ? AND report = ?", where)
