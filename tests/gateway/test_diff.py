"""A harness change as a person reads it, of every kind."""

from reef.gateway.diff import edits
from reef.harness.tree import Entry


def diff(before, after):
    return edits({entry.id: entry for entry in before}, {entry.id: entry for entry in after})


def skill(text, **more):
    return Entry("s", "skill", {"name": "s", "description": "When it fits.", "text": text, **more})


def test_texts_are_compared_line_by_line_and_fields_by_value():
    made = diff([skill("One.\nTwo.")], [skill("One.\nThree.", description="Always.")])
    assert made["changed"] == ["s"]
    assert made["holds"] == []
    lines = made["text"].splitlines()
    assert lines[:2] == ["--- a/s", "+++ b/s"]
    assert {"-description: When it fits.", "+description: Always.", "-Two.", "+Three.", " One."} <= set(lines)


def test_settings_code_and_needs_are_readable_and_held():
    config = Entry("c", "config", {"agent": "pi", "values": {"b": {"x": 1}, "a": "é"}, "needs": ["s"]})
    code = Entry("e", "extension", {"agent": "pi", "file": "e.ts", "text": "line 1\nline 2\n"})
    made = diff([skill("One.")], [skill("One."), config, code])
    assert made["added"] == ["c", "e"]
    lines = made["text"].splitlines()
    assert {"+[config]", "+agent: pi", '+  "a": "é",', '+    "x": 1', '+  "s"'} <= set(lines)
    assert {"+[extension]", "+file: e.ts", "+line 1", "+line 2"} <= set(lines)
    assert [said.split()[0] for said in made["holds"]] == ["config", "extension"]
    taken = diff([code], [])
    assert (taken["removed"], len(taken["holds"])) == (["e"], 1)


def test_nothing_is_hidden_and_a_number_is_not_a_truth():
    made = diff([skill("a")], [skill("a\u202e\u200b\u2028b")])
    assert "+a\\u{202e}\\u{200b}\\u{2028}b" in made["text"].split("\n")
    one, other = ({"agent": "pi", "values": {"n": value}} for value in (1, True))
    assert diff([Entry("c", "config", one)], [Entry("c", "config", other)])["changed"] == ["c"]
