"""A step by `ray` against the same step by `local`: `python bench/workers.py [--rounds 5] [--only lora] [--write]`.

The embedded model, GRPO on 16 samples of 128 prompt and 64 response tokens, a LoRA and then full weights. Arms take
turns in one run: `local` in this process with all CPUs as threads; `ray 1`, one worker with all of them; `ray 2`, two
workers that share them. Seconds are the whole step, files included. Also: how long Ray and the workers take to start,
and the memory (PSS) of each worker after its steps and of Ray's own processes. `--write` stores the figures beside this
file as the baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).resolve().parents[1]))

from recipes.grpo.recipe import GRPORecipe
from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.engines.local.folder import prepare
from reef.trainers import Ground
from reef.trainers.local import Options as LocalOptions
from reef.trainers.local.work import LocalWork
from reef.trainers.ray import Options
from reef.trainers.ray.cluster import Cluster
from reef.trainers.ray.work import RayWork

SAMPLES, PROMPT, RESPONSE = 16, 128, 64


def data(seed: int) -> list[Datum]:
    draw = random.Random(seed)
    return [
        Datum(
            tokens=draw.choices(range(1000, 20000), k=PROMPT + RESPONSE),
            prompt_length=PROMPT,
            mask=[1] * RESPONSE,
            logprobs=[-10.0] * RESPONSE,
            reward=float(number % 2),
            record_id=f"{number:032x}",
            choice=0,
            temperature=1.0,
            lag=0,
            group=f"g{number // 4}",
        )
        for number in range(SAMPLES)
    ]


def order(line: str, step: int, rank: int) -> Step:
    objective = GRPORecipe(kl=0.0).objective()
    options = dict(objective.options) | {"rank": rank, "learning_rate": 1e-5}
    return Step(
        "bench", "weights", line, step, "r0", 0, objective.path, options, f"b{step}", [f"u{step}"], step, data(step)
    )


def quiet(stage: str, done: int, total: int) -> None:
    pass


def memory(pids: Iterable[int]) -> float:
    """MB of PSS: shared pages count once among those who share them."""
    whole = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    whole += int(line.split()[1])
    return round(whole / 1024)


def below(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def timed(call: Callable[..., Any], *given: Any) -> float:
    began = time.perf_counter()
    call(*given)
    return time.perf_counter() - began


def shown(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 2),
        "min": round(min(seconds), 2),
        "max": round(max(seconds), 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5, help="of LoRA steps; full weights: half as many")
    arguments.add_argument("--only", choices=("lora", "full"), help="one of the two")
    arguments.add_argument("--write", action="store_true", help="store the figures as the baseline")
    arguments.add_argument("--note", default="", help="what else the machine did, kept with the figures")
    args = arguments.parse_args()
    cpus, model = len(os.sched_getaffinity(0)), prepare("smollm2-135m")
    figures: dict[str, Any] = {"note": args.note, "cpus": cpus, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="reef-") as place, contextlib.ExitStack() as stack:
        base = WeightFiles("base", {}, {"base": {"name": model.name, "digest": model.digest}, "kind": "base"})

        def ground(name: str) -> Ground:
            return Ground(model.path, Path(place) / name / "training", lambda release: base, model.name, model.digest)

        cluster = Cluster(Options(workers=3, cpus=cpus), ground("ray").training)
        stack.callback(cluster.close)
        figures["Ray starts, s"] = round(timed(cluster.open, lambda: None), 1)
        arms: dict[str, Any] = {"local": LocalWork(ground("local"), LocalOptions())}
        for workers in (1, 2):
            arms[f"ray {workers}"] = RayWork(
                ground(f"ray{workers}"), Options(workers=workers, cpus=max(1, cpus // workers)), cluster=cluster
            )
        for name, work in arms.items():
            stack.callback(work.close)
            figures[f"first step of {name}, s"] = round(timed(work.advance, order("warm", 1, 8), quiet), 1)
        kinds = (("lora", 8, args.rounds), ("full", 0, max(1, args.rounds // 2)))
        for kind, rank, rounds in [each for each in kinds if args.only in (None, each[0])]:
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            for step in range(1, rounds + 1):
                for name in arms if step % 2 else reversed(arms):
                    seconds[name].append(timed(arms[name].advance, order(kind, step, rank), quiet))
            figures[kind] = {name: shown(each) for name, each in seconds.items()}
            for name in list(arms)[1:]:
                each = [one / other for one, other in zip(seconds[name], seconds["local"], strict=True)]
                figures[kind][f"{name} / local"] = round(statistics.median(each), 2)
            pids = {name: [pid for _, pid in work.workers] for name, work in arms.items() if name != "local"}
            mine = {f"a worker of {name}": memory(each) / len(each) for name, each in pids.items()}
            figures[kind]["MB"] = mine | {"this process": memory([os.getpid()])}
        helpers = below(os.getpid()) - {pid for each in pids.values() for pid in each}
        figures["MB of Ray's own processes"] = memory(helpers)
    print(json.dumps(figures, indent=2))
    if args.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
