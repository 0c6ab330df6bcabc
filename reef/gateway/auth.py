"""Tokens and rights: who may do what, in which scenarios.

Knows: tokens as digests, the five rights, the two headers a token may come in, expiry and revocation.
Does not know: where tokens are kept or made. A token's text is never held, compared as text, logged or sent back.

A refused request leaves a line in the log with its route and the client's address, at most ten in a second, so that a
flood of wrong tokens does not become a flood of lines.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import hmac
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reef.core.errors import AuthError, RightError
from reef.gateway.lines import Lines
from reef.records.tokens import RIGHTS, Grant, Quota, digest

__all__ = ["RIGHTS", "Quota", "Token", "Tokens"]

log = logging.getLogger(__name__)
_sha256, _same = hashlib.sha256, hmac.compare_digest
_FREE = Quota()


_EVERYBODY = ("operator", "anybody")


@dataclass(frozen=True, slots=True)
class Token:
    """What one token allows. `scenarios` None: every scenario; else names and patterns (`team-*`).

    `release_id`: an episode's token, whose requests are answered by this release, whatever is served, and are an
    evaluation.
    """

    name: str
    rights: frozenset[str] = RIGHTS
    scenarios: frozenset[str] | None = None
    quota: Quota = _FREE
    release_id: str | None = None

    @property
    def mark(self) -> dict[str, str]:
        """The tag by which records tell whose requests they are; none for the server's own token."""
        return {} if self.name in _EVERYBODY else {"token": self.name}

    def require(self, right: str) -> None:
        if right not in self.rights:
            raise RightError(
                f"this token lacks the right {right!r}; use one that has it, or make one: reef token create"
            )

    def enter(self, scenario: str) -> None:
        if not self.sees(scenario):
            names = ", ".join(sorted(self.scenarios or ()))
            raise RightError(
                f"this token is for the scenarios {names}, not for {scenario!r}; name one of them in the header "
                "x-reef-scenario, or in the address: /s/NAME/v1/…"
            )

    def sees(self, scenario: str) -> bool:
        return self.scenarios is None or scenario in self.scenarios or _matches(self.scenarios, scenario)


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    token: Token
    expires_at: float | None = None
    revoked: bool = False

    def refusal(self) -> str | None:
        """Why it is not let in."""
        if self.revoked:
            return "this token was revoked"
        if self.expires_at is not None and self.expires_at <= time.time():
            return "this token has expired"
        return None


class Tokens:
    """The tokens a server accepts: fixed ones, and those of the table, which `refresh` replaces.

    `free` (auth: none, loopback only) accepts requests without one.
    """

    def __init__(self, tokens: Iterable[tuple[str, Token]] = (), *, free: bool = False) -> None:
        self._fixed = tuple(_Known(digest(secret), token) for secret, token in tokens)
        self._known = self._fixed
        self._seen: dict[bytes, _Known] = {}  # by digest; holds no secret, and nothing that was not found
        self._free = Token("anybody") if free else None
        self._lines = Lines(log, "refused %d more requests without a right token")

    @property
    def keyless(self) -> bool:
        """Whether requests are answered without a token."""
        return self._free is not None

    def refresh(self, grants: Iterable[Grant]) -> None:
        """The table's rows as they are now. Takes effect with the next request."""
        self._known = (*self._fixed, *(_known(grant) for grant in grants))
        self._seen = {}

    def find(self, headers: Mapping[str, str], *, route: str = "", client: object = None) -> Token:
        """The token of a request; AuthError. `route` (a pattern, not the path) and `client` are for the log alone.

        A digest that was found before is found by its own hash; any other is compared with every known one, in constant
        time each, to the end. Neither tells anything about a token: who does not have it cannot choose its digest.
        """
        if self._free is not None:
            return self._free
        found = None
        why = "no token"
        given = headers.get("authorization", "")
        if given[:7].lower() == "bearer ":
            why = "wrong token"
            found = self._look(given[7:].strip())
            if found is not None and found.expires_at is None and not found.revoked:
                return found.token
        if (key := headers.get("x-api-key")) and (found is None or found.refusal() is not None):
            why = "wrong token"
            found = self._look(key.strip()) or found
        if found is not None:
            if (refused := found.refusal()) is None:
                return found.token
            why = refused
        self._lines.tell(route, client, why)
        if found is not None:
            raise AuthError(f"{why}; use another, or make one: reef token create NAME")
        raise AuthError(
            f"{why}: send Authorization: Bearer TOKEN (or x-api-key) with the token that reef serve printed, which is "
            "kept in the file `token` of the state folder, or with one that `reef token create` made"
        )

    def _look(self, secret: str) -> _Known | None:
        made = _sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = self._seen.get(made)
        if found is not None:
            return found if _same(found.digest, made) else None
        for known in self._known:
            if _same(known.digest, made):
                found = found or known
        if found is not None:
            self._seen[made] = found
        return found


def _known(grant: Grant) -> _Known:
    scenarios = None if grant.scenarios is None else frozenset(grant.scenarios)
    token = Token(grant.name, grant.rights, scenarios, grant.quota, grant.release_id)
    return _Known(grant.digest, token, grant.expires_at, grant.revoked_at is not None)


@functools.lru_cache(maxsize=4096)
def _matches(patterns: frozenset[str], scenario: str) -> bool:
    return any(fnmatch.fnmatchcase(scenario, pattern) for pattern in patterns)
