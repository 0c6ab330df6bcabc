"""What a request gets of a tree: rules, matching skills, a budget; the same for equal requests, in every dialect."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.harness.apply import BYTES, LOOKED, NOTHING, Applied, Wish, newest
from reef.harness.match import Index, words
from reef.harness.tree import Entry, render_rules

RULES = [Entry("r1", "rules", {"text": "Be brief."}), Entry("r2", "rules", {"text": "Be kind."})]
SQL = Entry("sql", "skill", {"name": "sql-style", "description": "How we write SQL queries.", "text": "Upper case."})
TESTS = Entry(
    "tests", "skill", {"name": "run-tests", "description": "Run the test suite before a commit.", "text": "make test"}
)
WISH = Wish(apply=True)


def ask(text):
    return {"messages": [{"role": "user", "content": text}]}


def system(body):
    return body["messages"][0]["content"]


def test_rules_always_and_skills_that_match():
    applied = Applied.of([TESTS, SQL, *RULES], WISH)
    body, added = applied.add(ask("Hello there."))
    assert (system(body), added.ids, added.left) == (render_rules(RULES), ("r1", "r2"), 0)
    body, added = applied.add(ask("Write an SQL query for me."))
    assert added.ids == ("r1", "r2", "sql")
    assert system(body) == (
        f"{render_rules(RULES)}\n\nUse what helps of these skills:"
        "\n\n## sql-style: How we write SQL queries.\n\nUpper case."
    )
    body, added = applied.add(ask("Query the tests with SQL, then run the suite."))
    assert set(added.ids[2:]) == {"sql", "tests"}
    assert applied.apply(ask("Hello there.")) == applied.add(ask("Hello there."))[0]


def test_only_so_many_skills_the_best_first():
    skills = [
        Entry(f"s{n}", "skill", {"name": f"skill-{n}", "description": f"Bread and butter{' and jam' * n}", "text": "x"})
        for n in range(3)
    ]
    applied = Applied.of(skills, Wish(True, skills=2))
    _, added = applied.add(ask("bread with butter and jam"))
    assert added.ids == ("s1", "s2")  # jam is the rarer word; equal ones go by id
    assert not Applied.of(skills, Wish(True, skills=0))


def test_without_a_wish_there_is_nothing_but_the_tree():
    applied = Applied.of(RULES, Wish())
    assert not applied
    assert applied.entries == tuple(RULES)
    body = ask("hi")
    assert applied.apply(body) is body
    assert NOTHING.apply(body) is body


def test_what_is_not_there_is_needed_in_vain():
    hanging = Entry("r0", "rules", {"text": "Never.", "needs": ["gone"]})
    chained = Entry("r3", "rules", {"text": "Nor this.", "needs": ["r0"]})
    fine = Entry("r4", "rules", {"text": "Fine.", "needs": ["r1"]})
    applied = Applied.of([hanging, chained, fine, *RULES], WISH)
    assert (applied.ids, applied.left) == (("r1", "r2", "r4"), 0)


def test_an_entry_without_room_is_left_out_whole_and_counted():
    long = Entry("r0", "rules", {"text": "long " * 200})
    applied = Applied.of([long, *RULES, SQL], Wish(True, tokens=20))
    _, added = applied.add(ask("Write an SQL query."))
    assert (added.ids, added.left) == (("r1", "r2"), 2)
    nothing = Applied.of([long], Wish(True, tokens=10))
    body = ask("hi")
    made, added = nothing.add(body)
    assert made is body
    assert (added.text, added.ids, added.left) == ("", (), 1)


@pytest.mark.parametrize(
    ("dialect", "body", "text"),
    [
        ("chat", {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}, "one"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "x"}]}]}, "one"),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "user", "content": [{"type": "tool_result", "content": "two"}]},
                ]
            },
            "one",
        ),
        ("responses", {"input": "one"}, "one"),
        (
            "responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                    {"type": "function_call_output", "output": "two"},
                ]
            },
            "one",
        ),
        ("chat", {"messages": "odd"}, ""),
        ("chat", {"messages": ["odd", {"role": "user", "content": None}, {"role": "user", "content": [3]}]}, ""),
        ("embeddings", {"input": "one"}, ""),
    ],
)
def test_the_newest_user_text(dialect, body, text):
    assert newest(body, dialect) == text


def test_both_ends_of_a_long_text_are_looked_at():
    text = "begin " + "x " * 20 * LOOKED + "end"
    found = newest(ask(text))
    assert found.startswith("begin")
    assert found.endswith("end")
    assert len(found) == 2 * LOOKED + 1


@pytest.mark.parametrize(
    ("dialect", "body", "where"),
    [
        ("chat", ask("hi"), lambda made: made["messages"][0]["content"]),
        ("count", ask("hi"), lambda made: made["messages"][0]["content"]),
        ("messages", ask("hi"), lambda made: made["system"]),
        ("count_tokens", ask("hi"), lambda made: made["system"]),
        ("responses", {"input": "hi"}, lambda made: made["instructions"]),
    ],
)
def test_every_dialect_is_told(dialect, body, where):
    before = copy.deepcopy(body)
    made, added = Applied.of(RULES, WISH).add(body, dialect)
    assert where(made) == render_rules(RULES)
    assert added.ids == ("r1", "r2")
    assert body == before


def test_what_takes_no_rules_gets_none():
    body = {"input": "hi"}
    assert Applied.of(RULES, WISH).add(body, "embeddings") == (body, None)


def test_a_key_is_of_tree_and_wish():
    keys = [
        Applied.of(tree, wish).key
        for tree in (RULES, RULES[:1], [*RULES, SQL])
        for wish in (WISH, Wish(), Wish(True, 2), Wish(True, 3, 99))
    ]
    assert len(set(keys)) == len(keys)
    assert Applied.of(RULES[::-1], WISH).key == keys[0]
    assert Applied.of(RULES, Wish(False, 1)).key == Applied.of(RULES, Wish(False, 2)).key  # neither adds anything
    json.loads(keys[0])


# --- what matches -----------------------------------------------------------------------------------------------------

INDEX = Index(
    [
        ("sql", "sql-style", "How we write SQL queries against the warehouse."),
        ("tests", "testing", "Run the test suite, look at failures, fix them."),
        ("pdf", "pdf-forms", "Fill in PDF forms. Use when the user asks for a filled form."),
        ("茶", "tea", "日本茶の淹れ方"),
    ]
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Please write me an SQL query", ["sql"]),
        ("Which queries hit the warehouse?", ["sql"]),
        ("sql", []),  # one word of two
        ("SQL in our style, please", ["sql"]),  # its whole name
        ("My tests fail", ["tests"]),  # its name, without its ending
        ("Use it when the user asks", []),  # words that say nothing
        ("Fill the form in this PDF", ["pdf"]),
        ("日本茶をください", ["茶"]),
        ("", []),
        ("🙂 \ud800 \x00", []),
    ],
)
def test_matches(text, found):
    assert [name for _, name in INDEX.best(text)] == found


@pytest.mark.parametrize(
    ("one", "other"), [("tests", "testing"), ("query", "queries"), ("run", "running"), ("write", "writing")]
)
def test_endings_do_not_count(one, other):
    assert words(one) == words(other) != set()


def test_a_name_of_silent_words_alone_matches_nothing():
    assert Index([("x", "how-to", "Bake.")]).best("bake how to") == []


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=60).filter(str.strip)
NAMES = st.from_regex(r"[a-z]{1,8}(-[a-z]{1,8})?", fullmatch=True)
ENTRIES = st.lists(
    st.one_of(
        st.builds(lambda text: ("rules", {"text": text}), TEXT),
        st.builds(
            lambda name, about, text: ("skill", {"name": name, "description": about, "text": text}), NAMES, TEXT, TEXT
        ),
    ),
    max_size=8,
).map(lambda found: [Entry(f"e{place}", *one) for place, one in enumerate(found)])


@settings(max_examples=150, deadline=None)
@given(ENTRIES, TEXT, st.integers(0, 4), st.integers(1, 80))
def test_any_tree_any_text(entries, text, skills, tokens):
    wish = Wish(True, skills, tokens)
    applied = Applied.of(entries, wish)
    body = ask(text)
    made, added = applied.add(body)
    again, same = Applied.of(entries[::-1], wish).add(copy.deepcopy(body))
    assert (made, added) == (again, same)  # only the set of entries, the wish and the request count
    assert body == ask(text)
    assert len(added.text.encode()) <= tokens * BYTES
    assert made == (
        {"messages": [{"role": "system", "content": added.text}, *body["messages"]]} if added.text else body
    )
    kinds = {entry.id: entry.kind for entry in entries}
    assert added.rules == sum(kinds[name] == "rules" for name in added.ids)
    chosen = [kinds[name] for name in added.ids]
    assert chosen == sorted(chosen)  # rules before skills
    assert chosen.count("skill") <= skills
    assert list(added.ids[: chosen.count("rules")]) == sorted(added.ids[: chosen.count("rules")])
    for name in added.ids:
        entry = next(one for one in entries if one.id == name)
        assert entry.config["text"].strip().replace("\n", "\n  ") in added.text or entry.kind == "skill"
    assert chosen.count("rules") + added.left >= list(kinds.values()).count("rules")
