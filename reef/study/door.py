"""Requests to a server that may be away for a moment: what a driver and `reef teach` send.

Knows: the public HTTP contract, which refusals pass by themselves, and how Reef's errors read.
Does not know: what is asked, or what a report is worth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reef.core.errors import AuthError, InputError, MissingError, ReefError, WireError

if TYPE_CHECKING:
    import httpx

AWAY = 60.0  # seconds a server may be unreachable, restarting
_PASSING = (408, 429, 500, 502, 503, 504)
_ERRORS: dict[int, type[ReefError]] = {400: InputError, 401: AuthError, 403: AuthError, 404: MissingError}


async def send(
    client: httpx.AsyncClient, method: str, path: str, *, good: Sequence[int] = (), unauthorized: str = "", **more: Any
) -> httpx.Response:
    """One request, again while the server is away or busy. Errors are Reef's, with the server's own words.

    `good`: statuses that are answers besides 2xx. `unauthorized`: what to do about a 401, to end its message with.
    """
    import httpx

    deadline = time.monotonic() + AWAY
    pause = 0.2
    while True:
        try:
            answer = await client.request(method, path, **more)
        except httpx.HTTPError as error:
            problem = f"{client.base_url} does not answer ({type(error).__name__})"
        else:
            if answer.is_success or answer.status_code in good:
                return answer
            problem = f"{path} answered {answer.status_code}: {_message(answer)}"
            problem += f"; {unauthorized}" if answer.status_code == 401 and unauthorized else ""
            if answer.status_code not in _PASSING:
                raise _ERRORS.get(answer.status_code, ReefError)(problem)
        if time.monotonic() > deadline:
            raise WireError(f"{problem}; see the server's logs")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 3.0)


async def chain(client: httpx.AsyncClient, scenario: str) -> list[dict[str, Any]]:
    """A scenario's releases, newest first."""
    found: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        query = {"limit": "200"} | ({"after": after} if after else {})
        page = (await send(client, "GET", f"/reef/scenarios/{scenario}/releases", params=query)).json()
        found += page["releases"]
        after = page.get("next")
        if not after:
            return found


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
