"""Tasks for agents in a suite: how they are written, worked on by both sides in turn, scored, kept and counted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from reef.core.errors import ConfigError
from reef.core.nouns import Cost, Usage
from reef.evaluation import TOLD, Means, Price, Score, Sizes
from reef.evaluation.ask import Asker
from reef.evaluation.book import Book
from reef.evaluation.policies import Better
from reef.evaluation.scorers import Reach
from reef.evaluation.suite import Judging, Listed, Sources, load_suite, read_line, task_key
from reef.evaluation.trial import Trial
from reef.harness.apply import Applied, Wish
from reef.harness.episode import Outcome
from reef.harness.trajectory import Move, Trajectory
from reef.harness.tree import Entry
from tests.harness.fakes import AGENT, installed

SIZES = Sizes(tasks=40, least=1)


@pytest.fixture
def judging(tmp_path):
    return Judging({}, Reach(), installed(tmp_path / "clients"))


def line(number=0, **rest):
    return {"id": f"t{number}", "agent": AGENT, "prompt": f"work {number}", "check": "true", **rest}


def read(judging, given, number=1):
    return read_line(given, number, judging, trust="configuration", origin="code")


class Worked:
    """Episodes that end as `ends` says: of (release, prompt), or always alike. `asked` are those, in order."""

    def __init__(self, ends=None):
        self.ends = ends or (lambda release, prompt: Outcome(1.0))
        self.asked, self.entries, self.seconds = [], [], 0.0

    async def run(self, job, entries, release_id):
        self.asked.append((release_id, job.prompt))
        self.entries.append(tuple(entries))
        await asyncio.sleep(self.seconds)
        return self.ends(release_id, job.prompt)


@pytest.fixture
def means(engine, judging):
    book = Book.memory()

    def make(episodes, count=4, given=(), **rest):
        tasks = [read(judging, one, number) for number, one in enumerate(given or map(line, range(count)), 1)]
        suite = Sources("s", [Listed("suite", tasks)], book)
        return Means("s", engine, "base", book=book, suite=suite, episodes=episodes, **rest)

    yield make
    book.close()


# --- how they are written ---------------------------------------------------------------------------------------------


def test_a_line_is_a_job(judging):
    given = line(files={"a/b.py": "1"}, hidden={"t.py": "2"}, seconds=60, protected=True)
    task = read(judging, given)
    assert (task.job.agent, task.job.prompt, task.job.files) == (AGENT, "work 0", {"a/b.py": "1"})
    assert (task.job.check, task.job.hidden, task.job.seconds) == ("true", {"t.py": "2"}, 60.0)
    assert (task.id, task.protected, task.scorer.name) == ("t0", True, "check")
    words = read(judging, {"agent": AGENT, "prompt": "2+3?", "scorer": "number", "answer": 5})
    assert (words.job.check, words.scorer.name, words.id) == (None, "number", "line 1")
    assert read(judging, {"prompt": "2+3?", "scorer": "number", "answer": 5}).job is None


def test_a_jobs_key_changes_with_all_of_it(judging):
    lines = [line(), line(prompt="other"), line(files={"a": "1"}), line(check="false"), line(hidden={"a": "1"})]
    lines.append(line(seconds=9))
    assert len({task_key(read(judging, one)) for one in lines}) == len(lines)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": ""}, "what the agent is to do"),
        ({"prompt": 3}, "what the agent is to do"),
        ({"prompt": "é" * 60_000}, "put long texts into files"),
        ({"check": "x" * 100_001}, "put long texts into files"),
        ({"files": {"../x": "1"}}, r"the path '../x' of files must be relative"),
        ({"hidden": {"/x": "1"}}, "the path '/x' of hidden"),
        ({"files": ["a"]}, "files are texts by their paths"),
        ({"files": {"a": 1}}, "files are texts by their paths"),
        ({"files": {"a": "x" * (4 * 2**20 + 1)}}, "more than"),
        ({"check": 3}, "check is a shell command"),
        ({"check": None, "hidden": {"a": "1"}}, "hidden files are there for the check"),
        ({"scorer": "exact"}, "give check, or a scorer"),
        ({"check": None}, "gate.scorer names none"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"seconds": 10**6}, "3600"),
        ({"protected": 1}, "protected is true or false"),
        ({"max_tokens": 5}, "unknown key 'max_tokens'; a task for an agent has"),
        ({"agent": "pii"}, "there is no agent 'pii'; did you mean pi"),
        ({"agent": 3}, "there is no agent 3"),
    ],
)
def test_lines_that_are_wrong(given, says, judging):
    with pytest.raises((ValueError, ConfigError), match=says):
        read(judging, {key: value for key, value in {**line(), **given}.items() if value is not None})


def test_a_suite_file_names_the_line(tmp_path, judging, monkeypatch):
    path = tmp_path / "work.jsonl"
    path.write_text(json.dumps(line()) + "\n")
    with pytest.raises(ConfigError, match=r"work.jsonl, line 1: there is no agent .*may stand in code"):
        load_suite(path, judging)  # a file of tasks names no code
    path.write_text("\n" + json.dumps(line(agent="pi")) + "\n")
    with pytest.raises(ConfigError, match=r"work.jsonl, line 2: the client pi of agent pi is not installed here"):
        load_suite(path, judging)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"work.jsonl, line 2: an agent's episode .*install bubblewrap"):
        load_suite(path, judging)


# --- a look -----------------------------------------------------------------------------------------------------------


async def test_both_sides_work_once_on_each_task_in_turn(release, means):
    worked = Worked()
    made = means(worked, 6, renders=lambda one: Applied.of([Entry(one.id, "rules", {"text": "x"})], Wish()))
    trial = await Trial.open(made, release("c", rules="1"), release("i", rules="2"), sizes=SIZES)
    await trial.more(16)
    pairs = list(zip(worked.asked[::2], worked.asked[1::2], strict=True))
    assert [(one[1], other[1]) for one, other in pairs] == [(task.job.prompt,) * 2 for task in trial.tasks]
    firsts = [one[0] for one, _ in pairs]
    assert firsts in (["c", "i"] * 3, ["i", "c"] * 3), "which side goes first alternates"
    assert {entries[0].id for entries in worked.entries} == {"c", "i"}, "each works with its own tree"
    assert trial.rows == [(1.0, (1.0,))] * 6


async def test_scores_are_the_checks_the_scorers_or_a_faults(release, means):
    said = Trajectory("fake", "s", (Move("assistant", "it is 5"),))
    ends = {
        "work 0": Outcome(0.0, said="failed"),
        "work 1": Outcome(fault="fake crashed"),
        "words": Outcome(trajectory=said),
        "silence": Outcome(),
    }
    words = {"agent": AGENT, "scorer": "number", "answer": 5}
    given = [line(0), line(1), {**words, "id": "w", "prompt": "words"}, {**words, "id": "n", "prompt": "silence"}]
    worked = Worked(lambda release, prompt: ends[prompt] if release == "c" else Outcome(1.0, said))
    trial = await Trial.open(means(worked, given=given), release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(16)
    assert {one.id: one.ours for one in trial.results} == {"t0": 0.0, "t1": 0.0, "w": 1.0, "n": 0.0}
    assert all(one.theirs == (1.0,) for one in trial.results)
    assert trial.candidate_failures == 1


async def test_trouble_is_tried_again_twice_and_is_then_missing(release, means):
    tries = []

    def ends(release, prompt):
        tries.append((release, prompt))
        lost = release == "c" and (prompt == "work 0" or tries.count((release, prompt)) < 3)
        return Outcome(trouble="no sandbox") if lost else Outcome(1.0)

    trial = await Trial.open(means(Worked(ends), 2), release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(16)
    found = {one.id: one.missing for one in trial.results}
    assert found == {"t0": "no sandbox", "t1": None}
    assert tries.count(("c", "work 0")) == tries.count(("c", "work 1")) == 3
    assert len(trial.rows) == 1


async def test_what_was_done_is_not_done_again(release, means):
    """A look that was cut short goes on where it was, with a new asker, as after a crash."""
    worked = Worked()
    made = means(worked, 4)
    sides = release("c", "w1"), release("i")
    first = await Trial.open(made, *sides, sizes=SIZES)
    await first.more(2)
    assert len(worked.asked) == 4
    second = await Trial.open(made, *sides, sizes=SIZES)
    await second.more(16)
    assert len(worked.asked) == len(set(worked.asked)) == 8
    third = await Trial.open(made, release("d", "w2"), sides[1], sizes=SIZES)
    await third.more(16)
    assert worked.asked[8:] == [("d", task.job.prompt) for task in third.tasks], "the incumbent's are kept"


async def test_progress_is_told(release, means):
    told = []
    TOLD.set(lambda *of: told.append(of))
    made = means(Worked(), 3)
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(1)
    await trial.more(16)
    assert told[0] == ("episodes", 0, 6)
    assert told[-1] == ("episodes", 6, 6)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    told.clear()
    again = await Trial.open(made, release("c", "w1"), release("i"), sizes=SIZES)
    await again.more(16)
    assert told == [("episodes", 6, 6)]


async def test_the_cost_is_all_calls_of_all_tries(release, means):
    ends = iter(
        [Outcome(trouble="x", calls=1, usage=Usage(5, 1), seconds=1.0)] + [Outcome(1.0, calls=2, seconds=2.0)] * 9
    )
    made = means(Worked(lambda *_: replace(next(ends))), 1, price=Price(1e6, 2e6))
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(16)
    assert trial.cost == Cost(5, 5, 1, 5.0, 7.0)


async def test_a_cap_on_calls_holds_for_episodes(release, means):
    made = means(Worked(lambda *_: Outcome(1.0, calls=10)), 8)
    trial = await Trial.open(made, release("c", "w1"), release("i"), sizes=replace(SIZES, calls=25))
    while await trial.more(1):
        pass
    assert 1 <= len(trial.results) < 8
    assert "evaluation budget of 25 calls" in trial.capped


async def test_without_a_place_for_agents_their_tasks_are_missing(release, means):
    trial = await Trial.open(means(None, 1), release("c", "w1"), release("i"), sizes=SIZES)
    await trial.more(16)
    assert trial.results[0].missing == "nothing here can run an agent's episode"


async def test_a_better_tree_is_accepted_after_its_guards(engine, release, means, records):
    """Guards ask the engine as for any candidate; the suite is worked on."""
    worked = Worked(lambda release, prompt: Outcome(float(release == "c")))
    made = means(worked, 24, prompts=lambda: asyncio.sleep(0, records))
    sizes = replace(SIZES, alpha=0.4)
    found = await Better(made, sizes, {}).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict == "accept", found.reason
    assert "it scores 1.00, the incumbent 0.00" in found.reason
    assert engine.asked
    same = await Better(made, sizes, {}).evaluate(release("d", "w2"), release("i"), 1)
    assert same.verdict != "accept"


async def test_a_worse_tree_costs_few_episodes(release, means, records):
    """Agents' tasks are asked a few at a time, so that a look ends as soon as there is no hope."""
    worked = Worked(lambda release, prompt: Outcome(float(release == "i")))
    made = means(worked, 24, prompts=lambda: asyncio.sleep(0, records))
    found = await Better(made, SIZES, {}).evaluate(release("c", "w1"), release("i"), 1)
    assert found.verdict != "accept"
    assert len(worked.asked) < 32
    crashes = Worked(lambda release, prompt: Outcome(fault="pi ended with 1: no"))
    made = means(crashes, 24, prompts=lambda: asyncio.sleep(0, records))
    found = await Better(made, SIZES, {}).evaluate(release("d", "w2"), release("i", "w3"), 1)
    assert "of its episodes failed by themselves, which score 0, one because pi ended with 1: no" in found.reason


async def test_episodes_are_remembered_by_the_asker(release, means):
    worked = Worked(lambda *_: Outcome(0.0, said="why"))
    made = means(worked, 1)
    asker = Asker.of(made)
    side = await asker.side(release("c"))
    (task,) = (await made.suite.draw(1)).tasks
    first = await asker.reply(side, task.question)
    assert (await asker.apart().reply(side, task.question)) is first
    assert (len(worked.asked), first.outcome.said) == (1, "why")
    assert await task.scorer.score(task, "x") == Score(None, "only an episode's own check can judge this task")
