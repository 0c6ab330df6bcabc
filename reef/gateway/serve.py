"""Runs the app on a listening socket until it is told to stop, and lets what is under way end first.

Knows: uvicorn, signals, draining. Does not know: who bound the socket, or what the context is made of.

At SIGTERM (or SIGINT) the socket is closed here, idle connections too; requests in work have `drain_seconds` to end,
and those that do not are broken off and their records closed as interrupted. Then `serve` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import uvicorn

from reef.gateway.app import App
from reef.gateway.context import Context
from reef.gateway.protocol import limited

_EXPECTED = "ASGI callable returned without"
"""What uvicorn says when the app leaves an answer unfinished, which is how it drops a socket."""


class Server(uvicorn.Server):
    """A uvicorn server that ends at a signal and leaves the process to its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # broken off: each still closes its record, which needs the store
            await asyncio.wait(self.server_state.tasks, timeout=5.0)

    def stop(self) -> None:
        """Begin to drain."""
        if isinstance(self.config.app, App):
            self.config.app.stop()
        self.should_exit = True


def server(context: Context) -> Server:
    """A server for a context, not yet running. `server.stop()` ends it as SIGTERM does."""
    logging.getLogger("uvicorn.error").addFilter(_unexpected)
    limits = context.limits
    config = uvicorn.Config(
        App(context),
        http=limited(limits.header_bytes, limits.headers, min(limits.connections, _files() // 2)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(limits.drain_seconds)),
    )
    return Server(config)


def _files() -> int:
    """How many files this process may have open, after asking for as many as it may ask for.

    Half of them are for clients: a request in work may need a connection to a provider as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


async def serve(context: Context, sock: socket.socket) -> None:
    """Answer requests on a listening socket until SIGTERM, then drain. Closes its own copy of the socket only."""
    await server(context).serve(sockets=[sock])


def run(make: Callable[[], AbstractAsyncContextManager[Context]], sock: socket.socket) -> None:
    """A whole gateway process: an event loop, the context opened in it, `serve`, the context closed. Blocking."""
    import uvloop

    async def main() -> None:
        async with make() as context:
            await serve(context, sock)

    uvloop.run(main())


def _unexpected(record: logging.LogRecord) -> bool:
    return _EXPECTED not in str(record.msg)
