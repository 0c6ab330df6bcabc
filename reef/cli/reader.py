"""What commands and gateways read of a state folder beside records and chain: audit, journal, costs; also without a
server.

Knows: where the files are. Does not know: what is in them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reef.cli import state
from reef.cli.api import Found
from reef.core.errors import MissingError, StoreError, WireError

if TYPE_CHECKING:
    from reef.config import Settings
    from reef.records.board import Board
    from reef.releases.chain import GitChain
    from reef.scenario.why import Why

_T = TypeVar("_T")


def spender(folder: Path) -> Callable[[str], Mapping[str, Any] | None]:
    """What a scenario's evaluations cost this month; None where nothing was ever evaluated."""

    def spent(name: str) -> Mapping[str, Any] | None:
        from reef.evaluation.book import Book

        path = folder / "gate.db"
        if not path.exists():
            return None
        book = Book(path, reading=True)
        try:
            return asdict(book.spent(name))
        except StoreError:  # damaged, or of a version that the learner has not brought up to date yet: `doctor` says so
            return None
        finally:
            book.close()

    return spent


def folder(place: Found) -> Path:
    """The state folder of a command that found no server. WireError when there is nothing in it either."""
    if not (place.state_dir / "releases.git").is_dir():
        raise WireError(
            f"no server answers on {place.url}, and {place.state_dir} holds no releases; start one with `reef serve`"
        )
    return place.state_dir


@contextlib.contextmanager
def held(place: Found, settings: Settings | None = None) -> Iterator[tuple[GitChain, Board]]:
    """Chain and board of a folder that no server runs on, under its lock, so that none can start meanwhile. With
    settings, large files that are not here come from `releases.remote`."""
    from reef.cli import assemble

    with contextlib.ExitStack() as stack:
        stack.callback(state.claim(folder(place), patience=0.0).release)
        chain, board = assemble.open_chain(place.state_dir, settings), assemble.open_board(place.state_dir)
        stack.callback(board.close)
        chain.open()
        if chain.head(place.scenario) is None:
            raise MissingError(f"no scenario {place.scenario!r} in {place.state_dir}; name one with --scenario")
        yield chain, board


def asking(place: Found, ask: Callable[[Why, list[str]], Awaitable[_T]]) -> _T:
    """Ask a folder why, without a server. It is only read, so no lock is needed."""
    from reef.cli import assemble
    from reef.records.journal import Journal
    from reef.records.queue import Queue
    from reef.records.sqlite import SqliteStore
    from reef.scenario.learnt import Family
    from reef.scenario.why import Why as Asked

    async def run() -> _T:
        chain, board = assemble.open_chain(folder(place)), assemble.open_board(place.state_dir)
        store = SqliteStore(place.state_dir / "records.db", owner="why")
        await store.start()
        try:
            audit, asks = assemble.open_audit(place.state_dir), Queue(board)
            asked = Asked(chain, store, Journal(board), audit, Family(chain), asks)
            return await ask(asked, board.names())
        finally:
            await store.close()
            board.close()

    return asyncio.run(run())
