"""Another model's name in a body, and nothing else changed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.engines.rename import rename


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (b'{"model": "a" , "x":1.50}', b'{"model": "new" , "x":1.50}'),
        (b'{"x":{"model":"a"},\n "model" :\t"a"}', b'{"x":{"model":"a"},\n "model" :\t"new"}'),
        (rb'{"\"model":"a","model":"a"}', rb'{"\"model":"a","model":"new"}'),
        (rb'{"x":"\"model\":\"a\"","model":"a"}', rb'{"x":"\"model\":\"a\"","model":"new"}'),
        (b'{"model":"a","model":"a"}', b'{"model":"a","model":"new"}'),
        (b'{"model":null,"x":1e400}', b'{"model":"new","x":1e400}'),
        (b'{"model":{"a":[1]}}', b'{"model":"new"}'),
        (b' { "x":1}', b' {"model":"new", "x":1}'),
        (b"{ }", b'{"model":"new" }'),
        (rb'{"mod\u0065l":"a", "x":{"model":"a"}}', b'{"model":"new","x":{"model":"a"}}'),
        (b'{"model":"new"}', b'{"model":"new"}'),
    ],
)
def test_only_the_name_changes(body, made):
    assert rename(body, "new") == made


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":', b'{"model":"a"} x', b'"model"', b'{"model":"a",}'])
def test_what_is_no_object(body):
    with pytest.raises(InputError):
        rename(body, "new")


def test_many_like_it():
    body = b'{"x":[' + b",".join([b'{"model":"a"}'] * 1000) + b'], "model":"a"}'
    assert json.loads(rename(body, "new")) == {"x": [{"model": "a"}] * 1000, "model": "new"}


KEYS = st.text(max_size=3) | st.sampled_from(["model", '"model"', "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("model"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, JSON, max_size=4), st.text(max_size=8), st.sampled_from([None, 1]))
def test_any_object(value, model, indent):
    made = rename(json.dumps(value, indent=indent).encode(), model)
    assert json.loads(made) == value | {"model": model}
    if "model" in value:  # the rest has its bytes
        mark = json.dumps(model, ensure_ascii=False).encode()
        assert made == json.dumps(value | {"model": "\0"}, indent=indent).encode().replace(rb'"\u0000"', mark)
