"""In a wheel the methods are `reef_recipes`: every recipe, objective and study is found there under its usual name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "recipes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from reef.core.load import load
from reef.recipe import RECIPES
from reef.study import STUDIES

for path in [*RECIPES.values(), *STUDIES.values()]:
    found = load(path)
    assert path.startswith("reef.") or type(found).__module__.startswith(("reef_recipes", "reef.study", "builtins"))
for name in ("sao", "grpo", "openclawrl", "tttd", "sft", "sdft"):
    objective = load(RECIPES[name])().objective()
    assert objective.path.startswith("reef_recipes."), objective.path
    load(objective.path)(**objective.options)
print("found")
"""


def test_the_methods_are_found_in_a_wheel(tmp_path):
    (tmp_path / "reef_recipes").symlink_to(ROOT / "recipes")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.strip() == "found", done.stderr
