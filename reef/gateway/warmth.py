"""A release is loaded by its scenario's engine before a person's decision makes it served: no first answer waits.

Knows: the bound of the wait, and which of an engine's troubles speak of the release.
Does not know: how a release becomes the head. An engine that is down, starting or slow holds nobody up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from reef.core.errors import ConflictError, DigestError, EngineError, ReefError
from reef.core.nouns import Release

if TYPE_CHECKING:
    from reef.gateway.app import App

WAIT = 45.0
"""Seconds, below what `reef rollback` waits for an answer. A load that takes longer goes on in the engine."""

log = logging.getLogger(__name__)


async def warm(app: App, release: Release) -> None:
    """Load it, where the engine is there and quick enough. ConflictError when the engine says that it cannot be loaded:
    served, it would answer nobody."""
    short = release.id[:12]
    try:
        engine = app.context.route(release.scenario, None).engine
        async with asyncio.timeout(WAIT):
            if not await engine.ready():
                return
            try:
                await engine.load(release.id)
            except DigestError as error:
                log.warning("release %s was not served: %s", release.id, error.message)
                raise ConflictError(
                    f"the engine cannot load {short}: files of it are missing or damaged; nothing was changed. "
                    "`reef doctor` names them; choose another release, or bring them back",
                    param="release_id",
                ) from None
            except EngineError as error:
                if await engine.ready():
                    raise ConflictError(
                        f"the engine cannot load {short} ({error.message}); nothing was changed. Choose another "
                        "release, or try again",
                        param="release_id",
                    ) from None
    except TimeoutError:
        log.warning("release %s is served before the engine has loaded it: that takes over %.0f s", release.id, WAIT)
    except ConflictError:
        raise
    except ReefError as error:  # of the engine or the wire to it; what is wrong with the release, the decision says
        log.warning("release %s is served before the engine has loaded it: %s", release.id, error.message)
