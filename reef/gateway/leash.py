"""Ends a request's work when its client goes away.

Knows: the connection's `Line` (our protocol's) or ASGI's disconnect message (any other server's), and how to cancel
exactly the work inside a `with` block.
Does not know: what the work is.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from reef.gateway.call import Call, Gone, Line


class Leash:
    """`with Leash(call):` raises Gone out of the block once the client disconnects, at the await it is in.

    The request's body must have been read. Outside the block a disconnect changes nothing: what is being stored then
    is stored. A cancellation that comes from elsewhere passes as it is.
    """

    __slots__ = ("_armed", "_call", "_gone", "_line", "_task", "_watch")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._gone = False
        self._armed = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._line: Line | None = self._call.line
        if self._line is None:
            self._watch = asyncio.create_task(self._wait())
        elif self._line.gone:
            raise Gone
        else:
            self._line.cut = self._cut
        self._armed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        if self._line is not None:
            self._line.cut = None
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and self._task.uncancel() == 0 and error is not None:
            raise Gone from None

    def _cut(self) -> None:
        if self._armed and not self._gone:
            self._gone = True
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._call.receive())["type"] != "http.disconnect":
            pass
        self._cut()
