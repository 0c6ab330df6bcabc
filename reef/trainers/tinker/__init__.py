"""Steps made by the Tinker service: it holds the model and a LoRA of it, Reef sends batches and fetches the LoRA.

Unverified: built to the documented interface of the client package `tinker` (0.38) and tested against a stub of it.
`docs/trainers.md` says how to verify it.
"""

from __future__ import annotations

from dataclasses import dataclass

from reef.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """`base_model` is the service's name of the model that `reef.model` names here."""

    base_model: str = ""
    key_env: str = "TINKER_API_KEY"  # the environment variable with the service's key
    base_url: str | None = None  # None: the client's own
    seconds: float = 900.0  # that one call may take, at most
    attempts: int = 4  # at a step, when the service fails in passing
    wait: float = 2.0  # seconds before the second of them; twice as long before each one after
    expire_days: float | None = None  # after which the service forgets a step's state; None: never
    package: str = "tinker"  # the module of the client

    def __post_init__(self) -> None:
        if not self.base_model:
            raise ConfigError(
                "base_model is missing; give the service's own name of the model in reef.model", param="base_model"
            )
        if not self.key_env:
            raise ConfigError(
                "key_env is empty; name the environment variable that holds the service's key", param="key_env"
            )
        if not self.seconds > 0:
            raise ConfigError(
                f"seconds is {self.seconds!r}; give the seconds that one call may take, above 0", param="seconds"
            )
        if not 1 <= self.attempts <= 20:
            raise ConfigError(f"attempts is {self.attempts!r}; give a number from 1 to 20", param="attempts")
        if not 0 <= self.wait <= 600:
            raise ConfigError(f"wait is {self.wait!r}; give seconds from 0 to 600", param="wait")
        if self.expire_days is not None and not 1 / 24 <= self.expire_days <= 3650:
            raise ConfigError(
                f"expire_days is {self.expire_days!r}; give days from 0.042 (an hour) to 3650, or null",
                param="expire_days",
            )
