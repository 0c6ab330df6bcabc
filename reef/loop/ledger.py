"""The learner's own memory, `learn.db`: what became of every unit, orders given to a trainer, looks taken by the gate.

Knows: cursors, the fate of each unit, the one outstanding order of a part, steps and their metrics, looks (audit rows).
Does not know: how any of it is decided. Losing the file loses explanations, not the exactly-once rule: training folders
and chain restore who was trained (`recover.py`).

- SQLite, WAL, synchronous=FULL; each method is one transaction, durable when it returns.
- A unit has at most one fate besides `duplicate` (a unique index keeps it so).
- An order is written before it is given. It stays, and is given again unchanged, until it is settled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from reef.core import damage
from reef.core.database import Database
from reef.core.errors import MissingError
from reef.core.failpoint import failpoint
from reef.core.nouns import Evaluation, Json, PartName
from reef.core.wire import Step
from reef.experience.units import Drop
from reef.harness.tree import Mutation
from reef.recipe.bench import Proposed, Refusal
from reef.records.queue import is_ask

MIGRATIONS = (
    """
    CREATE TABLE cursors (scenario TEXT, part TEXT, place INTEGER NOT NULL, PRIMARY KEY (scenario, part)) WITHOUT ROWID;
    CREATE TABLE fates (
        scenario TEXT, part TEXT, unit TEXT, report TEXT, fate TEXT NOT NULL, line TEXT, step INTEGER, at REAL NOT NULL,
        PRIMARY KEY (scenario, part, unit, report)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX one_fate ON fates (scenario, part, unit) WHERE fate != 'duplicate';
    CREATE INDEX trained_by ON fates (scenario, part, line, step) WHERE line IS NOT NULL;
    CREATE TABLE orders (scenario TEXT, part TEXT, body BLOB NOT NULL, tries INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (scenario, part)) WITHOUT ROWID;
    CREATE TABLE steps (
        scenario TEXT, part TEXT, line TEXT, step INTEGER, batch TEXT NOT NULL, metrics TEXT NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (scenario, part, line, step)
    ) WITHOUT ROWID;
    CREATE TABLE looks (
        id INTEGER PRIMARY KEY, scenario TEXT NOT NULL, part TEXT NOT NULL, line TEXT NOT NULL, step INTEGER NOT NULL,
        look INTEGER NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, candidate TEXT, release TEXT,
        evaluation TEXT, actor TEXT NOT NULL, timings TEXT NOT NULL DEFAULT '{}', at REAL NOT NULL
    );
    CREATE INDEX looks_of ON looks (scenario, part, line);
    """,
    """
    CREATE INDEX looks_release ON looks (release) WHERE release IS NOT NULL;
    CREATE INDEX looks_candidate ON looks (candidate) WHERE candidate IS NOT NULL;
    CREATE INDEX looks_at ON looks (scenario, at)
    """,
    """
    CREATE TABLE assessments (scenario TEXT, part TEXT, unit TEXT, body TEXT NOT NULL,
        PRIMARY KEY (scenario, part, unit)) WITHOUT ROWID
    """,
    """
    CREATE TABLE proposals (
        scenario TEXT, batch TEXT, line TEXT NOT NULL, ask TEXT, mutations TEXT NOT NULL, reason TEXT NOT NULL,
        why TEXT,  -- it was turned down (null: it waits for a person)
        at REAL NOT NULL, PRIMARY KEY (scenario, batch)
    ) WITHOUT ROWID;
    CREATE INDEX proposals_at ON proposals (scenario, at)
    """,
)
"""Each is run once, in order, under a lock. Never edit one that was released: add another."""

PROPOSALS = 200
"""Proposals of a scenario that came to nothing, or wait, and are kept."""
_UNASSESS = "DELETE FROM assessments WHERE scenario=? AND part=? AND unit=?"

Ruling = Literal["accept", "reject", "undecided", "hold"]
Reader = PartName | Literal["reports", "webhook"]
"""Who has a cursor: a part's pool and the reader of what reports ask for (event log), and the webhook (journal)."""


@dataclass(frozen=True, slots=True)
class Order:
    """One step that was asked for: the message to the trainer as it was, so that a retry asks for exactly the same."""

    part: PartName
    message: Step
    reports: tuple[str, ...]  # the report of each of the message's units
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the batch
    waited: float = 0.0  # seconds from the newest report of the batch to the order


@dataclass(frozen=True, slots=True)
class Look:
    """One audit row: what the gate said of a line's step, and what came of it."""

    scenario: str
    part: PartName
    line: str
    step: int
    look: int  # counts from 1 on each line
    verdict: Ruling
    reason: str
    candidate: str | None = None
    release: str | None = None
    evaluation: Evaluation | None = None
    actor: str = "learner"
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds: waiting, training, gate, activation
    at: float = 0.0


def set_aside(path: Path) -> Path | None:
    """Move a damaged file away; see `damage.set_aside`."""
    return damage.set_aside(path, "learning goes on from the chain and the training folders")


class Ledger(Database):
    """Used from one thread. Readers in other processes open their own."""

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        super().__init__(path, MIGRATIONS, reading=reading)

    # --- units --------------------------------------------------------------------------------------------------------

    def cursor(self, scenario: str, part: Reader) -> int:
        """Every event up to here is settled."""
        rows = self._read("SELECT place FROM cursors WHERE scenario=? AND part=?", scenario, part)
        return int(rows[0][0]) if rows else 0

    def furthest(self) -> tuple[int, int]:
        """The last event and the last act that any reader is done with."""
        rows = self._read("SELECT part = 'webhook', max(place) FROM cursors GROUP BY 1")
        found = {bool(webhook): int(place) for webhook, place in rows}
        return found.get(False, 0), max(0, found.get(True, 0) - 1)

    def advance(self, scenario: str, part: Reader, cursor: int) -> None:
        with self._writing():
            self._advance(scenario, part, cursor)
            failpoint("loop.in_advance")

    def settled(self, scenario: str, part: PartName, unit: str) -> str | None:
        """The report that settled this unit (empty: not known which); None when nothing did."""
        rows = self._read(
            "SELECT report FROM fates WHERE scenario=? AND part=? AND unit=? AND fate!='duplicate'",
            scenario, part, unit,
        )  # fmt: skip
        return str(rows[0][0]) if rows else None

    def drop(self, scenario: str, part: PartName, drops: Iterable[Drop], cursor: int) -> None:
        """These units will never train, for the reasons given."""
        with self._writing():
            for drop in drops:
                self._fate(scenario, part, drop.unit, drop.report, drop.reason)
            self._advance(scenario, part, cursor)

    def fates(self, scenario: str, part: PartName) -> dict[str, int]:
        """How many units met each fate: trained, or the reasons they were not. What people asked for is no unit."""
        rows = self._read(
            "SELECT fate, count(*) FROM fates WHERE scenario=? AND part=? AND unit NOT GLOB 'ask_*' GROUP BY fate",
            scenario, part,
        )  # fmt: skip
        return {str(fate): int(count) for fate, count in rows}

    def fate(self, scenario: str, unit: str) -> list[tuple[str, str, str, str | None, int | None]]:
        """(part, report, fate, line, step) of one unit: why it trained, or did not."""
        rows = self._read(
            "SELECT part, report, fate, line, step FROM fates WHERE scenario=? AND part IN ('weights', 'harness')"
            " AND unit=?",  # the parts are named so that the primary key finds it
            scenario, unit,
        )  # fmt: skip
        return [(str(a), str(b), str(c), d, e) for a, b, c, d, e in rows]

    # --- assessments --------------------------------------------------------------------------------------------------

    def assessments(self, scenario: str, part: PartName) -> dict[str, Json]:
        """What was made of each unit that is not settled yet. None: it will never train."""
        rows = self._read("SELECT unit, body FROM assessments WHERE scenario=? AND part=?", scenario, part)
        return {str(unit): json.loads(body) for unit, body in rows}

    def assess(self, scenario: str, part: PartName, unit: str, found: Json) -> None:
        """Keep what was made of a unit until it is settled; the first answer stays."""
        with self._writing():
            self._base.execute(
                "INSERT OR IGNORE INTO assessments VALUES (?,?,?,?)", (scenario, part, unit, json.dumps(found))
            )
            failpoint("loop.in_assess")

    def unassess(self, scenario: str, part: PartName, units: Collection[str]) -> None:
        """Forget what was made of these units."""
        if units:
            with self._writing():
                self._base.executemany(_UNASSESS, [(scenario, part, unit) for unit in units])

    # --- orders and steps ---------------------------------------------------------------------------------------------

    def order(self, scenario: str, part: PartName) -> Order | None:
        """The order that was given and not settled."""
        rows = self._read("SELECT body FROM orders WHERE scenario=? AND part=?", scenario, part)
        return msgspec.msgpack.decode(rows[0][0], type=Order) if rows else None

    def reserve(self, order: Order) -> None:
        """Write an order down before it is given. StoreError when another is outstanding."""
        with self._writing():
            self._base.execute(
                "INSERT INTO orders (scenario, part, body) VALUES (?,?,?)",
                (order.message.scenario, order.part, msgspec.msgpack.encode(order)),
            )

    def retry(self, order: Order) -> int:
        """Count one more failure of an order; returns how many there were."""
        with self._writing():
            where = (order.message.scenario, order.part)
            self._base.execute("UPDATE orders SET tries=tries+1 WHERE scenario=? AND part=?", where)
        return int(self._read("SELECT tries FROM orders WHERE scenario=? AND part=?", *where)[0][0])

    def release(self, order: Order) -> None:
        """Take an order back that nobody can have carried out; its units are free again."""
        with self._writing():
            self._close(order)

    def settle(
        self, order: Order, fate: str, metrics: Mapping[str, float], *, proposed: Proposed | None = None, why: str = ""
    ) -> None:
        """An order is done: its units met this fate (`trained`, or why not), the cursor moves, the order is gone.
        `why` says it in a sentence, and `proposed` is what was not taken."""
        with self._writing():
            step, part, done = order.message, order.part, fate == "trained"
            for unit, report in zip(step.unit_ids, order.reports, strict=True):
                self._fate(step.scenario, part, unit, report, fate, step.line, step.step if done else None)
            if done:
                self._step(step.scenario, part, step.line, step.step, step.batch_id, metrics)
            elif why:
                ask = next(filter(is_ask, step.unit_ids), None)
                self._propose(step.scenario, step.batch_id, step.line, ask, proposed or Proposed(()), why)
            self._advance(step.scenario, part, step.cursor)
            self._close(order)
            failpoint("loop.in_settle")

    def restore(
        self,
        scenario: str,
        part: PartName,
        line: str,
        step: int,
        units: Iterable[str],
        *,
        batch: str = "",
        metrics: Mapping[str, float] | None = None,
        cursor: int = 0,
    ) -> None:
        """Learn from a training folder or a release that these units were trained, if that is not known yet."""
        with self._writing():
            for unit in units:
                self._fate(scenario, part, unit, "", "trained", line, step)
            if batch:
                self._step(scenario, part, line, step, batch, metrics or {})
            self._advance(scenario, part, cursor)

    def trained(self, scenario: str, part: PartName, line: str, upto: int) -> tuple[str, ...]:
        """The units a line has learnt from, up to and with a step."""
        rows = self._read(
            "SELECT unit FROM fates WHERE scenario=? AND part=? AND line=? AND step<=? ORDER BY step, unit",
            scenario, part, line, upto,
        )  # fmt: skip
        return tuple(str(unit) for (unit,) in rows)

    def free(self, scenario: str, part: PartName, ask: str) -> None:
        """What a person asked for may be carried out again."""
        with self._writing():
            self._base.execute("DELETE FROM fates WHERE scenario=? AND part=? AND unit=?", (scenario, part, ask))

    def asked(self, scenario: str, part: PartName, line: str) -> int:
        """The newest step of a line that a person asked for; 0 when there is none."""
        rows = self._read(
            "SELECT max(step) FROM fates WHERE scenario=? AND part=? AND line=? AND unit GLOB 'ask_*'",
            scenario, part, line,
        )  # fmt: skip
        return int(rows[0][0] or 0)

    def metrics(self, scenario: str, part: PartName, limit: int = 1) -> list[tuple[str, int, dict[str, float], float]]:
        """(line, step, metrics, time) of the newest steps, newest first."""
        rows = self._read(
            "SELECT line, step, metrics, at FROM steps WHERE scenario=? AND part=? ORDER BY at DESC LIMIT ?",
            scenario, part, limit,
        )  # fmt: skip
        return [(str(line), int(step), json.loads(metrics), float(at)) for line, step, metrics, at in rows]

    def idle(self, scenario: str, part: PartName, line: str) -> frozenset[int]:
        """The steps of a line that changed nothing: their gradient was exactly zero."""
        rows = self._read(
            "SELECT step, metrics FROM steps WHERE scenario=? AND part=? AND line=?", scenario, part, line
        )
        return frozenset(int(step) for step, metrics in rows if json.loads(metrics).get("grad_norm") == 0)

    # --- proposals that came to nothing -------------------------------------------------------------------------------

    def rejected(self, scenario: str, limit: int = 50) -> list[Refusal]:
        """What was refused or turned down, the newest first."""
        rows = self._read(
            "SELECT mutations, reason, why, at FROM proposals WHERE scenario=? AND why IS NOT NULL AND mutations!='[]'"
            " ORDER BY at DESC LIMIT ?",
            scenario, limit,
        )  # fmt: skip
        return [
            Refusal(tuple(Mutation(**each) for each in json.loads(text)), reason, why, at)
            for text, reason, why, at in rows
        ]

    def why(self, scenario: str, ask: str) -> str:
        """Why nothing came of what a person asked for; empty where that is not known."""
        rows = self._read("SELECT why FROM proposals WHERE scenario=? AND ask=? AND why IS NOT NULL", scenario, ask)
        return str(rows[0][0]) if rows else ""

    # --- looks --------------------------------------------------------------------------------------------------------

    def audit(self, look: Look, proposals: Iterable[tuple[str, str | None, Proposed]] = ()) -> None:
        """Add one audit row; the same line, step, look and verdict once only. `proposals` are the batch, ask and edit
        of each step that it speaks of, where it turns them down or holds them."""
        evaluation = msgspec.json.encode(look.evaluation).decode() if look.evaluation is not None else None
        with self._writing():
            self._base.execute(
                "INSERT INTO looks (scenario, part, line, step, look, verdict, reason, candidate, release, evaluation,"
                " actor, timings, at) SELECT ?,?,?,?,?,?,?,?,?,?,?,?,? WHERE NOT EXISTS (SELECT 1 FROM looks WHERE"
                " scenario=? AND part=? AND line=? AND step=? AND look=? AND verdict=?)",
                (
                    look.scenario, look.part, look.line, look.step, look.look, look.verdict, look.reason,
                    look.candidate, look.release, evaluation, look.actor, json.dumps(dict(look.timings)),
                    look.at or time.time(), look.scenario, look.part, look.line, look.step, look.look, look.verdict,
                ),
            )  # fmt: skip
            for batch, ask, proposed in proposals:
                self._propose(look.scenario, batch, look.line, ask, proposed, None)
            if look.verdict == "reject" and look.part == "harness":
                self._base.execute(
                    "UPDATE proposals SET why=?, at=? WHERE scenario=? AND line=? AND why IS NULL",
                    (look.reason, time.time(), look.scenario, look.line),
                )
            failpoint("loop.in_audit")

    def overrule(self, scenario: str, candidate: str, actor: str, reason: str) -> Look:
        """A person turns a held candidate down: its line ends, the next begins from the head. MissingError when no
        candidate of that id is held."""
        rows = [look for look in self.looks(scenario) if look.candidate == candidate]
        if not rows or rows[0].verdict != "hold":
            raise MissingError(f"no candidate {candidate} of {scenario} is held", param="candidate")
        look = replace(rows[0], verdict="reject", reason=reason, actor=actor, timings={}, at=0.0)
        self.audit(look)
        return look

    def timed(self, look: Look, seconds: float) -> None:
        """Add to an accepted look how long activation took."""
        with self._writing():
            self._base.execute(
                "UPDATE looks SET timings=json_set(timings, '$.activation', ?)"
                " WHERE scenario=? AND part=? AND release=?",
                (seconds, look.scenario, look.part, look.release),
            )

    def looks(
        self, scenario: str, part: PartName | None = None, line: str | None = None, limit: int = 1000
    ) -> list[Look]:
        """Audit rows, newest first."""
        rows = self._read(
            "SELECT scenario, part, line, step, look, verdict, reason, candidate, release, evaluation, actor, timings,"
            " at FROM looks WHERE scenario=?1 AND (?2 IS NULL OR part=?2) AND (?3 IS NULL OR line=?3)"
            " ORDER BY id DESC LIMIT ?4",
            scenario, part, line, limit,
        )  # fmt: skip
        return [_look(row) for row in rows]

    def knows(self, scenario: str, release: str) -> bool:
        """Whether an audit row speaks of this release."""
        return bool(self._read("SELECT 1 FROM looks WHERE scenario=? AND release=? LIMIT 1", scenario, release))

    def lines(self, scenario: str, part: PartName, prefix: str) -> set[str]:
        """Every line ever begun on the release whose id starts with `prefix`."""
        rows = self._read(
            "SELECT line FROM steps WHERE scenario=?1 AND part=?2 AND line LIKE ?3"
            " UNION SELECT line FROM looks WHERE scenario=?1 AND part=?2 AND line LIKE ?3",
            scenario, part, prefix + "-%",
        )  # fmt: skip
        return {str(line) for (line,) in rows}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _advance(self, scenario: str, part: Reader, cursor: int) -> None:
        self._base.execute(
            "INSERT INTO cursors VALUES (?,?,?) ON CONFLICT DO UPDATE SET place=max(place, excluded.place)",
            (scenario, part, cursor),
        )

    def _fate(
        self, scenario: str, part: str, unit: str, report: str, fate: str, line: str | None = None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        self._base.execute(
            "INSERT OR IGNORE INTO fates VALUES (?,?,?,?,?,?,?,?)",
            (scenario, part, unit, report, fate, line, step, time.time()),
        )
        if fate != "duplicate":
            self._base.execute(_UNASSESS, (scenario, part, unit))

    def _propose(
        self, scenario: str, batch: str, line: str, ask: str | None, proposed: Proposed, why: str | None
    ) -> None:
        plain = json.dumps([asdict(one) for one in proposed.mutations], ensure_ascii=False)
        self._base.execute(
            "INSERT OR REPLACE INTO proposals VALUES (?,?,?,?,?,?,?,?)",
            (scenario, batch, line, ask, plain, proposed.reason, why, time.time()),
        )
        self._base.execute(
            "DELETE FROM proposals WHERE scenario=?1 AND at < (SELECT at FROM proposals WHERE scenario=?1"
            " ORDER BY at DESC LIMIT 1 OFFSET ?2)",
            (scenario, PROPOSALS),
        )

    def _step(self, scenario: str, part: str, line: str, step: int, batch: str, metrics: Mapping[str, float]) -> None:
        self._base.execute(
            "INSERT OR IGNORE INTO steps VALUES (?,?,?,?,?,?,?)",
            (scenario, part, line, step, batch, json.dumps(dict(metrics)), time.time()),
        )

    def _close(self, order: Order) -> None:
        self._base.execute("DELETE FROM orders WHERE scenario=? AND part=?", (order.message.scenario, order.part))


def _look(row: tuple[Any, ...]) -> Look:
    scenario, part, line, step, look, verdict, reason, candidate, release, evaluation, actor, timings, at = row
    return Look(
        scenario, part, line, step, look, verdict, reason, candidate, release,
        msgspec.json.decode(evaluation, type=Evaluation) if evaluation else None,
        actor, json.loads(timings), at,
    )  # fmt: skip
