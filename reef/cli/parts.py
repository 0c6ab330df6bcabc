"""Small pieces that processes are put together from: what a chain's files mean to an engine, a gate or a trainer.

Knows: how weights are found by release, what a scenario's first release holds, what a release adds to a request.
Does not know: processes, sockets, the loop; `assemble` puts everything together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from reef.cli.process import Boot
from reef.config import ScenarioSettings, Settings
from reef.core.errors import MissingError
from reef.core.kinds import OWN

if TYPE_CHECKING:
    from reef.core.nouns import Part, Release
    from reef.engines import Resolver, WeightFiles
    from reef.engines.remote import Away
    from reef.harness.apply import Applied, Wish
    from reef.releases import NewPart
    from reef.releases.chain import GitChain


def resolver(chain: GitChain) -> Resolver:
    from reef.engines import WeightFiles as Found

    def resolve(release_id: str) -> WeightFiles:
        part = chain.get(release_id).parts["weights"]
        return Found(part.kind, chain.files(release_id, "weights"), part.meta)

    return resolve


def recorded(chain: GitChain) -> Callable[[str], Part]:
    """A release's weights as the chain records them: names, digests, sizes. None of the files is looked at."""
    return lambda release_id: chain.get(release_id).parts["weights"]


def base(boot: Boot, settings: Settings, engine: str) -> NewPart:
    """The weights of seq 0: a name and digest, no tensors."""
    from reef.releases import NewPart

    chosen = settings.engine(engine)
    if boot.model is not None and chosen.kind in OWN:
        base = {"name": boot.model["name"], "digest": boot.model["digest"]}
    elif chosen.kind == "upstream":
        base = {"name": chosen.model or urlsplit(chosen.url or "").hostname or engine, "digest": ""}
    else:
        base = {"name": engine, "digest": "0" * 64}
    meta = {"base": base, "kind": "base", "rank": 0, "alpha": 0}
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return NewPart("base", {"weights.json": text.encode()}, meta)


def away(boot: Boot, settings: Settings, name: str, chain: GitChain) -> Away:
    """What an engine with servers of its own is made with: where they are, and the base model that they must have."""
    from reef.engines.remote import Away as Made

    assert boot.model is not None
    chosen = settings.engine(name)
    return Made(
        name=name,
        urls=chosen.servers,
        model=chosen.model,
        key=os.environ.get(chosen.key_env or ""),
        folder=Path(boot.model["path"]),
        base=boot.model["name"],
        digest=boot.model["digest"],
        resolve=resolver(chain),
        place=settings.reef.state_dir / "engines" / name,
        connect=chosen.connect,
        idle=chosen.idle,
    )


def first(chain: GitChain, name: str) -> str:
    """The id of a scenario's release number 0."""
    before: str | None = None
    while page := chain.history(name, limit=200, before=before):
        before = page[-1].id
    if before is None:
        raise MissingError(f"no scenario {name}", param="scenario")
    return before


def wish(scenario: ScenarioSettings, recipe: object | None) -> Wish:
    """What a scenario's requests get of its releases' harness: as configured, else as its harness recipe (an instance
    or class; None: it has none) wishes."""
    from reef.harness.apply import Wish as Wished

    given = scenario.harness
    apply = bool(getattr(recipe, "applies", False)) if given.apply is None else given.apply
    return Wished(apply, given.skills, given.tokens)


def applied(chain: GitChain, release: Release, wish: Wish) -> Applied:
    """What a release adds to a request, exactly as the gateway does it."""
    from reef.harness import tree
    from reef.harness.apply import NOTHING, Applied

    if "harness" not in release.parts:
        return NOTHING
    return Applied.of(tree.read(chain.files(release.id, "harness")[tree.FILE].read_bytes()), wish)
