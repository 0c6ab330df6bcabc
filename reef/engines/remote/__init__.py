"""Engines that are servers of their own (vLLM, SGLang), given the chain's weights over HTTP.

Knows: which servers there are, how a release's weights get to them, and how to tell that they answer with those.
Does not know: scenarios, records, how a server is started, or what a release is for.

A kind of server is one module: an `Options` dataclass, a `Server`, and an engine that is a `RemoteEngine` of them.

    engine   the Engine seam: asks, failures before the first byte, what is recorded     said     answers with tokens
    words    whether tokens are an answer's and a request's                              native   SGLang's answers
    pool     which server a request goes to: health, sessions, adapters that stay        turns    whose weights a server
    staging  a release's files where servers read them                                            holds, among processes
    proof    that a server answers with the weights that it was given                    door     HTTP to one server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reef.core.errors import ConfigError, EngineError
from reef.core.nouns import Sampling
from reef.engines import Ask, Resolver

if TYPE_CHECKING:
    from reef.engines.remote.door import Door

BASE = ""
"""The name of the base model's own weights among sets of full weights."""


@dataclass(frozen=True, slots=True)
class Common:
    """What can be chosen for servers of every kind."""

    loras: int = 16  # adapters that each server keeps; those not used for longest go
    everywhere: bool | None = None  # a new release goes to every server; by default LoRAs do, and full weights to one
    seen_as: str | None = None  # the folder that is <state_dir>/engines/<name> here, as the servers see it
    turn: float = 2.0  # seconds a set of full weights is kept at least, once others are asked for
    wait: float = 60.0  # seconds a request waits for its full weights before it is told to try again
    patience: float = 300.0  # seconds for a load or a rating
    max_tokens: int | None = None  # of an answer whose request names no limit; by default what the context has room for

    def __post_init__(self) -> None:
        if self.loras < 1:
            raise ConfigError("loras must be at least 1", param="loras")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("max_tokens must be at least 1", param="max_tokens")
        for name in ("wait", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 (seconds)", param=name)
        if not self.turn >= 0:
            raise ConfigError("turn must be 0 or more (seconds)", param="turn")


@dataclass(frozen=True, slots=True)
class Away:
    """What such an engine is made with, beside its options. Each gateway and the learner has one of its own, on the
    same servers and the same folder."""

    name: str  # the engine's, in the configuration
    urls: tuple[str, ...]  # its servers, without /v1; all of them serve the same base model
    model: str | None  # the base model's name there; None: the only one that the server lists
    key: str | None
    folder: Path  # the base model here: tokenizer, chat template, and what the trainer trains
    base: str  # its name
    digest: str  # sha256 (hex) of its weights
    resolve: Resolver
    place: Path  # a folder of this engine's: adapters and weights that its servers read, locks, what is known of them
    connect: float = 10.0  # seconds
    idle: float = 300.0  # seconds without a byte


class Down(EngineError):
    """A server cannot be reached, or broke off: another may be asked the same."""


class Lost(EngineError):
    """A server does not have the adapter that it was asked for by name: it was started anew, or dropped it."""


@dataclass(frozen=True, slots=True)
class Want:
    """The weights of a release, as servers have them: a set of full weights, and an adapter on the base's, if any."""

    full: str = BASE  # names the set by its content: releases with the same weights want the same set
    lora: str | None = None  # the release's id, which is the adapter's name


@dataclass(frozen=True, slots=True)
class Look:
    """What a server says of itself. `holds`: the set of full weights it was given last; None: it cannot be given any,
    or none was since it started, so it holds the base's."""

    models: tuple[str, ...]  # names that it answers to: the base's, adapters
    holds: str | None = None
    context: int | None = None  # tokens


@dataclass(slots=True)
class Request:
    """An ask as a server gets it, and what it means for the record.

    `logprobs`: whether the client asked for them. `untrainable`: why log-probs of such an answer cannot be exact.
    `state` is the server's own, for one answer.
    """

    path: str
    body: bytes
    sampling: Sampling
    logprobs: bool = False
    untrainable: str | None = None
    state: Any = None


@dataclass(slots=True)
class Taken:
    """What one chunk of an answer (or a whole one) held. `shown` is the chunk as the client may see it."""

    shown: dict[str, Any]
    prompt: Sequence[int] | None = None  # the prompt's tokens
    drawn: Sequence[tuple[int, Sequence[int], Sequence[float]]] = ()  # (choice, token ids, their log-probs)
    flaws: Sequence[str] = field(default_factory=tuple)  # what is wrong with its tokens, in words


class Server(Protocol):
    """One server of a kind, over HTTP. All but the last two are calls, each with a time limit of its own.

    They raise Down when the server cannot be reached, and EngineError (UpstreamError with its status) when it refuses.
    A name is what an answer is asked by: an adapter's, or the base model's (`base`).
    """

    url: str
    door: Door

    async def look(self) -> Look:
        """That it is well, which names it answers to, and which full weights it holds."""

    async def put(self, kind: str, name: str, folder: str | None) -> None:
        """Give it weights out of a folder as it sees it. `lora`: an adapter of that name, beside the others; putting
        what it has is no error. `full`: a set of weights in place of what the base's name stood for (no folder: the
        base's own), with nothing of the old ones left in its caches; called while nothing of ours runs on it."""

    async def drop(self, name: str) -> None:
        """Take an adapter from it. One that it does not have is no error."""

    async def rate(
        self, name: str, sequences: Sequence[Sequence[int]], starts: Sequence[int], priority: int = 1
    ) -> list[list[float]]:
        """Log-probs at temperature 1 of given tokens, from `starts[i]` on, computed anew (from no cache)."""

    async def draw(self, name: str, tokens: Sequence[int]) -> tuple[int, float]:
        """The likeliest next token and its log-prob at temperature 1, as answers get them: prompts may be cached."""

    async def count(self, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of a chat body has."""

    async def encode(self, text: str) -> Sequence[int]:
        """A text's tokens, without special ones of the tokenizer's own making."""

    def request(self, ask: Ask, name: str) -> Request:
        """A chat ask as this server takes it: by that name, with token ids and log-probs, sampling pinned to what is
        recorded. InputError names a field that is wrong."""

    def read(self, request: Request, chunk: Any) -> Taken:
        """What a chunk (an object, or a whole answer: an object or a list) holds, in chat's form; it may be changed.
        Names in it are put right by the caller: only what the client did not ask for has to go."""
