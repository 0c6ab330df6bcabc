"""A child process for what can take for ever on a text that somebody else wrote: patterns, and schemas with patterns.

Knows: one question and one answer at a time, JSON lines over pipes, and an alarm that ends the child mid-question.
Does not know: what the answer is worth.

Python's pattern matcher holds the interpreter's lock until it is done and cannot be stopped from a thread: `(a+)+$` on
thirty letters is a minute. The default action of SIGPROF ends a process wherever it is, so the child asks for one; it
counts the child's own time, so that a busy machine ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the child runs this file alone
    from reef.core.nouns import Json

LIMIT = 1.0  # seconds of computing for one question


class Unsettled(Exception):
    """The child could not say; the message tells why."""


class Worker:
    """Starts the child at the first question and again after one that was ended. Safe to call from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, question: Json) -> Json:
        """The child's answer. Unsettled when it did not come to one."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            stdin, stdout = self._child.stdin, self._child.stdout
            assert stdin is not None
            assert stdout is not None
            try:
                stdin.write(line)
                stdin.flush()
                said = stdout.readline()
            except BrokenPipeError:
                said = b""
            if not said.endswith(b"\n"):
                for pipe in (stdin, stdout):
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass
                self._child.wait()
                self._child = None
                raise Unsettled(f"the pattern or schema took more than {LIMIT:g} s on this answer; make it simpler")
        found = json.loads(said)
        if isinstance(found, str):
            raise Unsettled(found)
        return found


_worker = Worker()
_thread = ThreadPoolExecutor(1, thread_name_prefix="reef-match")


async def match(kind: Literal["regex", "schema"], rule: Json, subject: Json) -> bool:
    """Whether any pattern of a list is found in a text, or a JSON value fits a schema. Unsettled: not known."""
    return bool(await asyncio.get_running_loop().run_in_executor(_thread, _worker.ask, [kind, rule, subject]))


def serve() -> None:
    """The child: answers until its input ends, and is ended by a question that takes too long."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the end of input follows
    for line in sys.stdin.buffer:
        kind, rule, subject = json.loads(line)
        check = _regex if kind == "regex" else _schema(rule)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        try:
            found: bool | str = check(rule, subject)
        except Exception as error:  # the rule's fault, such as a `$ref` that leads nowhere
            found = f"the pattern or schema cannot be used: {type(error).__name__}: {str(error)[:200]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def _regex(patterns: list[str], text: str) -> bool:
    import re

    return any(re.search(pattern, text) is not None for pattern in patterns)


def _schema(rule: Any) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    # An empty registry: a `$ref` to an address is an error here, never a request.
    validator = validator_for(rule)(rule, registry=Registry())
    return lambda _, value: validator.is_valid(value)


if __name__ == "__main__":
    serve()
