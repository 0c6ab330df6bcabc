"""Imports go down the list of rooms only, the halves never meet, and nothing light loads anything heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = (
    ("core",),
    ("config",),
    ("records", "releases", "engines"),
    ("scenario",),
    ("experience", "harness"),
    ("evaluation", "trainers", "cordis"),
    ("recipe",),
    ("gateway", "loop", "console", "study"),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
HEAVY = {"torch", "ray", "transformers", "peft", "vllm"}
FILES = sorted(path for path in (ROOT / "reef").rglob("*.py"))


def imported(path):
    """(module, line) of every import in a file, also those inside functions; `from a import b` is both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for name in node.names:
                yield f"{node.module}.{name.name}", node.lineno


def room_of(path):
    parts = path.relative_to(ROOT / "reef").parts
    return parts[0] if len(parts) > 1 else None


def breaches(path):
    room = room_of(path)
    for module, line in imported(path):
        parts = module.split(".")
        where = f"{path.relative_to(ROOT)}:{line}: {module}"
        if parts[0] in ("recipes", "reef_recipes"):
            yield f"{where}: nothing in reef/ imports a recipe"
        if parts[0] != "reef" or room is None or len(parts) < 2 or parts[1] not in LEVEL or parts[1] == room:
            continue
        if LEVEL[parts[1]] >= LEVEL[room]:
            yield f"{where}: {room} is not above {parts[1]}"
    if room not in ("engines", "trainers", None):
        yield from (
            f"{path.relative_to(ROOT)}:{line}: {module} is heavy"
            for module, line in imported(path)
            if module.split(".")[0] in HEAVY
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    assert list(breaches(path)) == []


def test_every_folder_is_a_room():
    found = {path.parent.name for path in (ROOT / "reef").glob("*/__init__.py")}
    assert found <= LEVEL.keys()
    assert found >= LEVEL.keys() - {"console"}


def test_a_breach_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "reef" / "records").mkdir(parents=True)
    bad = tmp_path / "reef" / "records" / "x.py"
    bad.write_text(
        "from reef.releases import chain\ndef f():\n    import recipes.sao\n    import torch\nimport reef.core.ids\n"
    )
    assert [line.split(": ", 1)[0][-3:] for line in breaches(bad)] == ["y:1", "y:3", "y:4"]


NAMES = {f"reef.trainers.{name}" for name in ("TRAINERS", "WORKS", "OPTIONS")}


def test_only_assembly_joins_the_halves():
    """In `cli`, the loop is reached through `assemble` alone; `bind` may know the trainers' names."""
    for path in (ROOT / "reef" / "cli").glob("*.py"):
        if path.name == "assemble.py":
            continue
        for module, line in imported(path):
            joins = module.startswith(("reef.loop", "reef.trainers")) and module not in NAMES
            assert not joins, f"{path.name}:{line}: {module}"


@pytest.mark.parametrize(
    "module",
    ["reef", "reef.gateway.app", "reef.loop.learner", "reef.cli.main", "reef.cli.assemble", "reef.evaluation.policies"],
)
def test_nothing_light_loads_anything_heavy(module):
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_program_starts_light():
    heavy = HEAVY | {"numpy", "matplotlib"}
    code = f"import sys, reef.cli.main as m; m.parser(); print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
