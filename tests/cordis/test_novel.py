"""What says nothing new does not enter a tree. Case 50: what is told anyway is no lesson."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.cordis.novel import restates, runs, share

BOOT = """You are a careful coding agent. Read files before you change them.
Always run the tests, and
say what failed.

- Keep functions short.
- Prefer the standard library.
"""


@pytest.mark.parametrize(
    "text",
    [
        "Read files before you change them.",
        "ALWAYS run the tests and say what failed",
        "* Prefer the standard library!\n* Keep functions short.",
        "1. Keep functions short.\n2. You are a careful coding agent.",
        BOOT,
    ],
)
def test_what_is_said_already_is_found_whatever_its_form(text):
    assert restates(text, [BOOT])


@pytest.mark.parametrize(
    "text",
    [
        "Read files after you change them.",
        "Keep functions long.",
        "Prefer the standard library, and say which part of it you used.",
        "My name is B.",
        "函数要短。",
        "Run the linter before the tests.",
    ],
)
def test_what_is_not_said_yet_is_new(text):
    assert not restates(text, [BOOT, "My name is A."])


def test_writings_without_blanks_are_compared_by_letters():
    assert restates("答案应该更短。", ["请注意。答案应该更短。谢谢。"])
    assert not restates("答案应该更长。", ["答案应该更短。"])


def test_pieces_of_several_texts_restate_them_together():
    assert restates("Be brief. Be kind.", ["Be brief.", "Be kind."])
    assert not restates("Be brief. Be exact.", ["Be brief.", "Be kind."])


@settings(deadline=None)
@given(st.text(max_size=80), st.lists(st.text(max_size=80), max_size=3))
def test_the_share_is_a_part_of_one_and_a_text_restates_itself(text, others):
    assert 0 <= share(runs(text), map(runs, others)) <= 1
    assert restates(text, [*others, text])
