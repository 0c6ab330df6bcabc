"""The folder between Reef and slime: which files there are, and how each comes to be whole or not at all.

    batches/<name>/batch.json, samples.jsonl   Reef: a batch, and what it starts from and wants of slime
    rollouts/<number>.json                     slime: rollout <number> trains that batch
    weights/<name>.json                        slime: its weights are whole, there, with these digests
    refused/<name>.json                        slime: why it cannot train that batch
    start.json                                 slime: from which rollout it is to start again

Knows: names, JSON, fsync and rename. Standard library alone: slime's side imports it too.
Does not know: tensors, objectives, slime.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
SAMPLES = "samples.jsonl"


class Torn(Exception):
    """A file of the exchange does not hold what it says. The message names it."""


@dataclass(frozen=True, slots=True)
class Exchange:
    root: Path

    def batch(self, name: str) -> Path:
        return self.root / "batches" / name

    def claim(self, rollout: int) -> Path:
        return self.root / "rollouts" / f"{rollout}.json"

    def weights(self, name: str) -> Path:
        return self.root / "weights" / f"{name}.json"

    def refused(self, name: str) -> Path:
        return self.root / "refused" / f"{name}.json"

    @property
    def start(self) -> Path:
        return self.root / "start.json"

    # --- batches ------------------------------------------------------------------------------------------------------

    def offer(self, name: str, said: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
        """Write a batch; nothing happens when it is there already."""
        place = self.batch(name)
        if (place / "batch.json").is_file():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.parent / f".{name}-{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            file = draft / SAMPLES
            with file.open("w") as out:
                for sample in samples:
                    out.write(json.dumps(sample, allow_nan=False) + "\n")
                out.flush()
                os.fsync(out.fileno())
            whole = {**said, "format": FORMAT, "name": name, "digest": sha256(file), "size": file.stat().st_size}
            _write(draft / "batch.json", whole)
            if place.exists():  # a rest without its manifest
                shutil.rmtree(place)
            os.rename(draft, place)
            _sync(place.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def batches(self) -> list[dict[str, Any]]:
        """What is offered, oldest first."""
        found = []
        for place in (self.root / "batches").glob("[!.]*/batch.json"):
            said = read(place)
            if said is not None and said.get("format") == FORMAT:
                with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                    found.append((place.stat().st_mtime_ns, said["name"], said))
        return [said for _, _, said in sorted(found, key=lambda one: one[:2])]

    def samples(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A batch's samples, checked. Torn when they are not what its manifest says."""
        file = self.batch(said["name"]) / SAMPLES
        if not file.is_file() or sha256(file) != said["digest"]:
            raise Torn(f"{file} is missing or does not match its digest; remove {file.parent}, Reef writes it again")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def withdraw(self, name: str) -> None:
        """A batch that nobody is to train, or whose step is durable."""
        place = self.batch(name)
        grave = place.parent / f".{name}-{uuid.uuid4().hex}"
        try:
            os.rename(place, grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)

    # --- weights ------------------------------------------------------------------------------------------------------

    def publish(self, name: str, said: Mapping[str, Any], place: Path) -> None:
        """Say that a folder holds a batch's weights: its files, synced, with size and digest, then the marker."""
        files = sorted(file for file in place.iterdir() if file.is_file())
        for file in files:
            _sync(file)
        _sync(place)
        listed = {file.name: [sha256(file), file.stat().st_size] for file in files}
        write(self.weights(name), {**said, "format": FORMAT, "name": name, "folder": str(place), "files": listed})


def read(path: Path) -> dict[str, Any] | None:
    """A JSON file of the exchange; None when there is none. Torn when it is something else."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Torn(f"{path} cannot be read ({error}); remove it") from None
    if not isinstance(found, dict):
        raise Torn(f"{path} is no JSON object; remove it")
    return found


def write(path: Path, said: Mapping[str, Any]) -> None:
    """Whole or not at all, and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        _write(draft, said)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, said: Mapping[str, Any]) -> None:
    with path.open("w") as out:
        json.dump(said, out, indent=1, sort_keys=True, allow_nan=False)
        out.flush()
        os.fsync(out.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
