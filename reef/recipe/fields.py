"""Checks of a recipe's fields, in the words of a configuration error.

Knows: the kinds of numbers that fields are. Does not know: YAML, places in a file; `config.check` adds them.
"""

from __future__ import annotations

import math
from typing import Any

from reef.core.errors import ConfigError


def whole(recipe: Any, name: str, low: int, high: int | None = None, *, none: bool = False) -> None:
    """The field is a whole number from `low` to `high` (None: no limit), or null where `none` allows it."""
    value = getattr(recipe, name)
    if none and value is None:
        return
    right = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    between = f"at least {low}" if high is None else f"between {low} and {high}"
    need(right, name, f"{'null or ' if none else ''}a whole number, {between}", value)


def number(
    recipe: Any, name: str, low: float, high: float | None = None, *, above: bool = False, none: bool = False
) -> None:
    """The field is a finite number from `low` (`above`: more than it) to `high` (None: no limit), or null."""
    value = getattr(recipe, name)
    if none and value is None:
        return
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    right = right and (value > low if above else value >= low) and (high is None or value <= high)
    between = f"{'above' if above else 'at least'} {low:g}" + ("" if high is None else f" and at most {high:g}")
    need(right, name, f"{'null or ' if none else ''}a finite number {between}", value)


def one_of(recipe: Any, name: str, *values: str) -> None:
    value = getattr(recipe, name)
    need(value in values, name, " or ".join(map(repr, values)), value)


def flag(recipe: Any, name: str) -> None:
    value = getattr(recipe, name)
    need(isinstance(value, bool), name, "true or false", value)


def policy(recipe: Any) -> None:
    """The fields that every recipe of weights has: see `batches.RATES` for `learning_rate`."""
    whole(recipe, "max_staleness", 0, none=True)
    one_of(recipe, "train", "lora", "full")
    number(recipe, "learning_rate", 0, 1, above=True, none=True)
    whole(recipe, "rank", 1, 512)
    number(recipe, "alpha", 0, above=True)
    whole(recipe, "seed", 0, 2**63 - 1)


def need(right: bool, name: str, wanted: str, value: object) -> None:
    if not right:
        raise ConfigError(f"{name} must be {wanted}, not {value!r}", param=name)
