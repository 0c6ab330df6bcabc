"""The scorer `tests`: unit tests of an answer's code, in a bubblewrap sandbox.

Knows: what a sandboxed Python sees (itself, an empty /tmp, no network), its limits, and how it is ended.
Does not know: what runs in it (`runner`), or whose answer it is.

- What the answer's code does wrong (a crash, an endless loop, too much of anything) is its score: 0. A sandbox that
  does not come up says nothing of the answer: not judged.
- Started by root, it gets a user of its own, or the limit of processes would not hold; else a user namespace.
- A sandbox keeps the machine safe, not the score honest: code that shares a process with its tests can deceive them,
  for example by objects that equal everything.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reef.core.errors import ReefError
from reef.evaluation import Score, Scorer, Task
from reef.evaluation.scorers import Reach, digest, fenced
from reef.harness import room
from reef.harness.room import program

START = 20.0  # seconds a sandbox may take to come up; it takes hundredths on an idle machine
OUTPUT = 64 * 1024  # bytes of report; the code's own output goes nowhere
DISK = 16 * 1024 * 1024  # bytes of /tmp, which is memory
OPEN = 64  # files open at once, in each process
RUNNER = Path(__file__).with_name("runner.py")
_ROOM = "/tmp"  # noqa: S108 - the sandbox's own
_PYTHON = ("", "python", "python3", "py")
_pool = ThreadPoolExecutor(2, thread_name_prefix="reef-sandbox")


@dataclass(frozen=True, slots=True)
class Tests:
    """The answer's longest Python block (or all of it, without one) passes the tests `answer`.

    `answer` is Python: functions `test_…` without arguments, each of which is a test; without any, the whole of it is
    one test. It has the names of the answer's code, which is also the module `answer`. The score is the share of tests
    that pass; with `share: false` 1 when all do, else 0. `memory` is in MiB, of each of at most so many `processes`.
    """

    answer: str
    seconds: float = 10.0
    memory: int = 256
    processes: int = 8
    share: bool = True

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise ValueError("answer is empty; it is the Python code of the tests")
        if not (0 < self.seconds <= 600 and 32 <= self.memory <= 65536 and 1 <= self.processes <= 256):
            raise ValueError("seconds is at most 600, memory from 32 to 65536 (MiB), processes from 1 to 256")
        names(self.answer)

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        bubblewrap()
        return Sandbox(name, digest(key, sys.version_info[:2]), self)


class Sandbox:
    """Runs an answer's code with the tests, and counts."""

    def __init__(self, name: str, key: str, tests: Tests) -> None:
        self.name, self.key, self._tests = name, key, tests
        self._names = names(tests.answer)

    async def score(self, task: Task, text: str) -> Score:
        return await asyncio.get_running_loop().run_in_executor(_pool, self._score, text)

    def _score(self, text: str) -> Score:
        tests = self._tests
        limits = {
            "cpu": int(tests.seconds) + 1,
            "memory": tests.memory * 1024 * 1024,
            "file": DISK,
            "processes": tests.processes,
            "open": OPEN,
        }
        ran = run(code(text), tests.answer, self._names, limits, tests.seconds)
        if ran.trouble is not None:
            return Score(None, f"the sandbox cannot start: {ran.trouble}")
        if ran.fault is not None:
            return Score(0.0, ran.fault)
        wanted = self._names or ("",)
        passed = sum(each in ran.passed for each in wanted)
        note = ran.failed[0] if ran.failed else ""
        return Score(passed / len(wanted) if tests.share else float(passed == len(wanted)), note)


@dataclass(frozen=True, slots=True)
class Ran:
    """What came out. `trouble`: the sandbox did not come up; `fault`: the code was ended or ended itself."""

    passed: frozenset[str] = frozenset()
    failed: tuple[str, ...] = ()  # test: error
    fault: str | None = None
    trouble: str | None = None
    output: str = ""  # what the code printed, where that was asked for: the end of it


def printed(code: str, *, seconds: float = 10.0, memory: int = 256, room: int = 16 * 1024) -> tuple[str, str | None]:
    """(what a program printed, the last `room` characters; why it did not end well, or None). `memory` is in MiB.
    ReefError when the sandbox cannot start: that says nothing of the program."""
    bubblewrap()
    limits = {"cpu": int(seconds) + 1, "memory": memory * 1024 * 1024, "file": DISK, "processes": 8, "open": OPEN}
    ran = run(code, "", (), limits, seconds, output=room)
    if ran.trouble is not None:
        raise ReefError(f"the sandbox cannot start: {ran.trouble}")
    failed = [note for note in ran.failed if note not in ("SystemExit: ", "SystemExit: 0", "SystemExit: None")]
    return ran.output, ran.fault or (failed[0] if failed else None)


