"""Which engine answers a scenario's requests, by the configuration and by what the scenario was created with.

Knows: scenarios' settings, aliases, engines by name. Does not know: processes, requests, or how an engine answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from reef.cli import parts, process
from reef.cli.bind import bind, engine_names, harmless, running
from reef.cli.process import Boot
from reef.config import ScenarioSettings, Settings
from reef.config import check as rules
from reef.config.file import Place, Where
from reef.core.errors import ChainError, ConfigError, EngineError, ModelError
from reef.core.kinds import OWN

if TYPE_CHECKING:
    from reef.engines import Engine
    from reef.gateway.context import Learning, Target
    from reef.harness.apply import Wish
    from reef.records.board import Board

NOTHING = ("record", "reef.recipe.record:RecordRecipe")
"""Recipes that keep what happens and learn nothing from it."""


def nowhere(where: Where) -> Place:
    return Place("the request")


def scenario_of(settings: Settings, name: str, created: Mapping[str, Any]) -> ScenarioSettings:
    """A scenario as it runs: from the file, or as it was created. ConfigError when that no longer fits the file."""
    found = rules.scenario(settings, name, created, dict(created), nowhere)
    running(settings, found)
    return found


def check(settings: Settings, name: str, created: Mapping[str, Any]) -> None:
    """Refuse settings that a request may not give a scenario, or that do not fit together. ConfigError."""
    wanted = scenario_of(settings, name, created)
    harmless(settings, wanted)
    bind(settings, wanted, nowhere)


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A scenario's settings as a gateway needs them. `bound`: it names its engine itself; `recipes` as people write."""

    engine: str
    model: str | None
    bound: bool
    recipes: str
    learns: bool
    wish: Wish
    learning: Learning
    created: Mapping[str, Any]
    trouble: str | None  # why it cannot be served by its engine


class Scenarios:
    """What a gateway needs of each scenario's settings, worked out once. `answering` is each engine's model's name.

    `trouble` says of a scenario and its engine's name why it cannot be served; that lasts until a restart.
    """

    def __init__(
        self,
        settings: Settings,
        board: Board,
        engines: Mapping[str, Engine],
        answering: Mapping[str, str],
        trouble: Callable[[str, str], str | None] = lambda name, engine: None,
    ) -> None:
        self._trouble = trouble
        self._settings = settings
        self._board = board
        self._engines = engines
        self._answering = answering
        self._known: dict[str, _Known] = {}
        self._targets: dict[str, Target] = {}  # scenarios' own engines

    def renew(self) -> None:
        """Forget what was worked out of settings that have changed since."""
        rows = self._board.scenarios()
        for name, known in list(self._known.items()):
            if rows.get(name, {}) != known.created:
                self._known.pop(name, None)
                self._targets.pop(name, None)

    def engine(self, name: str) -> str:
        return self._find(name).engine

    def recipe(self, name: str) -> str | None:
        """None when the scenario's settings no longer fit the configuration: the status of the others is not lost."""
        try:
            return self._find(name).recipes
        except ConfigError:
            return None

    def trouble(self, name: str) -> str | None:
        """Why a scenario cannot be served, and what to do; None when it can."""
        try:
            return self._find(name).trouble
        except ConfigError as error:
            return error.message

    def lenient(self, name: str) -> bool:
        """Whether its requests are answered also when they cannot be recorded: as configured, else if it learns."""
        wanted = self._settings.records.on_trouble
        return wanted == "serve" if wanted is not None else not self._find(name).learns

    def learning(self, name: str) -> Learning:
        """How it can be told to learn."""
        return self._find(name).learning

    def wish(self, name: str) -> Wish:
        """What its requests get of its releases' harness."""
        return self._find(name).wish

    def route(self, scenario: str, model: str | None) -> Target:
        """Who answers a scenario's request for a model.

        Without aliases the scenario's engine answers any name. With them, a name means something: an alias, an
        engine/model, or what the scenario's engine answers with; a scenario that names its engine answers the rest.
        """
        from reef.gateway.context import Target

        aliases = self._settings.models
        if not aliases and (target := self._targets.get(scenario)) is not None:
            return target
        own = self._find(scenario)
        if aliases and model is not None:
            engine, slash, name = aliases.get(model, model).partition("/")
            if slash and name and engine in self._engines:
                return Target(engine, self._engines[engine], name)
            if not own.bound and model not in (self._answering[own.engine], own.model):
                names = ", ".join(dict.fromkeys((*aliases, self._answering[own.engine])))
                raise ModelError(
                    f"there is no model {model[:100]!r}; there are {names}, and engine/model with one of the engines "
                    f"{', '.join(self._engines)}",
                    param="model",
                )
        if own.trouble is not None:
            raise EngineError(own.trouble)
        target = self._targets[scenario] = Target(own.engine, self._engines[own.engine], own.model)
        return target

    def _find(self, name: str) -> _Known:
        if (found := self._known.get(name)) is None:
            created = self._board.scenarios().get(name, {})
            scenario = scenario_of(self._settings, name, created)
            entry = self._settings.scenarios.get(name)
            bound = (entry.engine if entry is not None else created.get("engine")) is not None
            upstream = self._settings.engine(scenario.engine).kind == "upstream"
            model = scenario.model if upstream and scenario.model != self._settings.reef.model else None
            names = [use.recipe for use in scenario.recipes]
            learns = any(name not in NOTHING for name in names)
            trouble = None
            with contextlib.suppress(ChainError):  # a damaged chain is told where a release of it is read
                trouble = self._trouble(name, scenario.engine)
            wish = parts.wish(scenario, harness_recipe(scenario))
            told = instructed(scenario)
            found = _Known(scenario.engine, model, bound, " + ".join(names), learns, wish, told, created, trouble)
            self._known[name] = found
        return found


