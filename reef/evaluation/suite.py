"""Tasks: the built-in general questions, how a task is written down, and the order in which a suite hands them out.

Knows: lines of a suite file, sources of tasks (files, code; `traffic` has the others), rotation.
Does not know: engines, how scores are made, or what follows from one.

A line of a suite file: {"prompt": "What is 2+3?", "scorer": "number", "answer": 5}. `messages` may stand for `prompt`;
`scorer` may be a mapping, {"use": "number", "tolerance": 0.01}, and may be left out where the configuration's
`gate.scorer` judges; `answer` is handed to it. `id`, `max_tokens` (64), `temperature` (1), `seed` (line number) and
`protected` (false) are optional.

A line with the key `agent` is a job for that agent: {"agent": "pi", "prompt": "Make the tests pass.", "files": {"a.py":
"…"}, "check": "python3 -m unittest", "hidden": {"test_a.py": "…"}, "seconds": 120}. With `check` its exit status is the
score; without, the agent's last words are judged like any answer.

Within a generation (see `book`) the order stays: tasks are added to its end only. The next one begins with tasks that
earlier ones did not have, if there are any.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from reef.core.errors import ConfigError
from reef.core.load import load
from reef.evaluation import Draw, Origin, Score, Scorer, Task
from reef.evaluation.ask import Question
from reef.evaluation.book import ROTATE, Book, digest
from reef.evaluation.scorers import Reach, Trust, make
from reef.harness import agents, room
from reef.harness.clients import Clients
from reef.harness.episode import Job, flaw

KNOWN = frozenset({"id", "prompt", "messages", "scorer", "answer", "max_tokens", "temperature", "seed", "protected"})
WORK = frozenset({"id", "agent", "prompt", "files", "check", "hidden", "seconds", "scorer", "answer", "protected"})
LARGEST: Final = 4 * 1024 * 1024  # bytes of all files of a job
LONGEST: Final = 3600.0  # seconds of a job
WORDS: Final = 100_000  # bytes of a job's prompt and of its check, each of which is one argument of a program
FEW: Final = 32  # tasks below which a suite can tell little: said, not refused


# --- the general questions --------------------------------------------------------------------------------------------


class Pattern:
    """Our own pattern, searched at once: no stranger wrote it, so nothing bounds its time."""

    name = "regex"

    def __init__(self, pattern: str) -> None:
        self.key = pattern
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def judge(self, text: str) -> float:
        return float(self._pattern.search(text) is not None)

    async def score(self, task: Task, text: str) -> Score:
        return Score(self.judge(text))


@dataclass(frozen=True, slots=True)
class General:
    """An easy question that the base answers right, for the guards."""

    question: Question
    pattern: Pattern

    def right(self, text: str) -> bool:
        return self.pattern.judge(text) > 0


def _general(text: str, pattern: str) -> General:
    return General(Question.of(text, max_tokens=20), Pattern(pattern))


GENERAL = (
    _general("What is the capital of France?", r"\bparis\b"),
    _general("What colour is the sky on a clear day?", r"\bblue\b"),
    _general("How many months are there in a year?", r"\b(?:12|twelve)\b"),
    _general("What is the opposite of hot?", r"\b(?:cold|cool)\b"),
    _general("What language is spoken in Spain?", r"\b(?:spanish|castilian)\b"),
    _general("Who wrote Romeo and Juliet?", r"\bshakespeare\b"),
    _general("What is the largest ocean on Earth?", r"\bpacific\b"),
    _general("What gas do plants absorb from the air?", r"\b(?:carbon|co2)\b"),
    _general("Say hello in French.", r"\b(?:bonjour|salut)\b"),
    _general("What is the chemical symbol for gold?", r"\bau\b"),
    _general("What star is at the centre of the solar system?", r"\bsun\b"),
    _general("Who painted the Mona Lisa?", r"\b(?:leonardo|vinci)\b"),
    _general("Which country has the city of Cairo?", r"\begypt"),
    _general("Write the first line of a story about a dragon.", r"\bdragons?\b"),
)
"""Easy and diverse; the embedded base model gets 13 or 14 of them right when it answers greedily (measured)."""


# --- tasks that are written down --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judging:
    """How tasks get their scorers: `default` is the configuration's `gate.scorer`, `reach` what scorers may use.
    `clients` is where agents' jobs find theirs."""

    default: Mapping[str, Any]
    reach: Reach
    clients: Clients = field(default_factory=Clients)

    def scorer(self, given: Mapping[str, Any] | str | None, answer: Any, trust: Trust) -> Scorer:
        """From what a task brings, else from the default with the task's answer. ConfigError says what is wrong."""
        if given is None and not self.default:
            raise ConfigError("the task has no scorer, and gate.scorer names none")
        spec = dict(self.default) if given is None else {"use": given} if isinstance(given, str) else dict(given)
        if answer is not None:
            spec["answer"] = answer
        return make(spec, self.reach, trust="configuration" if given is None else trust)


