"""Whether a scenario's releases can be served by the model that its engine has now: a state with a name, not a crash.

Knows: which model the releases were made for, which one is here, and what to do when they differ or it is gone.
Does not know: how a model is found or loaded. The engine checks again when it loads a release.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from reef.cli.process import Boot
from reef.config import Settings
from reef.core.errors import EngineError
from reef.core.kinds import OWN

if TYPE_CHECKING:
    from reef.core.nouns import Release
    from reef.engines import Answer, Ask, Head, Piece

CHANGED, GONE = "base changed", "base missing"
"""How the two states begin; a server in one of them runs, and its other scenarios serve."""


def trouble(boot: Boot, settings: Settings, name: str, engine: str, head: Release | None) -> str | None:
    """Why a scenario cannot be served now, and what to do; None when it can. `engine` is the scenario's, by name."""
    kind = settings.engine(engine).kind
    if kind in OWN and boot.model is not None and "missing" in boot.model:
        return f"{GONE}: {boot.model['missing']}. Scenario {name} is served again after a restart with its model"
    part = head.parts.get("weights") if head is not None else None
    if part is None:
        return None
    base = part.meta.get("base") or {}
    made, digest = base.get("name") or "unknown", str(base.get("digest") or "")
    advice = "start the server with that model, or with another folder (--reef.state_dir FOLDER) to begin anew"
    if kind == "upstream" and part.kind != "base" and digest:
        return (
            f"{CHANGED}: the releases of scenario {name} belong to the model {made} ({digest[:12]}), and its engine "
            f"{engine} answers with a provider's; give the scenario a local engine and {advice}"
        )
    if kind in OWN and boot.model is not None and digest not in ("", boot.model["digest"]):
        return (
            f"{CHANGED}: the releases of scenario {name} belong to the model {made} ({digest[:12]}), and the server "
            f"has {boot.model['name']} ({boot.model['digest'][:12]}); {advice}"
        )
    return None


class Absent:
    """The engine in the place of a local one whose model is gone: it answers nothing, and says why."""

    dialects = frozenset({"chat"})

    def __init__(self, why: str) -> None:
        self._why = f"{GONE}: {why}"

    def _refuse(self) -> NoReturn:
        raise EngineError(self._why)

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        self._refuse()
        yield  # an async generator, like every engine's

    async def load(self, release_id: str) -> None:
        self._refuse()

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        self._refuse()

    async def ready(self) -> bool:
        return False

    async def close(self) -> None:
        return None
