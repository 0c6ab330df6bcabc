"""The trainer process: orders come over a socket, one step is made at a time, progress is streamed back.

Knows: the wire messages, one worker thread, and that a backend is made at the first order and not before.
Does not know: which backend that is, who restarts the process, how batches are chosen, what becomes of a step.

- A second order for the same step waits and is then answered from disk.
- An order whose caller went away stops at the next progress; nothing of it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

from reef.core import rpc
from reef.core.disk import advice, full
from reef.core.errors import ReefError, StoreError, TrainError, WireError
from reef.core.load import load
from reef.core.wire import Message, Ping, Pong, Progress, Step, Stepped
from reef.trainers import WORKS, Ground, Report, Work
from reef.trainers import folder as steps
from reef.trainers import options as read_options
from reef.trainers.broadcast import Listening, Sender

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The caller went away."""


class Server:
    """Answers Step and Ping. `options` are the backend's; None: its defaults. `sender`: is told of every step that is
    durable, and sends it to engines beside this."""

    def __init__(
        self, ground: Ground, backend: str = "local", options: Any = None, sender: Sender | None = None
    ) -> None:
        self._ground = ground
        self._backend = backend
        self._options = read_options(backend, {}) if options is None else options
        self._sender = sender
        self._turn = asyncio.Lock()
        self._work: Work | None = None

    def answer(self, message: Message) -> Awaitable[Message] | AsyncIterator[Message]:
        if isinstance(message, Step):
            return self._step(message)
        return self._call(message)

    def close(self) -> None:
        if self._work is not None:
            self._work.close()
        if self._sender is not None:
            self._sender.close()

    async def _call(self, message: Message) -> Message:
        if isinstance(message, Ping):
            detail = {"loaded": self._work is not None, "backend": self._backend}
            if self._sender is not None:
                detail["broadcast"] = self._sender.shown()
            return Pong(pid=os.getpid(), kind="trainer", detail=detail)
        raise WireError(f"the trainer does not answer {type(message).__name__}")

    async def _step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        training = self._ground.training
        place = steps.path(training, order.scenario, order.part, order.line, order.step)
        if (place / steps.STATE).exists():  # its files are read, all of them, so not in the loop
            done = await asyncio.to_thread(steps.answered, training, order)
            if done is not None:
                self._announce(done)
                yield done
                return
        async with self._turn:
            loop = asyncio.get_running_loop()
            news: asyncio.Queue[Progress] = asyncio.Queue()
            gone = threading.Event()

            def report(stage: str, done: int, total: int) -> None:
                if gone.is_set():
                    raise _Stopped
                loop.call_soon_threadsafe(news.put_nowait, Progress(stage=stage, done=done, total=total))

            work = asyncio.ensure_future(asyncio.to_thread(self._advance, order, report))
            try:
                while not work.done():
                    wait = asyncio.ensure_future(news.get())
                    try:
                        await asyncio.wait((wait, work), return_when=asyncio.FIRST_COMPLETED)
                        if wait.done():
                            yield wait.result()
                    finally:
                        wait.cancel()  # also when the caller leaves while nothing is new
                made = await work
                self._announce(made)
                yield made
            finally:
                gone.set()
                while not work.done():  # the turn is over when the thread is, also for a caller that left, or twice
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait((work,))
                if not work.cancelled() and isinstance(work.exception(), _Stopped):
                    log.info("step %d of line %s was left unfinished: its caller went away", order.step, order.line)

    def _announce(self, done: Stepped) -> None:
        if self._sender is not None:
            self._sender.announce(Path(done.folder))

    def _advance(self, order: Step, report: Report) -> Stepped:
        """One step. Whatever goes wrong inside is TrainError, so that the batch is given up in the end; a full disk is
        StoreError, because another batch would meet it too."""
        try:
            if (done := steps.answered(self._ground.training, order)) is not None:
                return done
            if self._work is None:
                report("load", 0, 1)
                self._work = load(WORKS[self._backend], what="trainer")(self._ground, self._options)
            return self._work.advance(order, report)
        except (ReefError, _Stopped):
            raise
        except Exception as error:
            log.error("step %d of line %s failed", order.step, order.line, exc_info=error)
            if (no_room := full(error)) is not None:
                raise StoreError(f"a step cannot be written ({no_room.strerror}); {advice(no_room)}") from error
            raise TrainError(f"{type(error).__name__}: {error}") from error
        finally:
            _trim()


def _trim() -> None:
    """Hand freed memory back, of which the C library keeps what steps of other shapes left in pieces. Measured on 30
    small steps of random lengths: at the end 857 MB resident instead of 1324, and 587 with few kept kernels (`run`)."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _sending(wanted: Listening | None) -> Sender | None:
    """Engines read files where nothing can be sent, so a port that is taken stops no training."""
    if wanted is None:
        return None
    sender = Sender(wanted)
    try:
        sender.start()
    except WireError as error:
        log.error("%s", error.message)
        return None
    return sender


def run(
    listener: socket.socket,
    ground: Ground,
    backend: str = "local",
    options: Any = None,
    broadcast: Listening | None = None,
) -> None:
    """Serve until SIGTERM. A step in the making is left: its line's last finished step is what counts. `broadcast`:
    where engines may come for the weights of each step."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads would starve the engine
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # kernels by shape; of 1024 nearly none come again
    steps.sweep(ground.training)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        trainer = Server(ground, backend, options, _sending(broadcast))
        server = await rpc.serve(listener, trainer.answer)
        await stop.wait()
        server.close()
        trainer.close()

    asyncio.run(main())
