"""The receiving side of an engine process: one thread that finds the trainer, stays in touch and takes what it sends.

Knows: the file that says where the trainer listens, one connection to it, process groups, arrivals.
Does not know: releases, the model, or whether anybody will ever want what arrived.

- The thread steps back for the model's (a higher nice value on Linux, also for the threads of the process group), and
  waits without holding Python's lock.
- Everything that goes wrong ends one arrival, never the thread: the connection is dialled again until `close`.
- Of two senders the one that is connected is heard; the other one when its file is the one that is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from reef.core.errors import WireError
from reef.core.failpoint import failpoint
from reef.engines.local.broadcast import group, talk
from reef.engines.local.broadcast.arrivals import Arrivals, Space
from reef.engines.local.broadcast.held import Digests

PAUSE = 0.5  # seconds between looks for a trainer
REST = 5.0  # seconds between calls at a door where nobody, or somebody else, was
NICE = 10
LEAVING = 12.0  # seconds in which a transfer under way ends: its own patience, and a little
log = logging.getLogger(__name__)


class Receiver:
    """`start`, then `close`. What it takes is in `arrivals`."""

    def __init__(self, place: Path, arrivals: Arrivals, *, pause: float = PAUSE) -> None:
        self._place, self._pause, self.arrivals = place, pause, arrivals
        self._stop = threading.Event()
        self._link: talk.Link | None = None
        self._told: str | None = None
        self._tried: tuple[talk.Where, float] | None = None  # in vain, and when
        self._last: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._live, name="receive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """A transfer under way is left at its next chunk, and waited for: a process that ends inside of one aborts."""
        self._stop.set()
        if (link := self._link) is not None:
            link.close()
        if self._thread.is_alive():
            self._thread.join(LEAVING)

    def shown(self) -> dict[str, Any]:
        return {"connected": self._link is not None, "last": self._last, **self.arrivals.shown()}

    def _live(self) -> None:
        step_back()
        while not self._stop.is_set():
            try:
                where = talk.find(self._place)
                if where is not None and self._worth(where):
                    self._tried = (where, time.monotonic())
                    self._link = talk.dial(where)
                    self._told = self._tried = None
                    if not self._stop.is_set():
                        self._listen(self._link)
            except WireError as error:
                if error.message != self._told:  # once, not at every look
                    self._told = error.message
                    log.info("no weights by broadcast: %s", error.message)
            except Exception as error:
                log.error("receiving weights failed; files are read instead", exc_info=error)
            finally:
                link, self._link = self._link, None
                if link is not None:
                    link.close()
            self._stop.wait(self._pause)

    def _worth(self, where: talk.Where) -> bool:
        return self._tried is None or self._tried[0] != where or time.monotonic() - self._tried[1] >= REST

    def _listen(self, link: talk.Link) -> None:
        """Until the connection ends. At most one offer is in hand; another one takes its place."""
        log.info("the trainer at %s:%d broadcasts weights to this engine", link.peer, link.port)
        generation, space = "", None
        try:
            while (word := link.receive()) is not None:
                if isinstance(word, talk.Offer):
                    self._drop(space)
                    generation, space = word.generation, self._accept(link, word)
                elif isinstance(word, talk.Begin) and word.generation == generation and space is not None:
                    if self._take(link, word, space):
                        space = None
                elif isinstance(word, talk.Over) and word.generation == generation:
                    self._drop(space)
                    space = None
        finally:
            self._drop(space)

    def _accept(self, link: talk.Link, offer: talk.Offer) -> Space | None:
        mine = self.arrivals.device.type
        if offer.device != mine:
            found: Space | str = f"it comes from {offer.device} buffers, and this engine has {mine}"
        else:
            found = self.arrivals.offer(offer.files)
        if isinstance(found, str):
            log.info("weights are not taken from the trainer: %s", found)
            link.send(talk.Refused(generation=offer.generation, why=found))
            return None
        link.send(talk.Ready(generation=offer.generation))
        return found

    def _take(self, link: talk.Link, begin: talk.Begin, space: Space) -> bool:
        """One try. True when the arrival is there; else the sender may begin again."""
        began = time.perf_counter()
        failpoint("broadcast.receive")
        try:
            digests = self._carry(link, begin, space)
            wrong = digests.wrong()
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            wrong, digests = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None
        seconds = time.perf_counter() - began
        if wrong is not None or digests is None:
            log.warning("weights did not arrive: %s", wrong)
            link.send(talk.Lost(generation=begin.generation, prefix=begin.prefix, why=wrong or ""))
            return False
        self.arrivals.keep(space)
        self._last = {
            "files": {file.name: file.sha256[:12] for file in space.files},
            "bytes": space.flat.numel(),
            "seconds": round(seconds, 4),
            "verify": round(digests.seconds, 4),
        }
        link.send(talk.Got(generation=begin.generation, prefix=begin.prefix, seconds=seconds, verify=digests.seconds))
        return True

    def _carry(self, link: talk.Link, begin: talk.Begin, space: Space) -> Digests:
        if not (0 < begin.rank < begin.world and 0 < begin.chunk <= 1 << 30 and 0 < begin.patience <= 600):
            raise ValueError("the sender's beginning makes no sense")
        seat = group.Seat(
            link.peer, begin.port, begin.prefix, begin.rank, begin.world, link.own, begin.patience, begin.chunk
        )
        digests = Digests(space.files, space.flat)

        def done(start: int, stop: int) -> None:
            failpoint("broadcast.received")
            digests.take(start, stop)
            if self._stop.is_set():
                raise RuntimeError("this engine stops")

        with group.group(seat, self.arrivals.device) as made:
            group.carry(made, seat, space.flat, done)
        return digests

    def _drop(self, space: Space | None) -> None:
        if space is not None:
            self.arrivals.drop(space)


def step_back(nice: int = NICE) -> None:
    """This thread, and those that it starts, wait for the others of the process. Only Linux has nice threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
