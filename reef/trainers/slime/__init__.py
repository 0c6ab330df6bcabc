"""Steps made by slime (Megatron on a cluster): batches go out as files in a folder both sides see, weights come back.

Unverified: built to slime's documented arguments and types and tested against a stub of them. `docs/trainers.md` says
how to verify it. The other side's files are `run` (starts slime) and `rollout` (slime reads batches through it).
"""

from __future__ import annotations

from dataclasses import dataclass

from reef.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """`exchange` is a folder that both machines see, for one scenario alone."""

    exchange: str = ""
    seconds: float = (
        7200.0  # without a sign of life from the other side, after which a step fails and is asked for again
    )
    poll: float = 1.0  # seconds between two looks

    def __post_init__(self) -> None:
        if not self.exchange:
            raise ConfigError("exchange is missing; name the folder that slime's machines see too", param="exchange")
        if not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds!r}; give a number above 0", param="seconds")
        if not 0.01 <= self.poll <= 600:
            raise ConfigError(f"poll is {self.poll!r}; give seconds from 0.01 to 600", param="poll")
