import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import ChainError, InputError
from reef.harness.kinds import KINDS, reserved
from reef.harness.tree import (
    MAX_ENTRIES,
    MAX_ENTRY,
    Entry,
    apply_rules,
    flaw,
    needs,
    read,
    render_rules,
    settled,
    waiting,
    write,
)


def rule(name: str, text: str = "Be brief.") -> Entry:
    return Entry(name, "rules", {"text": text})


ids = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z").filter(lambda name: not reserved(name))
plain = st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), include_characters="\t\n")
texts = st.text(plain, min_size=1, max_size=60).filter(str.strip)
lines = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40)
names = st.from_regex(r"\A[a-z0-9]{1,9}(-[a-z0-9]{1,9}){0,2}\Z").filter(lambda name: not reserved(name))
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.dictionaries(
    texts,
    st.recursive(scalars | texts, lambda some: st.lists(some, max_size=3) | st.dictionaries(texts, some, max_size=3)),
    max_size=4,
)
short = {"name": names, "description": lines, "text": texts}
configs = {
    "rules": {"text": texts},
    "skill": short,
    "command": short,
    "config": {"agent": names, "values": values},
    "extension": {"agent": names, "file": names.map("{}.ts".format), "text": texts},
}
entries = st.one_of(
    st.builds(
        Entry,
        ids,
        st.just(kind),
        st.fixed_dictionaries(fields, optional={"needs": st.lists(ids, max_size=3, unique=True)}),
    )
    for kind, fields in configs.items()
)
trees = st.lists(entries, max_size=8, unique_by=lambda entry: entry.id)


def test_every_kind_is_tried():
    assert configs.keys() == KINDS.keys()


@settings(deadline=None)
@given(trees, st.randoms())
def test_same_tree_same_bytes_whatever_the_order(tree, random):
    shuffled = list(tree)
    random.shuffle(shuffled)
    assert write(shuffled) == write(tree)
    assert read(write(tree)) == tuple(sorted(tree, key=lambda entry: entry.id))
    assert write(read(write(tree))) == write(tree)


@settings(deadline=None)
@given(trees)
def test_order_of_keys_does_not_matter_and_numbers_keep_their_kind(tree):
    turned = [Entry(entry.id, entry.kind, dict(reversed(entry.config.items()))) for entry in tree]
    assert write(turned) == write(tree)
    assert repr(read(write(tree))) == repr(read(write(turned)))
    assert write([Entry("a", "config", {"agent": "pi", "values": {"n": 1}})]) != write(
        [Entry("a", "config", {"agent": "pi", "values": {"n": 1.0}})]
    )


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
        (rule("a\n"), "valid id"),
        (rule("ａ"), "valid id"),
        (rule("con"), "valid id"),
        (rule("nul.x"), "valid id"),
        (rule("a."), "valid id"),
        (rule("$(rm -rf ~)"), "valid id"),
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


def waits(name: str, *needed: str) -> Entry:
    return Entry(name, "rules", {"text": "Be brief.", "needs": list(needed)})


def test_settled_puts_what_is_needed_first_and_leaves_out_what_waits():
    tree = [waits("a", "c"), waits("b", "nowhere"), rule("c"), waits("d", "b", "c"), waits("e", "f"), waits("f", "e")]
    assert [entry.id for entry in settled(tree)] == ["c", "a"]
    assert waiting(tree) == {
        "b": "needs 'nowhere', which is not in the tree",
        "d": "needs 'b', which waits itself",
        "e": "needs itself, through 'f'",
        "f": "needs itself, through 'e'",
    }
    assert [entry.id for entry in settled(tree, {"c"})] == []
    assert waiting(tree, {"c"})["a"] == "needs 'c', which failed"
    assert settled([]) == ()
    assert settled([rule("b"), rule("a")]) == (rule("a"), rule("b"))
    assert [entry.id for entry in settled([waits("c", "a"), waits("b", "a"), rule("d"), rule("a")])] == list("abcd")


graphs = st.lists(
    st.builds(waits, st.sampled_from("abcdef"), st.sampled_from("abcdefg"), st.sampled_from("abcdefg")),
    max_size=6,
    unique_by=lambda entry: entry.id,
).map(lambda tree: [Entry(e.id, e.kind, {"text": "x", "needs": sorted(set(needs(e)))}) for e in tree])
graphs |= st.lists(st.builds(waits, st.sampled_from("abcdef")), max_size=6, unique_by=lambda entry: entry.id)


@settings(deadline=None)
@given(graphs, graphs, st.randoms())
def test_settled_is_the_largest_set_that_stands_by_itself(one, other, random):
    tree = list({entry.id: entry for entry in (*one, *other)}.values())
    order = settled(tree)
    for at, entry in enumerate(order):
        assert set(needs(entry)) <= {before.id for before in order[:at]}
    left = {entry.id for entry in tree} - {entry.id for entry in order}
    for entry in tree:
        assert (entry.id in left) == bool(set(needs(entry)) - {stands.id for stands in order})
    assert waiting(tree).keys() == left
    random.shuffle(tree)
    assert settled(tree) == order


def test_a_long_chain_and_a_long_circle_are_no_trouble():
    chain = [waits("n0")] + [waits(f"n{n}", f"n{n - 1}") for n in range(1, MAX_ENTRIES)]
    assert len(settled(reversed(chain))) == MAX_ENTRIES
    circle = [waits("n0", f"n{MAX_ENTRIES - 1}"), *chain[1:]]
    assert settled(circle) == ()
    assert all("needs itself" in why for why in waiting(circle).values())
    assert all(len(why) < 100 for why in waiting(circle).values())


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
