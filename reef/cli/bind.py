"""The configuration's second stage: what needs the other rooms to be checked.

Knows: which recipes, engines, trainers and policies exist, and what a recipe needs of its engine and gate.
Does not know: processes, folders, the chain. Everything here is made and thrown away: nothing is opened.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from reef.cli import gate, options, process
from reef.config import Loaded, ScenarioSettings, Settings, Use
from reef.config import check as rules
from reef.config.file import Where, dotted
from reef.config.settings import TASKS, EngineSettings, file_source
from reef.core.errors import ConfigError
from reef.core.kinds import OWN
from reef.core.load import load
from reef.core.nouns import PartName

if TYPE_CHECKING:
    from reef.recipe import Recipe


_PROVIDER = {"url", "api", "model", "speaks", "retries", "retry_seconds", "connect", "idle", "connections"}
_PROVIDER |= {"proxy", "trust_env"}
_OPTIONS = {"local": "reef.engines.local.server:Options", "vllm": "reef.engines.remote.vllm:Options"}
_OPTIONS |= {"sglang": "reef.engines.remote.sglang:Options"}


@dataclass(frozen=True, slots=True)
class Bound:
    """A scenario's settings with its recipes made. `names` is how each recipe is written in a release, `asides` what is
    allowed and will come to nothing."""

    settings: ScenarioSettings
    recipes: Mapping[PartName, Recipe]
    names: Mapping[PartName, str]
    asides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " + ".join(self.names.values()) or "record"


def load_checked(args: argparse.Namespace) -> tuple[Loaded, dict[str, Bound]]:
    """Both stages on what the arguments ask for. ConfigError has a line for each fault, of either stage."""
    faults: list[ConfigError] = []
    loaded = options.load(args, faults)
    try:
        bound = check(loaded.settings, loaded.values, loaded.place)
    except ConfigError as error:
        faults.append(error)
        raise together(faults) from None
    if faults:
        raise together(faults)
    return loaded, bound


def together(faults: Sequence[ConfigError]) -> ConfigError:
    """Several errors as one: each line once, in the order of the file."""

    def place(line: str) -> int:
        found = re.match(r"[^:\s]+:(\d+): ", line)
        return int(found[1]) if found else 0

    lines = dict.fromkeys(line for fault in faults for line in fault.message.splitlines())
    return ConfigError("\n".join(sorted(lines, key=place)), param=faults[0].param)


def check(
    settings: Settings, values: Mapping[str, Any], lookup: rules.Lookup, *, keys: bool = True
) -> dict[str, Bound]:
    """Everything that needs the other rooms: names, recipes and their fields, keys that must be set.

    Returns the default scenario and those of the file, bound. ConfigError names the place. `keys`: whether providers'
    keys must be set, as they must for a server.
    """
    from reef.engines import ENGINES
    from reef.trainers import OPTIONS, TRAINERS, WORKS

    rules.choice(("training", "backend"), settings.training.backend, TRAINERS, lookup, "trainer")
    if (backend := settings.training.backend) in WORKS:
        made_of = load(OPTIONS[backend], what="options")
        rules.arguments(made_of, settings.training.options, ("training", "options"), f"{backend} trainer", lookup)
    for name, engine in settings.engines.items():
        rules.choice(("engines", name, "kind"), engine.kind, ENGINES, lookup, "kind of engine")
        if keys and engine.key_env and not os.environ.get(engine.key_env):
            where: Where = ("engines", name, "key_env")
            raise ConfigError(
                f"{lookup(where)}: the key of engine {name} is read from {engine.key_env}, which is not set; export it"
            )
        if engine.kind == "upstream":
            from reef.engines.upstream import UpstreamEngine

            try:
                UpstreamEngine(**provider(engine))
            except ConfigError as error:
                at = ("engines", name, str(error.param))
                raise ConfigError(f"{lookup(at)}: engine {name}: {error.message}", param=dotted(at)) from None
        if engine.kind in OWN:
            made_of = load(_OPTIONS[engine.kind], what="options")
            rules.arguments(made_of, engine.options, ("engines", name, "options"), f"{engine.kind} engine", lookup)
    hook = settings.observability.webhook
    if keys and hook is not None and hook.secret_env and not os.environ.get(hook.secret_env):
        at = ("observability", "webhook", "secret_env")
        raise ConfigError(
            f"{lookup(at)}: the secret of the webhook is read from {hook.secret_env}, which is not set; export it",
            param=dotted(at),
        )
    local = {name for name in engine_names(settings) if settings.engine(name).kind == "local"}
    if len(local) > 1:
        raise ConfigError(f"there can be one engine of kind local, not {', '.join(sorted(local))}; one process runs it")
    found, faults = {}, []
    for name in (settings.reef.default_scenario, *settings.scenarios):
        within = ("scenarios", name) if name in settings.scenarios else ()
        try:
            found[name] = bind(settings, rules.scenario(settings, name, None, values, lookup), lookup, within)
        except ConfigError as error:
            faults.append(error)
    if faults:
        raise together(faults)
    return found


def bind(settings: Settings, scenario: ScenarioSettings, lookup: rules.Lookup, within: Where = ()) -> Bound:
    """Make a scenario's recipes and check what they need of its engine and gate."""
    kind = settings.engine(scenario.engine).kind
    if kind in OWN and (scenario.model or settings.reef.model) != settings.reef.model:
        raise ConfigError(
            f"{lookup((*within, 'model'))}: a server trains one model; remove the model of scenario {scenario.name}"
        )
    if scenario.releases.remote != settings.releases.remote:
        raise ConfigError(
            f"{lookup((*within, 'releases', 'remote'))}: a server pushes all scenarios to one remote; set "
            "releases.remote at the top of the configuration",
            param="releases.remote",
        )
    for key in ("clients", "parallel"):
        if getattr(scenario.harness, key) != getattr(settings.harness, key):
            raise ConfigError(
                f"{lookup((*within, 'harness', key))}: agents of all scenarios work in one place; set harness.{key} at "
                "the top of the configuration",
                param=f"harness.{key}",
            )
    recipes: dict[PartName, Recipe] = {}
    names: dict[PartName, str] = {}
    floor = scenario.gate.evaluate_every * scenario.gate.patience
    for use in scenario.recipes:
        made = _recipe(use, floor, lookup)
        part = type(made).part
        if part is None:
            continue
        if part in recipes:
            raise ConfigError(
                f"{lookup(use.where)}: {names[part]} and {use.recipe} both improve the {part}; keep one of them"
            )
        if part == "weights" and kind == "upstream":
            raise ConfigError(
                f"{lookup(use.where)}: the recipe {use.recipe} trains weights, and those of engine {scenario.engine} "
                "are not ours; use engine: local, or a recipe that needs no weights (recipe: record)"
            )
        if part == "weights" and kind == "local" and settings.engine(scenario.engine).options.get("quantised"):
            raise ConfigError(
                f"{lookup(_place(use))}: the recipe {use.recipe} trains weights, and engine {scenario.engine} answers "
                f"with quantised ones; remove quantised from engines.{scenario.engine}.options, or take a recipe that "
                "needs no weights (recipe: record)"
            )
        for asked in getattr(made, "engines", ()):  # the models that it asks about units
            where = (*use.where, *_names(made, asked))
            rules.choice(where, asked, engine_names(settings), lookup, "engine", path=False)
        _readable(settings, scenario, made, use, lookup)
        recipes[part], names[part] = made, use.recipe
    asides = gate.check(settings, scenario, engine_names(settings), lookup, within)
    if scenario.training.trigger == "manual":
        taking = [part for part, made in recipes.items() if part == "weights" or hasattr(made, "search")]
        if recipes and not taking:
            asides.append(
                f"training.trigger is manual and {' + '.join(names.values())} takes no instructions: nothing is learnt "
                "from experience; set training.trigger: auto"
            )
    return Bound(scenario, recipes, names, tuple(asides))


