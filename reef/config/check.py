"""Errors that a person can act on, and the second stage of the check: a recipe's fields.

Knows: how to name the place, the wrong key and the nearest right one; how a dataclass's fields and types read values.
Does not know: recipes, engines or policies (a class, or the names that exist, are handed in).

- A recipe's fields are its YAML keys. A field that shadows a built-in key is an error of the recipe, not of the file.
- `max_staleness` below `evaluate_every * patience` would starve the line, so it is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import pydantic

from reef.config.file import Place, Where, dotted
from reef.config.settings import ReefSettings, ScenarioOverrides, ScenarioSettings, Section, Settings, Use
from reef.core.errors import ConfigError, ReefError

_COERCE = pydantic.ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True)
_SECTIONS = {"GateSettings": "gate", "ReleaseSettings": "releases", "TrainingSettings": "training"}
_SECTIONS |= {"HarnessSettings": "harness"}
Lookup = Callable[[Where], Place]


def explain(
    error: pydantic.ValidationError, values: Mapping[str, Any], lookup: Lookup, within: Where = ()
) -> ConfigError:
    """A pydantic error as one that names place, key and the nearest right key; one line for each fault.

    `within` is where the validated section sits.
    """
    lines, first = [], ""
    for fault in error.errors(include_url=False):
        where = _trim((*within, *_flat(fault["loc"])), values)
        first = first or dotted(where)
        place, key = lookup(where), dotted(where)
        if fault["type"] == "extra_forbidden":
            lines.append(unknown(where, keys_at(where[:-1]), place))
        elif fault["type"] == "missing":
            lines.append(f"{place}: {key} needs {fault['loc'][-1]}")
        elif fault["type"] == "value_error":
            reason = str(fault["ctx"]["error"])
            place = lookup((*where, reason.split(":")[0].split(" ")[0]))  # the key a rule's sentence begins with
            lines.append(f"{place}: {key + ': ' if key else ''}{reason}")
        else:
            shown = "" if secret(key) else f", not {fault['input']!r}"
            lines.append(f"{place}: {key}: {_plain(fault)}{shown}")
    return ConfigError("\n".join(dict.fromkeys(lines)), param=first or None)


def without(error: pydantic.ValidationError, shaped: Mapping[str, Any]) -> Settings | None:
    """The settings with defaults in place of what is wrong, to find what else is. None when that would mislead: what
    is wrong is no single key, or says which keys there can be."""
    kept = copy.deepcopy(dict(shaped))
    for fault in error.errors(include_url=False):
        inner: Any = kept
        for key in fault["loc"][:-1]:
            inner = inner.get(key) if isinstance(inner, dict) else None
        decides = fault["type"] == "value_error" or fault["loc"][-1] in ("recipe", "recipes")
        if decides or not isinstance(inner, dict):
            return None
        inner.pop(fault["loc"][-1], None)
    try:
        return Settings.model_validate(kept)
    except pydantic.ValidationError:
        return None


def scenario(
    settings: Settings, name: str, created: Mapping[str, Any] | None, values: Mapping[str, Any], lookup: Lookup
) -> ScenarioSettings:
    """What a scenario does, with errors that name the place. `created` is what a request made it with."""
    within: Where = () if created is not None else ("scenarios", name)
    try:
        found = settings.scenario(name, created)
    except pydantic.ValidationError as error:
        section = _SECTIONS.get(error.title)
        raise explain(error, values, lookup, (*within, section) if section else within) from None
    except KeyError as error:
        key = str(error.args[0])
        choice((*within, "engine"), key, (*settings.engines, "local", "fake"), lookup, "engine", path=False)
        raise
    return found


def unknown(where: Where, known: Sequence[str], place: Place, also: Iterable[str] = (), owner: str = "") -> str:
    """The sentence for a key that does not exist. `also` are further places' keys, spelled in full; `owner`, whose
    fields may stand there too."""
    key, parent = str(where[-1]), dotted(where[:-1])
    full = [f"{parent}.{name}" if parent else name for name in known]
    near = difflib.get_close_matches(key, list(known), 1)
    close = [f"{parent}.{name}" if parent else name for name in near]
    close += [n for n in (*also, *_elsewhere(key)) if n not in close]
    none = f", and the {owner} has no such field" if owner else ""
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else none + _choices(full)
    return f"{place}: {dotted(where)} is not a setting{hint}"


def choice(where: Where, value: str, known: Iterable[str], lookup: Lookup, what: str, *, path: bool = True) -> None:
    """Refuse a name that is not known and not (where `path` allows one) a dotted path."""
    if value in (names := sorted(known)) or (path and ":" in value):
        return
    close = difflib.get_close_matches(value, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    raise ConfigError(
        f"{lookup(where)}: {dotted(where)}: there is no {what} {value!r}; {hint}"
        + (" (or give package.module:Name)" if path else ""),
        param=dotted(where),
    )


def recipe(made_of: type[Any], use: Use, floor: int, lookup: Lookup) -> Any:
    """Second stage: an instance of a recipe's dataclass from the fields written beside it.

    `floor` is evaluate_every * patience. Raises ConfigError with the place of the wrong field.
    """
    if not dataclasses.is_dataclass(made_of):
        raise ConfigError(f"{lookup(use.where)}: {use.recipe} is not a recipe: a recipe is a frozen dataclass")
    names = {item.name for item in dataclasses.fields(made_of)}
    if shadowed := sorted(names & {*ReefSettings.model_fields, *ScenarioOverrides.model_fields, "use"}):
        raise ConfigError(
            f"the recipe {use.recipe} has a field {shadowed[0]!r}, which is a key of reef: already; rename the field"
        )
    made = arguments(made_of, use.fields, use.where, f"recipe {use.recipe}", lookup, use.inherited)
    stale = getattr(made, "max_staleness", None)
    if stale is not None and getattr(made_of, "part", None) == "weights" and stale < floor:
        where = (*use.where, "max_staleness")
        raise ConfigError(
            f"{lookup(where)}: {dotted(where)} is {stale}, but a line goes up to gate.evaluate_every * gate.patience = "
            f"{floor} steps between releases, and would starve; set it to {floor} or more, or lower gate.patience",
            param=dotted(where),
        )
    return made


def arguments(
    made_of: type[Any],
    given: Mapping[str, Any],
    where: Where,
    name: str,
    lookup: Lookup,
    inherited: Collection[str] = (),
) -> Any:
    """An instance of a dataclass from written values: every key one of its fields, every value of that field's type.

    The values sit at `where`; those of the keys in `inherited`, under reef. ConfigError has a line for each fault.
    """
    fields = {item.name: item for item in dataclasses.fields(made_of) if item.init}
    hints = _hints(cast(Hashable, made_of))
    ready: dict[str, Any] = {}
    wrong: list[ConfigError] = []
    for key, value in given.items():
        home: Where = ("reef",) if key in inherited else where
        at = (*home, key)
        if key not in fields:
            own = [f"{dotted(home)}.{near} (of {name})" for near in difflib.get_close_matches(key, fields, 1)]
            built_in = keys_at(home) if len(home) < 3 else ["use"]
            wrong.append(ConfigError(unknown(at, built_in, lookup(at), own, name), param=dotted(at)))
            continue
        try:
            ready[key] = _field(hints[key], value, at, name, lookup)
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise ConfigError("\n".join(error.message for error in wrong), param=wrong[0].param)
    if missing := [key for key, item in fields.items() if key not in ready and _required(item)]:
        raise ConfigError(f"{lookup(where)}: the {name} needs {', '.join(missing)}", param=missing[0])
    try:
        return made_of(**ready)
    except (ReefError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{lookup(where)}: the {name}: {error}", param=getattr(error, "param", None)) from None


def keys_at(where: Where) -> list[str]:
    """The keys that may stand at a place; empty where any may."""
    model: Any = Settings
    if len(where) > 2 and where[0] == "scenarios" and where[2] in _SECTIONS.values():
        where = where[2:]
    for key in where:
        if isinstance(model, type) and issubclass(model, Section):
            item = model.model_fields.get(str(key))
            model = item.annotation if item else None
        else:
            inner = typing.get_args(model)
            model = inner[-1] if typing.get_origin(model) is dict and inner else None
    return _keys(model) if isinstance(model, type) and issubclass(model, Section) else []


def secret(key: str) -> bool:
    """Whether a setting's value is never shown."""
    last = key.rsplit(".", 1)[-1].lower()
    return any(word in last for word in ("token", "secret", "password", "api_key")) and not last.endswith("tokens")


