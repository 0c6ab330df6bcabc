"""What a gateway is given to work with. Put together in `cli/assemble.py`, and by tests.

Knows: names and types. Does not know: how any of it is made, or what it does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from reef.core.nouns import Json, Serving
from reef.core.rpc import Client
from reef.engines import Engine
from reef.gateway.auth import Tokens
from reef.records import RecordStore
from reef.records.board import Board
from reef.releases import ReleaseChain
from reef.scenario.serving import Watch


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, requests in work at once, and seconds a stop waits for them."""

    body_bytes: int = 64 * 1024 * 1024
    report_bytes: int = 1024 * 1024
    header_bytes: int = 64 * 1024
    headers: int = 256
    concurrent: int = 1024
    drain_seconds: float = 20.0


async def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Context:
    """`ensure_scenario` blocks and is called in a thread. Whoever opened the store, engines and chain closes them.

    `engine_of` names the engine a scenario is bound to. `recipe_of` is a scenario's recipe as people write it, for the
    status. `fixed` scenarios are defined in the configuration file and cannot be changed over HTTP.
    """

    store: RecordStore
    board: Board
    watch: Watch
    chain: ReleaseChain
    engines: Mapping[str, Engine]
    engine_of: Callable[[str], tuple[str, Engine]]
    tokens: Tokens
    ensure_scenario: Callable[[str, Mapping[str, Json]], Serving]
    learner: Client | None = None
    engine_ready: Callable[[], Awaitable[bool]] = _always
    store_ready: Callable[[], Awaitable[bool]] = _always
    recipe_of: Callable[[str], str | None] = lambda name: None
    models: tuple[str, ...] = ()  # ids that GET /v1/models lists; empty: the engines' names
    default_scenario: str = "default"
    create_scenarios: bool = True
    fixed: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
