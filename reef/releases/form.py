"""The form of a release in git: `release.json`, the names of its files, `.gitattributes`, the commit's message.

Knows: how a Release is written and read again, and the digest that recognises a retried draft.
Does not know: git commands, disks, or whether a release is the head.

    release.json  weights/<file>…  harness/<file>…  .gitattributes
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import msgspec

from reef.core.errors import ChainError, InputError
from reef.core.nouns import Consumed, Evaluation, Guard, Operation, Part, PartName, Release
from reef.releases import Draft, NewPart
from reef.releases.lfs import large

FORMAT = 1
"""Grows when a page can no longer be read by its own keys. A key that is added with a default needs no new number."""

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WEIGHTS = (".safetensors", ".json", ".txt", ".md", ".jinja")
_DRAFT = re.compile(r"^draft ([0-9a-f]{64})$", re.MULTILINE)


class _Page(msgspec.Struct, frozen=True):
    """`release.json` as it is read. Unknown keys are ignored: a later minor form may add some."""

    format: int
    scenario: str
    seq: int
    operation: Operation
    base: str | None
    step: int
    line: str | None
    evaluation: Evaluation | None
    recipe: str | None
    consumed: dict[PartName, Consumed]
    actor: str
    reason: str
    created_at: float
    parts: dict[PartName, Part]


def check(part: PartName, new: NewPart) -> None:
    """InputError for a part that may not enter the chain: pickled weights, or names that are no plain file names."""
    for name in new.files:
        if not _FILE.fullmatch(name):
            raise InputError(f"{part}/{name!r}: a part's file is named with letters, digits, '.', '_' and '-' only")
        if part == "weights" and not name.endswith(_WEIGHTS):
            raise InputError(f"weights/{name}: weights are stored as safetensors only, never in a pickled form")


def write(release: Release) -> bytes:
    """`release.json`. The id and the parent are the commit's own, so they are not in it."""
    return _text({"format": FORMAT, **_content(release), "created_at": release.created_at})


def digest(release: Release) -> str:
    """What the release says, whenever it was said: equal for a retry of the same draft on the same parent."""
    return hashlib.sha256(_text(_content(release))).hexdigest()


def read(release_id: str, parent: str | None, data: bytes) -> Release:
    """The release of a commit. ChainError when `release.json` is damaged or of a later form."""
    try:
        page = msgspec.json.decode(data, type=_Page)
    except msgspec.MsgspecError as error:
        raise ChainError(f"release.json of {release_id} cannot be read: {error}") from None
    if not 1 <= page.format <= FORMAT:
        raise ChainError(
            f"release {release_id} has format {page.format}; this Reef reads up to {FORMAT}: use a newer one"
        )
    for part in page.parts.values():
        for name, (sha256, _) in part.files.items():
            if not (_FILE.fullmatch(name) and _SHA256.fullmatch(sha256)):
                raise ChainError(f"release.json of {release_id} names a file that cannot be one: {name!r}")
    return Release(
        id=release_id,
        seq=page.seq,
        scenario=page.scenario,
        operation=page.operation,
        parent=parent,
        parts=page.parts,
        base=page.base,
        step=page.step,
        line=page.line,
        evaluation=page.evaluation,
        recipe=page.recipe,
        consumed=page.consumed,
        actor=page.actor,
        reason=page.reason,
        created_at=page.created_at,
    )


def compose(
    scenario: str,
    draft: Draft,
    parent: Release | None,
    base: Release | None,
    parts: Mapping[PartName, Part],
    now: float,
) -> Release:
    """The release a draft makes on a parent, still without an id. Parts not in `parts` come from the base or parent."""
    source = base or parent
    carried = dict(source.parts) if source else {}
    return Release(
        id="",
        seq=parent.seq + 1 if parent else 0,
        scenario=scenario,
        operation=draft.operation,
        parent=parent.id if parent else None,
        parts=dict(sorted({**carried, **parts}.items())),
        base=draft.base,
        step=draft.step,
        line=draft.line,
        evaluation=_finite(draft.evaluation) if draft.evaluation else None,
        recipe=draft.recipe,
        consumed=dict(sorted(draft.consumed.items())),
        actor=draft.actor,
        reason=draft.reason,
        created_at=now,
    )


def message(release: Release) -> bytes:
    """The commit's message: one line for people, then the draft's digest."""
    reason = " ".join("".join(sign if sign.isprintable() else " " for sign in release.reason).split())[:100]
    subject = f"{release.operation} {release.seq}" + (f": {reason}" if reason else "")
    return f"{subject}\n\ndraft {digest(release)}\n".encode("utf-8", "replace")


def drafted(message: str) -> str | None:
    """The draft's digest from a commit's message."""
    found = _DRAFT.search(message)
    return found[1] if found else None


def attributes(files: Iterable[tuple[PartName, str, int]]) -> bytes:
    """`.gitattributes`: every file byte for byte, the large ones through LFS. `files` are (part, name, size)."""
    lines = ["* -text", "*.safetensors filter=lfs diff=lfs merge=lfs -text"]
    for part, name, size in sorted(files):
        if large(name, size) and not name.endswith(".safetensors"):
            lines.append(f"/{part}/{name} filter=lfs diff=lfs merge=lfs -text")
    return ("\n".join(lines) + "\n").encode()


def _content(release: Release) -> dict[str, Any]:
    try:
        content: dict[str, Any] = msgspec.to_builtins(release)
    except (TypeError, ValueError) as error:
        raise InputError(f"a release holds plain JSON with finite numbers only: {error}") from None
    for name in ("id", "parent", "created_at"):
        del content[name]
    return content


def _text(content: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"a release holds plain JSON with finite numbers only: {error}") from None
    return text.encode() + b"\n"


def _finite(evaluation: Evaluation) -> Evaluation:
    """An evaluation without numbers that JSON cannot hold: what could not be measured is missing, not zero."""

    def known(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    cost = evaluation.cost
    return Evaluation(
        policy=evaluation.policy,
        verdict=evaluation.verdict,
        reason=evaluation.reason,
        candidate_id=evaluation.candidate_id,
        incumbent_id=evaluation.incumbent_id,
        guards=tuple(Guard(g.name, g.passed, known(g.value), known(g.limit), g.note) for g in evaluation.guards),
        metrics={name: value for name, value in sorted(evaluation.metrics.items()) if math.isfinite(value)},
        looks=evaluation.looks,
        seconds=evaluation.seconds if math.isfinite(evaluation.seconds) else 0.0,
        suite=evaluation.suite,
        cost=replace(cost, money=known(cost.money), seconds=known(cost.seconds) or 0.0) if cost else None,
    )


assert set(get_args(PartName)) == {"weights", "harness"}  # these are folder names in a release's tree: never rename one
