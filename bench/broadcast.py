"""Full weights from a trainer's process to running engines: by broadcast, and by reading the same file.

    .venv/bin/python bench/broadcast.py              print the figures beside `bench/broadcast.json`
    .venv/bin/python bench/broadcast.py --write      and make them the baseline, with the figure
    .venv/bin/python bench/broadcast.py --device cuda --world 2
                                                     only that bytes arrive, through the backend of that device (nccl);
                                                     needs a GPU for each of the world's processes

Engines answer streams all the while, as `reef serve` runs them; the sender is at nice 19, as a trainer is. A sync is a
fresh release: its weights' file gets another digest, then either it is broadcast and loaded from the arrival, or
loaded from the file, whose digest is checked as the release chain does it. Both in turns, in the same run; the file
is in the page cache, which is the best a disk can do. `raw` is one torch.distributed broadcast of as many bytes
between two idle processes with nothing around it.

A gap is the time between two tokens of an answer as its client sees it. Medians, lowest and highest; run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from reef.core import wire
from reef.core.disk import sha256
from reef.core.errors import MissingError, ReefError, WireError
from reef.core.nouns import Part
from reef.core.rpc import Client
from reef.engines import WeightFiles
from reef.engines.local.broadcast import PLACE, Following
from reef.engines.local.folder import prepare
from reef.engines.local.server import Options, run
from reef.trainers.broadcast import Listening, Sender

BASELINE = Path(__file__).with_suffix(".json")
FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
WAYS = ("broadcast", "file")
STREAMS, TOKENS = 4, 32  # answers at once of each engine, and their length
PAUSE = 0.3  # seconds between syncs
NAME = "model.safetensors"
MARK = b"0" * 16  # in the file's header: another value there makes another digest


# --- the processes ----------------------------------------------------------------------------------------------------


def make_weights(source: Path, target: Path, dtype: str) -> None:
    """The model's weights in `dtype`, with a mark in the header that can be changed in place."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(source).items()}
    save_file(tensors, target, metadata={"format": "pt", "mark": MARK.decode()})


def release(folder: Path, number: int) -> str:
    """A fresh release: the same weights under a mark and a digest of their own. Its id."""
    path, name = folder / NAME, f"r{number}"
    with path.open("r+b") as file:
        head = file.read(1 << 16)
        at = head.index(b'"mark":"') + len(b'"mark":"')
        file.seek(at)
        file.write(f"{number:016d}".encode())
    (folder / name).write_text(json.dumps({"sha256": sha256(path), "size": path.stat().st_size}))
    return name


def recorded(folder: Path, name: str) -> Part:
    if name == "base":
        return Part("base")
    try:
        found = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise MissingError(f"no release {name}") from None
    return Part("full", {NAME: (found["sha256"], found["size"])})


def resolve(folder: Path, name: str) -> WeightFiles:
    """As a release chain does it: no file is handed out before its digest was checked."""
    part = recorded(folder, name)
    if part.kind == "base":
        return WeightFiles("base", {}, {})
    if sha256(folder / NAME) != part.files[NAME][0]:
        raise ReefError("the file is another one now")
    return WeightFiles("full", {NAME: folder / NAME}, {})


def engine(listener: socket.socket, model: Path, folder: Path, following: bool) -> None:
    options = Options(arrival_bytes=640 * 1024 * 1024, full=3)
    found = Following(folder / PLACE, lambda name: recorded(folder, name)) if following else None
    run(listener, model, lambda name: resolve(folder, name), options, found)


def sender(pipe: Connection, folder: Path, device: str) -> None:
    """Sends the file when it is told to, and says what that took."""
    if device == "cpu":
        os.nice(19)
    made = Sender(Listening(folder / PLACE, "127.0.0.1", 0, device))
    made.start()
    while (order := pipe.recv()) is not None:
        least, digest, size = order
        there = made.receivers(least, 120)
        began = time.perf_counter()
        sent = made.send({NAME: (folder / NAME, digest, size)})
        pipe.send(
            {
                "there": there,
                "got": len(sent.got),
                "lost": [*sent.lost, *sent.refused],
                "reading, sender": sent.reading,
                "hashing, sender": sent.verifying,
                "hashing, receiver": max((each.verify for each in sent.got), default=0.0),
                "group and transfer": sent.whole,
                "broadcast": time.perf_counter() - began,
            }
        )
    made.close()


