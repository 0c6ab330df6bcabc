"""docs/cases.md is true: each case is there, and each test it names exists and says which case it is of."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = (
    1, 2, 3, 5, 6, 7, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 31, 33,
    34, 35, 36, 38, 39, 41, 42, 43, 45, 46, 48, 49, 50, 51, 52, 54, 55, 56
)  # fmt: skip
PAGE = (ROOT / "docs/cases.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
NAMED = [(int(row[0]), name.strip()) for row in ROWS for name in row[2].split(",")]


@functools.cache
def documented(path):
    """Each test function of a file, and what its docstring and its file's say."""
    tree = ast.parse((ROOT / path).read_text())
    whole = ast.get_docstring(tree) or ""
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {node.name: whole + "\n" + (ast.get_docstring(node) or "") for node in functions}


def test_every_case_is_there_once_and_in_order():
    assert [int(row[0]) for row in ROWS] == list(NUMBERS)
    assert all(len(row) == 3 and row[1] for row in ROWS)


@pytest.mark.parametrize(("number", "name"), NAMED, ids=[f"case {number}-{name}" for number, name in NAMED])
def test_what_proves_a_case_exists_and_says_so(number, name):
    path, _, function = name.partition("::")
    assert function.startswith("test_")
    said = documented(path)
    assert function in said, f"there is no {name}"
    cases = re.findall(r"cases? (\d+)(?:(?:,| and) (?:case )?(\d+))?", said[function], re.IGNORECASE)
    assert str(number) in {each for pair in cases for each in pair}, f"{name} does not say case {number}"


def test_every_case_that_a_test_claims_is_on_the_page():
    for path in (ROOT / "tests").rglob("test_*.py"):
        for number in re.findall(r"\bcase (\d+)\b", path.read_text(), re.IGNORECASE):
            assert int(number) in NUMBERS, f"{path.name} speaks of case {number}"
