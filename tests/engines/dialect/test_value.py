"""What is not quite JSON: read, kept apart where it is cut, and written as JSON."""

import json
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.engines.dialect.value import DEEP, clean, dump, load, mend, read, ready, write

HALVES = st.text(st.sampled_from("aé北😀\ud83d\ude00\udbff\udc00\uffff"), max_size=8)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | HALVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HALVES, inner, max_size=3),
    max_leaves=12,
)


def nested(levels):
    return '{"a":' * levels + "1" + "}" * levels


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@given(ODD)
def test_what_is_written_is_json(value):
    """case 13: whatever a provider takes for JSON is written as JSON in UTF-8."""
    written = dump(load(json.dumps(value)))
    again = json.loads(written.decode(), parse_constant=no_constant)
    assert clean(again) == again
    if all(name not in json.dumps(value) for name in ("NaN", "Infinity")):
        assert again == clean(value)


@given(ODD)
def test_proper_json_is_said_to_be_so(value):
    """case 13: other readers take what is said to be proper; the rest is written anew."""
    data = json.dumps(value).encode()
    found, proper = read(data)
    if proper:
        json.loads(data, parse_constant=no_constant)
        assert clean(found) == found


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": NaN}', {"a": None}),
        (b'{"a": -Infinity}', {"a": None}),
        (b'{"a": 1e999}', {"a": None}),
        (b'{"a": ' + b"9" * 5000 + b"}", {"a": None}),
        (b'{"a": 99999999999999999999999, "b": NaN}', {"a": 99999999999999999999999, "b": None}),
        (b'{"a": "\\ud83d"}', {"a": "\ufffd"}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
        (b'{"\\ud83d": 1}', {"\ufffd": 1}),
        (b"\xef\xbb\xbf{}", {}),
    ],
)
def test_odd_values(data, value):
    assert json.loads(dump(load(data)), parse_constant=no_constant) == value


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, "\ud83d", b'{"a": }'])
def test_what_is_no_json_is_none(data):
    assert read(data) == (None, False)


@given(HALVES, st.lists(st.integers(0, 16)))
def test_halves_meet_across_any_cuts(words, cuts):
    """case 6: a text cut between any two of its escapes is the same text in the end, and valid all the way."""
    units = [chr(code) for code in memoryview(words.encode("utf-16-le", "surrogatepass")).cast("H")]
    found, waiting = [], []
    for at, unit in enumerate(units):
        waiting.append(unit)
        if at in cuts:
            found += ready(waiting)
    found += ready(waiting, ended=True)
    assert not waiting
    assert "".join(found) == mend(words)
    assert all(piece and piece.encode() for piece in found)


def test_what_is_nested_too_deeply():
    value = load(nested(900))
    assert json.loads(dump(value))
    hard = {"a": value, "b": math.nan, "c": 10**30, "d": "\ud83d"}
    assert json.loads(dump(hard))["d"] == "\ufffd"
    with pytest.raises(InputError, match=f"metadata is nested more than {DEEP} levels") as caught:
        write({"x": value}, {"model": "m", "metadata": value})
    assert caught.value.param == "metadata"
    assert orjson.loads(write({"seed": 2**70}, {"seed": 2**70})) == {"seed": 2.0**70}
