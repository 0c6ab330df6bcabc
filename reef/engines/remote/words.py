"""What tokens must say, by the base model's own tokenizer here: a check of what a server gives beside its answers.

Knows: the tokenizer of a model folder, whether ids are a text's, whether a prompt is that of a request.
Does not know: HTTP, templates, log-probs.

- Only what is certain counts: a form of tokenizer that cannot be read here, calls that a server took out of the text,
  and messages without enough plain letters are passed over.
- Prompts are compared by their letters and digits, which no template and no normaliser changes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reef.core.nouns import Choice, Json
from reef.engines.dialect.value import load
from reef.engines.local.layout import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TAIL = 64  # letters of the last message that must be in the prompt
LEAST = 8  # with fewer, they could be anywhere
NEAR = 1024  # tokens at the prompt's end in which they mostly are
_PLAIN = re.compile(r"[^a-z0-9]+")


class Words:
    """The tokenizer of a folder; read at the first `open`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._read = False
        self._vocabulary = 1 << 31

    async def open(self) -> None:
        if not self._read:
            await asyncio.to_thread(self._open)

    def flaw(self, body: bytes, prompt: Sequence[int], said: Sequence[tuple[Choice, Sequence[int]]]) -> str | None:
        """What is wrong with the tokens of an answer to a chat request; None when nothing is."""
        for choice, ids in said:
            if not all(type(each) is int and 0 <= each < self._vocabulary for each in ids):
                return "the server gave token ids that the base model does not have"
            if self._tokenizer is not None and choice.message is None and not self._says(ids, choice.text):
                return "the server's text is not what its token ids say"
        if not all(type(each) is int and 0 <= each < self._vocabulary for each in prompt):
            return "the server gave prompt tokens that the base model does not have"
        if self._tokenizer is not None and not self._asks(prompt, _last(load(body))):
            return "the server gave prompt tokens that are not of this request"
        return None

    def _open(self) -> None:
        self._vocabulary = vocabulary(self._folder) or self._vocabulary
        self._tokenizer = tokenizer(self._folder)
        self._read = True

    def _says(self, ids: Sequence[int], text: str) -> bool:
        """Whether a text is what the ids say, up to a stop string that was cut off."""
        return any(self._decode(ids, skip).strip().startswith(text.strip()) for skip in (True, False))

    def _asks(self, prompt: Sequence[int], text: str) -> bool:
        tail = _plain(text)[-TAIL:]
        if len(tail) < LEAST:
            return True
        return any(tail in _plain(self._decode(part, False)) for part in (prompt[-NEAR:], prompt))

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        assert self._tokenizer is not None
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip)
        return found


def tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where there is none that can be read here."""
    try:
        from tokenizers import Tokenizer as Made
    except ImportError:
        return None
    try:
        found = Made.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises plain Exception; a folder may have another form of tokenizer
        return None
    found.no_truncation()
    found.no_padding()
    return found


def vocabulary(folder: Path) -> int | None:
    """How many tokens a model has; None where its configuration does not say."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) and size > 1 else None


def _last(body: Json) -> str:
    """The text of a request's last message, if a user wrote it: other roles' may be written otherwise in a prompt."""
    messages = body.get("messages") if isinstance(body, dict) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
    return content if isinstance(content, str) else ""


def _plain(text: str) -> str:
    return _PLAIN.sub("", text.casefold())
