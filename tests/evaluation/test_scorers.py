"""Scorers as they are written down, and what they make of answers."""

import asyncio
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ConfigError
from reef.evaluation import Task
from reef.evaluation.ask import Question
from reef.evaluation.judge import Judge
from reef.evaluation.scorers import HARMLESS, SCORERS, Reach, fenced, graded, last_number, make, written
from reef.evaluation.suite import Judging, read_line
from reef.evaluation.worker import LIMIT


async def score(spec, text):
    scorer = make(spec)
    return await scorer.score(Task("t", Question.of("What is 2+3?"), scorer), text)


PERSON = {"type": "object", "required": ["name"], "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("spec", "text", "value"),
    [
        ({"use": "exact", "answer": "Paris"}, " Paris\n", 1),
        ({"use": "exact", "answer": "Paris"}, "Paris.", 0),
        ({"use": "exact", "answer": ["yes", 5]}, "5", 1),
        ({"use": "contains", "answer": "paris"}, "It is PARIS.", 1),
        ({"use": "contains", "answer": ["paris", "lyon"]}, "It is Rome.", 0),
        ({"use": "regex", "answer": r"\b12\b"}, "about 12 months", 1),
        ({"use": "regex", "answer": r"\b12\b"}, "about 120 months", 0),
        ({"use": "number", "answer": 5}, "2 + 3 = 5.", 1),
        ({"use": "number", "answer": 5}, "5 = 2 + 3", 0),
        ({"use": "number", "answer": "1234.5"}, "It costs 1,234.50", 1),
        ({"use": "number", "answer": [7, -7]}, "-7", 1),
        ({"use": "number", "answer": 0}, "none", 0),
        ({"use": "number", "answer": 100, "tolerance": 2}, "102", 1),
        ({"use": "number", "answer": 100, "tolerance": 2}, "102.1", 0),
        ({"use": "number", "answer": 1000, "relative": 0.05}, "about 960", 1),
        ({"use": "number", "answer": 1000, "relative": 0.05}, "about 940", 0),
        ({"use": "number", "answer": 5}, "9" * 500, 0),
        ({"use": "schema", "answer": PERSON}, '{"name": "Ada", "age": 36}', 1),
        ({"use": "schema", "answer": PERSON}, 'Sure:\n```json\n{"name": "Ada"}\n```\nAnything else?', 1),
        ({"use": "schema", "answer": PERSON}, '{"name": "Ada", "age": "36"}', 0),
        ({"use": "schema", "answer": PERSON}, '{"name": "Ada", "age": NaN}', 0),
        ({"use": "schema", "answer": PERSON}, "Ada, 36", 0),
        ({"use": "schema", "answer": PERSON}, '{"name": ' + "[" * 100_000, 0),
        ({"use": "schema", "answer": {"type": "array"}}, "[" * 500 + "]" * 500, 0),
    ],
)
async def test_what_answers_are_worth(spec, text, value):
    found = await score(spec, text)
    assert (found.value, found.note) == (value, "")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-5", -5), ("10-5", 5), ("−3e2 m", -300), ("1,2", 2), ("1,234,567.8", 1234567.8), (".5", 0.5), ("v1.5.", 1.5),
        ("f(-2)", -2), ("3 eggs, 4eggs", 4), ("12,34", 34), ("", None), ("- ,.", None),
    ],
)  # fmt: skip
def test_the_last_number(text, number):
    assert last_number(text) == number


@given(st.floats(-1e12, 1e12), st.text("abc ,:", max_size=5))
def test_numbers_as_python_writes_them_are_read_back(number, before):
    for shown in (repr(number), f"{number:,.3f}"):
        assert math.isclose(last_number(f"{before} = {shown}"), float(shown.replace(",", "")))


@given(st.text())
def test_any_text_can_be_read(text):
    assert last_number(text) is None or isinstance(last_number(text), float)
    assert all(isinstance(inside, str) for _, inside in fenced(text))
    try:
        json.dumps(written(text))
    except ValueError:
        pass


