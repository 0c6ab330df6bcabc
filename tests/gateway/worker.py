"""A gateway process for tests: `worker.py STATE FD DELAY DRAIN [MORE]`. Its engine waits DELAY seconds a word.

MORE is a JSON object: `upstream` (a provider's URL up to /v1: it answers instead of the fake), `lenient` (scenarios
that are answered also without the store), `store_seconds`, `busy` (the store's patience with a lock), `powerless` (root
gives up its rights, so that a file's mode counts).
"""

import contextlib
import ctypes
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from reef.engines.fake import FakeEngine
from reef.engines.upstream import UpstreamEngine
from reef.gateway.auth import Tokens
from reef.gateway.context import Context, Limits, Target
from reef.gateway.serve import run
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases.chain import GitChain
from reef.scenario.serving import Watch


def main(state: Path, descriptor: int, delay: float, drain: float, more: Mapping[str, Any]) -> None:
    if more.get("powerless"):
        give_up_rights()

    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Context]:
        board = Board(state / "records.db")
        store = SqliteStore(state / "records.db", owner=f"gateway-{os.getpid()}-test", busy=more.get("busy", 5.0))
        await store.start()
        engine = UpstreamEngine(more["upstream"]) if "upstream" in more else FakeEngine(delay=delay)
        yield Context(
            store=store,
            board=board,
            watch=Watch(board),
            chain=GitChain(state / "releases.git"),
            engines={"fake": engine},
            route=lambda name, model: Target("fake", engine),
            tokens=Tokens(free=True),
            ensure_scenario=lambda name, settings: board.get(name),
            lenient=lambda name: name in more.get("lenient", ()),
            limits=Limits(drain_seconds=drain, store_seconds=more.get("store_seconds", 10.0)),
        )
        await engine.close()
        await store.close()
        print("closed", flush=True)

    run(made, socket.socket(fileno=descriptor))


def give_up_rights() -> None:
    """Root without capabilities is an owner like any other. Before there are threads: each has its own."""
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(version, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    extra = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), extra)
