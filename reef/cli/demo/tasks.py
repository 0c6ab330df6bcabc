"""The tasks of the demos: small files, and two house rules that nobody has told the model.

Knows: what each task asks for, the check that knows the house rules, and the gate's own tasks, which are others.
Does not know: who works on them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

RULES: Final = (
    ('every Python file must begin with the line "# Licence: MIT"', "# Licence: MIT", ""),
    ('every changelog entry must end with the line "Reviewed: docs team"', "", "Reviewed: docs team"),
)
"""What a check says of a file that is not so, and the first or last line it wants."""
CHECK: Final = '''\
"""Exit 0 when a file is as the house rules want it; else say what is wrong."""
import pathlib, sys
path = pathlib.Path(sys.argv[1])
if not path.exists():
    sys.exit(f"{path} is missing")
text = path.read_text()
lines = text.splitlines()
if path.suffix == ".py" and (not lines or lines[0] != "# Licence: MIT"):
    sys.exit(f'{path}: every Python file must begin with the line "# Licence: MIT"')
if path.suffix == ".md" and (not lines or lines[-1] != "Reviewed: docs team"):
    sys.exit(f'{path}: every changelog entry must end with the line "Reviewed: docs team"')
if path.suffix == ".py":
    exec(compile(text, str(path), "exec"), {})
'''


@dataclass(frozen=True, slots=True)
class Task:
    """`path` is the file it asks for."""

    path: str
    prompt: str

    @property
    def check(self) -> str:
        """The command of which exit code 0 is a pass; CHECK is in check.py."""
        return f"python3 check.py {self.path}"

    @property
    def right(self) -> str:
        """A pattern of an answer that is as the house rules want it, for an application without files."""
        first, last = r"\A# Licence: MIT\n" if self.path.endswith(".py") else r"\A", r"\s*\Z"
        return first + "(?s:.+)" + (r"\nReviewed: docs team" if self.path.endswith(".md") else "") + last


def code(name: str, arguments: str, value: str) -> Task:
    path = f"{name}.py"
    return Task(path, f"Write the file `{path}` with a function `{name}({arguments})` that returns `{value}`.")


def entry(name: str, words: str) -> Task:
    path = f"{name}.md"
    return Task(path, f"Write a changelog entry into the file `{path}`, which says: {words}")


def note(name: str, words: str) -> Task:
    path = f"{name}.txt"
    return Task(path, f"Write into the file `{path}`: {words}")


LIVE: Final = (
    code("add", "a, b", "a + b"),
    note("shopping", "bread and cheese"),
    code("double", "a", "2 * a"),
    entry("colours", "Buttons have colours now."),
    note("planets", "Mars and Venus"),
    entry("speed", "Start takes half the time."),
)
"""What the demo's user works on."""

_NAMES: Final = ("sub", "mul", "square", "negate", "first", "last", "both", "none")
HELD: Final = (
    *(code(name, "a, b", f"[a, b][:{number + 1}]") for number, name in enumerate(_NAMES)),
    *(entry(name, f"The {name} page is new.") for name in ("help", "search", "login")),
    note("books", "two novels"),
)
"""What the gate measures on: the same kinds, none of the same tasks."""


def jobs(agent: str, seconds: float = 120.0) -> str:
    """The gate's suite for an agent, as JSON lines."""
    lines: list[dict[str, Any]] = [
        {
            "id": task.path,
            "agent": agent,
            "prompt": task.prompt,
            "check": task.check,
            "hidden": {"check.py": CHECK},
            "seconds": seconds,
        }
        for task in HELD
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def questions() -> str:
    """The gate's suite for an application without files, as JSON lines: the answer is the file."""
    lines = [
        {"id": task.path, "prompt": task.prompt, "scorer": "regex", "answer": task.right, "max_tokens": 200}
        for task in HELD
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def said(task: Task, answer: str) -> str:
    """What the check says of an answer that is the file's text; empty: it is right."""
    lines = answer.splitlines() or [""]
    for words, first, last in RULES:
        mine = task.path.endswith(".py") if first else task.path.endswith(".md")
        if mine and (lines[0] != first if first else lines[-1] != last):
            return f"{task.path}: {words}"
    return ""
