"""Log lines about refusals: who sends too much of what, without what was sent.

Knows: how many lines a second are enough, addresses. Does not know: why something was refused.
A flood of refused requests does not become a flood of lines: the rest of a second is counted.
"""

from __future__ import annotations

import logging
import time

MOST = 10  # lines in one second, about


class Lines:
    """`more` says how many further refusals a second had (`%d`)."""

    def __init__(self, log: logging.Logger, more: str) -> None:
        self._log, self._more = log, more
        self._second, self._count = 0, 0

    def tell(self, route: str, client: object, why: str) -> None:
        """`route` is a pattern, never a path; `client` an address as ASGI has it."""
        second = int(time.monotonic())
        if second != self._second:
            if self._count > MOST:
                self._log.warning(self._more, self._count - MOST)
            self._second, self._count = second, 0
        self._count += 1
        if self._count <= MOST:
            address = client[0] if isinstance(client, tuple | list) and client else "unknown"
            told = {"route": route or None}
            self._log.warning("refused %s from %s: %s", route or "a request", address, why, extra=told)