def _readable(settings: Settings, scenario: ScenarioSettings, made: Recipe, use: Use, lookup: rules.Lookup) -> None:
    """The task files that a recipe names are there and can be read."""
    read = gate.reading(scenario.gate, gate.judging(settings, scenario.gate))
    for name in TASKS:
        if isinstance(source := getattr(made, name, None), str) and file_source(source):
            where = ("reef", name) if name in use.inherited else (*use.where, name)
            try:
                read(source)
            except ConfigError as error:
                raise ConfigError(f"{lookup(where)}: {name}: {error.message}", param=name) from None


def _names(made: Recipe, engine: str) -> list[str]:
    """The field of a recipe that names this engine, if one does."""
    names = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]  # the first stage saw to it
    return [name for name in names if getattr(made, name) == engine][:1]


def _place(use: Use) -> Where:
    """Where a recipe is named in the file."""
    return (*use.where, "recipe") if len(use.where) < 3 else use.where


def _recipe(use: Use, floor: int, lookup: rules.Lookup) -> Recipe:
    from reef.recipe import RECIPES

    where = _place(use)
    rules.choice(where, use.recipe, RECIPES, lookup, "recipe")
    process.own_folder()
    try:
        made_of = load(RECIPES.get(use.recipe, use.recipe), what="recipe")
    except ConfigError as error:
        raise ConfigError(f"{lookup(where)}: {error.message}", param="recipe") from None
    return cast("Recipe", rules.recipe(made_of, use, floor, lookup))


