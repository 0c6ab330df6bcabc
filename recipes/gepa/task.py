"""The task of the studies of `gepa` and `harness_evolve`: answer in one sentence. Four sets of questions, and remarks.

Knows: the questions, what counts as an answer, what is said of one that does not. Does not know: servers or recipes.

Subjects are split once and for all: those that are learnt from, those that choose, those of the gate, and those that
are only measured at the end share none. The base hardly ever ends within the limit; told in its system message to
answer in one short sentence it does so often (measured on 32 training questions: 0.44 against 0.03), so that there is
something to find without training. Limit and temperature were chosen for that, on training questions alone.
"""

from __future__ import annotations

import random
import re
from typing import Any

from reef.evaluation import Score, Task
from reef.evaluation.ask import Question

from ..openclawrl.task import SUBJECTS, TEMPLATES, words

LIMIT, TEMPERATURE = 40, 0.5  # tokens of an answer
LEAST = 3  # words of one
CUT, LONG, NONE = "The answer was cut off.", "The answer is too long.", "That is no answer."
_SENTENCE = re.compile(r"[^.!?]*[.!?][\"')]*\s*", re.DOTALL)


def good(text: str) -> bool:
    """One whole sentence that says something."""
    return remark(text) == ""


def remark(text: str) -> str:
    """What a user says of an answer; nothing of a good one."""
    if words(text) < LEAST:
        return NONE
    if _SENTENCE.fullmatch(text.strip()):
        return ""
    return LONG if re.search(r"[.!?][\"')]*\s*\Z", text) else CUT


class Sentence:
    """A scorer: 1 for one whole sentence, else 0 with the remark."""

    name, key = "sentence", "1"

    async def score(self, task: Task, text: str) -> Score:
        return Score(float(good(text)), remark(text))


def split(*sizes: int) -> list[list[str]]:
    """Questions of so many subjects each; no subject is in two of them."""
    subjects = list(SUBJECTS)
    random.Random(54).shuffle(subjects)
    made, at = [], 0
    for size in sizes:
        made.append([form.format(subject) for subject in subjects[at : at + size] for form in TEMPLATES])
        at += size
    return made


_TRAIN, _VALIDATION, _GATE, _HELD = split(8, 5, 15, 12)


def _tasks(name: str, questions: list[str]) -> tuple[Task, ...]:
    scorer: Any = Sentence()
    made = [
        Question.of(text, max_tokens=LIMIT, temperature=TEMPERATURE, seed=place) for place, text in enumerate(questions)
    ]
    return tuple(Task(f"{name} {place}", one, scorer, "code") for place, one in enumerate(made))


TRAIN = _tasks("train", _TRAIN)  # 32
VALIDATION = _tasks("validation", _VALIDATION)  # 20
GATE = _tasks("gate", _GATE)  # 60
TRAINED, HELD = tuple(_TRAIN), tuple(_HELD)
"""The questions that users ask while there is something to learn, and the 48 that are asked at the end."""
