"""A trainer in a process of its own as its users see it: a socket. No torch here.

Knows: the wire messages. Does not know: which backend works there, or whether the process runs yet; the supervisor
starts it at the first connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from reef.core.errors import WireError
from reef.core.rpc import Client
from reef.core.wire import Ping, Pong, Progress, Step, Stepped


class SocketTrainer:
    def __init__(self, socket: Path) -> None:
        self._client = Client(socket)

    async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        """Progress, any number; then one Stepped. TrainError when it cannot be made; WireError when the process died:
        give the same order again, a finished step is answered from disk."""
        async with contextlib.aclosing(self._client.stream(order)) as items:  # type: ignore[type-var]
            async for item in items:
                if not isinstance(item, Progress | Stepped):
                    raise WireError(f"the trainer answered a step with {type(item).__name__}")
                yield item

    async def ready(self) -> bool:
        """Whether the process answers. Asking starts it (without torch) where a supervisor waits on its socket."""
        try:
            return isinstance(await self._client.call(Ping(), timeout=10), Pong)
        except WireError:
            return False

    async def close(self) -> None:
        await self._client.close()
