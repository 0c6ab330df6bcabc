"""A whole gateway on a real socket: SQLite, git, HTTP; only the model is a fake."""

import asyncio
import atexit
import contextlib
import functools
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from reef.core.nouns import Json, Record, Serving
from reef.core.rpc import Client
from reef.engines.fake import FakeEngine
from reef.gateway.auth import Token, Tokens
from reef.gateway.context import Context, Limits, Target
from reef.gateway.serve import Server, server
from reef.harness.apply import Wish
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases import NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import Watch, ensure

TOKEN = "t-all-rights"
BASE = NewPart("base", {"weights.json": b'{"base":{"name":"fake","digest":"0"},"kind":"base","rank":0,"alpha":0}'})
TOKENS = [
    (TOKEN, Token("owner")),
    ("t-infer", Token("app", frozenset({"infer"}))),
    ("t-one", Token("tenant", scenarios=frozenset({"one"}))),
]


@functools.cache
def template() -> Path:
    """A state folder with the default scenario, made once: each test works on a copy."""
    state = Path(tempfile.mkdtemp(prefix="reef-template-"))
    atexit.register(shutil.rmtree, state, ignore_errors=True)
    chain, board = GitChain(state / "releases.git"), Board(state / "records.db")
    chain.open()
    board.create_scenario("default", {})
    ensure("default", chain, board, BASE, None)
    board.close()
    return state


class Gateway:
    """A running gateway and the handles a test needs."""

    def __init__(self, state: Path, engine: Any, *, learner: Path | None = None, **settings: Any) -> None:
        if not (state / "releases.git").exists():
            shutil.copytree(template(), state, dirs_exist_ok=True)
        self.state = state
        self.engine = engine
        self.chain = GitChain(state / "releases.git")
        self.board = Board(state / "records.db")
        self.store = SqliteStore(state / "records.db", owner="gateway-1-test")
        self.learner = Client(learner) if learner else None
        self.settings = settings
        self.task: asyncio.Task[None] | None = None

    def ensure(self, name: str, created: Mapping[str, Json]) -> Serving:
        self.board.create_scenario(name, created)
        return ensure(name, self.chain, self.board, BASE, None)

    async def start(self) -> None:
        await self.store.start()
        self.context = Context(
            store=self.store,
            board=self.board,
            watch=Watch(self.board),
            chain=self.chain,
            engines={"fake": self.engine},
            tokens=self.settings.pop("tokens", None) or Tokens(TOKENS),
            ensure_scenario=self.ensure,
            learner=self.learner,
            engine_ready=self.engine.ready,
            **{
                "limits": Limits(drain_seconds=5),
                "route": lambda name, model: Target("fake", self.engine),
                "wish": lambda name: Wish(apply=True),
                **self.settings,
            },
        )
        sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.server: Server = server(self.context)
        self.task = asyncio.create_task(self.server.serve(sockets=[sock]))
        while not self.server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.server.stop()
        if self.task is not None:
            await self.task
        if self.learner is not None:
            await self.learner.close()
        await self.engine.close()
        await self.store.close()
        self.board.close()

    def client(self, token: str | None = TOKEN, **settings: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20, **settings)

    async def record(self, receipt: str) -> Record:
        (found,) = await self.store.get([receipt])
        assert isinstance(found, Record)
        return found

    async def closed(self, receipt: str, within: float = 2.0) -> Record:
        """The record once it is closed."""
        end = asyncio.get_running_loop().time() + within
        while (found := await self.record(receipt)).status == "open":
            assert asyncio.get_running_loop().time() < end, "the record stays open"
            await asyncio.sleep(0.01)
        return found

    def publish_rules(self, text: str, scenario: str = "default") -> str:
        """A release whose harness has one rule, served at once."""
        from reef.harness.tree import FILE, Entry, write
        from reef.releases import Draft

        part = NewPart("tree", {FILE: write([Entry("rule", "rules", {"text": text})])})
        head = self.chain.head(scenario)
        assert head is not None
        release = self.chain.publish(scenario, Draft("publish", {"harness": part}), head.id)
        self.board.flip(scenario, release.id)
        self.context.watch.refresh()
        return release.id


@contextlib.asynccontextmanager
async def running(state: Path, engine: Any = None, **settings: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(state, engine or FakeEngine(), **settings)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running(tmp_path) as made:
        yield made


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as made:
        yield made


@pytest.fixture
def run() -> Any:
    """`running`, for tests that need an engine or settings of their own."""
    return running
