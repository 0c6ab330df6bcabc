"""What is installed on a user's machine: a bundle (client, files, program) and the shell script that carries it.

Knows: the bundle's form, its digest, our program for Node (`*.mjs` here), the script's template.
Does not know: HTTP, releases, or how a client's files are made (`agents`).

- All that comes from a release is in base64; in shell code stand a digest, and the package's name and version.
- Same release, same address, same Reef: same bytes, so that "already current" is a comparison of digests.
- No token is in it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from reef.core.nouns import Json
from reef.harness.agents import Agent, Door, render
from reef.harness.tree import Entry

FORMAT: Final = 1
NODE: Final = "18.0"
"""What our own program needs; a client may need more."""
ROOT: Final = "/@reef-root@"
"""Stands for the config root in a bundle: where that is, only the user's machine knows."""
_HERE: Final = Path(__file__).parent
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*")
_WORD: Final = re.compile(r"[A-Za-z0-9@/._-]+")
_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "pi": ("-p", "--print", "--mode"),
    "opencode": ("run",),
    "claude": ("-p", "--print"),
}
"""Clients that show REEF_NOTICE themselves, but for the runs that one of these arguments makes one-shot."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a bundle is of. `keyless`: the server asks for no token."""

    release_id: str
    seq: int
    reason: str
    keyless: bool = False


def bundle(agent: Agent, entries: Sequence[Entry], door: Door, origin: Origin) -> dict[str, Json]:
    """All that a machine needs, as JSON. ValueError when the tree does not render for this agent."""
    return {
        "format": FORMAT,
        "adapter": agent.name,
        "url": door.url,
        "scenario": door.scenario,
        "release": {"id": origin.release_id, "seq": origin.seq, "reason": origin.reason},
        "keyless": origin.keyless,
        "client": asdict(agent.client) | {"node": max(agent.client.node, NODE, key=_parts)},
        "environment": dict(agent.environment(Path(ROOT))),
        "oneshot": list(_SHOWN[agent.name]) if agent.name in _SHOWN else None,
        "files": dict(sorted(render(agent, entries, door).items())),
        "program": dict(program()),
    }


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def write(made: Mapping[str, Json]) -> bytes:
    """A bundle's one byte form."""
    return json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@functools.cache
def program() -> Mapping[str, str]:
    """Our program's files by name."""
    return {path.name: path.read_text("utf-8") for path in sorted(_HERE.glob("*.mjs"))}


def script(made: Mapping[str, Json]) -> bytes:
    """The installer: a POSIX shell script, with the bundle in it and its digest."""
    data = write(made)
    client = made["client"]
    values = {
        "NODE": client["node"],
        "PACKAGE": f"{client['package']}@{client['version']}",
        "DIGEST": hashlib.sha256(data).hexdigest(),
    }
    wrong = [value for value in values.values() if not _WORD.fullmatch(value)]
    if not _NAME.fullmatch(made["adapter"]):
        wrong.append(made["adapter"])
    if wrong:
        raise ValueError(f"{wrong[0][:80]!r} cannot stand in a shell script")
    text = (_HERE / "install.sh").read_text("utf-8")
    for name, value in [*values.items(), ("PAYLOAD", textwrap.fill(base64.b64encode(data).decode(), 100))]:
        text = text.replace(f"@{name}@", value)
    return text.encode()
