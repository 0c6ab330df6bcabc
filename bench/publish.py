"""A publish against the `git` and `git lfs` commands that do the same: `python bench/publish.py [--write]`.

A LoRA of 10 MB and full weights of 270 MB, fresh random bytes each round, on this machine's disk. The arms take turns
in one run. `reef` is `GitChain.publish`: verified, and on disk when it returns. `git` is a work tree with git-lfs,
`git add` and `git commit`, as installed but without hooks; `git fsync` the same with core.fsync=all, as Reef has it;
`git durable` that and a sync of the large file, which git-lfs never makes, so it is the one that promises what Reef
does. Writing the file itself is nobody's time. Bytes are what a release adds on disk, the work tree's own copy apart.
`--write` stores the figures beside this file as the baseline; `--folder` puts the repositories elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kit.table import ratios, shown, spread

from reef.core.disk import sync
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain

SIZES = {"lora": 10_000_000, "full": 270_000_000}
SMALL = {"weights.json": b'{"kind": "lora", "rank": 8}\n', "adapter_config.json": b'{"r": 8}\n'}
LARGE = "model.safetensors"
FSYNC = ("-c", "core.fsync=all")


def tensors(path: Path, size: int) -> None:
    """Random weights, in the page cache and on disk, as a trainer leaves them."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for start in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - start)))
    sync(path)


def used(folder: Path) -> int:
    """Bytes that a folder takes on disk."""
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))


def cpu() -> float:
    """Seconds of processor, of this process and its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Reef:
    def __init__(self, folder: Path) -> None:
        self.store = folder / "releases.git"
        self._source = folder / LARGE
        self._chain = GitChain(self.store)
        self._chain.open()
        base = Draft("create", {"weights": NewPart("base", {"weights.json": b"{}\n"}, {})})
        self._head = self._chain.publish("default", base, None)

    def make(self, size: int) -> Callable[[], None]:
        tensors(self._source, size)
        step = self._head.step + 1
        part = NewPart("full", {**SMALL, LARGE: self._source}, {"step": step})

        def publish() -> None:
            draft = Draft("publish", {"weights": part}, base=self._head.id, step=step)
            self._head = self._chain.publish("default", draft, self._head.id)

        return publish


class Plain:
    """A work tree. `options` are git's; `durable` syncs the large file and the folders that name it."""

    def __init__(self, folder: Path, options: tuple[str, ...] = (), *, durable: bool = False) -> None:
        self._tree, self._options, self._durable, self._step = folder, options, durable, 0
        self.store = folder / ".git"
        self._git("init", "--quiet", "--initial-branch=default")
        for name, value in (("user.name", "bench"), ("user.email", "bench@localhost"), ("gc.auto", "0")):
            self._git("config", name, value)
        self._git("lfs", "install", "--local", "--skip-repo")
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        self._commit()

    def make(self, size: int) -> Callable[[], None]:
        self._step += 1
        weights = self._tree / "weights"
        weights.mkdir(exist_ok=True)
        tensors(weights / LARGE, size)
        for name, data in SMALL.items():
            (weights / name).write_bytes(data)
        (self._tree / "release.json").write_text(json.dumps({"seq": self._step, "operation": "publish"}))
        return self._commit

    def _commit(self) -> None:
        before = set(self.store.glob("lfs/objects/*/*/*")) if self._durable else set()
        self._git("add", ".")
        if self._durable:
            for made in set(self.store.glob("lfs/objects/*/*/*")) - before:
                for place in (made, made.parent, made.parent.parent):
                    sync(place)
        self._git("commit", "--quiet", "-m", f"publish {self._step}")

    def _git(self, *arguments: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        subprocess.run(
            ["git", *self._options, *arguments], cwd=self._tree, env=clean | quiet, check=True, capture_output=True
        )


ARMS: Mapping[str, Callable[[Path], Reef | Plain]] = {
    "reef": Reef,
    "git": Plain,
    "git fsync": lambda folder: Plain(folder, FSYNC),
    "git durable": lambda folder: Plain(folder, FSYNC, durable=True),
}


def measure(folder: Path, size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and bytes of each arm, round by round; the first round warms up and does not count."""
    arms: dict[str, Reef | Plain] = {}
    for name, kind in ARMS.items():
        (place := folder / name.replace(" ", "-")).mkdir()
        arms[name] = kind(place)
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu": [], "bytes": []} for name in arms}
    for turn in range(rounds + 1):
        names = list(arms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            arm = arms[name]
            publish = arm.make(size)
            before = used(arm.store)
            os.sync()  # what others left to write is not this arm's
            begin, worked = time.perf_counter(), cpu()
            publish()
            took, worked = time.perf_counter() - begin, cpu() - worked
            if turn:
                found[name]["seconds"].append(took)
                found[name]["cpu"].append(worked)
                found[name]["bytes"].append(used(arm.store) - before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures as the baseline")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the repositories are made")
    options = parser.parse_args()
    said = [
        subprocess.run(words, capture_output=True, text=True, check=True)
        for words in (["git", "--version"], ["git-lfs", "--version"])
    ]
    figures: dict[str, object] = {
        "python": platform.python_version(),
        "git": said[0].stdout.split()[2],
        "git_lfs": said[1].stdout.split()[0],
        "rounds": options.rounds,
        "load": round(os.getloadavg()[0], 1),
    }
    print("seconds, seconds of processor: median (smallest to largest); bytes on disk a release; times Reef by round")
    for kind, size in SIZES.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            found = measure(Path(name), size, options.rounds)
        ours = found["reef"]["seconds"]
        for arm, seen in found.items():
            over, middle = ratios(seen["seconds"], ours), statistics.median(seen["bytes"])
            worked = spread(seen["cpu"])
            told = f"{shown(spread(seen['seconds']), 8, 3)}{shown(worked, 8, 3)}{middle:14,.0f}  {shown(over, 6, 2)}"
            print(f"{kind:5}{arm:12}{told}")
            key = f"{kind}_{arm.replace(' ', '_')}"
            figures[f"{key}_seconds"] = spread(seen["seconds"])
            figures[f"{key}_cpu_seconds"] = worked
            figures[f"{key}_bytes"] = middle
            figures[f"{key}_over_reef"] = over
    figures["load_after"] = round(os.getloadavg()[0], 1)
    if options.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
