"""`learn.db` as other processes read it: fates of units and audit rows, without the learner.

Knows: the ledger's tables, and how a person's decision is written among them, one at a time on a machine.
Does not know: what is made of it (`scenario.why`, `scenario.decide`).

Each call opens the file for itself, so any thread may ask, and a file that is missing stays missing: it is the
learner's to make. StoreError says when it cannot be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from reef.core.errors import StoreError
from reef.core.nouns import Evaluation, Json, PartName
from reef.loop.ledger import Ledger
from reef.scenario.audit import Fate, Ruling

_LOOK = "id, part, line, step, look, verdict, reason, candidate, release, evaluation, actor, at"


class Audit:
    """A `scenario.audit.Audit`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fates(self, scenario: str, receipt: str) -> list[Fate]:
        """What became of each unit of one record, for each part and report."""
        rows = self._read(
            "SELECT part, unit, report, fate, line, step, at FROM fates WHERE scenario = ? AND part IN ('weights',"
            " 'harness') AND unit >= ? AND unit < ? ORDER BY part, unit, fate = 'duplicate', at",
            scenario, f"{receipt}:", f"{receipt};",
        )  # fmt: skip
        return [Fate(*row) for row in rows]

    def assessed(self, scenario: str, receipt: str) -> list[tuple[PartName, str, Json]]:
        """What was made of each unit of one record that is not settled yet: part, unit, assessment."""
        rows = self._read(
            "SELECT part, unit, body FROM assessments WHERE scenario = ? AND part IN ('weights', 'harness')"
            " AND unit >= ? AND unit < ? ORDER BY part, unit",
            scenario, f"{receipt}:", f"{receipt};",
        )  # fmt: skip
        return [(part, str(unit), json.loads(body)) for part, unit, body in rows]

    def where(self, receipt: str) -> list[str]:
        """The scenarios that wrote down a fate of this record."""
        rows = self._read(
            "SELECT DISTINCT cursors.scenario FROM cursors JOIN fates ON fates.scenario = cursors.scenario AND"
            " fates.part = cursors.part AND unit >= ? AND unit < ?",
            f"{receipt}:", f"{receipt};",
        )  # fmt: skip
        return [str(name) for (name,) in rows]

    def about(self, scenario: str, ids: Sequence[str]) -> list[Ruling]:
        """The audit rows that speak of these candidates or releases, newest first."""
        marks = ", ".join("?" * len(ids))
        return self._rulings(f"scenario = ? AND (candidate IN ({marks}) OR release IN ({marks}))", scenario, *ids, *ids)

    def of_line(self, scenario: str, part: PartName, line: str) -> list[Ruling]:
        """The audit rows of one line, newest first."""
        return self._rulings("scenario = ? AND part = ? AND line = ?", scenario, part, line)

    def newest(self, scenario: str, limit: int, verdicts: Sequence[str] = ()) -> list[Ruling]:
        """The newest audit rows, with one of these verdicts if any are given."""
        wanted = f" AND verdict IN ({', '.join('?' * len(verdicts))})" if verdicts else ""
        return self._rulings(f"scenario = ?{wanted}", scenario, *verdicts, limit=limit)

    def between(
        self, scenario: str, first: tuple[str, float], last: tuple[str, float], limit: int
    ) -> tuple[int, list[Ruling]]:
        """What was turned down between two releases (id and time of each): how many, and the newest of them.

        Audit rows are in order; time counts only for a release that has no row, such as a rollback.
        """
        low, high = self._place(scenario, *first), self._place(scenario, *last)
        where = "scenario = ? AND verdict = 'reject' AND id > ? AND id <= ?"
        ((count,),) = self._read(f"SELECT count(*) FROM looks WHERE {where}", scenario, low, high)  # noqa: S608
        return int(count), self._rulings(where, scenario, low, high, limit=limit)

    def overrule(self, scenario: str, candidate: str, actor: str, reason: str) -> None:
        """A person turns a held candidate down. MissingError when no candidate of that id is held."""
        self._there()
        ledger = Ledger(self._path)
        try:
            ledger.overrule(scenario, candidate, actor, reason)
        finally:
            ledger.close()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """One person's decision at a time: a candidate is not turned down while it is being promoted."""
        try:
            file = os.open(self._path.with_name("decide.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self._path.parent} cannot be written ({error.strerror}); check its rights and free space"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _place(self, scenario: str, release: str, at: float) -> int:
        rows = self._read("SELECT max(id) FROM looks WHERE scenario = ? AND release = ?", scenario, release)
        if rows[0][0] is None:
            rows = self._read("SELECT max(id) FROM looks WHERE scenario = ? AND at <= ?", scenario, at)
        return int(rows[0][0] or 0)

    def _rulings(self, where: str, *values: Any, limit: int = 200) -> list[Ruling]:
        sql = f"SELECT {_LOOK} FROM looks WHERE {where} ORDER BY id DESC LIMIT ?"  # noqa: S608
        return [_ruling(row) for row in self._read(sql, *values, limit)]

    def _read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        self._there()
        try:
            place = f"{self._path.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(place, uri=True, timeout=5.0)) as base:
                return base.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} cannot be read ({error}); a restart sets a damaged one aside") from None

    def _there(self) -> None:
        if not self._path.exists():
            raise StoreError(f"{self._path} is not there: nothing has been learnt here, or it was removed")


def _ruling(row: tuple[Any, ...]) -> Ruling:
    number, part, line, step, look, verdict, reason, candidate, release, evaluation, actor, at = row
    measured = msgspec.json.decode(evaluation, type=Evaluation) if evaluation else None
    return Ruling(part, line, step, look, verdict, reason, candidate, release, measured, actor, at, number)
