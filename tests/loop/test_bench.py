"""The bench of a search: trees are measured as what is served would answer with them, and it is no experience."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.cli.gate import reading
from reef.config.settings import GateSettings
from reef.core.errors import ConfigError, EngineError
from reef.core.nouns import Choice, Unit
from reef.engines.fake import FakeEngine, Fault
from reef.evaluation import Means, Score, Sizes, Task, ask
from reef.evaluation.ask import Question
from reef.evaluation.scorers import Reach
from reef.evaluation.suite import Judging
from reef.experience.sessions import Sessions
from reef.harness.apply import Wish
from reef.harness.episode import Job, Outcome
from reef.harness.trajectory import Move, Trajectory
from reef.harness.tree import Entry
from reef.loop.bench import Workbench
from reef.loop.binding import Searching, Work
from reef.loop.retell import EACH, MOST, cut, retell
from tests.loop.kit import NAME, Rules, World, record, report

TREE = (Entry("loud", "rules", {"text": "Speak up so that everybody hears it."}),)


class Says:
    """What an answer is worth: whether it is loud."""

    name, key = "says", "1"

    async def score(self, task: Task, text: str) -> Score:
        if "?" in text:
            return Score(None, "the answer asks back")
        return Score(float("LOUD" in text), "heard" if "LOUD" in text else "too quiet")


def answer(release_id: str, body: dict[str, Any]) -> str:
    said, question = json.dumps(body["messages"]), body["messages"][-1]["content"]
    return f"{release_id[:6]} {'LOUD' if 'Speak up' in said else 'quiet'} {'?' if question == 'odd' else ''}"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    made.engine = FakeEngine(reply=answer, context=60)
    made.recipes = {"harness": Rules()}
    yield made
    await made.close()


def bench(world: World, *, sizes: Sizes | None = None, wish: Wish | None = None, episodes: Any = None) -> Workbench:
    means = Means(NAME, world.engine, world.head.id, book=world.book, episodes=episodes)
    tasks = reading(GateSettings(), Judging({}, Reach()))
    searching = Searching(means, sizes or Sizes(), wish or Wish(apply=True), tasks)
    world.options = {"searching": searching}
    work = Work.open(world.tools, world.binding, "harness")
    return Workbench(world.folder / "bench", None, world.tools, world.binding, work, world.head)


def tasks(*texts: str) -> list[Task]:
    return [Task(text, Question.of(text, temperature=1.0), Says()) for text in texts]


async def test_a_tree_is_measured_as_what_is_served_would_answer_with_it(world: World) -> None:
    made, wanted = bench(world), tasks("one", "two")
    without, with_ = await made.measure((), wanted, 1), await made.measure(TREE, wanted, 1)
    assert [(one.score, one.feedback) for one in without] == [(0.0, "too quiet")] * 2
    assert [(one.score, one.feedback, one.note) for one in with_] == [(1.0, "heard", "")] * 2
    assert [one.task for one in with_] == wanted
    assert with_[0].answer.startswith(world.head.id[:6])
    assert {one.priority for one in world.engine.asked} == {1}
    assert await world.store.events(NAME, 0, 100) == [], "nothing of it is recorded"


async def test_the_same_is_asked_once_and_another_seed_anew(world: World) -> None:
    made, wanted = bench(world), tasks("one", "two")
    await made.measure(TREE, wanted, 1)
    await made.measure(TREE, wanted, 1)
    assert len(world.engine.asked) == 2
    await made.measure(TREE, wanted, 2)
    assert len(world.engine.asked) == 4
    seeds = [json.loads(one.body)["seed"] for one in world.engine.asked]
    assert len(set(seeds)) == 4
    assert world.book.spent(NAME).calls == 4, "it counts to the evaluation's budget"


async def test_what_cannot_be_measured_has_no_score_and_says_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "PAUSE", 0.0)
    world.engine.faults.extend([Fault("refuse")] * 3)
    (away,) = await bench(world).measure(TREE, tasks("one"), 1)
    assert (away.score, away.note) == (None, "the engine refused; try again")
    (odd,) = await bench(world).measure(TREE, tasks("odd"), 1)
    assert (odd.score, odd.note) == (None, "the answer asks back")
    assert odd.answer != ""


async def test_a_tree_that_leaves_no_room_is_worth_nothing(world: World) -> None:
    long = (Entry("long", "rules", {"text": " ".join(f"word{number}" for number in range(80))}),)
    (found,) = await bench(world).measure(long, tasks("one"), 1)
    assert found.score == 0.0
    assert "shorten" in found.feedback


async def test_a_budget_that_is_used_up_ends_the_measuring(world: World) -> None:
    made = bench(world, sizes=Sizes(calls=2))
    assert [one.score for one in await made.measure(TREE, tasks("one", "two"), 1)] == [1.0, 1.0]
    (more,) = await made.measure(TREE, tasks("three"), 1)
    assert more.score is None
    assert "raise gate.calls" in more.note
    assert len(world.engine.asked) == 2


async def test_chat_tasks_need_a_harness_that_is_in_the_requests(world: World) -> None:
    with pytest.raises(ConfigError, match="set harness"):
        await bench(world, wish=Wish()).measure(TREE, tasks("one"), 1)


@pytest.mark.parametrize(
    ("outcome", "score", "note", "feedback"),
    [
        (Outcome(1.0, said="3 passed"), 1.0, "", "3 passed"),
        (Outcome(fault="it ran out of time", said="killed"), 0.0, "", "it ran out of time\nkilled"),
        (Outcome(trouble="there is no sandbox"), None, "there is no sandbox", ""),
        (Outcome(trajectory=Trajectory("pi", "s", (Move("assistant", "LOUD"),))), 1.0, "", "heard"),
    ],
)
async def test_an_agents_job_is_an_episode(
    world: World, monkeypatch: pytest.MonkeyPatch, outcome: Any, score: Any, note: str, feedback: str
) -> None:
    monkeypatch.setattr(ask, "PAUSE", 0.0)
    seen: list[Any] = []

    class Stage:
        async def run(self, job: Job, entries: Any, release_id: str) -> Outcome:
            seen.append((job.prompt, tuple(entries), release_id))
            return outcome  # type: ignore[no-any-return]

    task = Task("fix", Question.of("fix", job=Job("pi", "Fix it.")), Says())
    (found,) = await bench(world, wish=Wish(), episodes=Stage()).measure(TREE, [task], 1)
    assert (found.score, found.note, found.feedback) == (score, note, feedback)
    assert found.trajectory == outcome.trajectory
    assert seen[0] == ("Fix it.", TREE, world.head.id)


async def test_a_model_is_asked_where_there_is_one(world: World) -> None:
    with pytest.raises(EngineError, match="nothing here can ask one"):
        await bench(world).ask(None, {})

    async def echo(engine: str | None, body: Any) -> str:
        return f"{engine}: {body['messages']}"

    made = bench(world)
    made._binding = replace(made._binding, ask=echo)
    assert await made.ask("judge", {"messages": "x"}) == "judge: x"


# --- tasks ------------------------------------------------------------------------------------------------------------

LINES = [{"prompt": "2+3?", "scorer": "number", "answer": 5}]


def make_lines() -> list[Any]:
    return [*LINES, *tasks("own")]


def test_tasks_come_from_a_file_or_from_code_but_not_from_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "gates"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(LINES[0]))
    gate = GateSettings(suite=(str(tmp_path / "gates.jsonl"), "tests.loop.test_bench:LINES"))
    read = reading(gate, Judging({}, Reach()))
    (task,) = read("mine.jsonl")
    assert task.scorer.name == "number"
    assert [one.id for one in read("tests.loop.test_bench:make_lines")] == ["line 1", "own"]
    for source in ("gates.jsonl", str(tmp_path / "gates.jsonl"), "tests.loop.test_bench:LINES", "traffic", "failures"):
        with pytest.raises(ConfigError, match="what the gate decides on"):
            read(source)
    for source, said in (("none.jsonl", "cannot read"), ("tests.loop.test_bench:NOTHING", "gives no tasks")):
        with pytest.raises(ConfigError, match=said):
            read(source)
    with pytest.raises(ConfigError, match="task 1"):
        read("tests.loop.test_bench:WRONG")


NOTHING = 5
WRONG = [{"prompt": "x", "scorer": "magic"}]


# --- stories ----------------------------------------------------------------------------------------------------------


def unit(made: Any, **more: Any) -> Unit:
    said = replace(report(1, made.id, score=0.0, feedback="It never ran the tests."), **more)
    return Unit(f"{made.id}:0", made, 0, said, said.score, None)


async def test_a_story_has_what_was_said_and_done_and_the_report_at_its_end(world: World) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "system", "content": "You are an agent. " * 200},
        {"role": "user", "content": "Fix the bug."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "main.py"},
    ]
    made = record(1, world.head.id, request=json.dumps({"messages": messages}).encode())
    story = await retell(world.tools, unit(made, demonstration="It should run them."))
    lines = story.splitlines()
    assert lines[0].startswith("system: You are an agent.")
    assert len(lines[0]) < 500
    assert lines[1:] == [
        "user: Fix the bug.",
        'assistant calls bash: {"command": "ls"}',
        "tool: main.py",
        "assistant: answer 1",
        "score: 0",
        "feedback: It never ran the tests.",
        "it should have been: It should run them.",
    ]


async def test_a_story_is_the_whole_session_whichever_turn_was_reported_on(world: World, tmp_path: Path) -> None:
    sessions = Sessions.open(tmp_path / "sessions.db")
    world.tools = replace(world.tools, sessions=sessions)
    history: list[dict[str, Any]] = []
    for number in range(3):
        history.append({"role": "user", "content": f"turn {number}"})
        body = json.dumps({"messages": history}).encode()
        choice = Choice(0, f"said {number}", "stop")
        await world.store.append(record(number, world.head.id, request=body, session="talk", choices=(choice,)))
        history.append({"role": "assistant", "content": f"said {number}"})
    await sessions.read(NAME, world.store)
    (first,) = await world.store.get([f"{0:032x}"])
    story = await retell(world.tools, unit(first))
    sessions.close()
    assert [line for line in story.splitlines() if "turn" in line or "said" in line] == [
        f"{who} {number}" for number in range(3) for who in ("user: turn", "assistant: said")
    ]


async def test_a_story_is_cut_and_keeps_its_end(world: World) -> None:
    messages = [{"role": "user", "content": f"{number} " + "x" * 50_000} for number in range(60)]
    made = record(1, world.head.id, request=json.dumps({"messages": messages}).encode())
    story = await retell(world.tools, unit(made, feedback="y" * 50_000))
    assert len(story) <= MOST
    assert "characters left out" in story
    assert story.splitlines()[-1].startswith("feedback: yyy")
    assert len(story.splitlines()[-1]) <= EACH + 20


async def test_a_request_that_cannot_be_read_is_still_a_story(world: World) -> None:
    made = record(1, world.head.id, request=b"\xff not json", choices=(), status="failed", error="it broke off")
    assert "assistant: (no answer: it broke off)" in await retell(world.tools, unit(made))


@pytest.mark.parametrize("most", [400, 2000])
def test_a_cut_text_is_no_longer_than_it_may_be(most: int) -> None:
    for size in (0, most, most + 1, 10 * most):
        assert len(cut("x" * size, most)) <= max(most, 0)
