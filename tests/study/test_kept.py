"""What a run remembers between two lives."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from reef.core.errors import StoreError
from reef.study.kept import Kept, key, read, write


def test_values_and_seconds_are_there_in_the_next_life(tmp_path):
    first = Kept(tmp_path)
    assert first.values == {}
    first.keep({"all": 2.0}, batch=1, curve=[[0, 0.5]])
    first.keep({"all": 3.0}, batch=2)
    second = Kept(tmp_path)
    assert second.values == {"batch": 2, "curve": [[0, 0.5]]}
    assert second.seconds == {"all": 3.0}


def test_calls_since_the_kept_place_are_repeated_and_those_before_it_are_not(tmp_path):
    first = Kept(tmp_path)
    first.note("a", 1)
    first.keep({}, batch=1)
    first.note("b", 2)
    second = Kept(tmp_path)
    assert second.take("a") == (False, None)
    assert second.take("b") == (True, 2)
    assert second.take("b") == (False, None)  # it was called once
    assert [path.name for path in tmp_path.glob("journal-*")] == ["journal-1.jsonl"]


def test_the_same_call_twice_is_two_calls(tmp_path):
    first = Kept(tmp_path)
    for value in ("before", "after"):
        assert first.take("head") == (False, None)
        first.note("head", value)
    second = Kept(tmp_path)
    assert [second.take("head") for _ in range(3)] == [(True, "before"), (True, "after"), (False, None)]


def test_a_line_that_was_cut_off_was_not_done(tmp_path):
    first = Kept(tmp_path)
    first.note("a", 1)
    path = tmp_path / "journal-0.jsonl"
    with path.open("ab") as file:
        file.write(b'["b", 2')
    second = Kept(tmp_path)
    assert second.take("b") == (False, None)
    second.note("c", 3)
    third = Kept(tmp_path)
    assert [third.take(name) for name in "abc"] == [(True, 1), (False, None), (True, 3)]


def test_a_journal_from_before_the_kept_place_is_no_more(tmp_path):
    first = Kept(tmp_path)
    first.note("a", 1)
    left = (tmp_path / "journal-0.jsonl").read_bytes()
    first.keep({}, batch=1)
    (tmp_path / "journal-0.jsonl").write_bytes(left)  # killed between the rename and the removal
    assert Kept(tmp_path).take("a") == (False, None)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write(tmp_path / "kept.json", {"values": {"batch": 1}})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "kept.json", {"values": {"batch": 2}})
    assert read(tmp_path / "kept.json") == {"values": {"batch": 1}}
    assert read(tmp_path / "nothing.json") is None


CALLS = some.lists(some.tuples(some.sampled_from("abc"), some.integers()), max_size=12)


@settings(max_examples=40, deadline=None)
@given(CALLS, some.integers(0, 12), some.integers(0, 12))
def test_a_driver_that_is_killed_anywhere_sees_what_it_would_have_seen(tmp_path_factory, calls, killed, kept_at):
    """Each call is made once, in whichever life; a repeated one gives what it gave."""
    folder, made = tmp_path_factory.mktemp("kept"), []

    def live(until):
        kept, seen = Kept(folder), []
        for place in range(kept.values.get("place", 0), len(calls)):
            if place == kept_at and kept.values.get("place", 0) < kept_at:
                kept.keep({}, place=place)
            if place >= until:
                return seen
            name, value = calls[place]
            known, found = kept.take(name)
            if not known:
                made.append(place)
                kept.note(name, value)
                found = value
            seen.append((place, found))
        return seen

    live(killed)
    last = live(len(calls))
    assert made == list(range(len(calls)))
    assert last == [(place, calls[place][1]) for place, _ in last]


def test_keys_tell_calls_apart():
    assert key("ask", {"a": 1, "b": 2}) == key("ask", {"b": 2, "a": 1})
    assert key("ask", {"a": 1}) != key("ask", {"a": 2})
    assert json.dumps(key("x"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"values": 1}', '{"seconds": {"all": "x"}}', '{"journal": "1"}']
)
def test_a_damaged_place_is_named_with_what_to_do(tmp_path, text):
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(StoreError, match=r"kept\.json is damaged .*--fresh"):
        Kept(tmp_path)


@pytest.mark.parametrize("line", ["{}", "7", "[1, 2, 3]", "no JSON"])
def test_a_damaged_journal_is_named(tmp_path, line):
    (tmp_path / "journal-0.jsonl").write_text(line + "\n")
    with pytest.raises(StoreError, match=r"journal-0\.jsonl is damaged .*--fresh"):
        Kept(tmp_path)
