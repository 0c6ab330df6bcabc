"""A query as SQL: which rows a page holds, newest first, and how the page is found without reading the others.

Knows: the tables' columns and indexes. Does not know: how a row becomes an entry, or connections.
"""

from __future__ import annotations

from reef.core.errors import InputError
from reef.records import Query

_RECORDS_ONLY = ("session", "release_id", "status", "purpose", "tag", "answer_id")
Value = str | int | float


def check(query: Query) -> None:
    """InputError names the filter that the kind of entry does not have."""
    if query.kind not in ("record", "report"):
        raise InputError(f"no kind {query.kind!r}; ask for record or report", param="kind")
    if query.kind == "report":
        for name in _RECORDS_ONLY:
            if getattr(query, name) is not None:
                raise InputError(f"reports have no {name}; drop that filter", param=name)


def select(query: Query, columns: str, *, after: int | None = None) -> tuple[str, list[Value]]:
    """The statement and its values for the records or reports of one page. `after`: oldest first, from there on."""
    if query.kind == "report":
        return _reports(query, columns, after)
    named = ", ".join(f"records.{column.strip()}" for column in columns.split(","))
    where: list[str] = []
    given: list[Value] = []
    if query.tag is not None:
        # The tag's rows are in order already: walk them, and look up each record.
        source, order = "tags CROSS JOIN records ON records.seq = tags.record", "tags.record"
        where += ["tags.scenario = ?", "tags.name = ?", "tags.value = ?"]
        given += [query.scenario, *query.tag]
    elif query.session is not None or query.answer_id is not None:
        source, order = "records", "records.seq"  # an index of their own
        where.append("records.scenario = ?")
        given.append(query.scenario)
    else:
        # A record's number is that of its first event, and a scenario's events are in order.
        source, order = "events CROSS JOIN records ON records.seq = events.seq", "events.seq"
        where.append("events.scenario = ?")
        given.append(query.scenario)
    if query.before is not None:
        where.append(f"{order} < ?")
        given.append(query.before)
    if after is not None:
        where.append(f"{order} > ?")
        given.append(after)
    for column in ("session", "release_id", "status", "purpose", "answer_id"):
        if (value := getattr(query, column)) is not None:
            where.append(f"records.{column} = ?")
            given.append(value)
    _between(where, given, "records.received_at", query.since, query.until, "<")
    if query.low is not None or query.high is not None:
        inner, scores = ["quotes.record = records.seq", "quotes.score IS NOT NULL"], given
        _between(inner, scores, "quotes.score", query.low, query.high, "<=")
        where.append(f"EXISTS (SELECT 1 FROM quotes WHERE {' AND '.join(inner)})")  # noqa: S608
    way = "DESC" if after is None else "ASC"
    sql = f"SELECT {named} FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} {way} LIMIT ?"  # noqa: S608
    return sql, [*given, query.limit]


def _reports(query: Query, columns: str, after: int | None) -> tuple[str, list[Value]]:
    where, values = ["scenario = ?"], [query.scenario]
    given: list[Value] = []
    if query.before is not None:
        where.append("seq < ?")
        given.append(query.before)
    if after is not None:
        where.append("seq > ?")
        given.append(after)
    _between(where, given, "created_at", query.since, query.until, "<")
    _between(where, given, "score", query.low, query.high, "<=")
    way = "DESC" if after is None else "ASC"
    sql = f"SELECT {columns} FROM reports WHERE {' AND '.join(where)} ORDER BY seq {way} LIMIT ?"  # noqa: S608
    return sql, [*values, *given, query.limit]


def _between(
    where: list[str], given: list[Value], column: str, low: float | None, high: float | None, below: str
) -> None:
    if low is not None:
        where.append(f"{column} >= ?")
        given.append(low)
    if high is not None:
        where.append(f"{column} {below} ?")
        given.append(high)
