"""Where an agent's client is on this machine, and what of it a room must have.

Knows: folders that `npm install` made, PATH, Node. Does not know: how a client is installed (`install`) or started.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reef.core.errors import ConfigError
from reef.harness.agents import Agent

INSIDE: Final = "/opt/client"
_NODE: Final = "/opt/node"


@dataclass(frozen=True, slots=True)
class Found:
    """`program` and `path` (for PATH) are as the room sees them; `reads` are (outside, inside)."""

    program: str
    path: tuple[str, ...]
    reads: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class Clients:
    """Installed clients. `folder` None: where Reef installs them for a user, else what PATH has."""

    folder: Path | None = None

    def find(self, agent: Agent) -> Found:
        """ConfigError says what to do when the client, or the Node it needs, is not there."""
        name, program = agent.name, agent.client.program
        for modules in self._places(name, agent.client.version):
            if (modules / ".bin" / program).exists():
                reads = ((modules.resolve(), f"{INSIDE}/node_modules"),)
                inside = f"{INSIDE}/node_modules/.bin/{program}"
                return _with_node(modules / ".bin" / program, inside, reads, agent.client.node)
        if self.folder is None and (given := shutil.which(program)) is not None:
            return _on_path(Path(given), agent.client.node)
        wanted = f"{agent.client.package}@{agent.client.version}"
        place = self.folder if self.folder is not None else _data() / name / "client" / agent.client.version
        raise ConfigError(
            f"the client {program} of agent {name} is not installed here; run: npm install --prefix {place} {wanted}, "
            "or name the folder that has it in harness.clients"
        )

    def _places(self, name: str, version: str) -> Iterator[Path]:
        """The node_modules that may have an agent's client."""
        base = self.folder.expanduser().absolute() if self.folder is not None else _data()
        yield base / name / "client" / version / "node_modules"
        if self.folder is not None:
            yield base / name / "node_modules"
            yield base / "node_modules"


def _data() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "reef"


def _on_path(given: Path, wanted: str) -> Found:
    """A program that PATH has: its whole node_modules, or the one file that it is."""
    real = given.resolve()
    if "node_modules" in real.parts:
        at = real.parts.index("node_modules") + 1
        inside = "/".join((INSIDE, "node_modules", *real.parts[at:]))
        return _with_node(real, inside, ((Path(*real.parts[:at]), f"{INSIDE}/node_modules"),), wanted)
    return _with_node(real, f"{INSIDE}/{real.name}", ((real, f"{INSIDE}/{real.name}"),), wanted)


@functools.lru_cache(8)
def _version(node: str) -> tuple[int, ...]:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return _numbers(said.stdout.strip().removeprefix("v"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _with_node(outside: Path, program: str, reads: tuple[tuple[Path, str], ...], wanted: str) -> Found:
    """With the Node that a script's first line asks for; a program of its own does without."""
    modules, inside = reads[0]
    if (modules / "node" / "bin" / "node").exists():  # npm's package `node`
        return Found(program, (f"{inside}/.bin", f"{inside}/node/bin"), reads)
    node = shutil.which("node")
    with outside.open("rb") as file:
        first = file.readline(200)
    scripted = first.startswith(b"#!") and b"node" in first
    if node is None:
        if scripted:
            raise ConfigError(f"{outside} needs Node, which PATH does not have; install Node {wanted} or newer")
        return Found(program, (f"{inside}/.bin",), reads)
    if scripted and (version := _version(node)) < _numbers(wanted):
        had = ".".join(map(str, version))
        raise ConfigError(f"{outside} needs Node {wanted} or newer, and {node} is {had}; install a newer one")
    real = Path(node).resolve()
    if real.is_relative_to("/usr"):
        return Found(program, (f"{inside}/.bin", str(real.parent)), reads)
    return Found(program, (f"{inside}/.bin", f"{_NODE}/bin"), (*reads, (real, f"{_NODE}/bin/node")))
