"""Arms and seeds, one after the other, each in a folder of its own; what was finished before is not run again.

Knows: where a run's folder is, when it is finished, and that a changed arm makes its old results worthless.
Does not know: servers (`run`), what is measured, how it is shown.

    <out>/<study>/<arm>-<seed>/   made.json      the arm as it was run
                                  kept.json, journal-*.jsonl, points.jsonl, serve.yaml, serve.log, state/
                                  result.json    once it has ended: figures, seconds, the learner's last words
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.core.errors import ConfigError, InputError, ReefError, StoreError
from reef.core.load import load
from reef.study import STUDIES, Arm, Study
from reef.study.kept import damaged, key, read, write
from reef.study.run import Run

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that has ended."""

    arm: str
    seed: int
    figures: dict[str, Any]
    seconds: dict[str, float]  # by what they were spent on; `all` is the whole


@dataclass(frozen=True, slots=True)
class Failure:
    arm: str
    seed: int
    why: str


def find(name: str) -> Study:
    """A study by its name, or by dotted path."""
    if name not in STUDIES and ":" not in name:
        raise InputError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or write package.module:NAME")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the installed program does not have the caller's folder there
    found = load(STUDIES.get(name, name), what="study")
    if not isinstance(found, Study):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a reef.study.Study")
    return found


def plan(study: Study, arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[Arm, int]]:
    """The runs that are asked for: these arms (default: all), with these seeds (default: each arm's own)."""
    known = {arm.name: arm for arm in study.arms}
    for name in arms:
        if name not in known:
            raise InputError(f"the study {study.name} has no arm {name!r}; it has {', '.join(known)}")
    return [(arm, seed) for arm in study.arms if not arms or arm.name in arms for seed in seeds or arm.seeds]


async def run(study: Study, arm: Arm, seed: int, out: Path, *, fresh: bool, show: Show) -> Outcome:
    """One run to its end; from where it was when it was cut short. ReefError when it cannot go on."""
    folder = place(study, arm, seed, out)
    made = key(arm.config, arm.options)
    if fresh and folder.exists():
        shutil.rmtree(folder)
    was = read(folder / "made.json")
    if was is not None and was.get("digest") != made:
        raise InputError(f"{folder} was run with other settings of arm {arm.name}; use --fresh, or another --out")
    if (done := outcome(study, arm, seed, out)) is not None:
        return done
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if was is None:
            write(folder / "made.json", {"digest": made, "config": arm.config, "options": arm.options})
        made_run = Run(folder, arm, seed, show=show)
        async with made_run.opened() as one:
            figures = await study.drive(one)
        _whole(study, figures)
        write(folder / "result.json", {"figures": figures, "seconds": made_run.spent})
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreError(f"{folder} cannot be written: {error.strerror}; free some space") from error
    return Outcome(arm.name, seed, figures, made_run.spent)


def outcome(study: Study, arm: Arm, seed: int, out: Path) -> Outcome | None:
    """What a run gave; None when it has not ended."""
    path = place(study, arm, seed, out) / "result.json"
    if (found := read(path)) is None:
        return None
    figures, seconds = found.get("figures"), found.get("seconds")
    if not isinstance(figures, dict) or not isinstance(seconds, dict) or not _numbers(figures, "base", "end"):
        raise damaged(path, "it has no figures and seconds of a run that ended")
    if not _numbers(seconds, "all"):
        raise damaged(path, "it does not say how long the run took")
    return Outcome(arm.name, seed, figures, seconds)


def outcomes(study: Study, out: Path) -> list[Outcome]:
    """Every run of the study's arms that has ended, with any seed, in the order of the arms."""
    found = []
    for arm in study.arms:
        made = key(arm.config, arm.options)
        seeds = [path.name.rpartition("-")[2] for path in (out / study.name).glob(f"{arm.name}-*")]
        for seed in sorted(int(text) for text in seeds if text.isdigit()):
            kept = read(place(study, arm, seed, out) / "made.json") or {}
            if kept.get("digest") == made and (one := outcome(study, arm, seed, out)) is not None:
                found.append(one)
    return found


def results(found: Sequence[Outcome]) -> dict[str, dict[int, dict[str, Any]]]:
    """As a study's demands read them; `seconds` is the run's whole time."""
    made: dict[str, dict[int, dict[str, Any]]] = {}
    for one in found:
        made.setdefault(one.arm, {})[one.seed] = {"seconds": one.seconds.get("all"), **one.figures}
    return made


def place(study: Study, arm: Arm, seed: int, out: Path) -> Path:
    return out / study.name / f"{arm.name}-{seed}"


@contextlib.contextmanager
def alone(study: Study, out: Path) -> Iterator[None]:
    """Two at once in one folder would run the same runs."""
    import fcntl

    (out / study.name).mkdir(parents=True, exist_ok=True)
    with (out / study.name / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"the study {study.name} runs in {out} already; wait, or use another --out") from None
        yield


def _numbers(found: dict[str, Any], *names: str) -> bool:
    return all(isinstance(found.get(name), int | float) for name in names)


def _whole(study: Study, figures: dict[str, Any]) -> None:
    missing = [name for name in ("base", "end") if not isinstance(figures.get(name), int | float)]
    if missing:
        raise ReefError(f"the drive of study {study.name} returned no number {missing[0]!r}")
    json.dumps(figures)


__all__ = ["Failure", "Outcome", "find", "outcomes", "plan", "results", "run"]
