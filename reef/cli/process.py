"""The entry of every child process: `python -m reef.cli.process ROLE`.

Knows: how to die with the supervisor, where the boot document is, logging. Does not know: what a role does.

- On Linux the kernel kills this process when the supervisor dies; everywhere, a pipe that only the supervisor holds
  open ends then. Both are set before anything heavy is imported.
- Nothing secret is in the arguments or the environment: settings come through an inherited, unlinked file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Boot:
    """What a child is told: settings as JSON, the folder of the sockets, the model, the address."""

    settings: dict[str, Any]
    run: Path
    address: str
    model: dict[str, str] | None  # path, name, digest; None: the engine brings its own

    def encode(self) -> bytes:
        return json.dumps(
            {"settings": self.settings, "run": str(self.run), "address": self.address, "model": self.model}
        ).encode()

    @staticmethod
    def decode(data: bytes) -> Boot:
        found = json.loads(data)
        return Boot(found["settings"], Path(found["run"]), found["address"], found["model"])


def command(role: str, *more: str) -> list[str]:
    """The command line of a child. `-P` keeps the caller's folder from shadowing the standard library."""
    return [sys.executable, "-P", "-m", "reef.cli.process", role, *more]


def environment() -> dict[str, str]:
    """What a child needs to find this very package, when it is not an installed one."""
    root = str(Path(__file__).resolve().parents[2])
    if Path(root).name in ("site-packages", "dist-packages"):
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": root + (os.pathsep + before if before else "")}


def own_folder() -> None:
    """Recipes and objectives of the caller's own are found in its folder, by every process alike: the last place that
    is looked in, so that nothing there hides another module."""
    with contextlib.suppress(OSError):  # the folder was removed meanwhile
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def fd(name: str) -> int:
    """A descriptor that the supervisor handed down."""
    return int(os.environ[f"REEF_FD_{name}"])


def owner(role: str) -> str:
    """This incarnation's name in the records it opens: <role>-<pid>-<incarnation>."""
    return f"{role}-{os.getpid()}-{os.environ['REEF_INCARNATION']}"


def read_boot() -> Boot:
    size = os.fstat(fd("BOOT")).st_size
    return Boot.decode(os.pread(fd("BOOT"), size, 0))


def _let_kernel_kill() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def die_with_parent() -> None:
    """End with the supervisor, however it ends."""
    _let_kernel_kill()
    life = fd("LIFE")
    if os.getppid() != int(os.environ["REEF_PARENT"]):
        os._exit(1)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(life, 1)  # nobody ever writes: this returns when the supervisor is gone
        os._exit(1)

    threading.Thread(target=watch, name="life", daemon=True).start()


def yield_to_others(nice: int) -> None:
    """Learning waits for serving: a low priority, and the first to go when memory runs out."""
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _prepare() -> int:
    """Boot document in on stdin, the model (or an error) out on stdout; progress goes to stderr."""
    from reef.cli import assemble
    from reef.core.errors import InputError, ReefError

    _let_kernel_kill()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word; the supervisor says enough
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not spoil the answer
    try:
        model = assemble.prepare(Boot.decode(sys.stdin.buffer.read()))
        found: dict[str, Any] = {"model": model}
    except ReefError as error:
        found = {"error": error.message, "config": isinstance(error, InputError)}
    with answer:
        json.dump(found, answer)
    return 0


def main() -> None:
    role = sys.argv[1]
    own_folder()
    if role == "prepare":
        raise SystemExit(_prepare())
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    boot = read_boot()
    if role == "trainer":  # before anything is loaded
        yield_to_others(boot.settings["training"]["nice"])
    from reef.cli import assemble, logs
    from reef.core.errors import ReefError

    logs.configure(boot.settings["observability"]["log"])
    roles = {
        "gateway": assemble.gateway,
        "engine": assemble.engine,
        "learner": assemble.learner,
        "trainer": assemble.trainer,
        "recover": assemble.recover,
    }
    try:
        roles[role](boot)
    except ReefError as error:
        logging.getLogger("reef").error("%s ended: %s", role, error.message)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
