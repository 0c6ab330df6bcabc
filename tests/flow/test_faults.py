"""A disk that fails, fills up or loses power at each durable step; and no durable step that no test comes by."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ChainError
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from tests.flow import kit_faults, kit_power

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")  # where a sync costs nothing; a process that is killed loses nothing there either
SMALL = "48m"


def tell(program: str, *words: object, seconds: float = 280) -> dict[str, Any]:
    """Run a program of this folder; what it says at the end."""
    command = [sys.executable, "-m", f"tests.{program}", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    said = f"{program} {' '.join(map(str, words[1:]))}"  # what to run again
    assert told["wrong"] == [], said
    return told


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        yield tmp_path / "story"
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "story"


# --- kills ------------------------------------------------------------------------------------------------------------


def passed(place: Path) -> set[str]:
    """The failpoints that the stories come by, and those at which another test kills by name."""
    seen = {*tell("flow.kit_lives", place, 0, 6)["seen"], *tell("loop.kills", place.with_name("life"), 1, 0)["seen"]}
    mine = {"kit_story.py", "kit_lives.py", "kills.py", "test_faults.py"}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in mine:
            seen |= set(re.findall(r'"([a-z]+\.[a-z_]+)(?::\d+)?"', path.read_text()))
    return seen


def failpoints() -> set[str]:
    source = "".join(path.read_text() for path in (ROOT / "reef").rglob("*.py"))
    return set(re.findall(r'failpoint\("([a-z_.]+)"\)', source))


def test_no_durable_step_is_passed_by_no_test(place: Path) -> None:
    found = failpoints()
    assert len(found) > 60
    place.parent.mkdir(exist_ok=True)
    place.with_name("life").mkdir()
    assert found - passed(place) == set()


@pytest.mark.parametrize("seed", [1])
def test_an_operators_story_killed_again_and_again(place: Path, seed: int) -> None:
    """Kills at failpoints and at any instant, with all of git's processes, while releases are made, held, promoted,
    pinned, taken back, pruned and pushed. case 39"""
    told = tell("flow.kit_lives", place, seed, 20)
    assert told["kills"] == 20


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 112))
def test_a_thousand_kills(place: Path, seed: int) -> None:
    """12 stories of 84 kills: 1008."""
    told = tell("flow.kit_lives", place, seed, 84, seconds=1800)
    print({name: told[name] for name in ("seed", "kills", "any_instant", "lives", "deeds", "seconds")})
    assert told["kills"] == 84


# --- a disk that fails ------------------------------------------------------------------------------------------------


def disturbed(place: Path, fault: str, seed: int, rounds: int) -> dict[str, Any]:
    told = tell("flow.kit_trouble", place, seed, rounds, fault, seconds=900)
    assert told["rounds"] == rounds
    assert sum(told["told"].values()) >= rounds // 3, "too few deeds noticed the trouble"
    print({name: told[name] for name in ("fault", "seed", "rounds", "deeds", "told", "seconds")})
    return told


@pytest.mark.parametrize("fault", ["stunted", "barred"])
def test_a_disk_that_takes_nothing_more_and_then_does(place: Path, fault: str) -> None:
    """case 41: at a durable step the disk takes no more bytes, or lets nobody write. What is served stays, the head
    can be read, the error says what to do, and afterwards the same deed succeeds."""
    disturbed(place, fault, 1, 16)


def test_a_full_file_system(tmp_path: Path) -> None:
    """case 41: a small file system that is full to the last block."""
    with kit_faults.small(tmp_path / "disk", SMALL) as allowed:
        if not allowed:
            pytest.skip("needs the right to mount a small file system")
        disturbed(tmp_path / "disk/story", "full", 1, 12)


def test_a_quota_that_is_used_up(place: Path) -> None:
    """case 41: EDQUOT at whatever makes something durable, be it only the pointer."""
    if not kit_faults.attachable():
        pytest.skip("needs strace, allowed to attach to a process")
    disturbed(place, "quota", 1, 12)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 13))
@pytest.mark.parametrize("fault", ["stunted", "barred", "quota"])
def test_longer_trouble(place: Path, fault: str, seed: int) -> None:
    if fault == "quota" and not kit_faults.attachable():
        pytest.skip("needs strace, allowed to attach to a process")
    disturbed(place, fault, seed, 120)


# --- a power cut ------------------------------------------------------------------------------------------------------


def cut(place: Path, seed: int, deeds: int, most: int) -> int:
    """Trace some deeds, then restart from what a power cut leaves, at `most` of the syncs; returns how many."""
    if not kit_faults.attachable():
        pytest.skip("needs strace, allowed to attach to a process")
    place.parent.mkdir(exist_ok=True)
    calls, disk = kit_power.trace(place, seed, deeds)
    whole = {str(path) for path in (place / "state").rglob("*") if not path.name.endswith("-shm")}
    syncs = sum(call.name in ("fsync", "fdatasync") for call in calls)
    draw, done, wrong = random.Random(seed), 0, []
    chosen = set(draw.sample(range(syncs), min(most, syncs)))
    for number, promise in enumerate(kit_power.cuts(calls, disk, place)):
        if number in chosen:
            done += 1
            after = place.with_name(f"cut-{number}")
            disk.restore(after / "state", draw if done % 2 else None)
            said = asyncio.run(kit_power.check(after, seed, promise)) if began(after) else []
            wrong += [f"{number} of {syncs}: {sentence}" for sentence in said]
    assert wrong == []
    assert disk.names.keys() - {disk.root} == whole, "the trace was not understood"
    files = {name: inode for name, inode in disk.names.items() if not inode.folder}
    assert [name for name, inode in files.items() if Path(name).read_bytes() != inode.data] == []
    return done


def began(place: Path) -> bool:
    """Whether there was a folder to go on with."""
    return (place / "state").is_dir()


def test_a_power_cut_leaves_every_release_that_was_promised(place: Path) -> None:
    """case 54: bytes that were not synced are lost, names that were are not. No head is empty, none has to be
    repaired, and no release that somebody was told of is gone."""
    assert cut(place, 1, 6, 12) >= 8


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_power_cuts(place: Path, seed: int) -> None:
    assert cut(place, seed, 24, 120) >= 80


def test_a_repository_whose_head_and_config_are_empty_is_made_whole(tmp_path: Path) -> None:
    """case 54: git does not sync these two when it makes a repository; Reef does, and makes them again if need be."""
    chain = GitChain(tmp_path / "releases.git")
    chain.open()
    part = NewPart("base", {"weights.json": b"{}"}, {})
    made = chain.publish("work", Draft("create", {"weights": part}), None)
    for name in ("HEAD", "config"):
        (chain.path / name).write_bytes(b"")
    with pytest.raises(ChainError):
        chain.git.run("for-each-ref")
    (said,) = GitChain(chain.path).open()
    assert "made HEAD, config" in said
    again = GitChain(chain.path)
    assert again.open() == []
    assert (again.head("work"), again.verify("work")) == (made, [])
    assert (chain.path / "HEAD").read_text() == "ref: refs/heads/work\n"


def test_trees_are_git_trees_and_synced(tmp_path: Path) -> None:
    """case 54: git's own command for trees neither syncs nor reports a failure; what is written instead is the same."""
    chain = GitChain(tmp_path / "releases.git")
    chain.open()
    blob = chain.git.line("hash-object", "-w", "--stdin", data=b"x")
    names = ["b", "a.b", "a", "a-b", "a0", "Z"]
    files = [f"100644 blob {blob}\t{name}" for name in names]
    inner = chain.git.tree(files)
    top = [*files[1:2], f"040000 tree {inner}\ta", f"100644 blob {blob}\ta.c", f"040000 tree {inner}\tb"]
    for entries in (files, top):
        theirs = chain.git.line("mktree", data="".join(f"{entry}\n" for entry in entries).encode())
        assert chain.git.tree(entries) == theirs
    assert sorted(chain.git.run("ls-tree", inner).stdout.decode().splitlines()) == sorted(files)
