"""YAML with lines: substitution, duplicate keys, types, and any text at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.config.file import parse, scalar
from reef.core.errors import ConfigError


def test_values_and_lines():
    tree = parse("reef:\n  port: 8901\n  model: x\ngate:\n  policy: always\n", "r.yaml", {})
    assert tree.values == {"reef": {"port": 8901, "model": "x"}, "gate": {"policy": "always"}}
    assert str(tree.places[("reef", "model")]) == "r.yaml:3"
    assert str(tree.places[("gate", "policy")]) == "r.yaml:5"


@pytest.mark.parametrize(
    ("text", "environment", "value"),
    [
        ("${PORT:-8900}", {}, 8900),
        ("${PORT:-8900}", {"PORT": "1"}, 1),
        ("${PORT:-8900}", {"PORT": ""}, 8900),
        ('"${PORT:-8900}"', {}, "8900"),
        ("${TOKEN:-}", {}, None),
        ("a-${X}-b", {"X": "1"}, "a-1-b"),
        ("$${X}", {}, "${X}"),
        ("${FLAG}", {"FLAG": "false"}, False),
    ],
)
def test_substitution(text, environment, value):
    assert parse(f"k: {text}", "r.yaml", environment).values["k"] == value


def test_substitution_remembers_the_variable():
    tree = parse("a: 1\nk: ${X}", "r.yaml", {"X": "1"})
    assert str(tree.places[("k",)]) == "environment X (r.yaml:2)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "r.yaml:3: a is given twice; first on line 1"),
        ("reef:\n  port: 1\n  port: 2", "r.yaml:3: reef.port is given twice; first on line 2"),
        ("a: 1\nb: ${NOPE}", "r.yaml:2: the environment variable NOPE is not set"),
        ("a: 1\nb: ${1 2}", "r.yaml:2:"),
        ("a: [1", "r.yaml:1: not valid YAML"),
        ("a: 1\n\tb: 2", "r.yaml:2: not valid YAML"),
        ("- a", "r.yaml:1: the file must hold"),
        ("word", "r.yaml:1: the file must hold"),
        ("{[a]: 1}", "r.yaml:1: a key must be a plain word"),
        ("a: &x [*x]", "contains itself"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("a: 1\n--- \nb: 2", "not valid YAML"),
    ],
)
def test_errors_name_the_line(text, message):
    with pytest.raises(ConfigError) as error:
        parse(text, "r.yaml", {})
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_nothing_is_empty(text):
    assert parse(text, "r.yaml", {}).values == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8901", 8901),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("{policy: always}", {"policy": "always"}),
        ("a: b: c", "a: b: c"),
        ("", ""),
    ],
)
def test_command_line_values(text, value):
    assert scalar(text) == value


@given(st.text(max_size=200))
def test_any_text_is_values_or_a_config_error(text):
    try:
        values = parse(text, "r.yaml", {}).values
    except ConfigError as error:
        values = {"error": error.message.index("r.yaml")}
    assert isinstance(values, dict)
