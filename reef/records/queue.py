"""What people ask a scenario to change: instructions in words and proposals of mutations, one row each, in order.

Knows: rows of the record store's file, their states, how many may wait, and that an id is stored once. Does not know:
HTTP, what a mutation is, or how anything asked for is done.

- Written by gateways, read and settled by the learner. What became of an ask is the ledger's and the chain's to know;
  the row tells people, and is brought up to date from them (`loop.asks`), so it can be behind and never wrong for long.
- A change here moves the board's version, so every process that follows the board notices within one look.
- An id that a client gives is stored once: the same ask again is answered with the row, another one is refused.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from reef.core.errors import BusyError, ConflictError, InputError, MissingError
from reef.core.failpoint import failpoint
from reef.core.ids import new_receipt
from reef.core.nouns import Json, PartName
from reef.records.board import Board

Kind = Literal["instruction", "proposal"]
State = Literal["queued", "taken", "done", "accepted", "held", "rejected", "refused", "failed"]
"""queued: waits for its turn. taken: the learner works on it. accepted: a release came of it. held: a candidate waits
for a person. rejected: the gate turned it down. refused: it is no admissible edit. done: nothing was to be changed, or
a step was trained that is not decided yet. failed: it could not be carried out."""

STATES: Final = get_args(State)
OPEN: Final = ("queued", "taken")
PREFIX: Final = "ask_"
MOST: Final = 64
"""Asks of a scenario that may be open at once."""
KEPT: Final = 1000
"""Rows of a scenario that are kept after they were settled."""
_ID = re.compile(r"ask_[A-Za-z0-9_-]{1,64}")
_COLUMNS = "seq, id, scenario, part, kind, body, actor, created_at, state, said, candidate, release, changed_at"


@dataclass(frozen=True, slots=True)
class Ask:
    """One row. `body` is an instruction's `text` (and `session`), or a proposal's `mutations` and `reason`; `said` is
    what came of it, as a sentence, with the candidate and release there are."""

    seq: int
    id: str
    scenario: str
    part: PartName
    kind: Kind
    body: Mapping[str, Json]
    actor: str
    created_at: float
    state: State
    said: str
    candidate: str | None
    release: str | None
    changed_at: float

    @property
    def open(self) -> bool:
        return self.state in OPEN


def is_ask(name: str) -> bool:
    """Whether a unit's id is that of an ask."""
    return name.startswith(PREFIX)


class Queue:
    """Blocking and short, like the board whose connection it uses; raises StoreError like it."""

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.time) -> None:
        self._board = board
        self._clock = clock

    def put(
        self,
        scenario: str,
        part: PartName,
        kind: Kind,
        body: Mapping[str, Json],
        *,
        actor: str,
        id: str | None = None,
    ) -> tuple[Ask, bool]:
        """Add an ask; returns its row and whether it was there already. `id` is the client's own: the same content
        again is the same row, other content a ConflictError. BusyError when as many wait as may."""
        if id is not None and not _ID.fullmatch(id):
            raise InputError("an ask's own id is ask_ and 1 to 64 of A-Z a-z 0-9 _ -", param="id")
        name, text, now = id or PREFIX + new_receipt(), _text(body), self._clock()
        with self._board.look() as db:  # a retry is answered without a write
            found = _find(db, name)
        if found is not None:
            return _same(found, scenario, part, kind, text), True
        with self._board.change() as db:
            if (found := _find(db, name)) is not None:
                return _same(found, scenario, part, kind, text), True
            sql = "SELECT count(*) FROM asks WHERE scenario = ? AND state IN ('queued', 'taken')"
            if db.execute(sql, (scenario,)).fetchone()[0] >= MOST:
                raise BusyError(
                    f"{MOST} asks of {scenario} wait already; `reef propose --list` shows them: wait until some are "
                    "done (is a candidate held? `reef candidates --held`), then ask again"
                )
            row = (name, scenario, part, kind, text, actor, now, "queued", "", None, None, now)
            db.execute(f"INSERT INTO asks VALUES (NULL, {', '.join('?' * len(row))})", row)  # noqa: S608
            db.execute(
                "DELETE FROM asks WHERE scenario = ?1 AND state NOT IN ('queued', 'taken', 'held') AND seq <= (SELECT"
                " seq FROM asks WHERE scenario = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
                (scenario, KEPT),
            )
            failpoint("queue.in_put")
            made = _find(db, name)
        assert made is not None
        failpoint("queue.stored")
        return made, False

    def get(self, id: str) -> Ask:
        """A row by its id. MissingError when there is none."""
        with self._board.look() as db:
            found = _find(db, id)
        if found is None:
            raise MissingError(f"there is no ask {id[:80]!r}; `reef propose --list` lists them", param="id")
        return found

    def open(self, scenario: str, part: PartName | None = None) -> list[Ask]:
        """The asks that are not settled, the oldest first."""
        sql = (
            f"SELECT {_COLUMNS} FROM asks WHERE scenario = ?1 AND state IN ('queued', 'taken')"  # noqa: S608
            " AND (?2 IS NULL OR part = ?2) ORDER BY seq"
        )
        with self._board.look() as db:
            return [_ask(row) for row in db.execute(sql, (scenario, part)).fetchall()]

    def list(
        self, scenario: str, limit: int = 50, *, states: Collection[str] = (), before: int | None = None
    ) -> list[Ask]:
        """The newest first; those with a `seq` below `before`, to page on."""
        wanted = f" AND state IN ({', '.join('?' * len(states))})" if states else ""
        sql = f"SELECT {_COLUMNS} FROM asks WHERE scenario = ? AND seq < ?{wanted} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        with self._board.look() as db:
            values = (scenario, before or 2**62, *states, limit)
            return [_ask(row) for row in db.execute(sql, values).fetchall()]

    def tell(
        self, id: str, state: State, said: str = "", *, candidate: str | None = None, release: str | None = None
    ) -> bool:
        """Say what becomes of an ask. False: the row says so already, or is gone; nothing is written then."""
        new = (state, said, candidate, release)
        with self._board.look() as db:
            found = _find(db, id)
        if found is None or (found.state, found.said, found.candidate, found.release) == new:
            return False
        with self._board.change() as db:
            db.execute(
                "UPDATE asks SET state = ?, said = ?, candidate = ?, release = ?, changed_at = ? WHERE id = ?",
                (*new, self._clock(), id),
            )
            failpoint("queue.in_tell")
        failpoint("queue.told")
        return True


def _text(body: Mapping[str, Json]) -> str:
    return json.dumps(dict(body), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _same(found: Ask, scenario: str, part: PartName, kind: Kind, text: str) -> Ask:
    if (found.scenario, found.part, found.kind, _text(found.body)) != (scenario, part, kind, text):
        raise ConflictError(f"there is an ask {found.id} already, with other content; leave its id out", param="id")
    return found


def _find(db: sqlite3.Connection, id: str) -> Ask | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM asks WHERE id = ?", (id,)).fetchone()  # noqa: S608
    return None if row is None else _ask(row)


def _ask(row: tuple[int, str, str, PartName, Kind, str, str, float, State, str, str | None, str | None, float]) -> Ask:
    seq, name, scenario, part, kind, body, actor, at, state, said, candidate, release, changed = row
    return Ask(seq, name, scenario, part, kind, json.loads(body), actor, at, state, said, candidate, release, changed)
