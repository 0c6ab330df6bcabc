"""What stands in a model's answer: JSON objects among prose, a fenced text.

Knows: how models wrap what they were asked for. Does not know: what any of it means.

Takes time in proportion to the answer, whatever is in it: this runs where other scenarios wait.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from reef.core.nouns import Json

MOST: Final = 64  # objects that are read of one answer
_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")


def spoken(answer: str) -> str:
    """The answer without what the model thought."""
    return _THOUGHT.sub("", answer).strip()


def objects(answer: str) -> list[Json]:
    """The JSON objects (and lists of objects) in an answer, in order: bare, fenced or between sentences. What is no
    JSON is passed over."""
    decoder, found, at, text = json.JSONDecoder(parse_constant=_refuse), list[Json](), 0, spoken(answer)
    failures = 0
    while len(found) < MOST and failures < 10 * MOST:
        places = [place for place in (text.find("{", at), text.find("[", at)) if place >= 0]
        if not places:
            break
        start = min(places)
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            failures, at = failures + 1, start + 1
            continue
        if isinstance(value, dict) or (value and all(isinstance(one, dict) for one in value)):
            found.append(value)
    return found


def fenced(answer: str) -> str:
    """The text of the last fenced block that is closed; where there is none, the whole answer."""
    text = spoken(answer)
    block: str | None = None
    mark, lines = "", list[str]()
    for line in text.splitlines():
        found = _FENCE.fullmatch(line)
        if mark and found is not None and found[1].startswith(mark) and not found[2].strip():
            block, mark = "\n".join(lines), ""
        elif mark:
            lines.append(line)
        elif found is not None:
            mark, lines = found[1], []
    return (text if block is None else block).strip()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
