"""Dotted-path loading, `package.module:Name`: the one door for recipes, engines, trainers and policies.

Knows: how to find a name and how to say what is missing. Does not know: what any of the names is for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from reef.core.errors import ConfigError


def load(path: str, *, what: str = "object") -> Any:
    """The object at `package.module:Name`.

    `recipes.X` falls back to `reef_recipes.X`, under which the wheel ships the recipes, when the folder itself is not
    importable. Raises ConfigError that names the part that is missing.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is not a dotted path to a {what}; write it as package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing_top = error.name == module_name.split(".")[0] or (error.name or "") in module_name
        if module_name.split(".")[0] == "recipes" and missing_top and importlib.util.find_spec("reef_recipes"):
            return load(f"reef_{path}", what=what)
        if missing_top:
            raise ConfigError(f"no module {error.name!r} for the {what} {path!r}; is its folder on the path?") from None
        raise ConfigError(f"the {what} {path!r} needs {error.name!r}, which is not installed") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{module_name} has no {name!r} (loading the {what} {path!r})") from None
