"""A YAML file as plain values, with the line of every key and value.

Knows: YAML, `${VAR}` and `${VAR:-default}` in scalars (`$${` is a literal `${`), duplicate keys (an error).
Does not know: which keys exist.

A plain scalar gets its type after substitution, so `port: ${PORT:-8900}` is a number; a quoted one stays text.
Numbers remember how they were written, so that a token of digits can still be read as text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reef.core.errors import ConfigError

Where = tuple[str | int, ...]
"""Where a value sits: the keys and list positions from the top."""

_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Whole(int):
    """A YAML integer that remembers its spelling."""

    text: str


class Real(float):
    """A YAML float that remembers its spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value came from. `variable` is the environment variable that supplied it, if one did."""

    source: str  # default | file | environment | command line
    file: str | None = None
    line: int | None = None
    variable: str | None = None

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.file else ""
        if self.source == "environment":
            return f"environment {self.variable}" + (f" ({at})" if at else "")
        return at if self.source == "file" else self.source


@dataclass(frozen=True, slots=True)
class Tree:
    """Plain values (dicts, lists, scalars) and the place of each, by path."""

    values: dict[str, Any]
    places: dict[Where, Place]


def read(path: Path, environment: Mapping[str, str] | None = None) -> Tree:
    """Read one YAML file. ConfigError names file and line of bad YAML, a duplicate key or an unset variable."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; give an existing one with -c, or write one with `reef init`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path), environment)


def parse(text: str, name: str, environment: Mapping[str, str] | None = None) -> Tree:
    """Read YAML text; `name` is what error messages call it."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    try:
        node = loader.get_single_node()
        reader = _Reader(loader, name, os.environ if environment is None else environment)
        values = {} if node is None else reader.value(node, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: a value contains itself") from None
    finally:
        loader.dispose()
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}:1: the file must hold `section: ...` lines, such as `reef:`, not a bare value")
    return Tree(values, reader.places if node is not None else {})


def scalar(text: str) -> Any:
    """A value from the command line, read as YAML (`8901`, `null`, `[a, b]`, `{policy: always}`), else as text."""
    try:
        return parse(f"value:\n  {text}", "command line", {}).values.get("value") if text.strip() else ""
    except ConfigError:
        return text


class _Reader:
    """Walks YAML nodes; collects the place of every value."""

    def __init__(self, loader: yaml.SafeLoader, name: str, environment: Mapping[str, str]) -> None:
        self.places: dict[Where, Place] = {}
        self._loader = loader
        self._name = name
        self._environment = environment

    def value(self, node: yaml.Node, path: Where) -> Any:
        line = node.start_mark.line + 1
        self.places.setdefault(path, Place("file", self._name, line))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: Where) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._name}:{line}: a key must be a plain word")
            key = str(key_node.value)
            if key in found:
                first = self.places[(*path, key)].line
                raise ConfigError(f"{self._name}:{line}: {dotted((*path, key))} is given twice; first on line {first}")
            self.places[(*path, key)] = Place("file", self._name, line)
            found[key] = self.value(value_node, (*path, key))
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Where, line: int) -> Any:
        text, variable = self._substitute(str(node.value), line)
        if variable is not None:
            self.places[path] = Place("environment", self._name, line, variable)
        tag = node.tag
        if text != node.value and node.style is None:
            tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if tag.startswith("tag:yaml.org,2002:timestamp"):
            return text
        value = self._loader.construct_object(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark), deep=True)
        return _spelled(value, text)

    def _substitute(self, text: str, line: int) -> tuple[str, str | None]:
        """The text with its variables filled in, and the first variable that supplied a value."""
        used: list[str] = []

        def replace(found: re.Match[str]) -> str:
            inner = found.group(1)
            if inner is None:
                return "${"
            name, has_default, default = inner.partition(":-")
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{self._name}:{line}: ${{{inner}}} is not ${{NAME}} or ${{NAME:-default}}")
            value = self._environment.get(name)
            if value:
                used.append(name)
                return value
            if has_default:
                return str(default)
            raise ConfigError(
                f"{self._name}:{line}: the environment variable {name} is not set; "
                f"set it, or write ${{{name}:-default}}"
            )

        return _VARIABLE.sub(replace, text), used[0] if used else None


def _spelled(value: Any, text: str) -> Any:
    if type(value) is int:
        whole = Whole(value)
        whole.text = text
        return whole
    if type(value) is float:
        real = Real(value)
        real.text = text
        return real
    return value


def dotted(path: Where) -> str:
    """A path as people write it: `recipes[0].use`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
