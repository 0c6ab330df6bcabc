"""A gateway process for tests: `worker.py STATE FD DELAY DRAIN`. Its engine waits DELAY seconds before each word."""

import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from reef.engines.fake import FakeEngine
from reef.gateway.auth import Tokens
from reef.gateway.context import Context, Limits
from reef.gateway.serve import run
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases.chain import GitChain
from reef.scenario.serving import Watch


def main(state: Path, descriptor: int, delay: float, drain: float) -> None:
    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Context]:
        board = Board(state / "records.db")
        store = SqliteStore(state / "records.db", owner=f"gateway-{os.getpid()}-test")
        await store.start()
        engine = FakeEngine(delay=delay)
        yield Context(
            store=store,
            board=board,
            watch=Watch(board),
            chain=GitChain(state / "releases.git"),
            engines={"fake": engine},
            engine_of=lambda name: ("fake", engine),
            tokens=Tokens(free=True),
            ensure_scenario=lambda name, settings: board.get(name),
            limits=Limits(drain_seconds=drain),
        )
        await store.close()
        print("closed", flush=True)

    run(made, socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
