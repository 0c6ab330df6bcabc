"""A child process that compiles a form before the engine does: the library's work has no bound in time for every form.

Knows: how long a form may take, and that a child that is slow, too large or falls over is killed and replaced.
Does not know: requests. The child reads forms from its standard input, a JSON string a line, and answers each with why
it is refused, or "". It starts with the first form and ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from reef.core.errors import EngineError

START = 60.0  # seconds until the child has read the tokenizer
PATIENCE = 5.0  # seconds for a form
MEMORY = 2 << 30  # bytes of the child's address space
STACK = 2 << 20  # bytes; no more than any thread of the engine has, so that what fits here fits there
TOO_MUCH = "it takes too long or too much memory to compile; make it smaller"


class Proof:
    """The child, started when it is needed. `check` may be called from any thread, one at a time."""

    def __init__(self, folder: Path, patience: float | None = None) -> None:
        self._folder, self._patience = folder, PATIENCE if patience is None else patience
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, legal: str) -> str:
        """Why this form is refused; empty when it compiles. EngineError when no child can be started."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            answer = self._ask(self._child, legal)
            if answer is None:
                self._stop()
        return TOO_MUCH if answer is None else answer

    def close(self) -> None:
        """Also while a check is under way, which then refuses."""
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reef.engines.local.proof", str(self._folder)]
        # Threads of its libraries would each reserve a part of the memory it is allowed.
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=alone)
        if self._read(child, START) is None:
            child.kill()
            child.wait()
            raise EngineError("the process that checks forms of answers does not start; see the log")
        return child

    def _ask(self, child: subprocess.Popen[bytes], legal: str) -> str | None:
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(legal).encode() + b"\n")
            child.stdin.flush()
        except OSError:
            return None
        return self._read(child, self._patience)

    def _read(self, child: subprocess.Popen[bytes], patience: float) -> str | None:
        """A line of the child, which is short: it comes whole."""
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], patience)
        line = child.stdout.readline() if ready else b""
        return json.loads(line) if line else None

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(OSError):  # what was not read yet does not matter
                child.communicate()


def live(folder: Path) -> None:
    """The child's life."""
    from reef.engines.local.layout import read_layout
    from reef.engines.local.legal import make, read_tokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    layout = read_layout(folder)
    tokenizer = read_tokenizer(folder, layout.vocab, layout.ends)
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        signal.alarm(int(2 * PATIENCE) + 1)  # ends this process should nobody be left to kill it
        made = make(json.loads(line), tokenizer, layout.vocab, layout.ends)
        signal.alarm(0)
        print(json.dumps(made if isinstance(made, str) else ""), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the parent decides, and its end is ours
    threading.stack_size(STACK)
    threading.Thread(target=live, args=(Path(sys.argv[1]),)).start()
