"""Turns joined into trees: which answer a request goes on from, and what it is if it goes on from none.

Knows: one table of turns and one of their answers, by digests of transcripts; the rules by which turns are joined.
Does not know: the event log, or how a request becomes a transcript. No text of anybody is kept, only digests.

- A scope is what may be joined: a session that its client named, else the requests of one client. Every digest that is
  looked up has its scope in it, so nothing is ever found outside of it, and a look-up costs the same in any session.
- A request goes on from the answer that stands in its transcript, the longest first. Where its history has another
  answer than the recorded one, it follows that turn, but says nothing about the recorded answer (`exact` is 0).
- Equal requests one after the other are retries: the last answered one counts, or the one gone on from. Equal ones at
  the same time that were both answered are samples, not retries.
- What is decided may change with a later turn: a call that a conversation goes on from was no side call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from reef.core.database import Database
from reef.core.ids import parse_receipt
from reef.core.nouns import Record
from reef.experience.transcript import START, Step, Transcript, answer, roll

Kind = Literal["main", "side", "retry"]
WINDOW = 300.0  # seconds from the end of a request within which an equal one is a retry
RECENT = 16  # equal candidates that are compared

MIGRATIONS = (
    """
    CREATE TABLE cursors (scenario TEXT PRIMARY KEY, place INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE turns (
        seq INTEGER PRIMARY KEY,        -- the event that closed the record
        record TEXT NOT NULL UNIQUE,
        scenario TEXT NOT NULL,
        session TEXT NOT NULL,
        given TEXT,                     -- the session as the client named it
        branch TEXT NOT NULL,
        parent INTEGER,
        choice INTEGER NOT NULL,        -- of the parent's answer
        exact INTEGER NOT NULL,         -- it goes on from the parent's answer as it was recorded
        kind TEXT NOT NULL,
        segment INTEGER NOT NULL,
        turn INTEGER NOT NULL,
        note TEXT NOT NULL,
        steps INTEGER NOT NULL,
        asked BLOB NOT NULL,            -- digest of scope and transcript
        whole BLOB NOT NULL,            -- digest of scope, branch and all that was asked
        system BLOB NOT NULL,
        tools BLOB,
        complete INTEGER NOT NULL,
        begun REAL NOT NULL,            -- unix seconds
        ended REAL NOT NULL,
        same INTEGER NOT NULL,          -- the first of the equal requests that it belongs to
        answer TEXT                     -- the answer's own id
    );
    CREATE INDEX turns_session ON turns (scenario, session, seq);
    CREATE INDEX turns_branch ON turns (scenario, session, branch, kind, seq);
    CREATE INDEX turns_segment ON turns (scenario, session, branch, segment);
    CREATE INDEX turns_given ON turns (scenario, given) WHERE given IS NOT NULL;
    CREATE INDEX turns_asked ON turns (asked);
    CREATE INDEX turns_whole ON turns (whole);
    CREATE INDEX turns_same ON turns (same);
    CREATE INDEX turns_parent ON turns (parent) WHERE parent IS NOT NULL;
    CREATE INDEX turns_answer ON turns (scenario, answer) WHERE answer IS NOT NULL;
    CREATE TABLE answers (
        turn INTEGER NOT NULL,
        choice INTEGER NOT NULL,
        after BLOB NOT NULL,            -- digest of scope, transcript and answer
        rolled BLOB NOT NULL,           -- the same without the scope
        calls BLOB,                     -- digest of scope and call ids
        said BLOB NOT NULL,             -- digest of the answer alone
        PRIMARY KEY (turn, choice)
    ) WITHOUT ROWID;
    CREATE INDEX answers_after ON answers (after);
    CREATE INDEX answers_calls ON answers (calls) WHERE calls IS NOT NULL;
    CREATE TABLE threads (scenario TEXT, session TEXT, thread TEXT NOT NULL,
        PRIMARY KEY (scenario, session)) WITHOUT ROWID
    """,
)
_COLUMNS = (
    "seq, record, scenario, session, given, branch, parent, choice, exact, kind, segment, turn, note, steps, asked,"
    " whole, system, tools, complete, begun, ended, same, answer"
)
_TURN = f"SELECT {_COLUMNS} FROM turns"  # noqa: S608
_INSERT = f"INSERT INTO turns ({_COLUMNS}) VALUES ({', '.join('?' * 23)})"  # noqa: S608
_SIDE_KINDS = {"compact", "compaction", "summary", "summarize", "title", "memory"}


@dataclass(frozen=True, slots=True)
class Turn:
    """A row of `turns`, in the order of its columns."""

    seq: int
    record: str
    scenario: str
    session: str
    given: str | None
    branch: str
    parent: int | None
    choice: int
    exact: int
    kind: Kind
    segment: int
    turn: int
    note: str
    steps: int
    asked: bytes
    whole: bytes
    system: bytes
    tools: bytes | None
    complete: int
    begun: float
    ended: float
    same: int
    answer: str | None

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name.strip()) for name in _COLUMNS.split(","))


@dataclass(frozen=True, slots=True)
class Found:
    """The turn that a request goes on from, and how."""

    turn: Turn
    choice: int = 0
    exact: bool = True
    note: str = ""


class Tree(Database):
    """Used from one thread. Writing happens inside `_writing` of whoever calls."""

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        super().__init__(path, MIGRATIONS, reading=reading)

    def add(self, seq: int, record: Record, said: Transcript | None) -> None:
        """Take a closed live record. `said`: its transcript; None: it has none."""
        session, branch = self._agent(record)
        scope = _scope(record, session)
        if said is None:
            said, why = Transcript(START, None, ()), "it has no conversation that can be read"
        else:
            why = _aside(record)
        found = self._follows(record, said, scope, session)
        if found is not None:
            branch = branch or found.turn.branch
            said = self._continued(said, found)
        received = record.timing.received_at
        turn = Turn(
            seq, record.id, record.scenario, session or record.id, record.session, branch,
            found.turn.seq if found else None, found.choice if found else 0, int(bool(found and found.exact)),
            "main", 0, 0, found.note if found else "", len(said.steps), _key(scope, said.end),
            _key(scope, branch.encode("utf-8", "surrogatepass"), said.whole), said.system, said.tools,
            int(record.status == "complete"), received, received + (record.timing.last or 0.0), seq, record.answer_id,
        )  # fmt: skip
        turn = replace(turn, kind="side", note=why) if why else self._again(turn) or self._placed(turn, found)
        self._base.execute(_INSERT, turn.values)
        self._answers(turn, record, said, scope)
        if turn.kind == "main" and found is not None and found.exact:
            self._proven(turn, found.turn)
        if turn.kind == "main" and turn.given is not None:
            self._settle(turn)

    def alone(self, seq: int, record: Record, note: str) -> None:
        """Give a record that cannot be taken a place of its own, with a sentence why. Nothing is found by it."""
        begun = record.timing.received_at if math.isfinite(record.timing.received_at) else 0.0
        key = _key(record.id.encode())
        who, when = (seq, record.id, record.scenario, record.id, None, "", None), (begun, begun, seq, None)
        turn = Turn(*who, 0, 0, "side", 0, 0, note, 0, key, key, START, None, 0, *when)
        self._base.execute(_INSERT, turn.values)

    # --- which agent, and which answer --------------------------------------------------------------------------------

    def _agent(self, record: Record) -> tuple[str | None, str]:
        """The session and its branch, as far as the record names them."""
        tags, session = record.tags, record.session
        if session is None:
            return None, ""
        if (outer := tags.get("parent-session-id")) and outer != session:
            query = "SELECT session FROM turns WHERE scenario = ? AND given = ? LIMIT 1"
            rows = self._read(query, record.scenario, outer)  # it may have been opened by an agent of its own
            return (rows[0][0] if rows else outer), session
        if agent := tags.get("agent-id"):
            return session, agent
        if thread := tags.get("thread-id"):  # the first one that a session has is its main one
            place = (record.scenario, session, thread)
            self._base.execute("INSERT OR IGNORE INTO threads VALUES (?, ?, ?)", place)
            (first,) = self._read("SELECT thread FROM threads WHERE scenario = ? AND session = ?", *place[:2])[0]
            return session, "" if thread == first else thread
        if (root := tags.get("root-turn-id")) and root != tags.get("turn-id") and tags.get("agent-name"):
            return session, tags["agent-name"]
        return session, ""

    def _follows(self, record: Record, said: Transcript, scope: bytes, session: str | None) -> Found | None:
        if said.earlier is not None:
            return self._named(record, said.earlier, session)
        steps, last = said.steps, 0
        for at in range(len(steps) - 2, 0, -1):  # mostly it is the first one
            if steps[at].role != "assistant":
                continue
            last = last or at
            where = "JOIN answers ON answers.turn = seq WHERE after = ?"
            turn, choice = self._latest(where, _key(scope, steps[at].rolled))
            if turn is not None:
                between = "" if at == last else "turns before it were not recorded"
                return Found(turn, choice, not between, between)
            turn, _ = self._latest("WHERE asked = ?", _key(scope, steps[at - 1].rolled))
            if turn is not None:
                return Found(turn, 0, False, "its history has another answer than the recorded one")
            if at == last and session is not None and (found := self._called(steps[at], scope)) is not None:
                return found
        return None

    def _named(self, record: Record, earlier: str, session: str | None) -> Found | None:
        """The turn whose answer a request names in the place of all that came before."""
        receipt = parse_receipt(earlier)
        query = f"{_TURN} WHERE scenario = ? AND (record = ? OR answer = ?) ORDER BY seq DESC LIMIT 1"
        rows = self._read(query, record.scenario, receipt or earlier, earlier)
        turn = Turn(*rows[0]) if rows else None
        return Found(turn) if turn is not None and session in (None, turn.session) else None

    def _called(self, step: Step, scope: bytes) -> Found | None:
        """The turn that made these calls, where the history before them was changed."""
        if step.calls is None:
            return None
        turn, choice = self._latest(
            "JOIN answers ON answers.turn = seq WHERE calls = ? AND said = ?", _key(scope, step.calls), step.digest
        )
        return None if turn is None else Found(turn, choice, True, "the history before was compacted or edited")

    def _latest(self, where: str, *values: bytes) -> tuple[Turn | None, int]:
        """Of the turns that match, that of the session in which something happened last; and which of its choices."""
        choice = "answers.choice" if "answers" in where else "0"
        names = ", ".join(f"turns.{name.strip()}" for name in _COLUMNS.split(","))
        query = f"SELECT {names}, {choice} FROM turns {where} ORDER BY seq DESC LIMIT {RECENT}"  # noqa: S608
        rows = self._read(query, *values)
        if len({row[3] for row in rows}) > 1:
            active = "SELECT max(seq) FROM turns WHERE scenario = ? AND session = ?"
            rows.sort(key=lambda row: (self._read(active, row[2], row[3])[0][0], row[0]), reverse=True)
        return (Turn(*rows[0][:-1]), rows[0][-1]) if rows else (None, 0)

    def _continued(self, said: Transcript, found: Found) -> Transcript:
        """A transcript that does not say again what came before, with that before it."""
        if said.earlier is None:
            return said
        rows = self._read("SELECT rolled FROM answers WHERE turn = ? AND choice = ?", found.turn.seq, found.choice)
        rolled = rows[0][0] if rows else found.turn.asked
        steps = []
        for step in said.steps:
            rolled = roll(rolled, step.digest)
            steps.append(step._replace(rolled=rolled))
        system = said.system if said.system != START else found.turn.system
        return replace(said, steps=steps, system=system)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _again(self, turn: Turn) -> Turn | None:
        """The turn as a retry, or as what a retried one was; None when it repeats nothing."""
        newest = self._one("WHERE whole = ? ORDER BY seq DESC LIMIT 1", turn.whole)
        first = self._one("WHERE whole = ? AND kind != 'retry' ORDER BY seq DESC LIMIT 1", turn.whole)
        if first is None or newest is None or turn.begun - newest.ended > WINDOW:
            return None
        overlap = turn.begun < first.ended and first.begun < turn.ended
        if (turn.complete and first.complete and overlap) or self._children(first):
            return None
        like = replace(
            first, seq=turn.seq, record=turn.record, given=turn.given, complete=turn.complete, begun=turn.begun,
            ended=turn.ended, answer=turn.answer,
        )  # fmt: skip
        if first.kind == "side":
            return like
        if turn.complete or not first.complete:
            self._change(first, kind="retry", note=f"asked again as {turn.record}")
            alone = first.complete and first.given is None and first.parent is None  # perhaps another's conversation
            return replace(like, session=turn.record) if alone else like
        return replace(like, kind="retry", note=f"asks {first.record} again, and was not answered")

    def _placed(self, turn: Turn, found: Found | None) -> Turn:
        before = found.turn if found is not None else None
        if before is not None:
            like = self._by(before.parent) or before if before.kind == "side" else before
            turn = replace(turn, session=before.session, segment=before.segment, turn=before.turn + 1)
            if like.tools is not None and turn.tools is None:
                return replace(turn, kind="side", note="offers no tools, unlike the turn before: a summary or a title")
            if turn.system != like.system and turn.tools != like.tools:
                return replace(turn, kind="side", note="another system prompt and other tools than the turn before")
            if turn.branch == before.branch and self._children(before):
                note = turn.note or "goes on from an earlier turn: the history was edited"
                return replace(turn, segment=self._segment(turn) + 1, note=note)
            if turn.note and turn.exact:
                return replace(turn, segment=self._segment(turn) + 1)
            return turn
        if turn.given is None:
            return turn
        head = self._head(turn)
        if head is not None and head.tools and turn.tools not in (None, head.tools) and turn.system != head.system:
            turn = replace(turn, branch=turn.branch or f"agent-{turn.system.hex()[:8]}")  # one that has no name
            head = self._head(turn)
        if head is None:
            return turn
        if turn.tools is None and (head.tools is not None or turn.system != head.system):
            what = "offers no tools" if head.tools is not None else "has another system prompt"
            return replace(turn, kind="side", note=f"{what}, and is no part of the session's transcript")
        what = "compacted" if turn.steps < head.steps else "edited"
        note = f"goes on from no recorded answer: the history was {what}, or this is another conversation"
        if head.tools is None and turn.tools is not None:
            note = ""  # what came before was no part of it: see `_settle`
        return replace(turn, segment=self._segment(turn) + 1, turn=head.turn + 1, note=note)

    def _proven(self, turn: Turn, before: Turn) -> None:
        """A conversation goes on from an answer, so its request was no side call, and no retry that came to nothing."""
        if before.kind == "main":
            return
        self._change(before, kind="main", note="")
        if before.kind == "side":
            query = "SELECT 1 FROM turns WHERE parent = ? AND kind = 'main' AND seq != ?"
            if before.parent is None or self._read(query, before.parent, before.seq):
                segment = self._segment(turn) + 1
                for each in (before, turn):
                    self._change(each, segment=segment)
            return
        for row in self._read(f"{_TURN} WHERE same = ? AND seq != ? AND kind = 'main'", before.same, before.seq):
            other = Turn(*row)
            if not self._children(other):
                self._change(other, kind="retry", note=f"the conversation went on from {before.record}")

    def _settle(self, turn: Turn) -> None:
        """Calls from before the session's first real turn was known: titles are asked for at the same time as it."""
        where = "WHERE scenario = ? AND session = ? AND branch = ? AND kind = 'main' AND seq < ?"
        place = (turn.scenario, turn.session, turn.branch, turn.seq)
        query = f"{_TURN} {where} AND parent IS NULL ORDER BY seq DESC LIMIT {RECENT}"
        if turn.turn > 2:
            return
        for row in self._read(query, *place):
            root = Turn(*row)
            apart = turn.parent is not None and root.system != turn.system
            bare = root.tools is None and turn.tools is not None
            if (apart or bare) and not self._children(root):
                what = "offers no tools" if bare else "has another system prompt"
                self._change(root, kind="side", note=f"{what}, and is no part of the session's transcript")

    def _answers(self, turn: Turn, record: Record, said: Transcript, scope: bytes) -> None:
        for choice in record.choices:
            made, calls = answer(choice)
            rolled = roll(said.end, made)
            calls = None if calls is None else _key(scope, calls)
            row = (turn.seq, choice.index, _key(scope, rolled), rolled, calls, made)
            self._base.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _one(self, where: str, *values: object) -> Turn | None:
        rows = self._read(f"{_TURN} {where}", *values)
        return Turn(*rows[0]) if rows else None

    def _by(self, seq: int | None) -> Turn | None:
        return self._one("WHERE seq = ?", seq) if seq is not None else None

    def _children(self, turn: Turn) -> Sequence[Turn]:
        """A main turn of its branch that goes on from it, if there is one."""
        query = f"{_TURN} WHERE parent = ? AND kind = 'main' AND branch = ? LIMIT 1"
        return [Turn(*row) for row in self._read(query, turn.seq, turn.branch)]

    def _head(self, turn: Turn) -> Turn | None:
        where = "WHERE scenario = ? AND session = ? AND branch = ? AND kind = 'main' ORDER BY seq DESC LIMIT 1"
        return self._one(where, turn.scenario, turn.session, turn.branch)

    def _segment(self, turn: Turn) -> int:
        query = "SELECT max(segment) FROM turns WHERE scenario = ? AND session = ? AND branch = ?"
        return self._read(query, turn.scenario, turn.session, turn.branch)[0][0] or 0

    def _change(self, turn: Turn, **fields: str | int) -> None:
        names = ", ".join(f"{name} = ?" for name in fields)
        self._base.execute(f"UPDATE turns SET {names} WHERE seq = ?", (*fields.values(), turn.seq))  # noqa: S608


def _scope(record: Record, session: str | None) -> bytes:
    whose = ("session", session) if session is not None else ("client", record.caller)
    return _key(*(text.encode("utf-8", "surrogatepass") for text in (record.scenario, *whose)))


def _key(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(4) + part)
    return made.digest()


def _aside(record: Record) -> str:
    """Why a record says by itself that it is a side call; empty when it does not."""
    if (kind := record.tags.get("request-kind", "")).lower() in _SIDE_KINDS:
        return f"its client says that it is a {kind}"
    return ""