def _keys(model: type[Section]) -> list[str]:
    return [name for name in model.model_fields if name != "recipe_fields"]


def _elsewhere(key: str) -> list[str]:
    """Where a key of this very name does exist."""
    found = []
    for section, item in Settings.model_fields.items():
        kind = item.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and key in _keys(kind):
            found.append(f"{section}.{key}")
    return found


def _field(hint: Any, value: Any, where: Where, name: str, lookup: Lookup) -> Any:
    inner = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    wrong = isinstance(value, bool) and not any(kind in inner for kind in (bool, str, Any))
    if str in inner and int not in inner and float not in inner and hasattr(value, "text"):
        value = value.text
    try:
        if wrong:
            raise ValueError(f"expected {_word(hint)}")
        return _adapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        reason = _plain(error.errors(include_url=False)[-1])
    except ValueError as error:
        reason = str(error)
    raise ConfigError(f"{lookup(where)}: {dotted(where)} (of {name}): {reason}, not {value!r}", param=dotted(where))


def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    """Kept where it can be: a suite has a hundred thousand scorers of a few types."""
    try:
        return _kept(hint)
    except TypeError:  # a hint that cannot be hashed
        return pydantic.TypeAdapter(hint, config=_COERCE)


@functools.lru_cache(256)
def _kept(hint: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(hint, config=_COERCE)


@functools.lru_cache(256)
def _hints(made_of: Any) -> dict[str, Any]:
    return typing.get_type_hints(made_of)


def _word(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _flat(location: tuple[int | str, ...]) -> Where:
    return tuple(key for key in location if key != "recipe_fields")


def _trim(where: Where, values: Any) -> Where:
    """Without what pydantic adds beyond the file's own keys (which branch of a union it tried, `[key]`)."""
    kept: list[str | int] = []
    for key in where:
        inside = (isinstance(values, Mapping) and key in values) or (
            isinstance(values, list) and isinstance(key, int) and key < len(values)
        )
        if not inside:
            break
        values = values[key]
        kept.append(key)
    return tuple(kept)


def _plain(fault: Any) -> str:
    text = str(fault["msg"])
    text = text[len("Value error, ") :] if text.startswith("Value error, ") else text
    if fault["type"] == "model_type":
        return "expected keys and values below it"
    return text[0].lower() + text[1:]


def _choices(names: list[str]) -> str:
    return f"; there are {', '.join(names)}" if names else ""