def read_line(line: Any, number: int, judging: Judging, *, trust: Trust, origin: Origin) -> Task:
    """The task of one line. ValueError or ConfigError says what is wrong with it."""
    if not isinstance(line, Mapping):
        raise ValueError("a task is a JSON object")
    if "agent" in line:
        return _read_job(line, number, judging, trust, origin)
    if unknown := sorted(set(line) - KNOWN):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("give prompt or messages, one of them")
    messages = line["messages"] if "messages" in line else [{"role": "user", "content": str(line["prompt"])}]
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise ValueError("messages must be a list of chat messages")
    if not isinstance(line.get("protected", False), bool):
        raise ValueError("protected is true or false")
    scorer = line.get("scorer")
    if scorer is not None and not isinstance(scorer, str | Mapping):
        raise ValueError(f"scorer must be a name or a mapping with use: …, not {scorer!r}")
    question = Question(
        json.dumps(messages, ensure_ascii=False),
        int(line.get("max_tokens", 64)),
        float(line.get("temperature", 1.0)),
        int(line.get("seed", number)),
    )
    if question.max_tokens < 1 or not 0 <= question.temperature <= 10:
        raise ValueError("max_tokens is 1 or more, temperature from 0 to 10")
    return Task(
        str(line.get("id", f"line {number}")),
        question,
        judging.scorer(scorer, line.get("answer"), trust),
        origin,
        bool(line.get("protected", False)),
    )


class Checked:
    """The scorer of a job that has its own check: the episode brings the score."""

    name = "check"

    def __init__(self, job: Job) -> None:
        self.key = digest(job.check, sorted(job.hidden.items()))

    async def score(self, task: Task, text: str) -> Score:
        return Score(None, "only an episode's own check can judge this task")


def _read_job(line: Mapping[str, Any], number: int, judging: Judging, trust: Trust, origin: Origin) -> Task:
    if unknown := sorted(set(line) - WORK):
        raise ValueError(f"unknown key {unknown[0]!r}; a task for an agent has {', '.join(sorted(WORK))}")
    name, prompt, check = line["agent"], line.get("prompt"), line.get("check")
    if not isinstance(prompt, str) or not prompt.strip() or "\0" in prompt:
        raise ValueError("prompt is what the agent is to do, a text")
    if check is not None and (not isinstance(check, str) or not check.strip() or "\0" in check):
        raise ValueError("check is a shell command")
    if max(len(text.encode("utf-8", "surrogatepass")) for text in (prompt, check or "")) > WORDS:
        raise ValueError(f"prompt and check have at most {WORDS} bytes each; put long texts into files")
    if check is not None and {"scorer", "answer"} & set(line):
        raise ValueError("give check, or a scorer for the agent's last words, not both")
    if check is None and "hidden" in line:
        raise ValueError("hidden files are there for the check, and there is none")
    if not isinstance(line.get("protected", False), bool):
        raise ValueError("protected is true or false")
    seconds = line.get("seconds", 300.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        raise ValueError(f"seconds is more than 0, and {LONGEST:g} at most")
    files, hidden = (_folder(line.get(key, {}), key) for key in ("files", "hidden"))
    job = Job(_agent(name, judging, trust), prompt, files, check, hidden, float(seconds))
    scorer = Checked(job) if check is not None else judging.scorer(line.get("scorer"), line.get("answer"), trust)
    question = Question.of(prompt, seed=number, job=job)
    return Task(str(line.get("id", f"line {number}")), question, scorer, origin, bool(line.get("protected", False)))


def _agent(name: Any, judging: Judging, trust: Trust) -> str:
    """The name of an agent that can be run here. ConfigError or ValueError says what is missing."""
    coded = isinstance(name, str) and ":" in name and trust == "configuration"
    if not isinstance(name, str) or (name not in agents.AGENTS and not coded):
        close = difflib.get_close_matches(str(name), agents.AGENTS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(agents.AGENTS)}"
        raise ValueError(f"there is no agent {name!r}; {hint} (package.module:Name may stand in code, not in a file)")
    room.bubblewrap("an agent's episode")
    judging.clients.find(agents.agent(name))
    return name


def _folder(given: Any, key: str) -> dict[str, str]:
    """Files by their paths. ValueError."""
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
        raise ValueError(f'{key} are texts by their paths, {{"a/b.py": "…"}}')
    for path in given:
        if (wrong := flaw(path)) is not None:
            raise ValueError(f"the path {path[:80]!r} of {key} {wrong}")
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in given.values()) > LARGEST:
        raise ValueError(f"{key} are more than {LARGEST} bytes")
    return dict(given)


