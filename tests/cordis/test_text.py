import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.cordis.text import excerpt, fold, hidden, strings, visible


@settings(deadline=None)
@given(st.text(max_size=50))
def test_what_is_visible_holds_nothing_hidden_and_all_the_rest(text):
    shown = visible(text)
    assert not any(hidden(sign) for sign in shown)
    assert visible(shown) == shown
    if not any(hidden(sign) for sign in text):
        assert shown == text


@settings(deadline=None)
@given(st.text(max_size=50))
def test_folding_twice_is_folding_once_for_ascii_and_never_fails(text):
    assert not any(unicodedata.category(sign) in ("Cf", "Mn") for sign in fold(text))
    if text.isascii():
        assert fold(fold(text)) == fold(text)
        assert fold(text).split() == text.split()


def test_a_gap_between_words_is_one_blank_or_one_empty_line():
    assert fold("a \t  b\u2028c\td\n e\n\t\n \n\nf") == "a b c\td\n e\n\nf"


ALIKE = ["ｉｇｎｏｒｅ", "іgnоrе", "íg\u0308nore", "ig\u200bno\u2060re", "ig\ufe0fnore", "ig\u115fnore", "ιgnοre"]


@pytest.mark.parametrize("text", ALIKE)
def test_what_looks_like_a_word_is_folded_to_it(text):
    assert fold(text) == "ignore"


def test_an_excerpt_is_one_short_line():
    assert excerpt("a\n\t b\x07\u2028c") == "a b\\u{7} c"
    assert excerpt("x" * 200, 10) == "x" * 9 + "…"


def test_strings_are_found_at_any_depth():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    assert list(strings(deep)) == ["x"]
    assert sorted(strings({"a": ["b", 1, None], "c": "d"}, pairs=True)) == ["a", "b", "c", "c=d", "d"]
