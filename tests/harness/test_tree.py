import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ChainError, InputError
from reef.harness.tree import MAX_ENTRIES, MAX_ENTRY, Entry, apply_rules, flaw, read, render_rules, write


def rule(name: str, text: str = "Be brief.") -> Entry:
    return Entry(name, "rules", {"text": text})


ids = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z")
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(str.strip)
trees = st.lists(st.builds(rule, ids, texts), max_size=8, unique_by=lambda entry: entry.id)


@given(trees, st.randoms())
def test_same_tree_same_bytes_whatever_the_order(tree, random):
    shuffled = list(tree)
    random.shuffle(shuffled)
    assert write(shuffled) == write(tree)
    assert read(write(tree)) == tuple(sorted(tree, key=lambda entry: entry.id))
    assert write(read(write(tree))) == write(tree)


def test_canonical_bytes_are_these():
    assert (
        write([rule("b", "é"), rule("a")])
        == (
            '{"entries":[{"config":{"text":"Be brief."},"id":"a","kind":"rules"},'
            '{"config":{"text":"é"},"id":"b","kind":"rules"}]}\n'
        ).encode()
    )
    assert write([]) == b'{"entries":[]}\n'


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (rule("Upper"), "valid id"),
        (rule(""), "valid id"),
        (rule("a" * 65), "valid id"),
        (rule("../up"), "valid id"),
        (Entry(7, "rules", {"text": "x"}), "valid id"),
        (Entry("a", "shell", {"text": "x"}), "unknown kind"),
        (Entry("a", ["rules"], {"text": "x"}), "unknown kind"),
        (Entry("a", "rules", {"text": 1}), "config"),
        (Entry("a", "rules", {"text": "x", "more": 1}), "config"),
        (Entry("a", "rules", None), "config"),
        (rule("a", "  \n"), "empty"),
        (rule("a", "\ud800"), "plain JSON"),
        (rule("a", "x" * MAX_ENTRY), "limit"),
    ],
)
def test_an_entry_that_cannot_stand_is_named_with_its_flaw(entry, word):
    assert word in flaw(entry)
    with pytest.raises(InputError, match=word):
        write([entry])


def test_limits_and_repeats():
    write([rule(f"r{i}") for i in range(MAX_ENTRIES)])
    with pytest.raises(InputError, match="limit is 1024"):
        write([rule(f"r{i}") for i in range(MAX_ENTRIES + 1)])
    with pytest.raises(InputError, match="two harness entries"):
        write([rule("a"), rule("a", "other")])
    with pytest.raises(InputError, match="shorten"):
        write([rule(f"r{i}", "x" * (MAX_ENTRY - 100)) for i in range(20)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"\xff",
        b'{"entries":{}}',
        b'{"entries":[],"x":1}',
        b'{"entries":[{"id":"a"}]}',
        b'{"entries":[{"id":"a","kind":"rules","config":{"text":NaN}}]}',
        b'{"entries":[{"id":"a","kind":"rules","config":{"text":""}}]}',
        b"[" * 100_000,
    ],
)
def test_damaged_bytes_say_what_to_do(data):
    with pytest.raises(ChainError, match="roll back"):
        read(data)


def test_rules_render_in_id_order_and_indent_long_ones():
    assert render_rules([]) is None
    assert render_rules([rule("b", "Two\nlines"), rule("a", " One ")]) == "Follow these rules:\n- One\n- Two\n  lines"


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [{"role": "system", "content": "R"}, USER]),
        ([], [{"role": "system", "content": "R"}]),
        ([{"role": "system", "content": "S"}, USER], [{"role": "system", "content": "R\n\nS"}, USER]),
        ([{"role": "system", "content": ""}, USER], [{"role": "system", "content": "R"}, USER]),
        ([{"role": "system", "content": None}, USER], [{"role": "system", "content": "R"}, USER]),
        (
            [{"role": "developer", "content": "S", "name": "n"}],
            [{"role": "developer", "content": "R\n\nS", "name": "n"}],
        ),
        (
            [{"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]}],
            [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "R"},
                        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
                    ],
                }
            ],
        ),
        # a system message in mid-talk stays where it is: the rules lead, so a session's prefix stays the same
        (
            [USER, {"role": "system", "content": "S"}],
            [{"role": "system", "content": "R"}, USER, {"role": "system", "content": "S"}],
        ),
        (["odd"], [{"role": "system", "content": "R"}, "odd"]),
    ],
)
def test_rules_join_the_leading_system_message(messages, expected):
    body = {"model": "m", "messages": messages, "unknown": [1, {"x": None}]}
    before = copy.deepcopy(body)
    applied = apply_rules(body, "R")
    assert applied == {**before, "messages": expected}
    assert list(applied) == list(before)
    assert body == before


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": "hi"}])
def test_a_body_without_messages_is_left_to_others(body):
    assert apply_rules(body, "R") == body


def test_no_rules_change_nothing():
    body = {"messages": [USER]}
    assert apply_rules(body, "") is body
    assert apply_rules(body, None) is body
    assert json.dumps(body) == json.dumps({"messages": [USER]})
