"""The gate's own memory, `gate.db`: scores of answers, candidates looked at, generations, costs, promoted failures.

Knows: what was measured and counted, so that nothing is asked or counted twice, also across crashes.
Does not know: what a score decides. Answers and prompts are not in it: numbers and digests only, and receipts.
Losing the file costs asking again, and the counts: the error budget and a suite's uses begin anew.

- SQLite, WAL, synchronous=FULL; each method is one transaction, durable when it returns.
- A *generation* is what one suite order and one set of seeds serve for: it ends with a release, or after ROTATE
  candidates. Scores of generations before the last one are removed, so the file stays small.
- A *shift* is when users began to want something else: what they said before it judges no answer any more.
- A *turn* is a candidate's place among those looked at since the last accepted one: it is what the error budget counts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reef.core.damage import set_aside
from reef.core.database import Database
from reef.core.failpoint import failpoint
from reef.core.nouns import Cost

ROTATE: Final = 50  # candidates that one generation serves for

MIGRATIONS = (
    """
    CREATE TABLE scores (
        scenario TEXT, side TEXT, task TEXT, seed INTEGER,
        value REAL NOT NULL, failed INTEGER NOT NULL, generation INTEGER NOT NULL,
        PRIMARY KEY (scenario, side, task, seed)
    ) WITHOUT ROWID;
    CREATE INDEX scores_age ON scores (scenario, generation);
    CREATE TABLE generations (
        scenario TEXT, number INTEGER, incumbent TEXT NOT NULL, began REAL NOT NULL, PRIMARY KEY (scenario, number)
    ) WITHOUT ROWID;
    CREATE TABLE uses (
        scenario TEXT, generation INTEGER, candidate TEXT, PRIMARY KEY (scenario, generation, candidate)
    ) WITHOUT ROWID;
    CREATE TABLE drawn (
        scenario TEXT, generation INTEGER, place INTEGER, task TEXT NOT NULL, receipt TEXT,
        PRIMARY KEY (scenario, generation, place)
    ) WITHOUT ROWID;
    CREATE TABLE decisions (scenario TEXT, suite TEXT, candidates INTEGER NOT NULL, PRIMARY KEY (scenario, suite))
        WITHOUT ROWID;
    CREATE TABLE turns (
        scenario TEXT, candidate TEXT, era INTEGER NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (scenario, candidate)
    ) WITHOUT ROWID;
    CREATE INDEX turns_era ON turns (scenario, era);
    CREATE TABLE eras (scenario TEXT PRIMARY KEY, era INTEGER NOT NULL, winner TEXT NOT NULL, budget REAL NOT NULL)
        WITHOUT ROWID;
    CREATE TABLE costs (
        scenario TEXT, month TEXT, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL, seconds REAL NOT NULL, money REAL NOT NULL, unpriced INTEGER NOT NULL,
        PRIMARY KEY (scenario, month)
    ) WITHOUT ROWID;
    CREATE TABLE failures (
        scenario TEXT, receipt TEXT, prompt TEXT NOT NULL, actor TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (scenario, receipt)
    ) WITHOUT ROWID;
    CREATE INDEX failures_prompt ON failures (scenario, prompt);
    """,
    """
    CREATE TABLE shifts (scenario TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
    """,
)
"""Each is run once, in order, under a lock. Never edit one that was released: add another."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The score of one answer. `side` and `task` are digests; `failed`: the release made the request impossible."""

    side: str
    task: str
    seed: int
    value: float
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    uses: int  # candidates that it serves for, so far


@dataclass(frozen=True, slots=True)
class Failure:
    """A live exchange that became a task. `prompt` is its side (see experience.holdout); its words are not here."""

    receipt: str
    prompt: str
    actor: str
    reason: str
    at: float


def digest(*words: object) -> str:
    """A short stable key of some values."""
    return hashlib.sha256("\x1f".join(map(str, words)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def month(at: float | None = None) -> str:
    """The calendar month (UTC) of a moment, such as 2026-11."""
    return time.strftime("%Y-%m", time.gmtime(time.time() if at is None else at))


class Book(Database):
    """Written by the learner, from one thread; others may read."""

    def __init__(self, path: Path | str, *, reading: bool = False) -> None:
        super().__init__(path, MIGRATIONS, reading=reading)

    @classmethod
    def open(cls, path: Path) -> Book:
        """For the process that writes it: a damaged file is moved away first, and a fresh one begins."""
        set_aside(path, "answers are asked again; the error budget and this month's costs are counted from zero")
        return cls(path)

    @classmethod
    def memory(cls) -> Book:
        """One that is forgotten with the process."""
        return cls(":memory:")

    # --- scores -------------------------------------------------------------------------------------------------------

    def scores(self, scenario: str, side: str) -> dict[tuple[str, int], Kept]:
        """What is kept of one side, by task and seed."""
        rows = self._read("SELECT task, seed, value, failed FROM scores WHERE scenario=? AND side=?", scenario, side)
        return {(task, seed): Kept(side, task, seed, value, bool(failed)) for task, seed, value, failed in rows}

    def keep(self, scenario: str, scores: Iterable[Kept], cost: Cost) -> None:
        """Scores, and what getting them cost, in one transaction. One that is kept already stays as it is."""
        with self._writing():
            number = self._number(scenario)
            self._base.executemany(
                "INSERT OR IGNORE INTO scores VALUES (?,?,?,?,?,?,?)",
                [(scenario, one.side, one.task, one.seed, one.value, one.failed, number) for one in scores],
            )
            self._charge(scenario, cost)
            failpoint("book.in_keep")
        failpoint("book.after_keep")

    # --- generations --------------------------------------------------------------------------------------------------

    def use(self, scenario: str, incumbent: str, candidate: str) -> Generation:
        """Count a look at a candidate against this incumbent (a release id). The same candidate again counts once.

        A new incumbent begins a generation, and so does a candidate that finds ROTATE others before it.
        """
        with self._writing():
            rows = self._read(
                "SELECT number, incumbent FROM generations WHERE scenario=? ORDER BY number DESC LIMIT 1", scenario
            )
            number, stood = rows[0] if rows else (0, None)
            if stood != incumbent:
                number = self._begin(scenario, number + 1, incumbent)
            known = self._uses(scenario, number, candidate)
            if not known and self._uses(scenario, number) >= ROTATE:
                number = self._begin(scenario, number + 1, incumbent)
            if not known:
                self._base.execute("INSERT INTO uses VALUES (?,?,?)", (scenario, number, candidate))
                self._base.execute("UPDATE decisions SET candidates=candidates+1 WHERE scenario=?", (scenario,))
            failpoint("book.in_use")
            return Generation(number, self._uses(scenario, number))

    def generation(self, scenario: str) -> Generation:
        """The present one, whoever uses it."""
        number = self._number(scenario)
        return Generation(number, self._uses(scenario, number))

    def shift(self, scenario: str, at: float) -> None:
        """What users want changed at this time (unix seconds): a generation begins, with tasks of later records only.
        An earlier shift than the known one changes nothing, nor does the same again."""
        with self._writing():
            if at <= self.since(scenario):
                return
            self._base.execute("INSERT OR REPLACE INTO shifts VALUES (?,?)", (scenario, at))
            sql = "SELECT number, incumbent FROM generations WHERE scenario=? ORDER BY number DESC LIMIT 1"
            if rows := self._read(sql, scenario):
                self._begin(scenario, int(rows[0][0]) + 1, str(rows[0][1]))
            failpoint("book.in_shift")

    def since(self, scenario: str) -> float:
        """From when on records tell what users want; 0 when that never changed."""
        rows = self._read("SELECT at FROM shifts WHERE scenario=?", scenario)
        return float(rows[0][0]) if rows else 0.0

    def drawn(self, scenario: str, generation: int) -> list[tuple[str, str | None]]:
        """(task id, the receipt it comes from or None) of a generation's tasks, in the order they are asked."""
        sql = "SELECT task, receipt FROM drawn WHERE scenario=? AND generation=? ORDER BY place"
        return [(task, receipt) for task, receipt in self._read(sql, scenario, generation)]

    def draw(self, scenario: str, generation: int, tasks: Sequence[tuple[str, str | None]]) -> None:
        """Add tasks to the end of a generation."""
        with self._writing():
            known = "SELECT coalesce(max(place), -1) FROM drawn WHERE scenario=? AND generation=?"
            last = self._read(known, scenario, generation)[0][0]
            self._base.executemany(
                "INSERT INTO drawn VALUES (?,?,?,?,?)",
                [(scenario, generation, place, *task) for place, task in enumerate(tasks, last + 1)],
            )

    def asked(self, scenario: str, before: int) -> set[str]:
        """Ids of the tasks that earlier generations had, as far as that is kept."""
        rows = self._read("SELECT DISTINCT task FROM drawn WHERE scenario=? AND generation<?", scenario, before)
        return {str(task) for (task,) in rows}

    def decisions(self, scenario: str, suite: str) -> int:
        """Candidates looked at with this suite (a name and digest) so far; counting begins with the first asking."""
        with self._writing():
            self._base.execute("INSERT OR IGNORE INTO decisions VALUES (?,?,1)", (scenario, suite))
        sql = "SELECT candidates FROM decisions WHERE scenario=? AND suite=?"
        return int(self._read(sql, scenario, suite)[0][0])

    # --- the error budget ---------------------------------------------------------------------------------------------

    def turn(self, scenario: str, candidate: str) -> int:
        """The place, from 1, of a candidate among those looked at since the last accepted one. Asking again is the same
        turn; for an accepted candidate too, until the next one is accepted."""
        with self._writing():
            era, winner = self._era(scenario)
            rows = self._read("SELECT era, turn FROM turns WHERE scenario=? AND candidate=?", scenario, candidate)
            if rows and (rows[0][0] == era or candidate == winner):
                return int(rows[0][1])
            sql = "SELECT coalesce(max(turn), 0) + 1 FROM turns WHERE scenario=? AND era=?"
            turn = int(self._read(sql, scenario, era)[0][0])
            self._base.execute("INSERT OR REPLACE INTO turns VALUES (?,?,?,?)", (scenario, candidate, era, turn))
            failpoint("book.in_turn")
        failpoint("book.after_turn")
        return turn

    def budget(self, scenario: str) -> float:
        """What the candidates since the last accepted one have to share, in parts of alpha; 1 until something is left
        over. See `evaluation.budget`."""
        rows = self._read("SELECT budget FROM eras WHERE scenario=?", scenario)
        return float(rows[0][0]) if rows else 1.0

    def won(self, scenario: str, candidate: str, budget: float = 1.0) -> None:
        """The candidate was accepted: turns begin anew, with this budget. Saying it twice is saying it once."""
        with self._writing():
            era, winner = self._era(scenario)
            if winner == candidate:
                return
            self._base.execute("INSERT OR REPLACE INTO eras VALUES (?,?,?,?)", (scenario, era + 1, candidate, budget))
            self._base.execute(
                "DELETE FROM turns WHERE scenario=? AND era<=? AND candidate!=?", (scenario, era, candidate)
            )
            failpoint("book.in_won")
        failpoint("book.after_won")

    # --- costs --------------------------------------------------------------------------------------------------------

    def charge(self, scenario: str, cost: Cost) -> None:
        """Add to what the scenario's evaluation cost this month."""
        with self._writing():
            self._charge(scenario, cost)

    def spent(self, scenario: str, of: str | None = None) -> Cost:
        """What evaluation cost in a month (UTC, like 2026-11; default: this one). `money` is None once a call's price
        was not known; see `paid`."""
        rows = self._costs(scenario, of)
        if not rows:
            return Cost()
        calls, prompt, output, seconds, money, unpriced = rows[0]
        return Cost(calls, prompt, output, seconds, None if unpriced else money)

    def paid(self, scenario: str, of: str | None = None) -> float:
        """The money of the calls whose price was known."""
        rows = self._costs(scenario, of)
        return float(rows[0][4]) if rows else 0.0

    # --- promoted failures --------------------------------------------------------------------------------------------

    def promote(self, scenario: str, receipt: str, prompt: str, *, actor: str, reason: str = "") -> bool:
        """Make a live exchange a task. False: it is one already."""
        with self._writing():
            done = self._base.execute(
                "INSERT OR IGNORE INTO failures VALUES (?,?,?,?,?,?)",
                (scenario, receipt, prompt, actor, reason, time.time()),
            )
            return done.rowcount > 0

    def demote(self, scenario: str, receipt: str) -> bool:
        """Take a promoted failure back. False: it is none."""
        with self._writing():
            sql = "DELETE FROM failures WHERE scenario=? AND receipt=?"
            return self._base.execute(sql, (scenario, receipt)).rowcount > 0

    def failures(self, scenario: str) -> list[Failure]:
        """Promoted failures, the newest first."""
        sql = "SELECT receipt, prompt, actor, reason, at FROM failures WHERE scenario=? ORDER BY at DESC, receipt"
        return [Failure(*row) for row in self._read(sql, scenario)]

    def failed(self, scenario: str, prompt: str) -> bool:
        """Whether a promoted failure has this prompt."""
        sql = "SELECT 1 FROM failures WHERE scenario=? AND prompt=? LIMIT 1"
        return bool(self._read(sql, scenario, prompt))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, scenario: str, number: int, incumbent: str) -> int:
        self._base.execute("INSERT INTO generations VALUES (?,?,?,?)", (scenario, number, incumbent, time.time()))
        for table, column, spare in (
            ("generations", "number", 5), ("uses", "generation", 5), ("drawn", "generation", 5),
            ("scores", "generation", 1),
        ):  # fmt: skip
            sql = f"DELETE FROM {table} WHERE scenario=? AND {column}<?"  # noqa: S608
            self._base.execute(sql, (scenario, number - spare))
        return number

    def _number(self, scenario: str) -> int:
        return int(self._read("SELECT coalesce(max(number), 0) FROM generations WHERE scenario=?", scenario)[0][0])

    def _uses(self, scenario: str, generation: int, candidate: str | None = None) -> int:
        sql = "SELECT count(*) FROM uses WHERE scenario=?1 AND generation=?2 AND (?3 IS NULL OR candidate=?3)"
        return int(self._read(sql, scenario, generation, candidate)[0][0])

    def _era(self, scenario: str) -> tuple[int, str | None]:
        rows = self._read("SELECT era, winner FROM eras WHERE scenario=?", scenario)
        return (int(rows[0][0]), str(rows[0][1])) if rows else (0, None)

    def _costs(self, scenario: str, of: str | None) -> list[tuple[Any, ...]]:
        return self._read(
            "SELECT calls, prompt_tokens, output_tokens, seconds, money, unpriced FROM costs"
            " WHERE scenario=? AND month=?",
            scenario, of or month(),
        )  # fmt: skip

    def _charge(self, scenario: str, cost: Cost) -> None:
        self._base.execute(
            "INSERT INTO costs VALUES (?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET calls=calls+excluded.calls,"
            " prompt_tokens=prompt_tokens+excluded.prompt_tokens, output_tokens=output_tokens+excluded.output_tokens,"
            " seconds=seconds+excluded.seconds, money=money+excluded.money, unpriced=unpriced+excluded.unpriced",
            (
                scenario, month(), cost.calls, cost.prompt_tokens, cost.output_tokens, cost.seconds, cost.money or 0.0,
                cost.calls if cost.money is None else 0,
            ),
        )  # fmt: skip
