"""What a search can be about: constructions with a value that a program computes exactly.

Knows: the protocol, the problems by name. Does not know: any of them, or how one is searched.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from reef.core.errors import ConfigError, InputError
from reef.core.load import load
from reef.core.nouns import Json

PROBLEMS = {
    "circle_packing": "recipes.tttd.circle:Rows",
    "circle_program": "recipes.tttd.circle:Program",
    "autocorrelation": "recipes.tttd.sequence:Runs",
}
"""Each is made with `n=`. Another one is named by its own path, package.module:Name."""
NEEDED = ("name", "max_tokens", "start", "prompt", "parse", "verify", "grammar")


@dataclass(frozen=True, slots=True)
class Judged:
    """What a verifier found. An invalid construction is worth 0. `key` is the same for the same construction; `note` is
    shown to whoever goes on from it (the end of a program's output)."""

    value: float
    valid: bool
    key: str
    note: str = ""


class Problem(Protocol):
    """A state is text: what an answer is made into, what is verified, what a child starts from. Larger is better.

    Problems that can be searched without a model also have `move(state, numbers) -> str`, a neighbour; those whose best
    can be refined by an optimiser have `polish(state) -> float`.
    """

    name: str
    max_tokens: int  # of an answer

    def start(self, numbers: random.Random) -> str:
        """A legal state, drawn without a model."""

    def prompt(self, state: str, judged: Judged) -> str:
        """What the model is asked when it goes on from this state."""

    def parse(self, text: str) -> str | None:
        """The state an answer is; None when it is none."""

    def verify(self, state: str) -> Judged:
        """Its value; the same state gets the same one. May take long: it is asked once for each state."""

    def grammar(self) -> Json:
        """What limits an answer, as the request field `structured_outputs`; None when nothing does."""


def choose(name: str, n: int) -> Problem:
    """InputError when there is no such problem, or no such n; ConfigError when what is named is no problem."""
    if name not in PROBLEMS and ":" not in name:
        raise InputError(f"no problem {name!r}; there are {', '.join(PROBLEMS)}, or write package.module:Name")
    try:
        found: Problem = load(PROBLEMS.get(name, name), what="problem")(n=n)
    except ValueError as error:
        raise InputError(f"{name} with n = {n}: {error}", param="n") from None
    except TypeError as error:
        raise ConfigError(f"{name} cannot be made with n = {n}, as a problem is: {error}") from error
    missing = [each for each in NEEDED if not hasattr(found, each)]
    if missing:
        raise ConfigError(f"{name} is no problem: it has no {', '.join(missing)}")
    return found
