"""What the children say: into `state_dir/logs/<role>.log` as JSON lines, warnings and crashes also to the terminal.

Knows: lines, levels, which words are secret. Does not know: what a line means.

Children write to a pipe that the supervisor reads, so a crash in C or a traceback is kept like any log line, files
rotate in one place, and a secret is struck out before it reaches a disk. A child's own lines are JSON already; whatever
else comes (a crash, a library that prints) is kept as a line without a level.

A line has time, level, process and message; from `logging`'s `extra` also receipt, scenario, route, status and seconds;
and `trace` where an exception was logged. The terminal gets the same as words.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

EXTRA = ("receipt", "scenario", "route", "status", "seconds")
"""What a line may tell beside its message, given as `log.info(…, extra={"receipt": …})`."""

_LOUD = ("WARNING", "ERROR", "CRITICAL")
_STRUCK = "***"
_SECRET = re.compile(r"\b(?:reef_|rf_|sk-|Bearer )[A-Za-z0-9_.~+/=-]{16,}")
"""What looks like a token or a provider's key, whosever it is."""


class _Patient(logging.handlers.RotatingFileHandler):
    """A full disk must not stop the supervisor; the terminal has the warnings."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Log:
    """The log file of one role over all its incarnations. `size` is bytes; two files are kept."""

    def __init__(self, folder: Path, role: str, *, secrets: Iterable[str] = (), size: int = 2 * 1024 * 1024) -> None:
        self._role = role
        self._secrets = sorted({word for word in secrets if len(word) >= 4}, key=len, reverse=True)
        self._file = _Patient(folder / f"{role}.log", maxBytes=size, backupCount=1, encoding="utf-8", delay=True)
        self._echo = True  # the last line that had a level was shown: what follows it (a crash) is shown too

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
        said = _parsed(text)
        if said is None:
            kept: dict[str, Any] = {"time": _time(time.time()), "level": None, "process": self._role, "message": text}
        else:
            self._echo = said["level"] in _LOUD
            kept = {"time": said["time"], "level": said["level"], "process": self._role} | said
        kept = {key: self._strike(value) for key, value in kept.items()}
        if self._echo:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone; a child must not block on its pipe
                print(f"[{self._role}] {_words(kept)}", file=sys.stderr, flush=True)
        line = json.dumps(kept, ensure_ascii=False)
        self._file.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))

    def _strike(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for word in self._secrets:
            value = value.replace(word, _STRUCK)
        return _SECRET.sub(_STRUCK, value)


class Lines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in EXTRA:
            if (value := getattr(record, name, None)) is not None:
                said[name] = value
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def configure(level: str) -> None:
    """Logging of a child process: to stderr, which the supervisor reads."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Lines())
    for noisy in ("asyncio", "httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _parsed(text: str) -> dict[str, Any] | None:
    """A line of ours, or None."""
    if not text.startswith('{"time": '):
        return None
    try:
        said = json.loads(text)
    except ValueError:
        return None
    return said if all(isinstance(said.get(name), str) for name in ("time", "level", "message")) else None


def _words(kept: Mapping[str, Any]) -> str:
    """A line for people."""
    if kept["level"] is None:
        return str(kept["message"])
    words = f"{kept['time'][11:19]} {kept['level']} {kept.get('logger', 'reef')}: {kept['message']}"
    told = " ".join(f"{name}={kept[name]}" for name in EXTRA if name in kept)
    return words + (f" ({told})" if told else "") + (f"\n{kept['trace']}" if "trace" in kept else "")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