def provider(chosen: EngineSettings) -> dict[str, Any]:
    """The arguments of an upstream engine; its key comes from the environment."""
    return chosen.model_dump(include=_PROVIDER) | {"key": os.environ.get(chosen.key_env or "")}


def engine_names(settings: Settings) -> list[str]:
    """The engines in use: every one under `engines`, and what the scenarios and aliases name."""
    named = [settings.reef.engine, *(s.engine for s in settings.scenarios.values() if s.engine), *settings.engines]
    named += [target.partition("/")[0] for target in settings.models.values()]
    return list(dict.fromkeys(named))


def local_engine(settings: Settings) -> EngineSettings | None:
    """The settings of the embedded engine, when a scenario may use it."""
    return next((settings.engine(n) for n in engine_names(settings) if settings.engine(n).kind == "local"), None)


def own_model(settings: Settings) -> str | None:
    """The base model whose weights are ours to train, by name or folder; None when no engine in use serves them."""
    if not any(settings.engine(name).kind in OWN for name in engine_names(settings)):
        return None
    local = local_engine(settings)
    return (local.model if local is not None else None) or settings.reef.model or gate.EMBEDDED


def trains_beside(settings: Settings) -> bool:
    """Whether the trainer is a process of this server."""
    from reef.trainers import WORKS

    return settings.training.backend in WORKS


def running(settings: Settings, wanted: ScenarioSettings) -> None:
    """A scenario's engine must be one that this server runs; `local` and `fake` have a name without being in use."""
    if wanted.engine not in (names := engine_names(settings)):
        raise ConfigError(
            f"the engine {wanted.engine} of scenario {wanted.name} does not run on this server; there is "
            f"{', '.join(names)}; name another under engines: in the configuration and restart",
            param="engine",
        )


def harmless(settings: Settings, wanted: ScenarioSettings) -> None:
    """A request may choose among what the configuration names; it cannot load other code or read other files."""
    running(settings, wanted)
    for name in ("backend", "options", "broadcast"):
        if getattr(wanted.training, name) != getattr(settings.training, name):
            raise ConfigError(
                f"training.{name}: a server has one trainer for all scenarios; set it in the configuration",
                param=f"training.{name}",
            )
    own = [settings.scenario(name) for name in (settings.reef.default_scenario, *settings.scenarios)]
    paths = {use.recipe for scenario in own for use in scenario.recipes}
    for path in (use.recipe for use in wanted.recipes):
        if ":" in path and path not in paths:
            raise ConfigError(f"{path} is not named in this server's configuration; a request cannot load code")
    for use in wanted.recipes:
        _trusted(use, [one for scenario in own for one in scenario.recipes if one.recipe == use.recipe])
    gate.harmless(settings, wanted, own)


def _trusted(use: Use, own: Sequence[Use]) -> None:
    """Fields that name files or code of the server (`trusted`): a request can repeat what the configuration says."""
    from reef.recipe import RECIPES

    fields: frozenset[str] = getattr(load(RECIPES.get(use.recipe, use.recipe), what="recipe"), "trusted", frozenset())
    for name in sorted(fields & use.fields.keys()):
        if use.fields[name] is not None and use.fields[name] not in [one.fields.get(name) for one in own]:
            raise ConfigError(
                f"{name}: {use.recipe} reads it from this server, so a request cannot choose it; set it in the "
                "configuration",
                param=name,
            )
