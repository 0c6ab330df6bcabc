"""Which skills match a text: a lexical measure, the same every time.

Knows: words without their endings, and how telling each is among the skills there are.
Does not know: requests, trees, or what a word means.

A skill matches when the text has every word of its name, or two different words of its name and description. Its score
is the sum, over the words found, of log(1 + skills / skills with that word), twice that for a word of the name; the
higher goes first, equal ones in the order in which they were given. Words are compared in lower case and without
English endings (`tests`, `testing`: `test`); those that say nothing (`the`, `use`, `when`) do not count. Chinese,
Japanese and Korean are compared by pairs of characters.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

_EAST = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_RUNS = re.compile(rf"[{_EAST}]+|[^\W_{_EAST}]+")
_ASCII = {code: " " for code in range(128) if not chr(code).isalnum()}
_ENDINGS = (("ies", "y"), ("ing", ""), ("ed", ""), ("es", ""), ("s", ""), ("e", ""))
_WORDS = """
a about above after again all also always an and another any are as ask asked asking asks at be because been before
being below best between both but by can could did do does doing done down each every few first for from get give
given gives go good had has have having he help helps her here him his how i if in instead into is it its just keep
kind know let like made make makes making many may me more most must my need needed needs never new no not now of off
on once one only or other our out over own please same say says see set she should show shows skill so some something
such take task tell than that the their them then there these they thing things this those through to too two under
until up upon us use used useful user users uses using very want wants was way we well were what when where whether
which while who whom why will with without work would you your
"""
_SILENT = frozenset(_WORDS.split())


class Index:
    """Skills by the words that find them, each given as (id, name, description)."""

    def __init__(self, skills: Sequence[tuple[str, str, str]]) -> None:
        self._ids = [name for name, _, _ in skills]
        self._named: list[int] = []  # how many words each name has
        places: dict[str, list[tuple[int, bool]]] = defaultdict(list)  # word: skills, and whether in the name
        for place, (_, name, description) in enumerate(skills):
            named = words(name)
            self._named.append(len(named))
            for word in sorted(named | words(description)):
                places[word].append((place, word in named))
        telling = {word: math.log(1 + len(skills) / len(found)) for word, found in places.items()}
        self._worth = {
            word: [(place, telling[word] * (2 if named else 1), named) for place, named in found]
            for word, found in places.items()
        }

    def best(self, text: str) -> list[tuple[int, str]]:
        """(place, id) of every skill that matches, the best first."""
        scores: dict[int, float] = {}
        counts: dict[int, tuple[int, int]] = {}  # words found, and those of the name
        for word in sorted(words(text) & self._worth.keys()):  # sums in one order: the same on every machine
            for place, worth, named in self._worth[word]:
                scores[place] = scores.get(place, 0.0) + worth
                both, own = counts.get(place, (0, 0))
                counts[place] = (both + 1, own + named)
        found = [place for place, (both, own) in counts.items() if both > 1 or 0 < own == self._named[place]]
        found.sort(key=lambda place: (-scores[place], place))
        return [(place, self._ids[place]) for place in found]


def words(text: str) -> set[str]:
    """The words of a text that can tell something, without their endings."""
    found: set[str] = set()
    if text.isascii():  # many times as fast
        runs = text.lower().translate(_ASCII).split()
    else:
        runs = _RUNS.findall(unicodedata.normalize("NFKC", text).casefold())
    for run in set(runs):
        if "\u3040" <= run[0] <= "\ud7af":
            found.update(run[at : at + 2] for at in range(max(1, len(run) - 1)))
        elif len(run) > 1 and run not in _SILENT:
            found.add(_stem(run))
    return found


@functools.lru_cache(maxsize=8192)
def _stem(word: str) -> str:
    """A word without an English ending; a letter that is doubled before it (`running`) counts once."""
    for end, instead in _ENDINGS:
        if word.endswith(end) and len(word) - len(end) > 2 and not word.endswith("ss"):
            word = word[: -len(end)] + instead
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word
