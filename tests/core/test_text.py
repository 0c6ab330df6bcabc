"""JSON that can always be written: the same as orjson's where that can, and readable where it cannot."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.text import Written, deeper, dump, tidy

wild = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\udfffb", "\ud83d\ude00", '"\ud800\n'])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | wild,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(wild, inner, max_size=3)
    ),
    max_leaves=10,
)


def nested(levels, inside=1):
    for n in range(levels):
        inside = {"a": inside} if n % 2 else [inside]
    return inside


def clean(value):
    if isinstance(value, str):
        return tidy(value)
    if isinstance(value, dict):
        return {tidy(key): clean(inner) for key, inner in value.items()}
    return [clean(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@given(values)
@settings(max_examples=200, deadline=None)
def test_every_value_is_written_and_reads_back(value):
    data = dump(value)
    data.decode()
    assert json.loads(data) == clean(value)


@given(values)
@settings(max_examples=100, deadline=None)
def test_both_ways_of_writing_agree(value):
    """A lone surrogate beside a value changes nothing about how the value is written."""
    try:
        whole = orjson.dumps(value)
    except TypeError:
        return
    assert dump(value) == whole
    assert dump([value, "\ud800"]) == b"[" + whole + ',"\ufffd"]'.encode()


def test_lone_surrogates_become_one_sign_each_and_others_stay():
    assert dump({"\ud800": ["a\udfff\udfffb", "é😀"]}) == '{"\ufffd":["a\ufffd\ufffdb","é😀"]}'.encode()


@pytest.mark.parametrize("levels", [254, 255, 5000])
def test_any_depth(levels):
    data = dump(nested(levels))
    assert data.count(b"[") + data.count(b"{") == levels
    assert data.count(b"[") == data.count(b"]")
    assert data.count(b"{") == data.count(b"}")


def test_what_is_written_already_stays_as_it_is():
    body = Written(b'{"a":  1}')
    assert dump({"body": body}) == b'{"body":{"a":  1}}'
    assert dump({"body": body, "said": "\ud800"}) == '{"body":{"a":  1},"said":"\ufffd"}'.encode()


def test_what_is_no_json_is_an_error():
    for value in (b"x", {"a": object(), "b": "\ud800"}):
        with pytest.raises(TypeError):
            dump(value)


def test_depth_counts_lists_and_objects():
    assert [deeper(nested(n), 3) for n in (0, 1, 3, 4, 2000)] == [False, False, False, True, True]
    assert not deeper([[], {}, [[1], "x"], {"a": {"b": {}, "c": "d"}}], 4)
    assert deeper([1, {"a": [1, []]}], 3)