def run(
    code: str, tests: str, wanted: tuple[str, ...], limits: Mapping[str, int], seconds: float, *, output: int = 0
) -> Ran:
    """Run code and tests in a sandbox of their own. Blocks for at most START + `seconds`. `output`: how many characters
    of what the code prints are wanted; 0: it goes nowhere."""
    root = os.geteuid() == 0
    token = secrets.token_hex(16)
    user = 200_000_000 + secrets.randbelow(2**28) if root else None  # nobody else's, so its processes are counted alone
    asked = {"code": code, "tests": tests, "names": wanted, "limits": dict(limits), "token": token, "user": user}
    asked |= {"output": output} if output else {}
    try:
        with tempfile.TemporaryFile() as told:  # a pipe would be waited for, and a sandbox that hangs never reads
            told.write(json.dumps(asked).encode())
            told.seek(0)
            child = subprocess.Popen(
                command(root),
                stdin=told,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        return Ran(trouble=f"{error}")
    with child:
        try:
            return _follow(child, token, seconds)
        finally:
            if child.returncode is None:  # its first process dies with it, and all others with that one
                os.killpg(child.pid, signal.SIGKILL)


def _follow(child: subprocess.Popen[bytes], token: str, seconds: float) -> Ran:
    """Read the report until it ends, or until time or room runs out."""
    assert child.stdout is not None
    assert child.stderr is not None
    deadline, said, read = time.monotonic() + START, b"", 0
    passed, failed, started, output = set(), list[str](), False, ""
    while True:
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(child.stdout.fileno(), OUTPUT) if ready else b""
        if not data:
            break
        read += len(data)
        said += data
        *lines, said = said.split(b"\n")
        for line in lines:
            word, name, note = _words(line, token)
            if word == "start" and not started:
                started, deadline = True, time.monotonic() + seconds
            elif word == "passed":
                passed.add(name)
            elif word == "failed":
                failed.append(f"{name}: {note}" if name else note)
            elif word == "output":
                output = note
            elif word == "end":
                return Ran(frozenset(passed), tuple(failed), output=output)
        if read > OUTPUT:
            return Ran(fault=f"the code wrote more than {OUTPUT} bytes of report")
    if started:
        late = time.monotonic() >= deadline
        return Ran(
            fault=f"not done within {seconds:g} s" if late else "the code ended its process before the tests did"
        )
    if not ready:
        return Ran(trouble=f"it was not up within {START:g} s")
    child.wait()
    why = child.stderr.read(4096).decode("utf-8", "replace").strip().splitlines()
    return Ran(trouble=why[-1] if why else f"bubblewrap ended with {child.returncode}")


def _words(line: bytes, token: str) -> tuple[str, str, str]:
    """Word, test and note of a line of the report; empty ones when it is none of the runner's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said) or said[:1] != [token]:
        return "", "", ""
    word, name, note = (*said[1:], "", "", "")[:3]
    return word, name, note


def command(root: bool) -> list[str]:
    """The sandbox's command line: Python and the system's libraries to read, /tmp to write, and nothing else there."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    line = [bubblewrap(), "--die-with-parent", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]
    line += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    for name in ("/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            line += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            line += ["--ro-bind", name, name]
    read = ["/usr/lib", "/usr/lib64", "/usr/lib32", f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    paths = [path for path in dict.fromkeys([*read, python, "/etc/ld.so.cache"]) if os.path.exists(path)]
    above = {str(folder) for path in paths for folder in Path(path).parents if folder != Path("/")}
    for folder in sorted(above):  # made by themselves, they would be readable for root alone
        line += ["--perms", "0755", "--dir", folder]
    for path in paths:
        line += ["--ro-bind", path, path]
    line += ["--dev", "/dev", "--remount-ro", "/dev", "--perms", "1777", "--size", str(DISK), "--tmpfs", _ROOM]
    line += ["--remount-ro", "/", "--chdir", _ROOM]
    return [*line, python, "-I", "-S", "-B", "-c", program(RUNNER)]


def bubblewrap() -> str:
    """The path of bwrap. ConfigError says what to install."""
    return room.bubblewrap("the scorer tests")


def code(text: str) -> str:
    """The Python of an answer: its longest Python block, or all of it when there is none."""
    blocks = [inside for word, inside in fenced(text) if word.split(" ")[0] in _PYTHON]
    return max(blocks, key=len) if blocks else text


def names(tests: str) -> tuple[str, ...]:
    """The test functions of a test's code, in order. ValueError when it is not Python, or one cannot be called."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"answer is not Python: {error}") from None
    found = [node for node in tree.body if getattr(node, "name", "").startswith("test")]
    for node in found:
        if not isinstance(node, ast.FunctionDef) or node.args.args or node.args.posonlyargs or node.args.kwonlyargs:
            raise ValueError(f"answer: {getattr(node, 'name', '')} is not a plain function without arguments")
    return tuple(dict.fromkeys(getattr(node, "name", "") for node in found))
