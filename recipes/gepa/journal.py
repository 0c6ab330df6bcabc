"""A search's file: where it is, and what it was answered since the last whole round.

Knows: one JSON file, written by rename after each answer. Does not know: what a round is made of.

A search that was killed goes on at the answer it waited for: a round is deterministic, so what is kept is handed to it
again and nothing is asked twice. What was asked for another plan or tree is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reef.harness.tree import Entry, write

from .search import Answer, Plan, Seen, Text
from .state import State, dump, load

FILE = "gepa.json"
FORMAT = 1


class Journal:
    """`state` is as it was when the round began, `said` what the round was answered so far."""

    def __init__(self, folder: Path, plan: Plan, tree: Sequence[Entry]) -> None:
        self.path = folder / FILE
        self._key = key(plan, tree)
        self.state, self.said = State(), list[Answer]()
        kept = self._read()
        if kept is not None:
            self.state, self.said = kept
        self.before = dump(self.state)

    def answered(self, answer: Answer) -> None:
        self.said.append(answer)
        self._write()

    def ended(self, state: State) -> None:
        """A round is over; this is the state after it."""
        self.state, self.said, self.before = state, [], dump(state)
        self._write()

    def _write(self) -> None:
        kept = {"format": FORMAT, "key": self._key, "state": self.before, "said": [_plain(one) for one in self.said]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(kept, file, ensure_ascii=True)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)

    def _read(self) -> tuple[State, list[Answer]] | None:
        """None: there is nothing, or nothing of use."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT or kept["key"] != self._key:
                return None
            return load(kept["state"]), [_made(one) for one in kept["said"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def key(plan: Plan, tree: Sequence[Entry]) -> str:
    """A digest of all that a search depends on, but for the answers."""
    plain = json.dumps(asdict(plan), sort_keys=True).encode()
    return hashlib.sha256(plain + write(tree)).hexdigest()


def _plain(answer: Answer) -> Any:
    return asdict(answer) if isinstance(answer, Text) else [asdict(one) for one in answer]


def _made(given: Any) -> Answer:
    if isinstance(given, Mapping):
        return Text(given["text"], given["why"])
    return [Seen(one["task"], one["score"], one["answer"], one["feedback"]) for one in given]