def raw(rank: int, port: int, size: int, rounds: int, pipe: Connection) -> None:
    """One rank of a plain broadcast."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    flat, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    pipe.send(seconds[1:])  # the first touches the memory
    dist.destroy_process_group()


def measure_raw(size: int, rounds: int) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mine, theirs = SPAWN.Pipe()
    ranks = [SPAWN.Process(target=raw, args=(rank, port, size, rounds, theirs)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found: list[float] = mine.recv()
    for rank in ranks:
        rank.join()
    return found


# --- load -------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the clients of one stretch saw."""

    began: float = field(default_factory=time.perf_counter)
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when it ended, seconds
    flights: list[tuple[float, int]] = field(default_factory=list)  # when, answers under way from then on
    syncs: list[tuple[float, float, str]] = field(default_factory=list)  # from, to, way
    releases: set[str] = field(default_factory=set)

    def largest(self, way: str) -> list[float]:
        """The largest gap that each sync of a way touched."""
        spans = [(start, stop) for start, stop, kind in self.syncs if kind == way]
        return [
            max((gap for end, gap in self.gaps if end >= start and end - gap <= stop), default=0.0)
            for start, stop in spans
        ]

    def outside(self) -> list[float]:
        """Gaps that no sync touched."""
        return [gap for end, gap in self.gaps if all(end < start or end - gap > stop for start, stop, _ in self.syncs)]


