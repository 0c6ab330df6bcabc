"""What no kind of entry takes, whoever proposes it: names that are paths, characters that act, shapes that differ."""

import pytest

from reef.harness.kinds import KINDS, MAX_DEPTH, MAX_NEEDS, flaw, quoted, reserved

GOOD = {
    "rules": {"text": "Be brief."},
    "skill": {"name": "test-first", "description": "When code changes.", "text": "Run the tests.\n\n\tThen stop."},
    "command": {"name": "review", "description": "Reviews.", "text": "Review it."},
    "config": {"agent": "pi", "values": {"theme": "dark", "n": [1, 2.5, True, None, {"é": "👩‍👧"}]}},
    "extension": {"agent": "pi", "file": "guard.ts", "text": "export default 1\n"},
}
FIELDS = [(kind, field) for kind, made in KINDS.items() for field in made.fields]


def test_every_kind_has_an_example():
    assert GOOD.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_config_has_no_flaw(kind):
    assert flaw(kind, GOOD[kind]) is None
    assert flaw(kind, {**GOOD[kind], "needs": []}) is None
    assert flaw(kind, {**GOOD[kind], "needs": ["a", "b.c_d-e"]}) is None


@pytest.mark.parametrize(("kind", "field"), FIELDS)
@pytest.mark.parametrize("letter", ["\x00", "\x07", "\x1b", "\r", "\x7f", "\x85", "\ud800"])
def test_no_field_takes_control_characters_or_half_letters(kind, field, letter):
    for text in (letter, f"a{letter}b", f"ab{letter}"):
        value = {text: 1} if field == "values" else text
        assert flaw(kind, {**GOOD[kind], field: value}) is not None
    if field == "values":
        assert flaw(kind, {**GOOD[kind], field: {"deep": [{"x": letter}]}}) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (None, "needs a config"),
        ([], "needs a config"),
        ({"more": 1}, "unknown key 'more'"),
        ({1: "x"}, "plain JSON"),
        ({"needs": "a"}, "list of entries' ids"),
        ({"needs": [1]}, "list of entries' ids"),
        ({"needs": [""]}, "list of entries' ids"),
        ({"needs": ["../a"]}, "list of entries' ids"),
        ({"needs": ["A"]}, "list of entries' ids"),
        ({"needs": ["a", "a"]}, "twice"),
        ({"needs": [f"n{n}" for n in range(MAX_NEEDS + 1)]}, "limit is 16"),
        ({"needs": ("a",)}, "a tuple"),
    ],
)
def test_a_config_of_the_wrong_form(kind, change, word):
    config = {**GOOD[kind], **change} if isinstance(change, dict) else change
    assert word in flaw(kind, config)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_every_field_is_needed_typed_and_limited(kind, field):
    without = {key: value for key, value in GOOD[kind].items() if key != field}
    assert f"needs the key {field!r}" in flaw(kind, without)
    for value in (1, None, True, [], "" if field == "values" else {}):
        assert f"{field} is not" in flaw(kind, {**without, field: value})
    most = KINDS[kind].fields[field].most
    large = {f"k{n}": n for n in range(most + 1)} if field == "values" else "x" * (most + 1)
    assert f"limit is {most}" in flaw(kind, {**without, field: large})
    if field != "values":
        assert "empty" in flaw(kind, {**without, field: " \n"})


PATHS = [
    *("..", ".", "../up", "/etc/passwd", "a/b", "a\\b", "C:x", "~", "~/x", "-rf", "%00"),
    *("a b", "a\tb", "a\nb", "$(rm -rf ~)", "`id`", "a;b", "a&b", "a|b", "a>b", "a*", "a?", "a'b", 'a"b'),
    *("é", "ａ", "а", "a\u200b", "a\u202e"),
]
DEVICES = ["con", "nul", "com1", "lpt9"]
NAMES = [*PATHS, *DEVICES, "Upper", "a--b", "-a", "a-", "a.b", "a_b", ".a", "x" * 65]
FILES = [*PATHS, *(f"{name}.ts" for name in [*PATHS, *DEVICES, "CON"] if name != "-rf")]
FILES += ["a", "a.sh", "a.exe", ".ts", ".a.ts", "a.ts.", "a.ts ", "a.ts\n", "x" * 62 + ".ts"]


@pytest.mark.parametrize("kind", ["skill", "command"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name(kind, name):
    assert "name" in flaw(kind, {**GOOD[kind], "name": name}) or "control" in flaw(kind, {**GOOD[kind], "name": name})


@pytest.mark.parametrize("agent", PATHS)
def test_an_agent_is_a_name(agent):
    assert flaw("config", {**GOOD["config"], "agent": agent}) is not None


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_a_plain_file(file):
    assert flaw("extension", {**GOOD["extension"], "file": file}) is not None


@pytest.mark.parametrize("kind", ["skill", "command"])
@pytest.mark.parametrize("text", ["a\nb", "a\tb", "a\u2028b", "a\u2029b", "---\nname: x"])
def test_a_description_is_one_line(kind, text):
    assert "one line" in flaw(kind, {**GOOD[kind], "description": text})


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (2**53 + 1, "2^53"),
        (-(10**30), "2^53"),
        (b"x", "a bytes"),
        ({1}, "a set"),
        (object(), "a object"),
        ({True: 1}, "no text"),
    ],
)
def test_values_are_the_same_json_everywhere(value, word):
    assert word in flaw("config", {"agent": "pi", "values": {"x": [value]}})


def test_depth_is_limited_before_anything_recurses():
    deep = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "deep" in flaw("config", {"agent": "pi", "values": {"x": deep}})
    right = "x"
    for _ in range(MAX_DEPTH - 3):
        right = {"k": right}
    assert flaw("config", {"agent": "pi", "values": {"x": right}}) is None


def test_reserved_names():
    for name in ("con", "CON", "nul.ts", "aux.tar.gz", "com¹", "a.", "a ", "CONIN$"):
        assert reserved(name)
    for name in ("console", "com10", "a.con", "nul-1", "community"):
        assert not reserved(name)


def test_what_is_quoted_is_short_and_plain():
    assert quoted("a\x1bé") == "'a\\x1b\\xe9'"
    assert len(quoted("\U0001f600" * 5000)) <= 66
    assert quoted(["x" * 5000]) == "(list)"
    assert quoted(10**5000) == "(int)"
