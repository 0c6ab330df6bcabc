"""Reading what clients left behind: bounded, below the root only, and never trusting a byte of it.

Knows: the newest file of a kind, JSON lines, and how messages, tool calls and their results become a Trajectory.
Does not know: which client wrote them.

A client's session could write anything below its root. So: links are not followed, nothing but plain files is opened,
sizes and depths are bounded, and whatever cannot be read is counted, never raised.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from reef.core.ids import parse_receipt
from reef.core.nouns import Json, Usage
from reef.harness.trajectory import Move, ToolCall, Trajectory

MOST: Final = 64 * 1024 * 1024  # bytes read of one transcript: its beginning
_LINE = 4 * 1024 * 1024  # bytes of one line
_TEXT = 256 * 1024  # characters kept of one text
_DEPTH = 24  # levels kept of one value
_FILES = 20_000  # directory entries looked at


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """A plain file, or None when there is none. A link as the last part is not followed, and a pipe does not block."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        yield None
        return
    with os.fdopen(handle, "rb") as file:
        yield file if path.is_file() else None


def below(root: Path, *parts: str) -> Path | None:
    """A path below the root of which no part is a link; None when one is."""
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            return None
    return path


def newest(folder: Path | None, suffix: str, depth: int) -> Path | None:
    """The file with this ending that changed last, exactly `depth` folders below."""
    best: tuple[int, str] | None = None
    left = _FILES
    todo = [] if folder is None else [(str(folder), depth)]
    while todo and left > 0:
        place, deeper = todo.pop()
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for item in found:
                left -= 1
                if left <= 0:
                    break
                if deeper and item.is_dir(follow_symlinks=False):
                    todo.append((item.path, deeper - 1))
                elif not deeper and item.name.endswith(suffix) and item.is_file(follow_symlinks=False):
                    best = max(best or (0, ""), (item.stat(follow_symlinks=False).st_mtime_ns, item.path))
    return Path(best[1]) if best else None


def lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; None for each line that is not one, and for what is left out."""
    with opened(path) as file:
        left = MOST
        while file is not None and (line := file.readline(_LINE)):
            left -= len(line)
            if left < 0:
                yield None
                return
            whole = len(line) < _LINE or line.endswith(b"\n")
            while len(line) == _LINE and not line.endswith(b"\n") and left > 0:
                line = file.readline(_LINE)
                left -= len(line)
            if whole and not line.strip():
                continue
            yield parse(line) if whole else None


def parse(data: bytes | str) -> dict[str, Any] | None:
    """A JSON object with nothing in it that would trouble who writes it down again; None when it is none."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _plain(value, _DEPTH) if isinstance(value, dict) else None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value[:_TEXT].encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {_plain(key, depth): _plain(item, depth - 1) for key, item in value.items()}
    return value


def inner(value: Json) -> dict[str, Any]:
    """The value when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(content: Json) -> str:
    """The text in a message's content: a text, a part, or a list of parts. Pictures and thoughts are left out."""
    parts = content if isinstance(content, list) else [content]
    said = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(each for each in said if isinstance(each, str))


def usage(prompt: Json, completion: Json) -> Usage | None:
    """None for what is not two counts, and for two zeros: clients write those where nothing was told."""
    if not isinstance(prompt, int) or not isinstance(completion, int) or min(prompt, completion) < 0:
        return None
    return Usage(int(prompt), int(completion)) if prompt or completion else None


def receipt(*found: Json) -> str | None:
    """The first of them that is a receipt, or an id that Reef derived from one."""
    return next((made for each in found if isinstance(each, str) and (made := parse_receipt(each))), None)


@dataclass(slots=True)
class Said:
    """A `Move` in the making."""

    role: Literal["user", "assistant", "system"]
    text: str = ""
    receipt: str | None = None
    usage: Usage | None = None
    error: str | None = None
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class Story:
    """A `Trajectory` in the making. `unread` is counted by whoever reads."""

    said: list[Said] = field(default_factory=list)
    unread: int = 0
    _open: dict[str, tuple[Said, int]] = field(default_factory=dict)

    def say(self, role: Literal["user", "assistant", "system"], words: str = "") -> Said:
        self.said.append(Said(role, words))
        return self.said[-1]

    def answer(self) -> Said:
        """The answer that is being told: the last move when it is the assistant's, else a new one."""
        return self.said[-1] if self.said and self.said[-1].role == "assistant" else self.say("assistant")

    def call(self, said: Said, id_: Json, name: Json, arguments: Json) -> None:
        if not isinstance(id_, str) or not isinstance(name, str):
            self.unread += 1
            return
        self._open[id_] = (said, len(said.calls))
        said.calls.append(ToolCall(id_, name, arguments))

    def result(self, id_: Json, words: str, *, failed: bool) -> None:
        """What a call returned. One that nobody made, or that has returned already, is counted."""
        at = self._open.pop(id_, None) if isinstance(id_, str) else None
        if at is None:
            self.unread += 1
            return
        said, index = at
        made = said.calls[index]
        said.calls[index] = ToolCall(made.id, made.name, made.arguments, words, failed)

    def told(self, agent: str, session: Json) -> Trajectory:
        moves = tuple(Move(s.role, s.text, tuple(s.calls), s.receipt, s.usage, s.error) for s in self.said)
        return Trajectory(agent, session if isinstance(session, str) else "", moves, self.unread)
