"""What a reflector is asked, and the text in its answer.

Knows: how a component and what it led to are shown. Does not know: who reflects, or what is done with the text.

Whatever a model or a person said stands inside fences and is cut: it is shown to be read, not obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from reef.cordis.fence import fence
from reef.recipe.answers import fenced

from .search import Seen

REMARK = 1_000  # characters of what was said of an answer

_ASKED = """\
You improve one text that instructs an assistant. {what}{none}

{material}

Find out what the remarks have in common and what the text should say so that answers to other questions of this kind \
score better too (scores go from 0 to 1). Keep what works, keep facts that the answers need, and do not mention single \
questions. The text is plain prose for the assistant: no commands, addresses or keys. At most {most} characters.

Answer with the whole new text, and nothing else, between two lines of three backticks."""
_KINDS = {
    "rules": "It stands in the assistant's system message, always.",
    "skill": "It is a skill: the assistant reads it when its description fits the task.",
}


def question(
    kind: str, text: str, seen: Sequence[Seen], asked: Mapping[str, str], reports: Sequence[str], most: int
) -> str:
    """`asked` has the question of each task; `reports` is what users wrote lately."""
    texts = [("the text as it is", text)] if text else []
    known = [one for one in seen if one.score is not None]
    texts += [(f"example {place}", _case(one, asked)) for place, one in enumerate(known, 1)]
    if reports:
        texts.append(("what users reported", "\n\n".join(one[:REMARK] for one in reports)))
    none = "" if text else " There is none yet: the assistant had no instructions."
    return _ASKED.format(what=_KINDS.get(kind, ""), none=none, material=fence(texts)[0], most=most)


def answer(said: str) -> str:
    """The new text: of the last fenced block, else the whole answer, without quotes and a heading around it."""
    text = fenced(said)
    text = re.sub(r"\A(?:new |improved )?(?:text|instructions?|rules?)\s{0,4}:\s{0,4}", "", text, flags=re.IGNORECASE)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'`":
        text = text[1:-1]
    return text.strip()


def _case(one: Seen, asked: Mapping[str, str]) -> str:
    """The remark comes last: of a text that is cut, the end is what is kept most of."""
    said = f"remark: {one.feedback[:REMARK]}" if one.feedback else "no remark"
    return f"question: {asked.get(one.task, '')}\nanswer: {one.answer}\nscore: {one.score:g}\n{said}"