def test_code_blocks():
    text = "a\n```python title\nx = '''```'''\n```\nb\n~~~\n```\n~~~\n````\n```\n````\n```js\nopen"
    assert fenced(text) == [
        ("python title", "x = '''```'''\n"), ("", "```\n"), ("", "```\n"), ("js", "open\n"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "under use"),
        ({"use": "exat", "answer": 1}, "did you mean exact"),
        ({"use": "os:system"}, "no scorer"),
        ({"use": "exact"}, "needs answer"),
        ({"use": "exact", "answer": []}, "answer is a text"),
        ({"use": "contains", "answer": " "}, "empty"),
        ({"use": "regex", "answer": "("}, "not a pattern"),
        ({"use": "number", "answer": "five"}, "five"),
        ({"use": "number", "answer": math.nan}, "not a number"),
        ({"use": "number", "answer": True}, "a text or a number"),
        ({"use": "number", "answer": 5, "tolerence": 1}, "did you mean scorer.tolerance"),
        ({"use": "number", "answer": 5, "tolerance": -1}, "0 or more"),
        ({"use": "schema", "answer": {"type": 5}}, "not a JSON schema"),
        ({"use": "schema", "answer": "object"}, "answer"),
        ({"use": "code", "call": "os:nope"}, "has no 'nope'"),
        ({"use": "code", "call": "os:sep"}, "not a plain function"),
        ({"use": "code", "call": "asyncio:sleep"}, "not a plain function"),
        ({"use": "code", "call": "math:floor", "seconds": 0}, "seconds"),
    ],
)
def test_what_is_written_wrong_is_said(spec, says):
    with pytest.raises(ConfigError, match=says):
        make(spec)


def test_who_may_name_what():
    """Code is named by the configuration alone; what comes with a request or report runs nothing and asks nobody."""
    specs = {
        "code": {"use": "code", "call": "os:getpid"},
        "tests": {"use": "tests", "answer": "assert True"},
        "judge": {"use": "judge", "engine": "e"},
        "number": {"use": "number", "answer": 1},
    }
    allowed = {
        trust: {name for name, spec in specs.items() if _makes(spec, trust)}
        for trust in ("configuration", "file", "request")
    }
    assert allowed == {"configuration": {*specs}, "file": {"tests", "judge", "number"}, "request": {"number"}}
    assert set(SCORERS) >= HARMLESS


def _makes(spec, trust):
    try:
        return bool(make(spec, trust=trust))
    except ConfigError as error:
        return "may only be named in" not in error.message


def test_a_key_changes_with_all_that_changes_a_judgement():
    specs = [
        {"use": "number", "answer": 5}, {"use": "number", "answer": 6}, {"use": "exact", "answer": 5},
        {"use": "number", "answer": 5, "tolerance": 1}, {"use": "schema", "answer": {}},
        {"use": "schema", "answer": {"type": "object"}}, {"use": "code", "call": "math:isnan"},
        {"use": "code", "call": "math:isnan", "answer": True},
        {"use": "code", "call": "math:isinf"},
    ]  # fmt: skip
    keys = [make(spec).key for spec in specs]
    assert len(set(keys)) == len(specs)
    assert keys == [make(dict(reversed(spec.items()))).key for spec in specs]


def test_a_key_of_code_changes_with_the_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for word in ("True", "False"):
        (tmp_path / "own_score.py").write_text(f"def score(text, task):\n    return {word}\n")
        sys.modules.pop("own_score", None)
        keys.append(make({"use": "code", "call": "own_score:score"}).key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 1.01, 90, "1", [1], object(), None])
def test_what_is_no_score_is_not_judged(value):
    found = graded(value)
    assert found.value is None
    assert found.note


@pytest.mark.parametrize(("value", "score"), [(True, 1), (False, 0), (0.25, 0.25), (1, 1), (0, 0)])
def test_what_is_a_score(value, score):
    assert graded(value).value == score


async def test_a_pattern_that_would_take_for_ever_is_not_judged_and_the_next_is():
    found = await asyncio.gather(
        score({"use": "regex", "answer": "(a+)+$"}, "a" * 50 + "b"),
        score({"use": "regex", "answer": "(a+)+$"}, "aaa"),
    )
    assert found[0].value is None
    assert f"more than {LIMIT:g} s" in found[0].note
    assert found[1].value == 1


async def test_patterns_wait_in_a_thread_not_in_the_loop():
    """The loop turns while a pattern is looked for: everything else the process does goes on."""
    turned = 0
    looked_for = asyncio.ensure_future(score({"use": "regex", "answer": "(a+)+$"}, "a" * 50 + "b"))
    while not looked_for.done():
        await asyncio.sleep(0.01)
        turned += 1
    assert turned > 10


