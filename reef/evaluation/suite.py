"""Tasks with checkable answers: the built-in general questions, a user's JSON-lines file, and the paired test.

Knows: how a task is written down, how an answer is scored (1 or 0), and McNemar's exact test.
Does not know: engines, releases, or what follows from a result.

A line of a suite file: {"prompt": "What is 2+3?", "scorer": "number", "answer": 5}. `messages` may stand for `prompt`;
`answer` may be a list of which any will do; `id`, `max_tokens` (64), `temperature` (1) and `seed` (line number) are
optional. Scorers: exact, contains (any case), regex (searched), number (the last number in the answer).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.core.errors import ConfigError
from reef.core.nouns import Json
from reef.evaluation.ask import Question

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _number(text: str, answer: Json) -> bool:
    found = _NUMBER.findall(text)
    return bool(found) and math.isclose(float(found[-1].replace(",", "")), float(answer), rel_tol=1e-9, abs_tol=1e-12)


SCORERS: dict[str, Callable[[str, Json], bool]] = {
    "exact": lambda text, answer: text.strip() == str(answer).strip(),
    "contains": lambda text, answer: str(answer).casefold() in text.casefold(),
    "regex": lambda text, answer: re.search(str(answer), text) is not None,
    "number": _number,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One question and how its answer is judged: right when any of `answers` fits."""

    id: str
    question: Question
    scorer: str
    answers: tuple[Json, ...]

    def right(self, text: str) -> bool:
        return any(SCORERS[self.scorer](text, answer) for answer in self.answers)


def _general(text: str, pattern: str) -> Task:
    return Task(text, Question.of(text, max_tokens=20), "regex", (f"(?i){pattern}",))


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


def load_suite(path: Path | str | None) -> tuple[Task, ...]:
    """The tasks of a suite file. ConfigError names the line and what is wrong with it; None is an error too."""
    if path is None:
        raise ConfigError(
            "this gate policy compares on a suite; set gate.suite to a JSON-lines file", param="gate.suite"
        )
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite {path}: {error}", param="gate.suite") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(json.loads(line), number))
            except (ValueError, TypeError, re.error) as error:
                raise ConfigError(f"{path}, line {number}: {error}", param="gate.suite") from None
    if not tasks:
        raise ConfigError(f"the suite {path} has no tasks", param="gate.suite")
    if len({task.id for task in tasks}) < len(tasks):
        raise ConfigError(f"two tasks of the suite {path} have the same id", param="gate.suite")
    return tuple(tasks)


def _task(line: Any, number: int) -> Task:
    if not isinstance(line, dict):
        raise ValueError("a task is a JSON object")
    known = {"id", "prompt", "messages", "scorer", "answer", "max_tokens", "temperature", "seed"}
    if unknown := sorted(set(line) - known):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("give prompt or messages, one of them")
    messages = line.get("messages") or [{"role": "user", "content": str(line["prompt"])}]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of chat messages")
    scorer = line.get("scorer")
    if scorer not in SCORERS:
        raise ValueError(f"scorer must be one of {', '.join(SCORERS)}, not {scorer!r}")
    if "answer" not in line or line["answer"] in (None, []):
        raise ValueError("answer is missing")
    answers = tuple(line["answer"]) if isinstance(line["answer"], list) else (line["answer"],)
    for answer in answers:
        SCORERS[scorer](
            "0", answer
        )  # a pattern that does not compile, a number that is none: said now, not at the gate
    question = Question(
        json.dumps(messages, ensure_ascii=False),
        int(line.get("max_tokens", 64)),
        float(line.get("temperature", 1.0)),
        int(line.get("seed", number)),
    )
    return Task(str(line.get("id", f"line {number}")), question, scorer, answers)


def mcnemar(wins: int, losses: int) -> float:
    """McNemar's exact test, one-sided: the chance of at least `wins` of `wins + losses` fair coin tosses (McNemar 1947,
    in the exact binomial form). Pairs with equal scores carry no evidence and are not counted. No pairs: 1."""
    pairs = wins + losses
    return float(sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs)
