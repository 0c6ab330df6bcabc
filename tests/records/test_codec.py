"""Nouns to bytes and back, exactly."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import InputError, StoreError
from reef.core.nouns import Choice, Report, Sampling
from reef.records import codec

floats32 = st.floats(width=32, allow_nan=False)


@given(st.binary(max_size=3000))
def test_packing_is_exact(data):
    assert codec.unpack(codec.pack(data)) == data


@given(st.lists(st.integers(0, 2**64 - 1)), st.lists(floats32 | st.floats(allow_nan=False)))
def test_token_columns_are_exact(ids, logprobs):
    choices = [Choice(0, "", output_ids=tuple(ids), logprobs=tuple(logprobs)), Choice(1, "")]
    suffix, answers = codec.unpack_tokens(codec.pack_tokens(ids, choices))
    assert suffix == tuple(ids)
    assert answers == [(tuple(ids), tuple(logprobs)), ((), ())]


def test_logprobs_of_an_engine_take_four_bytes_and_odd_ones_eight():
    (exact,) = struct.unpack("f", struct.pack("f", -0.1))
    assert len(codec.pack_floats([exact] * 10)) == 41
    assert len(codec.pack_floats([-0.1] * 10)) == 81
    _, [(_, (kept,))] = codec.unpack_tokens(codec.pack_tokens((), [Choice(0, "", output_ids=(), logprobs=(math.nan,))]))
    assert math.isnan(kept)


@pytest.mark.parametrize("feedback", [2**80, -(2**70), "lone \ud800", {"a": [1.5, None, True, {"é": "ü"}]}, 1e300])
def test_any_json_survives(report, feedback):
    before = report("a" * 32, feedback=feedback)
    assert codec.decode(codec.encode(before), Report) == before


def test_content_ignores_times_and_owner_and_nothing_else(record, report):
    one = record(id="a" * 32)
    assert codec.content(one) == codec.content(record(id="a" * 32, owner="x", timing=one.timing.__class__(9.0)))
    bodies = ({"request": b"{}"}, {"rendered": b""}, {"reply": b""})
    for change in (*bodies, {"answer_id": ""}, {"tags": {}}, {"prompt_ids": (1,)}, {"session": "s"}):
        assert codec.content(one) != codec.content(record(id="a" * 32, **change)), change
    first = report("a" * 32, id="rep_1", score=1, feedback={"x": 1, "y": 2})
    again = report("a" * 32, id="rep_1", score=1.0, feedback={"y": 2, "x": 1}, created_at=99.0)
    assert codec.content(first) == codec.content(again)
    assert codec.content(first) != codec.content(report("a" * 32, id="rep_1", score=None, feedback={"x": 1, "y": 2}))


@pytest.mark.parametrize("legal", [None, '{"regex":"a+"}', '{"choice":["é"]}'])
def test_the_form_of_an_answer_is_kept_with_its_sampling(record, legal):
    one = record(sampling=Sampling(0.7, max_tokens=9, stop=("x",), legal=legal))
    assert codec.unpack_meta(codec.pack_meta(one), one.status, one.purpose).sampling == one.sampling
    assert len(codec.pack_meta(record(sampling=Sampling()))) < len(
        codec.pack_meta(record(sampling=Sampling(legal="{}")))
    )


def test_impossible_values_are_refused_with_a_reason():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match="cannot be stored"):
        codec.encode(deep)
    with pytest.raises(InputError, match="token ids"):
        codec.pack_ids([-1])
    with pytest.raises(StoreError, match="install the Reef version"):
        codec.unpack(b"\x07abc")
