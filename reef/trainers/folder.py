"""The training folder: `training/<scenario>/<part>/<line>/<step>/`, one folder a step, and its `state.json`.

Knows: how a step becomes durable, how it is found again, checked, and forgotten.
Does not know: torch, tensors, objectives, releases. The files' bytes are the trainer's business.

- A step folder appears whole or not at all: temporary folder, fsync of each file, rename, fsync of the parents.
- `state.json` is the acknowledgement: it names batch, units, cursor and the sha256 of every other file. A unit is
  trained exactly once because a step that exists is answered from here and never made again.
- A step is whole until the next one of its line is durable; then `slim` leaves its `state.json`.
- safetensors and JSON only. A file that is missing or does not match its digest is a TrainError, never a guess. A disk
  that cannot be written is a StoreError: no batch is at fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from reef.core.disk import advice, full, sha256, sync
from reef.core.errors import StoreError, TrainError
from reef.core.failpoint import failpoint
from reef.core.wire import Step, Stepped

FORMAT = 1
STATE = "state.json"
PRIVATE = ("optimizer.safetensors", "modules.safetensors", "remote.json", STATE)
"""Files of a step that never become part of a release."""

Content = bytes | Callable[[Path], None]
"""A file's bytes, or a function that writes them to the path it is given."""


@dataclass(frozen=True, slots=True)
class State:
    """What `state.json` says. `files` maps each other file to (sha256 hex, size in bytes)."""

    scenario: str
    part: str
    line: str
    step: int
    base_release: str
    base_step: int
    kind: str  # lora | full, as in weights.json
    objective: str
    batch_id: str
    unit_ids: tuple[str, ...]
    cursor: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    format: int = FORMAT


def path(training: Path, scenario: str, part: str, line: str, step: int) -> Path:
    """Where a step lives. Names come from Reef itself, but a separator in one would escape the folder: TrainError."""
    for name in (scenario, part, line):
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise TrainError(f"{name!r} cannot name a training folder; use letters, digits, '-', '_' and '.'")
    return training / scenario / part / line / str(step)


def steps(training: Path, scenario: str, part: str, line: str) -> list[int]:
    """The finished steps of a line, ascending."""
    folder = path(training, scenario, part, line, 0).parent
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and (entry / STATE).is_file())


def latest(training: Path, scenario: str, part: str, line: str) -> State | None:
    """The newest finished step of a line; None for a line that has made none."""
    done = steps(training, scenario, part, line)
    return read(path(training, scenario, part, line, done[-1])) if done else None


def read(folder: Path) -> State | None:
    """A step's state, or None when there is no such step. TrainError when it is there but unreadable."""
    try:
        raw = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrainError(
            f"{folder / STATE} cannot be read ({error}); remove {folder} to train that step again"
        ) from None
    try:
        if raw["format"] != FORMAT:
            raise TrainError(f"{folder} has format {raw['format']}, this Reef reads {FORMAT}; remove it to train again")
        raw["unit_ids"] = tuple(raw["unit_ids"])
        raw["files"] = {name: (str(digest), int(size)) for name, (digest, size) in raw["files"].items()}
        return State(**raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainError(f"{folder / STATE} is damaged ({error!r}); remove {folder} to train that step again") from None


def verify(folder: Path, state: State, names: Collection[str] | None = None) -> None:
    """Check size and sha256 of a step's files (all of them, or `names`). TrainError names the first that is wrong."""
    for name, (digest, size) in state.files.items():
        if names is not None and name not in names:
            continue
        file = folder / name
        if not file.is_file():
            raise TrainError(f"{file} is missing; remove {folder} to train that step again")
        if file.stat().st_size != size or sha256(file) != digest:
            raise TrainError(f"{file} does not match its digest; remove {folder} to train that step again")


def part_files(folder: Path, *, check: bool = True) -> tuple[str, dict[str, Path], dict[str, Any]]:
    """A step as a release part: its kind, its files by name, and the meta that `weights.json` holds."""
    state = read(folder)
    if state is None:
        raise TrainError(f"{folder} holds no finished step")
    if not state.files:
        raise TrainError(f"{folder} was gone beyond: only its acknowledgement was kept; use the line's newest step")
    public = {name: folder / name for name in sorted(state.files) if name not in PRIVATE}
    if check:
        verify(folder, state, public)
    return state.kind, public, json.loads((folder / "weights.json").read_bytes())


def answered(training: Path, order: Step) -> Stepped | None:
    """The answer to an order whose step is on disk already; None when it still has to be made.

    TrainError when that step was made from another batch, or when the line has already learnt from one of the units:
    either way, making it would train something twice.
    """
    folder = path(training, order.scenario, order.part, order.line, order.step)
    state = read(folder)
    if state is None:
        wanted = set(order.unit_ids)
        for step in steps(training, order.scenario, order.part, order.line):
            earlier = read(folder.parent / str(step))
            if earlier is not None and (twice := wanted.intersection(earlier.unit_ids)):
                raise TrainError(f"unit {min(twice)} was trained at step {step} of line {order.line}; leave it out")
        return None
    if state.batch_id != order.batch_id:
        raise TrainError(
            f"step {order.step} of line {order.line} was made from batch {state.batch_id}, not {order.batch_id}; "
            f"continue at step {order.step + 1} or start a new line"
        )
    verify(folder, state)
    return Stepped(step=order.step, folder=str(folder), metrics=dict(state.metrics), reused=True)


def write(
    training: Path, order: Step, kind: str, files: Mapping[str, Content], metrics: Mapping[str, float]
) -> Stepped:
    """Make a step durable. When somebody else finished the same step meanwhile, theirs is the answer."""
    target = path(training, order.scenario, order.part, order.line, order.step)
    _make(target.parent, training)
    draft = target.parent / f".{order.step}-{uuid.uuid4().hex}"
    failpoint("trainers.before_write")
    try:
        draft.mkdir()
        written = {}
        for name, content in files.items():
            file = draft / name
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                content(file)
            sync(file)
            written[name] = (sha256(file), file.stat().st_size)
        state = State(
            scenario=order.scenario,
            part=order.part,
            line=order.line,
            step=order.step,
            base_release=order.base_release,
            base_step=order.base_step,
            kind=kind,
            objective=order.objective,
            batch_id=order.batch_id,
            unit_ids=tuple(order.unit_ids),
            cursor=order.cursor,
            metrics=dict(metrics),
            files=written,
        )
        _acknowledge(draft / STATE, state)
        sync(draft)
        failpoint("trainers.after_write")
        os.rename(draft, target)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if (failed := error if isinstance(error, OSError) else full(error)) is None:
            raise
        if target.exists() and (already := answered(training, order)) is not None:
            return already
        raise StoreError(f"cannot write {target}: {failed.strerror or failed}; {advice(failed)}") from None
    failpoint("trainers.after_rename")
    try:
        sync(target.parent)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}; {advice(error)}") from None
    return Stepped(step=order.step, folder=str(target), metrics=dict(metrics), reused=False)


