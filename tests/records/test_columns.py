"""The quick way to a row and the thorough one agree, and what is not short does not take the quick one."""

import dataclasses
import sqlite3

import pytest

from reef.core.nouns import Choice
from reef.records import schema
from reef.records.columns import plain
from reef.records.rows import Rows


def short(record, **fields):
    return record(**({"prompt_ids": None, "choices": (Choice(0, "It is 4.", "stop"),)} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"status": "open", "owner": "gateway-1-x", "choices": (), "usage": None},
        {"rendered": b"{}", "reply": b'{"id":"x"}', "answer_id": "x", "session": "s", "tags": {}},
        {"answer_id": "lone \ud800", "error": "broken", "choices": ()},
    ],
)
def test_both_ways_make_the_same_row(tmp_path, record, fields):
    one = short(record, **fields)
    schema.migrate(tmp_path / "records.db")
    connection = sqlite3.connect(tmp_path / "records.db")
    assert plain(one) == Rows(connection)._make(one)
    connection.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": (1, 2)},
        {"request": b"x" * 512},
        {"rendered": b"x" * 512},
        {"reply": b"x" * 512},
        {"choices": (Choice(0, "x" * 512),)},
        {"choices": (Choice(0, "", output_ids=()),)},
        {"choices": (Choice(0, "", message={"tool_calls": []}),)},
        {"choices": tuple(Choice(n, "x") for n in range(5))},
    ],
)
def test_what_needs_work_is_left_to_the_writer(record, fields):
    assert plain(short(record)) is not None
    assert plain(dataclasses.replace(short(record), **fields)) is None
