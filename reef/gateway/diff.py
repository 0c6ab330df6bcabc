"""What a candidate changes, for a person to read: texts line by line, settings by value, weights by name and size.

Knows: harness trees, what of a change a person must agree to (`cordis.hold`), and the header of a safetensors file (a
length, then JSON), so that no tensor is loaded.
Does not know: whether the change is a good one. Blocking: it reads the candidate's files, which verifies them.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from reef.cordis import hold
from reef.cordis.composition import same
from reef.cordis.text import visible
from reef.core.nouns import PartName, Release
from reef.harness import tree
from reef.releases import ReleaseChain

TENSORS = 200  # listed; the count is of all
_HEADER = 64 * 1024 * 1024  # bytes; a longer header is no header


def diff(chain: ReleaseChain, candidate: Release, base: Release, part: PartName) -> dict[str, Any]:
    """`{part, …}`: for a harness `text` (a unified diff), ids of entries and `holds`; for weights files and tensors."""
    if part == "harness":
        return {"part": part, **edits(_entries(chain, base), _entries(chain, candidate))}
    return {"part": part, **_weights(chain, candidate, base)}


def _entries(chain: ReleaseChain, release: Release) -> dict[str, tree.Entry]:
    if "harness" not in release.parts:
        return {}
    path: Path = chain.files(release.id, "harness")[tree.FILE]
    return {entry.id: entry for entry in tree.read(path.read_bytes())}


def edits(before: dict[str, tree.Entry], after: dict[str, tree.Entry]) -> dict[str, Any]:
    """Two trees by id: ids that were added, removed and changed, what of it a person must agree to, and a diff."""
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = _lines(before.get(name)), _lines(after.get(name))
        lines += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
    both = before.keys() & after.keys()
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in both if not same(before[name], after[name])),
        "holds": list(hold.reasons(list(before.values()), list(after.values()))),
        "text": "".join(f"{line}\n" for line in lines),
    }


def _lines(entry: tree.Entry | None) -> list[str]:
    """An entry as lines: its kind, its short fields, then its text as it stands. Nothing in it is hidden: characters
    that cannot be seen are written out."""
    if entry is None:
        return []
    lines = [f"[{entry.kind}]"]
    for key, value in sorted(entry.config.items()):
        if key == "text":
            continue
        said = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) if not isinstance(value, str) else value
        first, *more = said.split("\n")
        lines += [f"{key}: {first}", *more]
    if isinstance(text := entry.config.get("text"), str):
        lines += ([""] if len(lines) > 1 else []) + text.split("\n")
    return visible("\n".join(lines)).split("\n")


def _weights(chain: ReleaseChain, candidate: Release, base: Release) -> dict[str, Any]:
    new, old = candidate.parts["weights"], base.parts.get("weights")
    tensors: list[dict[str, Any]] = []
    for name, path in sorted(chain.files(candidate.id, "weights").items()):
        if name.endswith(".safetensors"):
            tensors += _tensors(name, path)
    return {
        "kind": new.kind,
        "was": old.kind if old is not None else None,
        "rank": new.meta.get("rank"),
        "alpha": new.meta.get("alpha"),
        "steps": candidate.step - base.step,
        "files": {name: {"sha256": sha256, "bytes": size} for name, (sha256, size) in sorted(new.files.items())},
        "bytes": sum(size for _, size in new.files.values()),
        "tensors": {"count": len(tensors), "listed": tensors[:TENSORS]},
    }


def _tensors(file: str, path: Path) -> list[dict[str, Any]]:
    """Names, types and shapes, from the header alone."""
    with path.open("rb") as read:
        length = int.from_bytes(read.read(8), "little")
        if not 2 <= length <= min(_HEADER, path.stat().st_size - 8):
            return []
        try:
            header = json.loads(read.read(length))
        except ValueError:
            return []
    if not isinstance(header, dict):
        return []
    return [
        {"file": file, "name": name, "dtype": held.get("dtype"), "shape": held.get("shape")}
        for name, held in sorted(header.items())
        if name != "__metadata__" and isinstance(held, dict)
    ]
