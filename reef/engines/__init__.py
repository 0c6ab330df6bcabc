"""Engines answer requests with the weights of one release.

Knows: how to turn a chat request and a release id into the bytes of an answer, with sampled tokens when it has them.
Does not know: scenarios, records, recipes, or where release files come from (a resolver is handed in).

An engine is asked for a release id and resolves it itself, so an old snapshot, a restarted engine, a late request and a
rollback need no special case.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reef.core.nouns import Choice, Sampling, Usage

ENGINES = {
    "local": "reef.engines.local.client:LocalEngine",
    "upstream": "reef.engines.upstream:UpstreamEngine",
    "fake": "reef.engines.fake:FakeEngine",
    "vllm": "reef.engines.remote.vllm:VllmEngine",
    "sglang": "reef.engines.remote.sglang:SglangEngine",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference request. `body` is the JSON to send (rendered); `headers` the client's, without secrets.

    `dialect` is one that the engine has in its `dialects` (`engines.dialect` translates the others):
    chat, responses, messages, count_tokens, embeddings; `count` is a chat body whose prompt is only counted.
    `query` is the request's query string (`beta=true`); `model` a name to put in the place of the one asked for.
    """

    receipt: str
    release_id: str
    dialect: str
    body: bytes
    stream: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0  # 0 live; 1 evaluation; 2 probe
    query: str = ""
    model: str | None = None
    session: str | None = None  # whose requests share a beginning: an engine of several servers keeps them together


@dataclass(frozen=True, slots=True)
class Head:
    """First: status and headers of the answer (content-type, retry-after, the provider's own request id …)."""

    status: int
    headers: Mapping[str, str]
    upstream_id: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Then any number of these: bytes for the client, untouched. `terminal` marks the one with the dialect's end.

    A terminal piece is held back until the record's commit; an answer that is not streamed is one terminal piece.
    """

    data: bytes
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Last: what the engine knows of its answer beyond the bytes. Token fields are None where it gives no tokens.

    `reply`, `id`: see `nouns.Record.reply` and `answer_id`. `error`: the answer ended with its dialect's error event
    (which is the terminal piece): it did not come to its end. `cached`: prompt tokens that were not computed again.
    """

    choices: tuple[Choice, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    usage: Usage | None = None
    model: str | None = None
    untrainable: str | None = None
    reply: bytes | None = None
    id: str | None = None
    error: str | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What a resolver finds for a release id: `kind` base | lora | full and the verified files."""

    kind: str
    files: Mapping[str, Path]
    meta: Mapping[str, object]


Resolver = Callable[[str], WeightFiles]
"""Release or candidate id to its weight files; MissingError when unknown. Blocking."""


class Engine(Protocol):
    dialects: frozenset[str]
    """What it answers by itself; `engines.dialect` makes Responses and Messages out of chat for the others."""

    def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        """Head, Pieces, Answer, in that order. Raises EngineError or ContextError before Head when nothing ran.

        An error after Head ends the iterator by an exception: the caller drops the client's socket. Closing the
        iterator early stops the work within a second.
        """

    async def load(self, release_id: str) -> None:
        """Make a release resident before it is served. EngineError when it cannot be."""

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        """Log-probs (temperature 1) of given tokens from `starts[i]` on; EngineError from an engine that cannot."""

    async def ready(self) -> bool:
        """Whether it can answer now."""

    async def close(self) -> None: ...
