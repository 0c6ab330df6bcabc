"""Tokens that commands made: who may do what, where, how much, until when. A table of the record store's file.

Knows: names, SHA-256 digests, rights, patterns, limits, dates; that a change moves the board's version, so that every
gateway follows within one look. Does not know: HTTP, or the operator's token of the state folder, which is a file.

A token's text is handed out once, when it is made, and is kept nowhere: only its digest is.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields

from reef.core.errors import ConflictError, InputError, MissingError
from reef.core.ids import is_scenario
from reef.records.board import Board

RIGHTS = frozenset({"infer", "report", "read", "operate", "admin"})
"""infer: ask. report: feedback. read: see records and releases. operate: create, roll back, pin. admin: the rest."""

PREFIX = "reef_"
EPISODE = "episode."
OLD = "~old"
"""What a token's name ends in while it lives on beside the one that replaced it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PATTERN = re.compile(r"[a-z0-9._*?\[\]!-]{1,80}")
_RESERVED = ("operator", "anybody", "nobody")
_LONGEST = 10 * 365 * 86400.0  # seconds
_COLUMNS = "name, digest, rights, scenarios, limits, release_id, created_at, expires_at, revoked_at"


@dataclass(frozen=True, slots=True)
class Quota:
    """How much one token may do in any 60 seconds, and at once. None: as much as the server can."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.requests_per_minute, self.tokens_per_minute, self.concurrent))


@dataclass(frozen=True, slots=True)
class Grant:
    """One row: what one secret allows. `scenarios` None: every scenario. Times are unix seconds."""

    name: str
    digest: bytes
    rights: frozenset[str]
    scenarios: tuple[str, ...] | None
    quota: Quota
    release_id: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def state(self, now: float) -> str:
        """active, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


