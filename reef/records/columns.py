"""One record as the columns of its row, and the statements that insert many at once.

Knows: the order of the columns, and how the row of a short record without tokens is made from it alone.
Does not know: connections, blobs, or numbers in the log, which are filled in when it is inserted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reef.core.nouns import Record
from reef.records import codec

SIZES = (64, 48, 32, 24, *range(16, 0, -1))  # rows of one statement, so that two statements do for most batches
FEW = 4  # choices of a short record
COLUMNS = (
    "seq, id, scenario, status, purpose, release_id, session, owner, closed, opening, request, rendered, reply,"
    " answer_id, received_at, meta, tokens, parent, shared"
)
SEQ, CLOSED, OPENING, LATE, RECEIVED, META = 0, 8, 9, 11, 14, 15  # places in it


def many(table: str, columns: str) -> dict[int, str]:
    row = f"({', '.join('?' * (columns.count(',') + 1))})"
    return {size: f"INSERT INTO {table} ({columns}) VALUES {', '.join([row] * size)}" for size in SIZES}  # noqa: S608


RECORDS = many("records", COLUMNS)
EVENTS = many("events", "seq, scenario, kind, ref")


class Made(NamedTuple):
    """A record as the columns of its row, without sequence numbers; and its prompt, when it has tokens."""

    columns: list[Any]
    prompt: bytes | None = None
    depth: int = 0


def plain(record: Record) -> Made | None:
    """The row of a record that needs nothing but itself: short, without tokens. Cheap, and may be made in any thread.

    None: the row needs blobs, compression or an earlier prompt.
    """
    if record.prompt_ids is not None or len(record.request) >= codec.PLAIN or len(record.choices) > FEW:
        return None
    rendered, reply = record.rendered, record.reply
    if (rendered is not None and len(rendered) >= codec.PLAIN) or (reply is not None and len(reply) >= codec.PLAIN):
        return None
    for choice in record.choices:
        if choice.output_ids is not None or choice.logprobs is not None:
            return None
        if choice.message is not None or len(choice.text) >= codec.PLAIN:
            return None
    rendered = None if rendered is None else codec.literal(rendered)
    reply = None if reply is None else codec.literal(reply)
    return make(record, codec.pack_meta(record), codec.literal(record.request), rendered, reply)


def make(
    record: Record,
    meta: bytes,
    request: bytes | None,
    rendered: bytes | None,
    reply: bytes | None,
    tokens: tuple[bytes | None, int | None, int] = (None, None, 0),
    prompt: bytes | None = None,
    depth: int = 0,
) -> Made:
    columns = [
        0,
        record.id,
        record.scenario,
        record.status,
        record.purpose,
        record.release_id,
        record.session,
        record.owner,
        None,
        None,
        request,
        rendered,
        reply,
        codec.column(record.answer_id),
        record.timing.received_at,
        meta,
        *tokens,
    ]
    if record.status == "open":
        columns[OPENING] = codec.opening(record, meta)
    return Made(columns, prompt, depth)