@pytest.mark.parametrize("schema", [{"$ref": "http://127.0.0.1:1/schema.json"}, {"$ref": "#/nowhere"}])
async def test_a_schema_fetches_nothing(schema):
    found = await score({"use": "schema", "answer": schema}, "{}")
    assert found.value is None
    assert "cannot be used" in found.note


async def test_a_schema_with_a_pattern_that_would_take_for_ever_is_not_judged():
    found = await score({"use": "schema", "answer": {"pattern": "^(a+)+$"}}, json.dumps("a" * 50 + "b"))
    assert found.value is None


async def test_lone_surrogates_and_bytes_of_any_kind_can_be_judged():
    assert (await score({"use": "regex", "answer": "x"}, "\ud800 x")).value == 1
    assert (await score({"use": "schema", "answer": {"const": "\ud800"}}, '"\\ud800"')).value == 1


def test_the_child_that_matches_ends_with_its_parent():
    script = (
        "import asyncio\n"
        "from reef.evaluation import worker\n"
        "print(asyncio.run(worker.match('regex', ['a'], 'a')), worker._worker._child.pid)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found, pid = ran.stdout.split()
    assert found == "True"
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the child is still there")


RELEASED = threading.Event()


def fair(text, task):
    """A scorer of one's own, as the configuration names it."""
    if text == "wait":
        RELEASED.wait(60)
    return {"nan": math.nan, "much": 90, "none": None, "half": 0.5, "text": "1"}.get(text, text == task.scorer.answer)


def cross(text, task):
    raise {"exit": SystemExit(1), "key": KeyError("x")}.get(text, ValueError("a bug"))


FAIR = {"use": "code", "call": f"{__name__}:fair", "answer": "5"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 1), ("6", 0), ("half", 0.5), ("nan", None), ("much", None), ("none", None), ("text", None)],
)
async def test_code(text, value):
    found = await score(FAIR, text)
    assert found.value == value
    assert bool(found.note) == (value is None)


@pytest.mark.parametrize(("text", "says"), [("", "ValueError: a bug"), ("exit", "SystemExit"), ("key", "KeyError")])
async def test_code_that_raises_says_nothing_of_the_answer(text, says):
    found = await score({"use": "code", "call": f"{__name__}:cross"}, text)
    assert found.value is None
    assert says in found.note
    line = cross.__code__.co_firstlineno + 1
    assert found.note.endswith(f" ({__file__}, line {line})")


async def test_code_that_hangs_is_not_judged_and_does_not_stop_others():
    RELEASED.clear()
    try:
        hung = await asyncio.gather(*(score({**FAIR, "seconds": 0.05}, "wait") for _ in range(8)))
        assert {each.value for each in hung} == {None}
        assert all("within 0.05 s" in each.note for each in hung)
        full = await score({**FAIR, "seconds": 0.05}, "5")
        assert full.value is None
        assert "still at work" in full.note
        assert (await score({"use": "number", "answer": 5}, "5")).value == 1
    finally:
        RELEASED.set()
    assert (await score(FAIR, "5")).value == 1


def test_nothing_of_ours_is_in_the_childs_reach():
    """The child that matches runs its file alone: it imports nothing of Reef, so it starts at once."""
    done = subprocess.run(
        [sys.executable, "-I", str(Path(make.__code__.co_filename).with_name("worker.py"))],
        input=b'["regex", ["a"], "b"]\n["schema", {}, 1]\n["regex", ["("], "b"]\n',
        capture_output=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[:2] == [False, True]
    assert "cannot be used" in lines[2]


def test_the_examples_of_the_page_are_true():
    page = (Path(__file__).parents[2] / "docs/scorers.md").read_text()
    lines = [line for word, inside in fenced(page) if word == "json" for line in inside.splitlines()]
    made = [
        read_line(json.loads(line), 1, Judging({}, Reach()), trust="file", origin="file").scorer.name for line in lines
    ]
    assert set(made) == {"number", "tests", "judge"}
    rows = [line.split("|")[1].replace("`", " ").strip() for line in page.splitlines() if line.startswith("| `")]
    assert set(SCORERS) <= set(rows)
    assert {field.name for field in dataclasses.fields(Judge)} <= set(re.findall(r"[a-z_]+", " ".join(rows)))
