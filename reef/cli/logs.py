"""What the children say: into `state_dir/logs/<role>.log`, warnings and crashes also to the terminal.

Knows: lines, levels, which words are secret. Does not know: what a line means.

Children write to a pipe that the supervisor reads, so a crash in C or a traceback is kept like any log line, files
rotate in one place, and a secret is struck out before it reaches a disk.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVEL = re.compile(r"^\d{4}-\d\d-\d\d \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class _Patient(logging.handlers.RotatingFileHandler):
    """A full disk must not stop the supervisor; the terminal has the warnings."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Log:
    """The log file of one role over all its incarnations. `size` is bytes; two files are kept."""

    def __init__(self, folder: Path, role: str, *, secrets: Iterable[str] = (), size: int = 2 * 1024 * 1024) -> None:
        self._role = role
        self._secrets = [word for word in secrets if len(word) >= 4]
        self._file = _Patient(folder / f"{role}.log", maxBytes=size, backupCount=1, encoding="utf-8", delay=True)
        self._echo = True  # the last line that had a level was shown: what follows it (a traceback) is shown too

    def drain(self, pipe: IO[bytes]) -> threading.Thread:
        """Read a child's output to its end, in a thread."""
        thread = threading.Thread(target=self._drain, args=(pipe,), name=f"log-{self._role}", daemon=True)
        thread.start()
        return thread

    def _drain(self, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                self.line(raw.decode("utf-8", "replace").rstrip("\n"))

    def line(self, text: str) -> None:
        for word in self._secrets:
            text = text.replace(word, "***")
        level = _LEVEL.match(text)
        if level is not None:
            self._echo = level.group(1) in ("WARNING", "ERROR", "CRITICAL")
        if self._echo:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone; a child must not block on its pipe
                print(f"[{self._role}] {text}", file=sys.stderr, flush=True)
        self._file.emit(logging.makeLogRecord({"msg": "%s", "args": (text,)}))


def configure(level: str) -> None:
    """Logging of a child process: to stderr, which the supervisor reads."""
    logging.basicConfig(level=level.upper(), format=FORMAT, stream=sys.stderr, force=True)
    for noisy in ("asyncio", "httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
