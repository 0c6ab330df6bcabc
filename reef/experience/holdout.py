"""Which prompts are held out: never trained on, so that what is measured on them says something.

Knows: a request's prompt in every dialect, normalised; a stable hash that puts a prompt on one side for good.
Does not know: suites, batches, or what else a request says (sampling, model, stream play no part).

- A prompt's *key* is a digest of its messages, with space and Unicode forms evened out: one task for each key.
- Its *side* hashes the user's turns alone, so that a system prompt with today's date in it, or another answer sampled
  before the last turn, leaves a question on the side where it was.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reef.core.errors import ReefError
from reef.core.nouns import Json, Record
from reef.engines import Ask
from reef.engines.dialect import translate


@dataclass(frozen=True, slots=True)
class Prompt:
    """`messages` are in chat terms, as they were sent. `tools`: the request offers some."""

    key: str
    side: str
    messages: Sequence[Json]
    tools: bool


@dataclass(frozen=True, slots=True)
class Holdout:
    """`share` of all prompts, and those of which `also` (a side, see `Prompt`) says so."""

    share: float = 0.0
    also: Callable[[str], bool] | None = None

    def holds(self, record: Record) -> bool:
        """Whether this record's prompt may never train."""
        prompt = read(record)
        return prompt is not None and self.takes(prompt)

    def takes(self, prompt: Prompt) -> bool:
        return fraction(prompt.side) < self.share or (self.also is not None and self.also(prompt.side))


def fraction(side: str) -> float:
    """Where a side lies in [0, 1): spread evenly, the same in every process and version."""
    return int(side[:12], 16) / 16**12


def read(record: Record) -> Prompt | None:
    """A record's prompt; None when its request has none that can be read (embeddings, a body that is no JSON)."""
    try:
        body = _chat(record)
    except (ReefError, ValueError, RecursionError):
        return None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        return None
    turns = [_turn(message) for message in messages]
    asked = [turn for turn in turns if turn[0] == "user"]
    return Prompt(_digest(turns), _digest(asked or turns), messages, bool(body.get("tools") or body.get("functions")))


def _chat(record: Record) -> Any:
    if record.dialect == "chat":
        return json.loads(record.request)
    ask = Ask(record.id, record.release_id, record.dialect, record.request, stream=False)
    return json.loads(translate(ask).ask.body)


def _turn(message: Json) -> tuple[str, str, str]:
    """(role, text, everything else that was said) of one message."""
    if not isinstance(message, dict):
        return "", "", _dump(message)
    role = str(message.get("role"))
    content, texts, rest = message.get("content"), [], []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        elif part is not None:
            rest.append(part)
    calls = message.get("tool_calls")
    other = _dump([rest, calls]) if rest or calls else ""
    return "system" if role == "developer" else role, even(" ".join(texts)), other


def even(text: str) -> str:
    """A text with its Unicode forms composed and its space evened out."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _dump(value: Json) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)


def _digest(turns: Sequence[tuple[str, str, str]]) -> str:
    return hashlib.sha256(json.dumps(turns, ensure_ascii=True).encode()).hexdigest()[:32]
