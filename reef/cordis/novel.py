"""Whether a text says anything that other texts do not say already.

Knows: words. Does not know: meaning: a paraphrase is new to it, and so is a contradiction. Two rules that contradict
each other are told apart by their ids only: an `update` replaces what was said, a second entry does not.

The measure: each sentence is cut into runs of four words, with three blanks before and after it (shingles; A. Broder,
"On the resemblance and containment of documents", 1997). A text restates others when at least four fifths of its runs
are in one or more of them. One changed word makes four new runs, so it makes a sentence of up to 17 words new.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Set
from typing import Final

RUN: Final = 4
SAME: Final = 0.8

_ENDS = re.compile(r"[.!?;。！？；](?=\s|$)|[。！？；]|\n[^\S\n]*\n|(?:^|\n)[^\S\n]{0,40}(?:[-*+>#]+|\d{1,3}[.)])\s")
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")  # a letter of those writings is about a word

Run = tuple[str, ...]


def runs(text: str) -> frozenset[Run]:
    """The runs of words of a text, whatever its case, punctuation and line breaks."""
    found: set[Run] = set()
    for sentence in _ENDS.split(unicodedata.normalize("NFKC", text).casefold()):
        if words := _WORDS.findall(sentence):
            padded = [""] * (RUN - 1) + words + [""] * (RUN - 1)
            found.update(tuple(padded[at : at + RUN]) for at in range(len(padded) - RUN + 1))
    return frozenset(found)


def share(text: frozenset[Run], known: Iterable[Set[Run]]) -> float:
    """Which part of a text's runs, 0 to 1, is in any of the others. A text without words says nothing: 1."""
    left: Set[Run] = text
    for each in known:
        left = left - each
    return 1 - len(left) / len(text) if text else 1.0


def restates(text: str, known: Iterable[str]) -> bool:
    """Whether a text says nothing that the known ones do not say."""
    return share(runs(text), map(runs, known)) >= SAME
