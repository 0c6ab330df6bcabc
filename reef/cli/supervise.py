"""Keep a set of child processes alive, and stop them in order.

Knows: commands, inherited file descriptors, back-off, process groups, signals.
Does not know: what a role does, or HTTP.

- A dead child is started again after a growing pause, for ever; one that lived ten seconds starts again at once.
- A role with `wakes` is started when a connection is pending on that socket, and not before.
- Children die with this process, however it ends: they watch a pipe that only it holds open, and on Linux the kernel
  kills them (see `process.py`). Their grandchildren share their process group, which is killed before it is reaped, so
  no signal ever goes to a reused id.
- Stopping goes by `phase`: gateways finish what they have while the engine still runs. A second signal kills at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reef.cli.logs import Log

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
FIRST_PAUSE, LONGEST_PAUSE, SETTLED = 0.1, 5.0, 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Role:
    """One child to keep alive. `fds` go to it as REEF_FD_<NAME>; `wakes` starts it; `phase` 0 stops first."""

    name: str
    command: Sequence[str]
    fds: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    wakes: socket.socket | None = None
    phase: int = 0
    grace: float = 10.0  # seconds from SIGTERM to SIGKILL
    once: bool = False  # runs when kicked (and at the start), until it ends well


@dataclass(slots=True)
class Child:
    role: Role
    log: Log
    process: subprocess.Popen[bytes] | None = None
    incarnation: str = ""
    began: float = 0.0
    due: float = 0.0  # when to start it next
    fails: int = 0
    starts: int = 0
    asked: float | None = None  # when it was asked to stop
    wanted: bool = True  # for a `once` role: it has work to do


class Supervisor:
    """`run` keeps the roles alive until SIGTERM or SIGINT, then stops them in order and returns.

    `died(role name, incarnation)` is called after each death that was not asked for, `stopping()` once, when the first
    roles have been told to stop. `run_id` begins every incarnation.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        logs: Path,
        *,
        run_id: str,
        keep: Sequence[int] = (),
        secrets: Sequence[str] = (),
        size: int = 2 * 1024 * 1024,
        died: Callable[[str, str], None] = lambda role, incarnation: None,
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self.children = [Child(role, Log(logs, role.name, secrets=secrets, size=size)) for role in roles]
        self.held: list[object] = []  # open files that the children inherit
        self._run_id = run_id
        self._keep = tuple(keep)  # descriptors every child inherits (the lock)
        self._died = died
        self._told = stopping
        self._count = 0
        self._stopping = 0  # how many signals came
        self._phase = -1  # roles of this phase and below are being stopped
        self._life_read, self._life_write = os.pipe()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def run(self) -> None:
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        signal.set_wakeup_fd(self._ring.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if before[number] is not signal.SIG_IGN:  # `nohup reef serve &` outlives its terminal
                signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while not self._ended():
                self._reap()
                self._start_due()
                self._stop_phase()
                self._wait()
        finally:
            for child in self.children:
                self._kill(child)
                if child.process is not None:
                    child.process.wait()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in (self._life_read, self._life_write):
                os.close(fd)
            self._bell.close()
            self._ring.close()

    def stop(self) -> None:
        """Begin to stop; a second call kills. Safe in a signal handler and from another thread."""
        self._stopping += 1
        with contextlib.suppress(OSError):
            self._ring.send(b"s")

    def kick(self, name: str) -> None:
        """Run the `once` role of this name (again)."""
        for child in self.children:
            if child.role.name == name:
                child.wanted = True

    # --- one turn of the loop -----------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return bool(self._stopping) and all(child.process is None for child in self.children)

    def _reap(self) -> None:
        for child in self.children:
            if child.process is None:
                continue
            if os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)  # what it started, while its id is still taken
            code = child.process.wait()
            child.process = None
            if child.asked is not None or (child.role.once and code == 0):
                continue
            child.wanted = True
            now = time.monotonic()
            child.fails = 0 if now - child.began >= SETTLED else child.fails + 1
            pause = 0.0 if child.fails == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (child.fails - 1))
            child.due = now + pause
            log.warning(
                "%s %s; starting it again%s", child.role.name, _ending(code), f" in {pause:.1f} s" if pause else ""
            )
            self._died(child.role.name, child.incarnation)

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self.children:
            due = self._startable(child) and child.due <= now
            if due and (child.role.wakes is None or _pending(child.role.wakes)):
                child.wanted = False
                self._start(child)

    def _startable(self, child: Child) -> bool:
        """Whether it is down and should be up, sooner or later. When stopping, only what others still lean on."""
        if child.process is not None or (child.role.once and not child.wanted):
            return False
        return not self._stopping or (child.role.phase > max(self._phase, 0) and not child.role.once)

    def _start(self, child: Child) -> None:
        role = child.role
        self._count += 1
        child.incarnation = f"{self._run_id}{self._count:04x}"
        fds = {**role.fds, "LIFE": self._life_read}
        environment = {**os.environ, **role.environment, "REEF_INCARNATION": child.incarnation}
        environment |= {f"REEF_FD_{name}": str(fd) for name, fd in fds.items()} | {"REEF_PARENT": str(os.getpid())}
        if child.starts:
            environment.pop("REEF_FAILPOINT", None)  # a failpoint kills once, not every incarnation
        try:
            process = subprocess.Popen(
                role.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=sorted({*fds.values(), *self._keep}),
                process_group=0,
            )
        except OSError as error:  # no memory or no process slots now; try again like any other death
            child.fails += 1
            child.due = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2**child.fails)
            log.warning("%s cannot be started (%s)", role.name, error.strerror or error)
            return
        child.process, child.began, child.asked = process, time.monotonic(), None
        child.starts += 1
        assert process.stdout is not None
        child.log.drain(process.stdout)

    def _stop_phase(self) -> None:
        """When stopping: ask the present phase to end, kill what took too long, move on when it is gone."""
        if not self._stopping:
            return
        now = time.monotonic()
        phases = sorted({child.role.phase for child in self.children if child.process is not None})
        if not phases:
            return
        self._phase = max(self._phase, phases[0])
        for child in self.children:
            if child.process is None or (child.role.phase > self._phase and self._stopping < 2):
                continue
            if child.asked is None:
                child.asked = now
                child.process.terminate()
            if self._stopping >= 2 or now - child.asked > child.role.grace:
                self._kill(child)
        told, self._told = self._told, lambda: None
        told()

    def _kill(self, child: Child) -> None:
        """Only for a child that was not reaped yet, so its process group is still its own."""
        if child.process is not None and child.process.returncode is None:
            child.asked = child.asked or time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        """Until a signal, a child's end, a connection for a sleeping role, or the next time something is due."""
        now = time.monotonic()
        waits = [5.0]
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for child in self.children:
                if child.process is not None:
                    if child.asked is not None:
                        waits.append(child.asked + child.role.grace - now + 0.05)
                elif self._startable(child):
                    if child.due > now:
                        waits.append(child.due - now)
                    elif child.role.wakes is not None:
                        selector.register(child.role.wakes, selectors.EVENT_READ)
            if not self._ended():
                selector.select(max(0.0, min(waits)))
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass


def _pending(listener: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        return bool(selector.select(0))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
