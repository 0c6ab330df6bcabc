"""The whole configuration as frozen models, each value with the place it came from.

Knows: every key with its default, the YAML file, `${VAR:-default}`, the environment, `--section.key value`.
Does not know: which recipes, engines or policies exist (their names are checked where everything is put together), or
what anything does with a setting. Loads no torch.

- `file`     a YAML file as plain values and the line of each
- `sources`  default < file < environment < command line, and which one won
- `settings` the models: every key, its type, its default
- `check`    errors that name the place, the wrong key and the nearest right one; the second stage for a recipe's fields
"""

from reef.config.settings import ScenarioSettings, Settings, Use
from reef.config.sources import Loaded, load

__all__ = ["Loaded", "ScenarioSettings", "Settings", "Use", "load"]