def harness_recipe(scenario: ScenarioSettings) -> object | None:
    """The class of the recipe that learns a scenario's harness; None when there is none, or it cannot be loaded here
    (the learner says so)."""
    from reef.core.load import load
    from reef.recipe import RECIPES

    process.own_folder()
    for use in scenario.recipes:
        with contextlib.suppress(ConfigError):
            made: object = load(RECIPES.get(use.recipe, use.recipe), what="recipe")
            if getattr(made, "part", None) == "harness":
                return made
    return None


def instructed(scenario: ScenarioSettings) -> Learning:
    """Its training's trigger, and the parts whose recipes take a person's instructions."""
    from reef.core.load import load
    from reef.gateway.context import Learning as Told
    from reef.recipe import RECIPES

    process.own_folder()
    parts = []
    for use in scenario.recipes:
        with contextlib.suppress(ConfigError):  # the learner says what is wrong with it
            made = load(RECIPES.get(use.recipe, use.recipe), what="recipe")
            part = getattr(made, "part", None)
            if part == "weights" or (part == "harness" and hasattr(made, "search")):
                parts.append(part)
    return Told(scenario.training.trigger, tuple(parts))


def answering(boot: Boot, settings: Settings) -> dict[str, str]:
    """The model that each engine answers with: the local one, or what an upstream is asked for; else its own name."""
    found = {}
    for name in engine_names(settings):
        chosen = settings.engine(name)
        local = boot.model["name"] if boot.model is not None and chosen.kind in OWN else None
        found[name] = local or chosen.model or name
    return found


def models(boot: Boot, settings: Settings) -> tuple[str, ...]:
    """What GET /v1/models lists, each a name that a request may give: the aliases, and the engines' own models.

    A provider that answers whatever it is asked for adds none. With aliases, a model of another engine than the
    default one has its engine's name before it.
    """
    found = list(settings.models)
    for name, model in answering(boot, settings).items():
        if settings.engine(name).kind == "upstream" and settings.engine(name).model is None:
            continue
        found.append(f"{name}/{model}" if settings.models and name != settings.reef.engine else model)
    return tuple(dict.fromkeys(found))
