"""The journal: what was done to each scenario's releases, by whom and why, for people and for whoever must be told.

Knows: acts in order, told once where a mark says so; pins. A table of the record store's file.
Does not know: what a release is. The chain and the learner's audit rows are the truth; losing the journal loses the
telling, never a release.

A change here moves the board's version, so every process that follows the board notices within one look.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from reef.core.failpoint import failpoint
from reef.core.nouns import Act, ActKind, Json
from reef.records.board import Board

_COLUMNS = "seq, scenario, kind, ref, actor, reason, at, detail"


@dataclass(frozen=True, slots=True)
class Pin:
    """A scenario that stays where it is: what the gate accepts is held until the pin is taken off."""

    scenario: str
    release_id: str
    actor: str
    reason: str
    at: float


def shown(act: Act) -> dict[str, Json]:
    """An act as one JSON object: its detail, and its own fields over it."""
    own = {"seq": act.seq, "scenario": act.scenario, "kind": act.kind, "ref": act.ref}
    return {**act.detail, **own, "actor": act.actor, "reason": act.reason, "at": act.at}


class Journal:
    """Blocking and short, like the board whose connection it uses; raises StoreError like it."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def tell(
        self,
        scenario: str,
        kind: ActKind,
        ref: str,
        *,
        actor: str,
        reason: str = "",
        detail: Mapping[str, Json] | None = None,
        once: bool = True,
    ) -> int | None:
        """Add an act; returns its number. With `once`, the same kind on the same ref is told once only (then None)."""
        mark = f"{scenario}/{kind}/{ref}" if once else None
        with self._board.change() as db:
            told = _add(db, scenario, kind, ref, actor, reason, detail or {}, mark)
        failpoint("journal.told")
        return told

    def after(self, seq: int, limit: int = 200, scenario: str | None = None) -> list[Act]:
        """Acts with a number above `seq`, in order."""
        return self._acts("seq > ?1", "seq", seq, scenario, limit)

    def newest(self, limit: int = 50, scenario: str | None = None, before: int | None = None) -> list[Act]:
        """The newest acts first; those below `before`, to page on."""
        return self._acts("seq < ?1", "seq DESC", before or 2**62, scenario, limit)

    def about(self, ref: str) -> list[Act]:
        """Everything told of one release or candidate, in order."""
        return self._read(f"SELECT {_COLUMNS} FROM acts WHERE ref = ? ORDER BY seq", ref)  # noqa: S608

    def last(self) -> int:
        """The number of the newest act; 0 when there is none."""
        with self._board.look() as db:
            return int(db.execute("SELECT coalesce(max(seq), 0) FROM acts").fetchone()[0])

    # --- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, scenario: str, release_id: str, *, actor: str, reason: str) -> None:
        """Keep a scenario where it is. A pin that is there already gets the new release, actor and reason."""
        with self._board.change() as db:
            row = (scenario, release_id, actor, reason, time.time())
            db.execute("INSERT OR REPLACE INTO pins VALUES (?, ?, ?, ?, ?)", row)
            _add(db, scenario, "pin", release_id, actor, reason)

    def unpin(self, scenario: str, *, actor: str, reason: str) -> bool:
        """Take the pin off. False: there was none."""
        if (pin := self.pinned(scenario)) is None:
            return False
        with self._board.change() as db:
            db.execute("DELETE FROM pins WHERE scenario = ?", (scenario,))
            _add(db, scenario, "unpin", pin.release_id, actor, reason)
        return True

    def pinned(self, scenario: str) -> Pin | None:
        with self._board.look() as db:
            row = db.execute("SELECT scenario, release_id, actor, reason, at FROM pins WHERE scenario = ?", (scenario,))
            found = row.fetchone()
        return Pin(*found) if found else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _acts(self, where: str, order: str, edge: int, scenario: str | None, limit: int) -> list[Act]:
        sql = f"SELECT {_COLUMNS} FROM acts WHERE {where} AND (?2 IS NULL OR scenario = ?2) ORDER BY {order} LIMIT ?3"  # noqa: S608
        return self._read(sql, edge, scenario, limit)

    def _read(self, sql: str, *values: Any) -> list[Act]:
        with self._board.look() as db:
            rows = db.execute(sql, values).fetchall()
        return [
            Act(seq, scenario, kind, ref, actor, reason, at, json.loads(detail))
            for seq, scenario, kind, ref, actor, reason, at, detail in rows
        ]


def _add(
    db: sqlite3.Connection,
    scenario: str,
    kind: ActKind,
    ref: str,
    actor: str,
    reason: str,
    detail: Mapping[str, Json] = MappingProxyType({}),
    mark: str | None = None,
) -> int | None:
    """An act, within the transaction of what it tells of. None: its mark is there already."""
    done = db.execute(
        "INSERT OR IGNORE INTO acts (scenario, kind, ref, actor, reason, at, detail, mark)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (scenario, kind, ref, actor, reason, time.time(), json.dumps(dict(detail)), mark),
    )
    failpoint("journal.in_act")
    return done.lastrowid if done.rowcount else None
