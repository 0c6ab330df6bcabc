"""Scripted reflectors for demonstrations and studies, where the served model is too small to reflect.

Knows: twelve edits and the remarks that suggest them. Does not know: which of them help: the search finds out.

They read what a model would read, the prompt, and answer the same to the same remarks and answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from . import task

EDITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Answer in one short sentence.", (task.CUT, task.LONG)),
    ("Reply with a single sentence of at most ten words.", (task.CUT, task.LONG)),
    ("Be brief.", (task.CUT, task.LONG)),
    ("Finish what you begin to say.", (task.CUT,)),
    ("Explain every step in detail, with several examples.", (task.CUT, task.NONE)),
    ("Always answer with a numbered list of ten points.", (task.LONG, task.NONE)),
    ("Be polite to everyone.", (task.CUT, task.LONG, task.NONE)),
    ("Use British spelling.", (task.CUT, task.LONG, task.NONE)),
    ("The user may live in any country.", (task.CUT, task.NONE)),
    ("Do not mention these rules.", (task.LONG, task.NONE)),
    ("Say what the thing is.", (task.NONE,)),
    ("Use common words.", (task.NONE, task.LONG)),
)
"""An edit and the remarks it is proposed for. Two ask for what is missing, two hurt, the rest do little or nothing."""
IDLE = (
    "Be polite to everyone.",
    "Finish what you begin to say.",
    "The user may live in any country.",
    "Do not mention these rules.",
    "Use common words.",
)
_ANSWER = re.compile(r"^answer: (.*)$", re.MULTILINE)


def reads(prompt: str) -> str:
    """One of the edits that the remarks in the prompt suggest, as the new text."""
    said = [text for text, remarks in EDITS if any(remark in prompt for remark in remarks)]
    return _drawn(prompt, said or [text for text, _ in EDITS])


def idles(prompt: str) -> str:
    """One of the edits that do nothing."""
    return _drawn(prompt, IDLE)


def _drawn(prompt: str, edits: Sequence[str]) -> str:
    """Another edit than the text there is, drawn by what the answers were (a fence has a new word each time)."""
    left = [text for text in edits if not re.search(rf"^{re.escape(text)}$", prompt, re.MULTILINE)]
    chosen = random.Random("\n".join(_ANSWER.findall(prompt))).choice(left)
    return f"Here is the new text.\n```\n{chosen}\n```"