def digest(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class TokenTable:
    """The rows, through a board's connection. Blocking and short, like the board; raises StoreError like it."""

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.time) -> None:
        self._board = board
        self._clock = clock

    def create(
        self,
        name: str,
        rights: Iterable[str] = ("infer", "report"),
        scenarios: Iterable[str] | None = None,
        quota: Quota | None = None,
        expires: float | None = None,
        release_id: str | None = None,
    ) -> str:
        """The secret of a new token. `scenarios` are patterns (`team-*`); `expires` is in seconds from now.

        A name whose token is revoked or expired may be used again. InputError for what cannot be; ConflictError for a
        name in use.
        """
        if not _NAME.fullmatch(name) or name in _RESERVED or name.startswith(EPISODE):
            raise InputError(
                f"a token's name is 1 to 63 of a-z A-Z 0-9 . _ - and begins with a letter or digit; {name[:80]!r} "
                f"is not one (nor are {', '.join(_RESERVED)} and {EPISODE}…)",
                param="name",
            )
        return self._insert(name, _rights(rights), _patterns(scenarios), _quota(quota), _seconds(expires), release_id)

    def episode(self, scenario: str, release_id: str, seconds: float) -> str:
        """The secret of a token that may only ask one scenario, is answered by one release, and ends by itself."""
        if not is_scenario(scenario) or not release_id:
            raise InputError("an episode's token needs a scenario and a release", param="scenario")
        name = EPISODE + secrets.token_hex(8)
        return self._insert(name, frozenset({"infer"}), (scenario,), Quota(), _seconds(seconds), release_id)

    def end(self, secret: str) -> None:
        """An episode is over: its token is gone. Others are revoked by name."""
        with self._board.change() as db:
            db.execute("DELETE FROM tokens WHERE digest = ? AND name GLOB ?", (digest(secret), EPISODE + "*"))

    def list(self) -> list[Grant]:
        """Every row, revoked and expired ones too, by name."""
        with self._board.look() as db:
            return [_grant(row) for row in db.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY name").fetchall()]  # noqa: S608

    def revoke(self, name: str) -> None:
        """End a token now, and with it what a rotation left living on. Again: no change. MissingError."""
        with self._board.change() as db:
            self._find(db, name)
            sql = "UPDATE tokens SET revoked_at = ? WHERE name IN (?, ?) AND revoked_at IS NULL"
            db.execute(sql, (self._clock(), name, name + OLD))

    def rotate(self, name: str, overlap: float = 3600.0) -> str:
        """A new secret for the same rights. The old one lives on for `overlap` seconds, as `NAME~old`.

        What an earlier rotation left living ends now. MissingError; ConflictError when the token is not active.
        """
        if not 0 <= overlap <= _LONGEST:
            raise InputError("the overlap must be 0 seconds or more, and at most 10 years", param="overlap")
        now, secret = self._clock(), _secret()
        with self._board.change() as db:
            row = self._find(db, name)
            if name.endswith(OLD):
                raise InputError(f"{name} is what a rotation left; rotate {name.removesuffix(OLD)}", param="name")
            if (state := row.state(now)) != "active":
                raise ConflictError(f"the token {name!r} is {state}; make another: reef token create", param="name")
            until = min(now + overlap, row.expires_at) if row.expires_at is not None else now + overlap
            db.execute("DELETE FROM tokens WHERE name = ?", (name + OLD,))
            db.execute("UPDATE tokens SET name = ?, expires_at = ? WHERE name = ?", (name + OLD, until, name))
            copied = (row.rights, row.scenarios, row.quota, row.release_id, now, row.expires_at)
            _write(db, name, digest(secret), *copied)
        return secret

    def _insert(
        self,
        name: str,
        rights: frozenset[str],
        scenarios: tuple[str, ...] | None,
        quota: Quota,
        seconds: float | None,
        release_id: str | None,
    ) -> str:
        now, secret = self._clock(), _secret()
        with self._board.change() as db:
            db.execute("DELETE FROM tokens WHERE name GLOB ? AND expires_at <= ?", (EPISODE + "*", now))
            found = db.execute(f"SELECT {_COLUMNS} FROM tokens WHERE name = ?", (name,)).fetchone()  # noqa: S608
            if found is not None:
                if _grant(found).state(now) == "active":
                    raise ConflictError(
                        f"there is a token {name!r} already; take another name, or: reef token rotate {name}",
                        param="name",
                    )
                db.execute("DELETE FROM tokens WHERE name = ?", (name,))
            until = None if seconds is None else now + seconds
            _write(db, name, digest(secret), rights, scenarios, quota, release_id, now, until)
        return secret

    def _find(self, db: sqlite3.Connection, name: str) -> Grant:
        row = db.execute(f"SELECT {_COLUMNS} FROM tokens WHERE name = ?", (name,)).fetchone()  # noqa: S608
        if row is None:
            raise MissingError(f"no token {name[:80]!r}; `reef token list` lists them", param="name")
        return _grant(row)


def _secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _write(
    db: sqlite3.Connection,
    name: str,
    digested: bytes,
    rights: frozenset[str],
    scenarios: tuple[str, ...] | None,
    quota: Quota,
    release_id: str | None,
    created: float,
    expires: float | None,
) -> None:
    patterns = None if scenarios is None else json.dumps(scenarios)
    limits = json.dumps({key: value for key, value in asdict(quota).items() if value is not None})
    row = (name, digested, " ".join(sorted(rights)), patterns, limits, release_id, created, expires)
    db.execute(f"INSERT INTO tokens ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)  # noqa: S608


def _grant(row: tuple[str, bytes, str, str | None, str, str | None, float, float | None, float | None]) -> Grant:
    name, digested, rights, scenarios, limits, release_id, created, expires, revoked = row
    patterns = None if scenarios is None else tuple(json.loads(scenarios))
    quota = Quota(**json.loads(limits))
    return Grant(name, digested, frozenset(rights.split()), patterns, quota, release_id, created, expires, revoked)


def _rights(given: Iterable[str]) -> frozenset[str]:
    rights = frozenset(given)
    if not rights or not rights <= RIGHTS:
        wrong = ", ".join(sorted(rights - RIGHTS)) or "none"
        raise InputError(f"rights are {', '.join(sorted(RIGHTS))}; not {wrong}", param="rights")
    return rights


def _patterns(given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    patterns = tuple(dict.fromkeys(given))
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise InputError(
                f"{pattern[:80]!r} matches no scenario; a pattern is a scenario's name, with * for any characters",
                param="scenarios",
            )
    if not patterns:
        raise InputError("give at least one scenario or pattern; leave it out for every scenario", param="scenarios")
    return patterns


def _quota(given: Quota | None) -> Quota:
    quota = given or Quota()
    for item in fields(quota):
        value = getattr(quota, item.name)
        if value is not None and not 1 <= value <= 10**12:
            raise InputError(f"{item.name} must be 1 or more; leave it out for no limit", param=item.name)
    return quota


def _seconds(given: float | None) -> float | None:
    if given is not None and not 0 < given <= _LONGEST:
        raise InputError("a token lives more than 0 seconds and at most 10 years; or leave it out", param="expires")
    return given
