"""Markdown pages with YAML front matter, the form in which every agent takes skills and commands.

Knows: how to quote a text so that it stays one. Does not know: where a client looks for the page.

- A value is always one line in double quotes, in what JSON and YAML 1.1 and 1.2 agree on, so nothing in it can end the
  front matter, begin another key, or become a number.
- `inert`, `closed` and `coded` take from a text what some clients run or read by themselves when they show it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # YAML breaks lines at some and refuses others
_RUN = re.compile(r"(!)(?=[`{])|(?<=```)(!)")
_IMPORT = re.compile(r"(^|\s)@(?=\S)")
_MENTION = re.compile(r"(?<![\w`])@([^\s`]*)")


def page(fields: Mapping[str, str], text: str) -> str:
    """The front matter's fields, in the order given, and the text below."""
    head = "".join(f"{name}: {quote(value)}\n" for name, value in fields.items())
    body = text.strip("\n")
    return f"---\n{head}---\n\n{body}\n"


def quote(value: str) -> str:
    """A text as a double-quoted scalar, which is the same in YAML and JSON."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def inert(text: str) -> str:
    """A text in which a client that runs !`…` or !{…} before it shows a page finds nothing: a blank comes between."""
    return _RUN.sub(lambda found: "! " if found[1] else " !", text)


def closed(text: str) -> str:
    """A text in which Claude Code, which puts @file's content in its place, finds no file: Markdown's own escape."""
    return _IMPORT.sub(r"\1\\@", text)


def coded(text: str) -> str:
    """The same for opencode, which does not know the escape, but leaves alone what stands in backticks."""
    return _MENTION.sub(r"`@\1`", text)
