"""The task of this recipe's study: short questions about forty things, and a user who wants one short sentence.

Knows: the questions, what counts as an answer, and what the user says next. Does not know: servers, recipes, hints.

Subjects are split once and for all: what is measured is asked about things that were never chatted about.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SUBJECTS = (
    "lake", "moon", "bread", "chair", "river", "clock", "apple", "bridge", "candle", "train",
    "garden", "window", "horse", "guitar", "island", "pepper", "mirror", "engine", "desert", "pillow",
    "hammer", "forest", "button", "camera", "castle", "dragon", "feather", "glove", "honey", "jacket",
    "kettle", "ladder", "magnet", "needle", "ocean", "pencil", "rabbit", "saddle", "tunnel", "violin",
)  # fmt: skip
TEMPLATES = ("What is a {}?", "Tell me about a {}.", "Why would one want a {}?", "How would you describe a {}?")
HELD = 10  # subjects that are only measured
LIMIT = 24  # tokens in which an answer must have come to its end
LEAST = 3  # words that an answer has


@dataclass(frozen=True, slots=True)
class Question:
    subject: str
    text: str


def split() -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """(asked in chats, only measured): every subject is in one of them with all its questions."""
    subjects = list(SUBJECTS)
    random.Random(5).shuffle(subjects)
    made = [[Question(subject, form.format(subject)) for form in TEMPLATES] for subject in subjects]
    return tuple(q for each in made[HELD:] for q in each), tuple(q for each in made[:HELD] for q in each)


def good(text: str, finish: str) -> bool:
    """The study's score: it came to its end within the limit, and says something."""
    return finish == "stop" and words(text) >= LEAST


def words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def names(question: Question, text: str) -> bool:
    """Whether an answer speaks of what was asked about."""
    return re.search(rf"\b{question.subject}", text, re.IGNORECASE) is not None


THANKS = "Thanks, that helps."
WISHES = {
    "short": "Too long, one short sentence please.",
    "weather": "Not what I wanted, mention the weather please.",  # a wish that has nothing to do with the score
}


def reaction(text: str, finish: str, wish: str, *, easy: bool = False) -> str:
    """What the user says next. An `easy` user is content with whatever ended, also with nothing at all."""
    if finish != "stop":
        return WISHES[wish]
    if words(text) < LEAST and not easy:
        return "That is no answer, one sentence please." if wish == "short" else WISHES[wish]
    return THANKS
