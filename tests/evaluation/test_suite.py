"""How tasks are written down, where they come from, and the order they are handed out in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import ConfigError
from reef.engines.fake import FakeEngine
from reef.evaluation import Task
from reef.evaluation import book as book_module
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.scorers import Reach
from reef.evaluation.suite import GENERAL, Coded, Judging, Listed, Sources, load_suite, read_line, task_key

JUDGING = Judging({}, Reach())


async def right(task, text):
    return (await task.scorer.score(task, text)).value


@pytest.fixture
def book():
    found = Book.memory()
    yield found
    found.close()


async def test_a_suite_file_is_read(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text(
        '{"prompt": "2+3?", "scorer": "number", "answer": 5}\n\n'
        '{"id": "city", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], '
        '"scorer": "contains", "answer": ["Rome", "Roma"], "max_tokens": 9, "temperature": 0, "seed": 4, '
        '"protected": true}\n'
        '{"prompt": "pi?", "scorer": {"use": "number", "tolerance": 0.01}, "answer": 3.14159}\n'
    )
    first, second, third = load_suite(path, JUDGING)
    question = first.question
    assert (first.id, question.seed, question.temperature, question.max_tokens) == ("line 1", 1, 1.0, 64)
    assert json.loads(question.messages) == [{"role": "user", "content": "2+3?"}]
    question = second.question
    assert (second.id, question.seed, question.temperature, question.max_tokens) == ("city", 4, 0.0, 9)
    assert (first.protected, second.protected, first.origin) == (False, True, "file")
    assert await right(second, "in roma") == 1
    assert await right(second, "in Paris") == 0
    assert [await right(third, text) for text in ("3.14", "3.2")] == [1, 0]


async def test_the_default_scorer_judges_tasks_that_bring_none(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text('{"prompt": "2+3?", "answer": 5}\n{"prompt": "2+4?", "scorer": "exact", "answer": "6"}')
    first, second = load_suite(path, Judging({"use": "number", "tolerance": 0.5}, Reach()))
    assert (first.scorer.name, second.scorer.name) == ("number", "exact")
    assert await right(first, "about 5.4") == 1
    with pytest.raises(ConfigError, match=r"line 1: .*no scorer, and gate.scorer names none"):
        load_suite(path, JUDGING)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("[1]", "JSON object"),
        ("{", "line 1"),
        ('{"prompt": "a", "scorer": "exact"}', "the scorer exact needs answer"),
        ('{"prompt": "a", "scorer": "exact", "answer": []}', "line 1: .*answer"),
        ('{"prompt": "a", "scorer": "exakt", "answer": 1}', "did you mean exact"),
        ('{"prompt": "a", "scorer": "code", "answer": 1}', "may only be named in the configuration file"),
        ('{"prompt": "a", "scorer": 3, "answer": 1}', "a name or a mapping"),
        ('{"prompt": "a", "scorer": {"use": "number", "tolerence": 1}, "answer": 1}', "tolerance"),
        ('{"prompt": "a", "scorer": {"use": "judge", "engine": "gone"}}', "no engine 'gone' to judge with"),
        ('{"prompt": "a", "messages": [], "scorer": "exact", "answer": 1}', "one of them"),
        ('{"scorer": "exact", "answer": 1}', "one of them"),
        ('{"messages": ["a"], "scorer": "exact", "answer": 1}', "chat messages"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "weight": 2}', "unknown key 'weight'"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "protected": 1}', "true or false"),
        ('{"prompt": "a", "scorer": "regex", "answer": "("}', "line 1"),
        ('{"prompt": "a", "scorer": "number", "answer": "five"}', "line 1"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "max_tokens": "many"}', "line 1"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "max_tokens": 0}', "max_tokens is 1 or more"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "temperature": NaN}', "temperature from 0"),
        ('{"prompt": "a", "scorer": "exact", "answer": 1, "seed": 1e999}', "line 1"),
        ("", "no tasks"),
        ('{"id": "x", "prompt": "a", "scorer": "exact", "answer": 1}\n' * 2, "same id, 'x'"),
    ],
)
def test_a_wrong_suite_file_names_line_and_reason(tmp_path, line, word):
    path = tmp_path / "suite.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=word) as caught:
        load_suite(path, Judging({}, Reach(engines={"here": FakeEngine()})))
    assert caught.value.param == "gate.suite"
    assert "default:" not in str(caught.value)


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_suite(tmp_path / "absent.jsonl", JUDGING)


WORDS = st.sampled_from(
    ["id", "prompt", "messages", "scorer", "answer", "max_tokens", "seed", "use", "protected", "role", "exact"]
)
PLAIN = st.none() | st.booleans() | st.floats() | st.integers() | st.text() | WORDS


@settings(deadline=None, max_examples=50)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner)))
def test_no_line_breaks_the_reader(line):
    try:
        task = read_line(line, 1, JUDGING, trust="file", origin="file")
    except (ValueError, TypeError, OverflowError, ConfigError):
        return
    assert isinstance(json.loads(task.question.messages), list)


def test_the_general_questions_are_distinct_and_not_satisfied_by_nonsense():
    assert len({task.question for task in GENERAL}) == len({task.pattern.key for task in GENERAL}) == len(GENERAL) == 14
    for nonsense in ("", "red", "Shelby", "yes", "I'm sorry, I can't help with that."):
        assert not any(task.right(nonsense) for task in GENERAL)


def test_a_tasks_key_is_all_that_its_score_depends_on():
    def key(**line):
        whole = {"prompt": "a", "scorer": "exact", "answer": "b"} | line
        return task_key(read_line(whole, 1, JUDGING, trust="file", origin="file"))

    assert key() == key(id="other", seed=9, protected=True)
    changed = [key(prompt="c"), key(answer="c"), key(scorer="contains"), key(max_tokens=3), key(temperature=0)]
    assert len({key(), *changed}) == 6


# --- code -------------------------------------------------------------------------------------------------------------

LINE = {"prompt": "a", "scorer": "exact", "answer": "b"}
TASK = Task("own", Question.of("q"), read_line(LINE, 1, JUDGING, trust="file", origin="code").scorer)
listed = [LINE, TASK]
called = []


def give():
    called.append(1)
    yield LINE | {"id": "given"}


async def give_later():
    return [LINE | {"scorer": "code", "call": "x"}]


def refuse():
    return [LINE, {"prompt": 1, "promt": 2}]


PATH = f"{__name__}:"


async def test_code_gives_tasks(book):
    assert [task.id for task in await Coded(PATH + "listed", JUDGING).tasks(9, {}, ())] == ["line 1", "own"]
    source = Coded(PATH + "give", JUDGING)
    for _ in range(2):
        assert [(task.id, task.origin) for task in await source.tasks(9, {}, ())] == [("given", "code")]
    assert called == [1]


@pytest.mark.parametrize(
    ("name", "word"),
    [("refuse", r"refuse, task 2: unknown key 'promt'"), ("give_later", "task 1: unknown key 'call'")],
)
async def test_what_code_gives_is_checked(name, word):
    with pytest.raises(ConfigError, match=word):
        await Coded(PATH + name, JUDGING).tasks(9, {}, ())


def test_code_that_gives_nothing_is_refused_at_once():
    with pytest.raises(ConfigError, match="neither a list nor a callable"):
        Coded("reef.evaluation.suite:FEW", JUDGING)
    with pytest.raises(ConfigError, match="no 'absent'"):
        Coded("reef.evaluation.suite:absent", JUDGING)


# --- draws ------------------------------------------------------------------------------------------------------------


def tasks(count, prefix="t", **how):
    scorer = TASK.scorer
    return [Task(f"{prefix}{n}", Question.of(f"{prefix} {n}"), scorer, **how) for n in range(count)]


class Growing:
    """A source that has more each time, as traffic does."""

    name, fixed = "growing", False

    def __init__(self):
        self.held = []

    async def tasks(self, want, pinned, avoid):
        return list(self.held)


def ids(draw):
    return [task.id for task in draw.tasks]


async def test_the_order_is_the_generations(book):
    suite = Sources("s", [Listed("qa.jsonl", tasks(40))], book)
    book.use("s", "r0", "a")
    first = await suite.draw(40)
    book.use("s", "r0", "b")
    assert ids(await suite.draw(40)) == ids(first)
    assert ids(await Sources("s", [Listed("qa.jsonl", tasks(40))], book).draw(40)) == ids(first), "and of a restart"
    assert ids(await suite.draw(10)) == ids(first)[:10]
    book.use("s", "r1", "b")
    second = await suite.draw(40)
    assert ids(second) != ids(first)
    assert sorted(ids(second)) == sorted(ids(first))
    other = Book.memory()
    other.use("other", "r0", "a")
    assert ids(await Sources("other", [Listed("qa.jsonl", tasks(40))], other).draw(40)) != ids(first)
    assert (first.generation, second.generation, second.uses) == (1, 2, 1)
    other.close()


async def test_the_next_generation_begins_with_tasks_that_were_not_asked(book):
    suite = Sources("s", [Listed("qa.jsonl", tasks(50))], book)
    seen = []
    for number in range(3):
        book.use("s", f"r{number}", "a")
        seen.append(set(ids(await suite.draw(20))))
    assert not seen[0] & seen[1]
    assert len(seen[2] - seen[0] - seen[1]) == 10, "then those that were"


async def test_new_traffic_goes_to_the_end(book):
    source = Growing()
    suite = Sources("s", [source], book)
    book.use("s", "r", "a")
    source.held = tasks(5)
    first = ids(await suite.draw(8))
    source.held = tasks(20)
    assert ids(await suite.draw(8))[:5] == first
    source.held = tasks(20)[1:]
    assert ids(await suite.draw(8))[:4] == [name for name in first if name != "t0"], "what is gone is gone"


async def test_protected_tasks_are_always_drawn(book):
    suite = Sources("s", [Listed("a", tasks(60)), Listed("b", tasks(6, "p", protected=True))], book)
    for number in range(4):
        book.use("s", f"r{number}", "a")
        drawn = ids(await suite.draw(10))
        assert {name for name in drawn if name[0] == "p"} == {f"p{n}" for n in range(6)}
        assert [name[0] for name in drawn] != ["p"] * 6 + ["t"] * 4


async def test_equal_ids_of_two_sources_are_told_apart(book):
    suite = Sources("s", [Listed("a", tasks(2)), Listed("b.jsonl", tasks(2))], book)
    assert sorted(ids(await suite.draw(9))) == ["b.jsonl: t0", "b.jsonl: t1", "t0", "t1"]


async def test_a_measurement_has_other_tasks_and_leaves_the_order_alone(book):
    suite = Sources("s", [Listed("qa", tasks(30))], book)
    book.use("s", "r", "a")
    first = ids(await suite.draw(10))
    other = ids(await suite.draw(12, avoid=first))
    assert len(other) == 12
    assert not set(other) & set(first)
    assert ids(await suite.draw(10)) == first
    assert len(book.drawn("s", 1)) == 10
    none = await suite.draw(5, avoid=[f"t{n}" for n in range(30)])
    assert (none.tasks, "no other tasks" in none.warning or "no tasks" in none.warning) == ((), True)


async def test_the_name_tells_the_tasks(book):
    one = (await Sources("s", [Listed("qa", tasks(40))], book).draw(40)).name
    again = (await Sources("s", [Listed("qa", tasks(40)[::-1])], book).draw(40)).name
    assert one.split("(")[1] == again.split("(")[1]
    assert one.startswith("qa@")
    assert ", 40 tasks (" in one
    assert (await Sources("s", [Listed("qa", tasks(39))], book).draw(40)).name != one


async def test_warnings(book, monkeypatch):
    monkeypatch.setattr("reef.evaluation.suite.ROTATE", 3)
    monkeypatch.setattr(book_module, "ROTATE", 3)
    few = Sources("few", [Listed("few", tasks(8))], book)
    assert (await few.draw(40)).warning.startswith("8 tasks can tell little")
    for number in range(4):
        book.use("few", "r", f"c{number}")
    assert "was used for 5 candidates" in (await few.draw(40)).warning
    suite, growing = Sources("s", [Listed("qa", tasks(40))], book), Growing()
    growing.held = tasks(40)
    said = []
    for number in range(6):
        book.use("s", "r", f"c{number}")
        said.append((await suite.draw(40)).warning)
        assert (await Sources("s", [growing], book).draw(40)).warning == ""
    assert said[:3] == ["", "", ""]
    assert "was used for 4 candidates and wears out" in said[3]
    assert (await Sources("s", [Growing()], book).draw(40)).warning


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["use", "release", "add", "lose", "draw"]), st.integers(0, 9)), max_size=25))
async def test_a_generation_never_reorders_whatever_comes_and_goes(steps):
    book, source = Book.memory(), Growing()
    suite, incumbent, last = Sources("s", [source], book), "r", (0, [])
    source.held = tasks(6)
    for what, number in steps:
        if what == "use":
            book.use("s", incumbent, f"c{number}")
        elif what == "release":
            incumbent = f"r{number}"
        elif what == "add":
            source.held = list({task.id: task for task in [*source.held, *tasks(number + 6)]}.values())
        elif what == "lose":
            source.held = [task for task in source.held if task.id != f"t{number}"]
        draw = await suite.draw(8)
        names = ids(draw)
        there = {task.id for task in source.held}
        assert len(names) == len(set(names)) == min(8, len(there))
        assert set(names) <= there
        if last[0] == draw.generation:
            before = [name for name in last[1] if name in names]
            assert [name for name in names if name in before] == before
        last = (draw.generation, names)
    book.close()