class Crowd:
    """Clients of one engine each, streaming from the newest release that all engines have."""

    def __init__(self, engines: Sequence[Client]) -> None:
        self.engines, self.seen, self.current = engines, Seen(), "base"
        self._done, self._flying, self._numbers = asyncio.Event(), 0, itertools.count()

    async def __aenter__(self) -> Crowd:
        self._tasks = [asyncio.create_task(self._live(one)) for one in self.engines for _ in range(STREAMS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks)

    async def _live(self, client: Client) -> None:
        while not self._done.is_set():
            number, wanted = next(self._numbers), self.current
            ask = {"role": "user", "content": f"Tell me a long story about the number {number}."}
            body = json.dumps({"messages": [ask], "max_tokens": TOKENS, "seed": number}).encode()
            self._fly(1)
            last, finished = None, False
            try:
                async for message in client.stream(wire.Generate(release_id=wanted, body=body)):
                    now = time.perf_counter()
                    if isinstance(message, wire.Delta):
                        if message.release_id != wanted:
                            self.seen.failed.append(f"{message.release_id} answered for {wanted}")
                        if last is not None:
                            self.seen.gaps.append((now, now - last))
                        last = now
                    finished |= isinstance(message, wire.Finished)
                if not finished or last is None:
                    self.seen.failed.append(f"{wanted}: cut off")
                self.seen.releases.add(wanted)
            except ReefError as error:
                self.seen.failed.append(f"{wanted}: {error.message}")
            self.seen.answers += 1
            self._fly(-1)

    def _fly(self, change: int) -> None:
        self._flying += change
        self.seen.flights.append((time.perf_counter(), self._flying))


async def load(engines: Sequence[Client], name: str) -> float:
    """Seconds until every engine has it, and a token went through it."""
    began = time.perf_counter()
    await asyncio.gather(*(one.call(wire.Load(release_id=name)) for one in engines))
    return time.perf_counter() - began


async def sync(
    way: str, crowd: Crowd | None, engines: Sequence[Client], pipe: Connection, folder: Path, number: int
) -> dict[str, float]:
    """One fresh release to every engine. Seconds of its stages."""
    name = await asyncio.to_thread(release, folder, number)
    await asyncio.sleep(PAUSE)  # what making it cost is none of the sync's
    found, began = dict[str, float](), time.perf_counter()
    if way == "broadcast":
        digest, size = recorded(folder, name).files[NAME]
        pipe.send((len(engines), digest, size))
        sent = await asyncio.to_thread(pipe.recv)
        found |= {stage: sent[stage] for stage in sent if isinstance(sent[stage], float)}
        if sent["got"] != len(engines):  # counted, and loaded from the file
            print(f"{sent['got']} of {len(engines)} engines got {name}: {sent['lost']}")
    found["load"] = await load(engines, name)
    ended = time.perf_counter()
    if crowd is not None:
        crowd.current = name
        crowd.seen.syncs.append((began, ended, way))
        await asyncio.sleep(PAUSE)
    return found | {"sync": ended - began}


@dataclass
class Arm:
    """Some engines: stages by way, idle and under load, and what clients saw."""

    idle: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    loaded: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    seen: Seen = field(default_factory=Seen)
    counts: list[dict[str, Any]] = field(default_factory=list)


async def measure(paths: Sequence[Path], pipe: Connection, folder: Path, syncs: int, idle: int, first: int) -> Arm:
    engines, arm, numbers = [Client(path) for path in paths], Arm(), itertools.count(first)
    for one in engines:
        while True:
            try:
                await one.call(wire.Ping(), timeout=60)
                break
            except WireError:
                await asyncio.sleep(0.05)
    for way in WAYS:  # the first ones touch fresh memory
        await sync(way, None, engines, pipe, folder, next(numbers))
    for _ in range(idle):
        for way in WAYS:
            arm.idle[way].append(await sync(way, None, engines, pipe, folder, next(numbers)))
    async with Crowd(engines) as crowd:
        await asyncio.sleep(1.0)
        for _ in range(syncs):
            for way in WAYS:
                arm.loaded[way].append(await sync(way, crowd, engines, pipe, folder, next(numbers)))
        await asyncio.sleep(1.0)
    arm.seen = crowd.seen
    for one in engines:
        pong = await one.call(wire.Ping())
        assert isinstance(pong, wire.Pong)
        arm.counts.append({key: pong.detail["arrivals"][key] for key in ("received", "loaded", "read", "lost")})
        await one.close()
    return arm


def arm_of(count: int, model: Path, folder: Path, syncs: int, idle: int, first: int) -> Arm:
    """So many engines and a sender, each a process; then they are gone."""
    paths, processes = [], []
    for number in range(count):
        path = folder / f"engine-{count}-{number}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        paths.append(path)
        processes.append(FORK.Process(target=engine, args=(listener, model, folder, True)))
    mine, theirs = FORK.Pipe()
    processes.append(FORK.Process(target=sender, args=(theirs, folder, "cpu")))
    for process in processes:
        process.start()
    try:
        return asyncio.run(measure(paths, mine, folder, syncs, idle, first))
    finally:
        mine.send(None)
        for process in processes:
            process.terminate()
            process.join()


# --- only that bytes arrive, on any device ----------------------------------------------------------------------------


def receiver(pipe: Connection, folder: Path, device: str) -> None:
    """Receives into a device's memory, and compares the views of it with the file's tensors."""
    import torch
    from safetensors.torch import load_file

    from reef.engines.local.broadcast.arrivals import Arrivals
    from reef.engines.local.broadcast.receive import Receiver

    made = Receiver(folder / PLACE, Arrivals(4 << 30, torch.device(device)))
    made.start()
    while (order := pipe.recv()) is not None:
        with made.arrivals.take({NAME: order}) as held:
            if held is None:
                pipe.send("nothing arrived")
                continue
            found = held[NAME].tensors()
            wrong = [
                name
                for name, tensor in load_file(folder / NAME).items()
                if found[name].device != torch.device(device) or not torch.equal(found[name].cpu(), tensor)
            ]
            pipe.send(f"{wrong} differ" if wrong else "")
    made.close()


def verify(device: str, world: int, folder: Path, rounds: int) -> int:
    """One sender, the others receivers, each on a device of its own. 0 when every tensor arrived as it was sent."""
    import torch

    if device == "cuda" and torch.cuda.device_count() < world:
        print(f"{world} processes need {world} GPUs, one each, and here are {torch.cuda.device_count()}")
        return 2
    places = [f"cuda:{rank}" if device == "cuda" else "cpu" for rank in range(world)]
    mine, theirs = SPAWN.Pipe()
    processes, pipes = [SPAWN.Process(target=sender, args=(theirs, folder, places[0]))], []
    for place in places[1:]:
        one, other = SPAWN.Pipe()
        pipes.append(one)
        processes.append(SPAWN.Process(target=receiver, args=(other, folder, place)))
    for process in processes:
        process.start()
    failed = 0
    for number in range(rounds):
        name = release(folder, number)
        digest, size = recorded(folder, name).files[NAME]
        mine.send((world - 1, digest, size))
        sent = mine.recv()
        for pipe in pipes:
            pipe.send((digest, size))
        said = [pipe.recv() for pipe in pipes]
        failed += sent["got"] != world - 1 or any(said)
        stages = ", ".join(f"{key} {value:.3f} s" for key, value in sent.items() if isinstance(value, float))
        print(f"{number}: {size} bytes to {sent['got']} of {world - 1} ({stages}) {sent['lost'] or ''} {said}")
    for pipe in (mine, *pipes):
        pipe.send(None)
    for process in processes:
        process.join(30)
    backend = "nccl" if device == "cuda" else "gloo"
    print(f"{backend} on {', '.join(places)}: {'FAILED' if failed else 'all tensors arrived as they were sent'}")
    return 1 if failed else 0


# --- figures ----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def stages(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {stage: spread([each[stage] for each in rounds]) for stage in rounds[0]} if rounds else {}


def gaps(seen: Seen) -> dict[str, Any]:
    """Milliseconds."""
    found: dict[str, Any] = {
        f"largest in a sync by {way}": spread([1000 * gap for gap in seen.largest(way)]) for way in WAYS
    }
    outside = sorted(1000 * gap for gap in seen.outside())
    if outside:
        found["outside"] = {
            "median": round(statistics.median(outside), 1),
            "p99": round(outside[int(len(outside) * 0.99)], 1),
            "highest": round(outside[-1], 1),
        }
    return found


def summary(arms: dict[int, Arm], floor: list[float], size: int) -> dict[str, Any]:
    return {
        "bytes": size,
        "raw broadcast, s": spread(floor),
        **{
            f"{count} engines": {
                "idle, s": {way: stages(arm.idle[way]) for way in WAYS},
                "under load, s": {way: stages(arm.loaded[way]) for way in WAYS},
                "gaps, ms": gaps(arm.seen),
                "answers": arm.seen.answers,
                "failed": arm.seen.failed,
                "releases that answered": len(arm.seen.releases),
                "broadcasts": sum(len(rounds["broadcast"]) for rounds in (arm.idle, arm.loaded)) + 1,
                "arrivals": arm.counts,
            }
            for count, arm in arms.items()
        },
    }


def draw(arms: dict[int, Arm], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"broadcast": "tab:blue", "file": "tab:orange"}
    figure, axes = plt.subplots(2, len(arms), figsize=(7 * len(arms), 6), sharex="col", squeeze=False)
    for column, (count, arm) in enumerate(arms.items()):
        seen = arm.seen
        flying, gap = axes[0][column], axes[1][column]
        flying.step([at - seen.began for at, _ in seen.flights], [n for _, n in seen.flights], where="post", color="k")
        flying.set_ylim(0, STREAMS * count + 1)
        flying.set_title(f"{count} engine process{'es' if count > 1 else ''}")
        gap.plot(
            [at - seen.began for at, _ in seen.gaps], [1000 * one for _, one in seen.gaps], ",", color="0.3", alpha=0.6
        )
        gap.set_yscale("log")
        gap.set_xlabel("seconds")
        for panel in (flying, gap):
            told = set()
            for start, stop, way in seen.syncs:
                label = None if way in told else f"a sync by {way}"
                told.add(way)
                panel.axvspan(start - seen.began, stop - seen.began, color=colours[way], alpha=0.3, lw=0, label=label)
    axes[0][0].set_ylabel("answers under way")
    axes[1][0].set_ylabel("ms between two tokens")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(found: dict[str, Any], before: dict[str, Any]) -> None:
    def walk(value: Any, known: Any, depth: int, name: str) -> None:
        known = known if isinstance(known, dict) else {}
        if isinstance(value, dict) and "median" in value:
            row = "  ".join(f"{key} {number:9.3f}" for key, number in value.items())
            was = known.get("median")
            print(f"{'  ' * depth}{name:34} {row}" + ("" if was is None else f"   (baseline {was:.3f})"))
        elif isinstance(value, dict):
            print(f"{'  ' * depth}{name}")
            for key, inner in value.items():
                walk(inner, known.get(key), depth + 1, key)
        else:
            print(f"{'  ' * depth}{name:34} {value}")

    for key, value in found.items():
        walk(value, before.get(key), 0, key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the figures the baseline, and draw the figure")
    parser.add_argument("--syncs", type=int, default=20, help="of each way, under load")
    parser.add_argument("--idle", type=int, default=4, help="of each way, without load")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the file")
    parser.add_argument("--engines", default="1,2", help="how many engine processes, one arm each")
    parser.add_argument("--note", default="", help="what else the machine did, kept with the figures")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only that bytes arrive there")
    parser.add_argument("--world", type=int, default=2, help="with --device: processes, the sender included")
    given = parser.parse_args()
    model = prepare("smollm2-135m").path
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        making = SPAWN.Process(target=make_weights, args=(model / NAME, folder / NAME, given.dtype))
        making.start()
        making.join()
        size = (folder / NAME).stat().st_size
        if given.device:
            return verify(given.device, given.world, folder, 5)
        floor = measure_raw(size, 7)
        arms, first = {}, 0
        for count in (int(each) for each in given.engines.split(",")):
            arms[count] = arm_of(count, model, folder, given.syncs, given.idle, first)
            first += 10_000
    found = summary(arms, floor, size)
    before = json.loads(BASELINE.read_text())["figures"] if BASELINE.exists() else {}
    report(found, before)
    print(f"load {os.getloadavg()[0]:.1f}")
    if given.write:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        settings = {"dtype": given.dtype, "syncs": given.syncs, "idle": given.idle, "note": given.note}
        BASELINE.write_text(json.dumps({"settings": machine | settings, "figures": found}, indent=2) + "\n")
        draw(arms, BASELINE.with_suffix(".png"))
    return 1 if any(arm.seen.failed for arm in arms.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