def slim(training: Path, scenario: str, part: str, line: str, before: int, keep: Collection[int] = ()) -> int:
    """Leave of a line's steps below `before`, which is durable, only the acknowledgement: what they hold was for the
    step after them. Those in `keep` stay whole. Returns how many bytes that freed."""
    freed = 0
    for step in steps(training, scenario, part, line):
        folder = path(training, scenario, part, line, step)
        if step < before and step not in keep:
            try:
                freed += _slim(folder)
            except TrainError:  # a damaged step is not needed either; who reads it says so
                continue
            except OSError as error:
                raise StoreError(f"cannot shrink {folder}: {error.strerror or error}; {advice(error)}") from None
    return freed


def _slim(folder: Path) -> int:
    state, held = read(folder), folder.stat()
    if state is None:
        return 0
    if state.files:  # the acknowledgement first: a step never names a file that is gone
        draft = folder / f".{STATE}"
        _acknowledge(draft, replace(state, files={}))
        os.replace(draft, folder / STATE)
        sync(folder)
        failpoint("trainers.slimmed")
    spare = [file for file in folder.iterdir() if file.name != STATE]
    freed = sum(file.stat().st_size for file in spare)
    for file in spare:
        file.unlink()
    if spare:
        os.utime(folder, ns=(held.st_atime_ns, held.st_mtime_ns))  # `_newest` goes by it
    return freed


def sweep(training: Path) -> int:
    """Remove the temporary folders a killed trainer left. Call before the first step; returns how many there were."""
    drafts = [entry for entry in training.glob("*/*/*/.*-*") if entry.is_dir()]
    for draft in drafts:
        shutil.rmtree(draft, ignore_errors=True)
    return len(drafts)


def prune(training: Path, scenario: str, part: str, keep: Collection[tuple[str, int]], live: str | None) -> list[Path]:
    """Forget old steps. Kept: the (line, step) pairs of `keep` (the head's and the last three releases'), every step
    of the `live` line, and the newest step of every line that has one in `keep`. Returns the folders removed."""
    root = path(training, scenario, part, "line", 0).parent.parent
    lines = [entry.name for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    newest = _newest(training, scenario, part, lines)
    removed = []
    for line in lines:
        if line == live:
            continue
        for step in steps(training, scenario, part, line):
            if (line, step) in keep or (line, step) == newest:
                continue
            folder = path(training, scenario, part, line, step)
            # Renamed first, so that a kill in the middle leaves a draft for `sweep`, never half a step.
            grave = folder.parent / f".{step}-{uuid.uuid4().hex}"
            try:
                os.rename(folder, grave)
            except OSError as error:
                raise StoreError(f"cannot remove {folder}: {error.strerror or error}; {advice(error)}") from None
            shutil.rmtree(grave, ignore_errors=True)
            removed.append(folder)
        with contextlib.suppress(OSError):
            (root / line).rmdir()
    return removed


def find(training: Path, scenario: str, part: str, step: int, name: str, digest: str) -> Path | None:
    """The step folder, on any line, whose file `name` has this sha256: where a release's optimizer may still be."""
    for folder in sorted((training / scenario / part).glob(f"*/{step}")):
        with contextlib.suppress(TrainError):  # a damaged step of another line is not this release's
            state = read(folder)
            if state is not None and state.files.get(name, ("", 0))[0] == digest:
                return folder
    return None


def _newest(training: Path, scenario: str, part: str, lines: list[str]) -> tuple[str, int] | None:
    """The step written last, on any line: never forgotten, it may be the acknowledgement nobody has read yet."""
    found = [
        (path(training, scenario, part, line, step).stat().st_mtime_ns, line, step)
        for line in lines
        for step in steps(training, scenario, part, line)
    ]
    return max(found)[1:] if found else None


def _acknowledge(file: Path, state: State) -> None:
    file.write_text(json.dumps(asdict(state), indent=1, sort_keys=True, allow_nan=False))
    sync(file)


def _make(folder: Path, root: Path) -> None:
    """Create a folder and its missing parents, each entry durable."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    try:
        for entry in reversed(missing):
            entry.mkdir(exist_ok=True)
            sync(entry.parent)
    except OSError as error:
        raise StoreError(f"cannot write below {root}: {error.strerror or error}; {advice(error)}") from None
