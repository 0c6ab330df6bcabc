"""Default, file, environment, command line: the later wins, and every setting remembers which one did.

Knows: `--section.key value`, the shorthands `--model provider/name`, `--model URL` and REEF_UPSTREAM_*, REEF_TOKEN.
Does not know: what a key means.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydantic

from reef.config import check
from reef.config.file import Place, Tree, Where, dotted, read, scalar
from reef.config.settings import TASKS, ReefSettings, ScenarioOverrides, Settings, file_source, split
from reef.core.errors import ConfigError

DEFAULT_FILE = "reef.yaml"
PROVIDERS: dict[str, dict[str, Any]] = {
    "openai": {"kind": "upstream", "url": "https://api.openai.com/v1", "key_env": "OPENAI_API_KEY"},
    "anthropic": {
        "kind": "upstream",
        "url": "https://api.anthropic.com/v1",
        "api": "anthropic",
        "key_env": "ANTHROPIC_API_KEY",
    },
    "openrouter": {"kind": "upstream", "url": "https://openrouter.ai/api/v1", "key_env": "OPENROUTER_API_KEY"},
    "ollama": {"kind": "upstream", "url": "http://127.0.0.1:11434/v1"},
}
"""Providers that `--model provider/name` knows without an entry under `engines:`."""

_DEFAULT = Place("default")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting as `reef config` shows it; a secret's value is masked."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings and where each came from. `file` is the file they were read from, if any."""

    settings: Settings
    values: Mapping[str, Any]  # as written, before defaults
    places: Mapping[Where, Place]
    file: Path | None

    def place(self, where: Where) -> Place:
        """The place of a value, or of the nearest thing around it that was written somewhere."""
        for length in range(len(where), 0, -1):
            if where[:length] in self.places:
                return self.places[where[:length]]
        return Place("file", str(self.file), 1) if self.file else _DEFAULT

    def rows(self) -> list[Row]:
        """Every setting, in the order of the file, secrets masked."""
        return [
            Row(
                dotted(where), "***" if value and check.secret(dotted(where)) else _mask(value), str(self.source(where))
            )
            for where, value in _leaves(self.settings.model_dump(mode="json"), ())
        ]

    def source(self, where: Where) -> Place:
        """Where exactly this value came from: unlike `place`, a default inside a written section is a default."""
        inner: Any = self.values
        for key in where:
            if isinstance(inner, Mapping) and key in inner:
                inner = inner[key]
            else:
                return _DEFAULT
        return self.place(where)


def load(
    file: Path | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    model: str | None = None,
    environment: Mapping[str, str] | None = None,
    faults: list[ConfigError] | None = None,
) -> Loaded:
    """Read and check everything. Without `file`, ./reef.yaml is read if there is one.

    `overrides` are (dotted key, text) from the command line. Raises ConfigError. With `faults`, wrong keys are added
    there and passed over, where that is possible, so that the caller can go on to find what else is wrong.
    """
    environment = os.environ if environment is None else environment
    if file is None and Path(DEFAULT_FILE).is_file():
        file = Path(DEFAULT_FILE)
    tree = read(file, environment) if file is not None else Tree({}, {})
    address = model if model is not None and "://" in model else None
    _environment(tree, environment, address)
    for key, text in overrides:
        _put(tree, tuple(key.split(".")), scalar(text), Place("command line"))
    if model is not None and address is None:
        _model(tree, model, Place("command line"))
    if file is not None:
        _suites(tree, file)
    shaped = _shape(tree)
    try:
        settings = Settings.model_validate(shaped)
    except pydantic.ValidationError as error:
        lookup = Loaded(Settings.model_construct(), tree.values, tree.places, file).place
        found = check.explain(error, tree.values, lookup)
        if faults is None or (rest := check.without(error, shaped)) is None:
            raise found from None
        faults.append(found)
        settings = rest
    loaded = Loaded(settings, tree.values, tree.places, file)
    for name in settings.scenarios:
        try:
            check.scenario(settings, name, None, tree.values, loaded.place)
        except ConfigError as error:
            if faults is None:
                raise
            faults.append(error)
    return loaded


def _shape(tree: Tree) -> dict[str, Any]:
    """The values with recipe fields moved aside, and empty sections (`gate:` alone) read as empty."""
    known = check.keys_at(())
    shaped = {key: {} if value is None and key in known else value for key, value in tree.values.items()}
    if isinstance(shaped.get("reef"), dict):
        reef = dict(shaped["reef"])
        if reef.get("token", "") is None:
            reef["token"] = ""
        shaped["reef"] = split(reef, ReefSettings)
    if isinstance(shaped.get("scenarios"), dict):
        shaped["scenarios"] = {
            name: split(entry or {}, ScenarioOverrides) if isinstance(entry, dict | None) else entry
            for name, entry in shaped["scenarios"].items()
        }
    return shaped


