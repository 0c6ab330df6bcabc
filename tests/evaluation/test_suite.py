import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ConfigError
from reef.evaluation.suite import GENERAL, SCORERS, load_suite, mcnemar


@pytest.mark.parametrize(("wins", "losses", "p"), [(8, 2, 0.0547), (10, 2, 0.0193), (15, 5, 0.0207), (20, 10, 0.0494)])
def test_mcnemar_worked_numbers(wins, losses, p):
    assert round(mcnemar(wins, losses), 4) == p


def test_the_fewest_wins_that_suffice():
    fewest = [next(wins for wins in range(40) if mcnemar(wins, losses) <= 0.05) for losses in range(9)]
    assert fewest == [5, 7, 9, 10, 12, 13, 15, 16, 18]
    assert mcnemar(0, 0) == 1.0


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_a_probability_that_falls_with_wins(wins, losses):
    assert 0 < mcnemar(wins + 1, losses) < mcnemar(wins, losses) + 1e-12 <= 1 + 1e-12


def test_equal_policies_are_seldom_called_better():
    rng = random.Random(14)
    accepts = 0
    for _ in range(200):
        pairs = [(rng.random() < 0.3, rng.random() < 0.3) for _ in range(48)]
        accepts += mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)) <= 0.05
    assert accepts <= 16


@pytest.mark.parametrize(
    ("scorer", "text", "answer", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "Paris.", "Paris", False),
        ("contains", "It is PARIS.", "paris", True),
        ("contains", "It is Rome.", "paris", False),
        ("regex", "about 12 months", r"\b12\b", True),
        ("regex", "about 120 months", r"\b12\b", False),
        ("number", "2 + 3 = 5.", 5, True),
        ("number", "5 = 2 + 3", 5, False),
        ("number", "It costs 1,234.50", 1234.5, True),
        ("number", "-7", -7, True),
        ("number", "none", 0, False),
        ("number", "", 0, False),
    ],
)
def test_scorers(scorer, text, answer, right):
    assert SCORERS[scorer](text, answer) is right


def test_a_suite_file_is_read(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text(
        '{"prompt": "2+3?", "scorer": "number", "answer": 5}\n\n'
        '{"id": "city", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], '
        '"scorer": "contains", "answer": ["Rome", "Roma"], "max_tokens": 9, "temperature": 0, "seed": 4}\n'
    )
    first, second = load_suite(path)
    assert (first.id, first.question.seed, first.question.temperature, first.question.max_tokens) == (
        "line 1",
        1,
        1.0,
        64,
    )
    assert json.loads(first.question.messages) == [{"role": "user", "content": "2+3?"}]
    assert (second.id, second.question.seed, second.question.temperature, second.question.max_tokens) == (
        "city",
        4,
        0.0,
        9,
    )
    assert second.right("in roma")
    assert not second.right("in Paris")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("[1]", "JSON object"),
        ("{", "line 1"),
        ('{"prompt": "a", "scorer": "exact"}', "answer is missing"),
        ('{"prompt": "a", "scorer": "exact", "answer": []}', "answer is missing"),
        ('{"prompt": "a", "scorer": "judge", "answer": 1}', "scorer must be one of"),
        ('{"prompt": "a", "messages": [], "scorer": "exact", "answer": 1}', "one of them"),
        ('{"scorer": "exact", "answer": 1}', "one of them"),
        ('{"messages": ["a"], "scorer": "exact", "answer": 1}', "chat messages"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "weight": 2}', "unknown key 'weight'"),
        ('{"prompt": "a", "scorer": "regex", "answer": "("}', "line 1"),
        ('{"prompt": "a", "scorer": "number", "answer": "five"}', "line 1"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "max_tokens": "many"}', "line 1"),
        ("", "no tasks"),
        ('{"id": "x", "prompt": "a", "scorer": "exact", "answer": 1}\n' * 2, "same id"),
    ],
)
def test_a_wrong_suite_file_names_line_and_reason(tmp_path, line, word):
    path = tmp_path / "suite.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=word) as caught:
        load_suite(path)
    assert caught.value.param == "gate.suite"


def test_no_suite_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"set gate\.suite"):
        load_suite(None)
    with pytest.raises(ConfigError, match="cannot read"):
        load_suite(tmp_path / "absent.jsonl")


def test_the_general_questions_are_distinct_and_not_satisfied_by_nonsense():
    assert len({task.question for task in GENERAL}) == len({task.answers for task in GENERAL}) == len(GENERAL) == 14
    for nonsense in ("", "red", "Shelby", "yes", "I'm sorry, I can't help with that."):
        assert not any(task.right(nonsense) for task in GENERAL)
