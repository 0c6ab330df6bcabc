"""Ends a request's work when its client goes away.

Knows: ASGI's disconnect message, and how to cancel exactly the work inside a `with` block.
Does not know: what the work is.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from reef.gateway.call import Gone, Receive


class Leash:
    """`with Leash(receive):` raises Gone out of the block once the client disconnects, at the await it is in.

    The request's body must have been read. Outside the block a disconnect changes nothing: what is being stored then
    is stored. A cancellation that comes from elsewhere passes as it is.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._armed = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._armed = True
        self._watch = asyncio.create_task(self._wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        self._watch.cancel()
        if self._gone and self._task.uncancel() == 0 and error is not None:
            raise Gone from None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._armed:
            self._gone = True
            self._task.cancel()