def _environment(tree: Tree, environment: Mapping[str, str], address: str | None) -> None:
    """REEF_TOKEN, and a provider by its address: REEF_UPSTREAM_URL, or `--model URL`, which goes before it."""
    if token := environment.get("REEF_TOKEN"):
        _put(tree, ("reef", "token"), token, Place("environment", variable="REEF_TOKEN"))
    url, model = address or environment.get("REEF_UPSTREAM_URL"), environment.get("REEF_UPSTREAM_MODEL")
    if model and not url:
        raise ConfigError("REEF_UPSTREAM_MODEL is set, but REEF_UPSTREAM_URL is not; set both, or neither")
    if not url:
        return
    where = Place("command line") if address else Place("environment", variable="REEF_UPSTREAM_URL")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{where}: a provider's address begins with http:// or https://, like http://127.0.0.1:8000/v1"
        )
    _put(tree, ("reef", "engine"), "upstream", where)
    _put(tree, ("engines", "upstream", "kind"), "upstream", where)
    _put(tree, ("engines", "upstream", "url"), _versioned(url), where)
    if model:
        _put(tree, ("engines", "upstream", "model"), model, Place("environment", variable="REEF_UPSTREAM_MODEL"))
    if environment.get("REEF_UPSTREAM_API_KEY"):
        place = Place("environment", variable="REEF_UPSTREAM_API_KEY")
        _put(tree, ("engines", "upstream", "key_env"), "REEF_UPSTREAM_API_KEY", place)


def _versioned(url: str) -> str:
    """An address up to and with /v1, which people leave out."""
    return url.rstrip("/") + "/v1" if urlsplit(url).path in ("", "/") else url


def _model(tree: Tree, model: str, place: Place) -> None:
    """`--model`: a provider's or engine's model, or what the local engine loads."""
    engines = tree.values.get("engines") or {}
    provider, slash, name = model.partition("/")
    reef = tree.values.get("reef")
    current = reef.get("engine", "local") if isinstance(reef, dict) else "local"
    if slash and name and not Path(model).exists() and (provider in PROVIDERS or provider in engines):
        if provider not in engines:
            for key, value in PROVIDERS[provider].items():
                _put(tree, ("engines", provider, key), value, place)
        _put(tree, ("reef", "engine"), provider, place)
        _put(tree, ("engines", provider, "model"), name, place)
    elif current in engines and (engines[current] or {}).get("kind", "upstream") == "upstream":
        _put(tree, ("engines", current, "model"), model, place)
    else:
        _put(tree, ("reef", "model"), model, place)


def _suites(tree: Tree, file: Path) -> None:
    """Suite and task files named in the file lie beside it; one from the command line, in the caller's folder."""
    sections: list[tuple[Any, Where]] = [(tree.values.get("gate"), ("gate",))]
    scenarios = tree.values.get("scenarios")
    for name, entry in scenarios.items() if isinstance(scenarios, dict) else ():
        sections.append((entry.get("gate") if isinstance(entry, dict) else None, ("scenarios", name, "gate")))
    for gate, where in sections:
        place = tree.places.get((*where, "suite"))
        if isinstance(gate, dict) and place is not None and place.file:
            gate["suite"] = _beside(gate["suite"], file.parent)
    named = [(entry, ("scenarios", name)) for name, entry in (scenarios.items() if isinstance(scenarios, dict) else ())]
    for section, where in [(tree.values.get("reef"), ("reef",)), *named]:
        if isinstance(section, dict):
            listed = section.get("recipes")
            _tasks(tree, section, where, file.parent)
            for number, use in enumerate(listed if isinstance(listed, list) else []):
                _tasks(tree, use, (*where, "recipes", number), file.parent)


def _tasks(tree: Tree, use: Any, where: Where, folder: Path) -> None:
    """Task files of a recipe lie beside the file that names them, as suites do."""
    for name in TASKS if isinstance(use, dict) else ():
        place = tree.places.get((*where, name)) or tree.places.get(where)
        if name in use and place is not None and place.file:
            use[name] = _beside(use[name], folder)


def _beside(suite: Any, folder: Path) -> Any:
    """One entry or several, files as paths from here."""
    if isinstance(suite, list):
        return [_beside(item, folder) if isinstance(item, str) else item for item in suite]
    return str(folder / suite) if isinstance(suite, str) and file_source(suite) else suite


def _put(tree: Tree, where: Where, value: Any, place: Place) -> None:
    inner: Any = tree.values
    for depth, key in enumerate(where[:-1]):
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
        if not isinstance(inner, dict):
            raise ConfigError(f"{place}: {dotted(where)} cannot be set: {dotted(where[: depth + 1])} is a single value")
    inner[where[-1]] = value
    for known in [w for w in tree.places if w[: len(where)] == where]:
        del tree.places[known]
    tree.places[where] = place


def _leaves(value: Any, where: Where) -> Iterator[tuple[Where, Any]]:
    if isinstance(value, dict) and (value or not where):
        for key, inner in value.items():
            if key == "recipe_fields":
                yield from (((*where, name), item) for name, item in inner.items())
            else:
                yield from _leaves(inner, (*where, key))
    else:
        yield where, value


def _mask(value: Any) -> Any:
    """A value with the credentials of a URL taken out."""
    if isinstance(value, str) and "://" in value and "@" in value.split("://", 1)[1].split("/", 1)[0]:
        scheme, rest = value.split("://", 1)
        return f"{scheme}://***@{rest.split('@', 1)[1]}"
    return value