def load_suite(path: Path | str, judging: Judging) -> tuple[Task, ...]:
    """The tasks of a suite file. ConfigError names the line and what is wrong with it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        close = difflib.get_close_matches(str(path), ("traffic", "failures"), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the suite {path}: {why}{hint}", param="gate.suite") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(read_line(json.loads(line), number, judging, trust="file", origin="file"))
            except (ValueError, TypeError, OverflowError, RecursionError, ConfigError) as error:
                raise ConfigError(f"{path}, line {number}: {_bare(error)}", param="gate.suite") from None
    return _checked(tasks, f"the suite {path}")


def _bare(error: Exception) -> str:
    return str(error).removeprefix("default: ")


def _checked(tasks: Sequence[Task], name: str) -> tuple[Task, ...]:
    if not tasks:
        raise ConfigError(f"{name} has no tasks", param="gate.suite")
    if twice := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise ConfigError(f"two tasks of {name} have the same id, {twice[0]!r}", param="gate.suite")
    return tuple(tasks)


def task_key(task: Task) -> str:
    """A digest of all that a score of it depends on, but for the seed."""
    asked = task.question
    job = () if asked.job is None else (asked.job.key,)
    return digest(asked.messages, asked.max_tokens, asked.temperature, task.scorer.name, task.scorer.key, *job)


# --- sources ----------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Where tasks come from. `fixed`: the same tasks until somebody changes them."""

    name: str
    fixed: bool

    async def tasks(self, want: int, pinned: Mapping[str, str | None], avoid: Collection[str]) -> Sequence[Task]:
        """Those of `pinned` (ids, with the receipt each came from) that are still there, and others, until there are
        `want` that are not in `avoid`, or no more."""


class Listed:
    """Tasks that are written in a file."""

    fixed = True

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self.name = f"{name}@{digest(*(task_key(task) for task in tasks))[:8]}"

    async def tasks(self, want: int, pinned: Mapping[str, str | None], avoid: Collection[str]) -> Sequence[Task]:
        return self._tasks

    def known(self) -> Sequence[Task]:
        return self._tasks


