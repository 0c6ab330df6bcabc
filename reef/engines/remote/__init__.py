"""Engines that are servers of their own (vLLM, SGLang), given the chain's weights over HTTP.

Knows: which servers there are, how a release's weights get to them, and how to tell that they answer with those.
Does not know: scenarios, records, how a server is started, or what a release is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reef.engines import Resolver


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
