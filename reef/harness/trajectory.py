"""What an agent did in one session, in one form for all clients.

Knows: steps, tool calls and their results, tokens, receipts. Does not know: how any client writes its transcript
(`agents`), or whether what was done was good. All of it is untrusted text: whoever shows it to a model fences it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reef.core.nouns import Json, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool the agent called, and what came back. `result` None: nothing did (cut short)."""

    id: str
    name: str
    arguments: Json
    result: str | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One message of the session. `receipt`: of the answer it came with, where the transcript tells."""

    role: Literal["user", "assistant", "system"]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    receipt: str | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A session of one agent. `final` is its last words."""

    agent: str
    session: str
    moves: tuple[Move, ...]
    unread: int = 0  # lines or rows of the transcript that could not be read

    @property
    def final(self) -> str:
        return next((move.text for move in reversed(self.moves) if move.role == "assistant" and move.text), "")

    @property
    def receipts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(move.receipt for move in self.moves if move.receipt))

    @property
    def errors(self) -> tuple[str, ...]:
        said = [move.error for move in self.moves if move.error]
        return (*said, *(call.result or "no result" for move in self.moves for call in move.calls if call.failed))
