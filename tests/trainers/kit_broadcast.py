"""Engines and trainers that only broadcast, in real processes. Forked from one that has loaded torch, so that each
starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reef.core.disk import sha256
from reef.core.failpoint import arm

Files = dict[str, tuple[Path, str, int]]
LOADED = ["reef.engines.local.broadcast.receive", "reef.trainers.broadcast"]


def engine(pipe: Connection, place: Path, limit: int, failpoint: str) -> None:
    """Receives, and answers what it is asked: None for its counts, else whether it has these files."""
    from reef.engines.local.broadcast.arrivals import Arrivals
    from reef.engines.local.broadcast.receive import Receiver

    _arm(failpoint)
    made = Receiver(place, Arrivals(limit), pause=0.05)
    made.start()
    pipe.send("started")
    while True:
        wanted = pipe.recv()
        if wanted is None:
            pipe.send(made.shown())
            continue
        with made.arrivals.take(wanted) as held:
            pipe.send(held and {name: hashlib.sha256(one.read_bytes()).hexdigest() for name, one in held.items()})


def trainer(pipe: Connection, place: Path, port: int, failpoint: str) -> None:
    """Sends each file it is given to the first engine that comes, and answers how many got it."""
    from reef.trainers.broadcast import Listening, Sender

    _arm(failpoint)
    made = Sender(Listening(place, "127.0.0.1", port))
    made.start()
    pipe.send("started")
    while True:
        path = pipe.recv()
        made.receivers(1, 20.0)
        pipe.send(len(made.send({path.name: (path, sha256(path), path.stat().st_size)}).got))


def _arm(failpoint: str) -> None:
    if failpoint:
        arm(failpoint)


class Child:
    """One of them."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self.line(60) == "started"

    def say(self, value: Any) -> None:
        self._pipe.send(value)

    def line(self, seconds: float = 30.0) -> Any:
        assert self._pipe.poll(seconds), "the process says nothing"
        return self._pipe.recv()

    def takes(self, files: Files) -> bool:
        """Whether an engine has these files from an arrival; their bytes are compared."""
        self.say({name: (digest, size) for name, (_, digest, size) in files.items()})
        found = self.line()
        assert found is None or found == {name: digest for name, (_, digest, _) in files.items()}
        return found is not None

    def shown(self) -> dict[str, Any]:
        self.say(None)
        found = self.line()
        assert isinstance(found, dict)
        return found

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> int | None:
        """How it ended; waits for it."""
        self.process.join(30)
        return self.process.exitcode

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(30)
        self._pipe.close()
