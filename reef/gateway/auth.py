"""Tokens and rights: who may do what, in which scenarios.

Knows: tokens as digests, the five rights, the two headers a token may come in.
Does not know: where tokens are kept or made. A token's text is never held, compared as text, logged or sent back.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reef.core.errors import AuthError, RightError

RIGHTS = frozenset({"infer", "report", "read", "operate", "admin"})
"""infer: ask. report: feedback. read: see records and releases. operate: create, roll back, pin. admin: the rest."""


@dataclass(frozen=True, slots=True)
class Token:
    """What one token allows. `scenarios` None: every scenario."""

    name: str
    rights: frozenset[str] = RIGHTS
    scenarios: frozenset[str] | None = None

    def require(self, right: str) -> None:
        if right not in self.rights:
            raise RightError(
                f"this token lacks the right {right!r}; use one that has it, or make one: reef token create"
            )

    def enter(self, scenario: str) -> None:
        if not self.sees(scenario):
            raise RightError(f"this token is not for the scenario {scenario!r}; use one that is")

    def sees(self, scenario: str) -> bool:
        return self.scenarios is None or scenario in self.scenarios


class Tokens:
    """The tokens a server accepts. `free` (auth: none, loopback only) accepts requests without one."""

    def __init__(self, tokens: Iterable[tuple[str, Token]] = (), *, free: bool = False) -> None:
        self._known = [(_digest(secret), token) for secret, token in tokens]
        self._free = Token("anybody") if free else None

    def find(self, headers: Mapping[str, str]) -> Token:
        """The token of a request. Every known digest is compared, in constant time each."""
        if self._free is not None:
            return self._free
        given = []
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(secret.strip())
        if key := headers.get("x-api-key"):
            given.append(key.strip())
        found: Token | None = None
        for secret in given:
            digest = _digest(secret)
            for known, token in self._known:
                if hmac.compare_digest(known, digest):
                    found = found or token
        if found is None:
            what = "wrong token" if given else "no token"
            raise AuthError(
                f"{what}: send Authorization: Bearer TOKEN (or x-api-key) with the token that reef serve printed; "
                "it is kept in the file `token` of the state folder"
            )
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
