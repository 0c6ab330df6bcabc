"""Queries read the rows of their page, not the table: whatever is asked, SQLite walks an index in its order."""

import sqlite3

import pytest

from reef.core.errors import InputError
from reef.records import Query, pages, schema
from reef.records.lookup import COLUMNS

FILTERS = [
    {},
    {"before": 9},
    {"status": "open", "purpose": "live", "release_id": "r"},
    {"session": "s"},
    {"session": "s", "before": 9},
    {"tag": ("team", "a")},
    {"tag": ("team", "a"), "before": 9, "session": "s"},
    {"answer_id": "resp_1"},
    {"low": 0.5, "high": 1.0},
    {"since": 1.0, "until": 2.0},
    {"since": 1.0, "tag": ("team", "a"), "high": 0.0},
]


@pytest.mark.parametrize("kind", ["record", "report"])
@pytest.mark.parametrize("filters", FILTERS)
def test_no_query_scans_or_sorts(tmp_path, kind, filters):
    query = Query("a", kind=kind, **filters)
    try:
        pages.check(query)
    except InputError:
        return
    schema.migrate(tmp_path / "records.db")
    sql, values = pages.select(query, COLUMNS if kind == "record" else "seq, body")
    connection = sqlite3.connect(tmp_path / "records.db")
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    assert plan
    for step in plan:
        assert not step.startswith("SCAN"), plan
        assert "answer_id" in filters or "TEMP B-TREE" not in step, plan
    connection.close()
