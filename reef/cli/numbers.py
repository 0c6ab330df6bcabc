"""The record store's numbers never fall behind what read them: a store that was lost or restored goes on above.

Knows: that events and acts have numbers, that releases and the learner's memory say up to which they were read, and how
to let a table go on higher. Does not know: what an event or act says.

Without it a new event would be taken for one that was read long ago, and nothing would learn from it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from reef.cli import assemble
from reef.core.errors import ReefError
from reef.core.nouns import Release
from reef.records.board import Board
from reef.releases.chain import GitChain

log = logging.getLogger("reef.records")


def keep_up(state: Path, chain: GitChain, board: Board) -> None:
    """Let events and acts go on above every cursor of the chain and of learn.db. Before anything else runs."""
    read: list[int] = []
    for name in chain.scenarios():
        with contextlib.suppress(ReefError):  # a damaged chain is told where its scenario is served
            head = chain.head(name)
            read.append(furthest([*([head] if head else []), *chain.candidates(name)]))
    acts = 0
    if (state / "learn.db").exists():
        with contextlib.suppress(ReefError):  # the learner tells of damage
            events, acts = assemble.furthest(state)
            read.append(events)
    if skip(board, "events", max(read, default=0)):
        log.warning("records.db is older than what was learnt from it, or new; its events go on with higher numbers")
    skip(board, "acts", acts)


def furthest(releases: Iterable[Release]) -> int:
    """The last event that any of these releases has read."""
    return max((part.cursor for each in releases for part in each.consumed.values()), default=0)


def skip(board: Board, table: Literal["events", "acts"], above: int) -> bool:
    """The table's next number is above this one. False: it was going to be."""
    with board.look() as db:
        row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    if above <= (row[0] if row else 0):
        return False
    with board.change() as db:
        db.execute(
            "INSERT INTO sqlite_sequence SELECT ?1, 0 WHERE ?1 NOT IN (SELECT name FROM sqlite_sequence)", (table,)
        )
        db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?", (above, table))
    return True
