"""What a gateway is given to work with. Put together in `cli/assemble.py`, and by tests.

Knows: names and types. Does not know: how any of it is made, or what it does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reef.core.nouns import Json, PartName, Serving
from reef.core.rpc import Client
from reef.engines import Engine
from reef.gateway.auth import Tokens
from reef.gateway.meter import Meter
from reef.gateway.metrics import Metrics
from reef.harness.apply import Wish
from reef.records import RecordStore
from reef.records.board import Board
from reef.releases import ReleaseChain
from reef.scenario.audit import Absent, Audit
from reef.scenario.serving import Watch


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes (`held_bytes`: of all request bodies in memory), requests in work at once, and seconds.

    `store_seconds`: an answer waits no longer for its record. `quiet_seconds`: a stream gets a comment that keeps it
    alive. `drain_seconds`: a stop waits for requests in work.
    """

    body_bytes: int = 64 * 1024 * 1024
    held_bytes: int = 1024 * 1024 * 1024
    stream_bytes: int = 256 * 1024 * 1024
    report_bytes: int = 1024 * 1024
    header_bytes: int = 64 * 1024
    headers: int = 256
    connections: int = 4096
    concurrent: int = 1024
    store_seconds: float = 10.0
    quiet_seconds: float = 15.0
    drain_seconds: float = 20.0


async def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Target:
    """Who answers: an engine, its name, and the model to ask it for (None: as the request says)."""

    name: str
    engine: Engine
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """How a scenario can be told to learn: its training's trigger, and the parts whose recipes take instructions."""

    trigger: str = "auto"
    parts: tuple[PartName, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """`ensure_scenario` blocks and is called in a thread. Whoever opened the store, engines and chain closes them.

    `route` finds the engine for a scenario and the model a request names; MissingError when there is none. `lenient`
    tells whether a scenario is answered also when its record cannot be stored now, `wish` what its requests get of its
    releases' harness. `recipe_of` is a scenario's recipe
    as people write it, for the status. `check_scenario` refuses settings that a request may not give, as creation does.
    `audit` reads what the learner wrote down. `spent` is what a scenario's evaluations cost this month, `remote` the
    state of the chain's remote, both for the status (None: nothing to show). `fixed` scenarios are defined in the
    configuration file and cannot be changed over HTTP.
    """

    store: RecordStore
    board: Board
    watch: Watch
    chain: ReleaseChain
    engines: Mapping[str, Engine]
    route: Callable[[str, str | None], Target]
    tokens: Tokens
    ensure_scenario: Callable[[str, Mapping[str, Json]], Serving]
    learner: Client | None = None
    engine_ready: Callable[[], Awaitable[bool]] = _always
    store_ready: Callable[[], Awaitable[bool]] = _always
    lenient: Callable[[str], bool] = lambda name: False
    wish: Callable[[str], Wish] = lambda name: Wish()
    recipe_of: Callable[[str], str | None] = lambda name: None
    trouble_of: Callable[[str], str | None] = lambda name: None  # why a scenario cannot be served by its engine
    learning: Callable[[str], Learning] = lambda name: Learning()
    check_scenario: Callable[[str, Mapping[str, Json]], None] = lambda name, settings: None
    audit: Audit = field(default_factory=Absent)
    sessions: Path | None = None  # what the learner joined; it need not be there
    spent: Callable[[str], Mapping[str, Json] | None] = lambda name: None
    remote: Callable[[Mapping[str, str]], Mapping[str, Json] | None] = lambda serving: None
    models: tuple[str, ...] | None = None  # ids that GET /v1/models lists; None: the engines' names
    default_scenario: str = "default"
    create_scenarios: bool = True
    fixed: frozenset[str] = frozenset()
    public_url: str | None = None  # the address that clients reach this server at; None: as each request says
    limits: Limits = field(default_factory=Limits)
    meter: Meter = field(default_factory=Meter)
    metrics: Metrics = field(default_factory=Metrics)