class Coded:
    """Tasks that `package.module:name` gives: an iterable of lines or Tasks, or a callable (plain or async) that
    returns one. Called once, at the first draw."""

    fixed = True

    def __init__(self, path: str, judging: Judging) -> None:
        self.name = path
        self._found = load(path, what="suite")
        self._judging = judging
        self._tasks: tuple[Task, ...] | None = None
        if not callable(self._found) and not isinstance(self._found, Iterable):
            raise ConfigError(f"{path} gives no tasks: it is neither a list nor a callable", param="gate.suite")

    async def tasks(self, want: int, pinned: Mapping[str, str | None], avoid: Collection[str]) -> Sequence[Task]:
        if self._tasks is None:
            given = await asyncio.to_thread(self._found) if callable(self._found) else self._found
            if inspect.isawaitable(given):
                given = await given
            self._tasks = self._made(given)
        return self._tasks

    def known(self) -> Sequence[Task] | None:
        """The tasks, where they are a list; None where code must be called for them."""
        return self._made(self._found) if isinstance(self._found, list | tuple) else None

    def _made(self, given: Iterable[Any]) -> tuple[Task, ...]:
        made = []
        for number, item in enumerate(given, 1):
            try:
                made.append(item if isinstance(item, Task) else self._read(item, number))
            except (ValueError, TypeError, OverflowError, ConfigError) as error:
                raise ConfigError(f"{self.name}, task {number}: {_bare(error)}", param="gate.suite") from None
        return _checked(made, self.name)

    def _read(self, item: Any, number: int) -> Task:
        return read_line(item, number, self._judging, trust="configuration", origin="code")


# --- the suite --------------------------------------------------------------------------------------------------------


class Sources:
    """A suite of one or several sources: `evaluation.Suite`. A later source's task with the id of an earlier one's is
    renamed after its source."""

    def __init__(self, scenario: str, sources: Sequence[Source], book: Book) -> None:
        self._scenario, self._sources, self._book = scenario, tuple(sources), book

    async def draw(self, limit: int, *, avoid: Collection[str] = ()) -> Draw:
        """At most `limit` tasks, without those whose ids are in `avoid`. With `avoid`, nothing is added to the
        generation's order: it is another measurement, beside the decisions."""
        book, scenario = self._book, self._scenario
        now = book.generation(scenario)
        order = dict(book.drawn(scenario, now.number))
        found = await self._gather(limit, order, avoid)
        before = book.asked(scenario, now.number)
        ordered = [found[name] for name in order if name in found]
        rest = [task for name, task in found.items() if name not in order]
        rest.sort(key=lambda task: (not task.protected, task.id in before, digest(scenario, now.number, task.id)))
        added = rest[: max(0, limit - len(ordered))]
        added.sort(key=lambda task: digest(scenario, now.number, task.id))
        if not avoid and added:
            book.draw(scenario, now.number, [(task.id, task.receipt) for task in added])
        tasks = tuple([task for task in (*ordered, *added) if task.id not in avoid][:limit])
        name = f"{' + '.join(source.name for source in self._sources)}, {len(tasks)} tasks"
        name += f" ({digest(*sorted(task_key(task) for task in tasks))[:12]})"
        return Draw(tasks, name, now.number, now.uses, self._warning(tasks, before))

    async def _gather(self, limit: int, order: Mapping[str, str | None], avoid: Collection[str]) -> dict[str, Task]:
        found: dict[str, Task] = {}
        for source in self._sources:
            _merge(found, source, await source.tasks(limit, order, avoid), avoid)
        return found

    def known(self) -> Mapping[str, Task] | None:
        """All tasks by their ids, where every source is a list that is here now; None where some come later."""
        found: dict[str, Task] = {}
        for source in self._sources:
            if not isinstance(source, Listed | Coded) or (tasks := source.known()) is None:
                return None
            _merge(found, source, tasks)
        return found

    def _warning(self, tasks: Sequence[Task], before: Collection[str]) -> str:
        if not tasks:
            return "the suite has no tasks yet" if not before else "the suite has no other tasks"
        if all(source.fixed for source in self._sources):
            name = " + ".join(source.name for source in self._sources)
            uses = self._book.decisions(self._scenario, name)
            if uses > ROTATE:
                return f"{name} was used for {uses} candidates and wears out: add tasks, or take some from traffic"
        if len(tasks) < FEW:
            return f"{len(tasks)} tasks can tell little: {FEW} or more are needed to see any but the largest gain"
        return ""


def _merge(found: dict[str, Task], source: Source, tasks: Sequence[Task], avoid: Collection[str] = ()) -> None:
    for task in tasks:
        name = task.id if task.id not in found else f"{source.name.partition('@')[0]}: {task.id}"
        if name not in found and name not in avoid:
            found[name] = task if name == task.id else replace(task, id=name)
