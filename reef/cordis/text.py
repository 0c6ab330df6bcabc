"""Text of unknown origin: made comparable, made visible, cut, and found inside JSON.

Knows: Unicode. Does not know: what a text may say (`screen`), or to whom it is shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from reef.core.nouns import Json

# Letters of other alphabets that look like Latin ones, as far as they spell English words.
_ALIKE: Final = str.maketrans(
    "аеорсухіјѕԁɡһӏткнмвагпԝАЕОРСУХІЈЅТКНМВαορνικτυϲΑΕΟΡΝΙΚΤΥΧΒΜΗΖıɩ",
    "aeopcyxijsdghltkhmvarnwAEOPCYXIJSTKHMBaopviktucAEOPNIKTYXBMHZii",
)
# Letters and signs that show as nothing, beside the classes of `hidden`.
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_UNSEEN: Final = frozenset(("Cf", "Cc", "Cs", "Co", "Zl", "Zp"))
_ODD = re.compile(r"[^\n\t -~]")
_WIDE, _TALL = re.compile(r"[^\S\n]{2,}|[^\S\n \t]"), re.compile(r"(?:[ \t]?\n){3,}")


def fold(text: str) -> str:
    """The letters a reader would take a text for: compatible forms, without accents, without what cannot be seen, with
    look-alikes of other alphabets as Latin letters, and without the rest of a long gap. For searching only."""
    if text.isascii():
        return _close(text)
    apart = unicodedata.normalize("NFKD", text)
    seen = (sign for sign in apart if sign not in _BLANK and unicodedata.category(sign) not in ("Cf", "Mn", "Me"))
    return _close("".join(seen).translate(_ALIKE))


def _close(text: str) -> str:
    """Blanks as one blank, empty lines as one: patterns bound the room between two words, which a writer does not."""
    return _TALL.sub("\n\n", _WIDE.sub(" ", text))


def hidden(sign: str) -> bool:
    """Whether a character other than newline and tab shows as nothing, or changes how others are shown."""
    if sign in "\n\t":
        return False
    chooses = "\ufe00" <= sign <= "\ufe0e" or "\U000e0000" <= sign <= "\U000e0fff"  # FE0F asks for an emoji's colours
    return chooses or sign in _BLANK or unicodedata.category(sign) in _UNSEEN


def visible(text: str) -> str:
    """The text with every control and invisible character written as `\\u{…}`, so that nobody is shown less than is
    there. Newline and tab stay."""
    return _ODD.sub(lambda found: f"\\u{{{ord(found[0]):x}}}" if hidden(found[0]) else found[0], text)


def excerpt(text: str, most: int = 100) -> str:
    """The beginning of a text on one line, for a sentence."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def strings(value: Json, pairs: bool = False) -> Iterator[str]:
    """Every text inside a JSON value, keys too; with `pairs` also each key with its text, as `key=text`."""
    held = [value]
    while held:
        part = held.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list | tuple):
            held += part
        elif isinstance(part, dict):
            held += [*part, *part.values()]
            if pairs:
                held += [f"{key}={text}" for key, text in part.items() if isinstance(text, str)]
