"""What a run remembers between two lives: the driver's place, and what happened since.

Knows: files. Does not know: what is kept in them.

- `kept.json` is replaced as a whole (temporary file, fsync, rename): the driver's values and the number of its journal.
- A journal has a line for each thing that was done since the last `keep`: what was asked and what came. A driver
  that starts again from its kept place repeats its calls and gets the same answers; what is not in the journal is done.
- `keep` begins a new journal, so what lies before the kept place is never looked at again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from reef.core.disk import sync
from reef.core.errors import StoreError


class Kept:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        found = read(folder / "kept.json") or {}
        self.values: dict[str, Any] = found.get("values", {})
        self.seconds: dict[str, float] = found.get("seconds", {})  # spent until the last `keep`
        self._number: int = found.get("journal", 0)
        right = isinstance(self.values, dict) and isinstance(self.seconds, dict) and isinstance(self._number, int)
        if not right or not all(isinstance(one, int | float) for one in self.seconds.values()):
            raise damaged(folder / "kept.json", "it has no values, seconds and journal as they are written")
        self._done: dict[str, list[Any]] = {}
        self._seen: Counter[str] = Counter()
        self._load()

    def keep(self, seconds: dict[str, float], **values: Any) -> None:
        """Durable when this returns."""
        before = self._journal
        self.values |= values
        self.seconds = dict(seconds)
        self._number += 1
        write(self._folder / "kept.json", {"values": self.values, "seconds": self.seconds, "journal": self._number})
        before.unlink(missing_ok=True)
        self._done, self._seen = {}, Counter()

    def take(self, key: str) -> tuple[bool, Any]:
        """Whether this call (the n-th with this key since the last `keep`) was made before, and what came of it."""
        place = self._seen[key]
        self._seen[key] += 1
        made = self._done.get(key, [])
        return (True, made[place]) if place < len(made) else (False, None)

    def note(self, key: str, value: Any) -> None:
        """A call was made. One write, so that a kill leaves the line whole or leaves none."""
        self._done.setdefault(key, []).append(value)
        line = json.dumps([key, value]).encode() + b"\n"
        descriptor = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    @property
    def _journal(self) -> Path:
        return self._folder / f"journal-{self._number}.jsonl"

    def _load(self) -> None:
        for path in self._folder.glob("journal-*.jsonl"):
            if path != self._journal:
                path.unlink()  # of before the kept place
        with contextlib.suppress(FileNotFoundError):
            whole = self._journal.read_bytes()
            good = whole[: whole.rfind(b"\n") + 1]
            if len(good) < len(whole):  # the machine went down in the middle of a line
                os.truncate(self._journal, len(good))
            for line in good.splitlines():
                try:
                    key, value = json.loads(line)
                except (ValueError, TypeError, RecursionError) as error:
                    raise damaged(self._journal, str(error)) from None
                self._done.setdefault(key, []).append(value)


def key(*what: Any) -> str:
    """A short name of a call: what is done, with which arguments."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when there is no such file. StoreError when it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, "it is no JSON object")
    return found


def damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged ({why}); start this run over with --fresh, or move its folder away")


def write(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole, durably."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)
