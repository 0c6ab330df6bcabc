"""The embedded engine with weights of 4 and 8 bits beside bfloat16: speed in interleaved rounds, and what it costs.

    .venv/bin/python bench/quantised.py             print the figures beside `bench/quantised.json`
    .venv/bin/python bench/quantised.py --write     and make them the baseline
    .venv/bin/python bench/quantised.py --moved     of weights that never were in a 4-bit file

Each round goes through the scheduler of every mode in turn: prompts of 128 tokens, different, then the steps of their
answers. Quality: answers that the mode drew at temperature 1, their log-probs beside those of float32 for the same
tokens; and greedy answers, the share of tokens before the first that differs. Medians, lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import load_file, save_file

from reef.engines.local.folder import prepare
from reef.engines.local.halves import halves
from reef.engines.local.layout import LAYER_LINEARS, Layout, read_layout, weight_files
from reef.engines.local.lora import Resident
from reef.engines.local.model import Model, Weights, load_weights, native
from reef.engines.local.quantised import packer
from reef.engines.local.sample import Draw
from reef.engines.local.scheduler import Event, Job, Sampled, Scheduler, Scored
from reef.engines.local.text import Text

BASELINE = Path(__file__).with_suffix(".json")
MODES = ("float32", "bfloat16", "halves", "int8", "int4")
COUNTS = (1, 2, 4, 8, 16)
PROMPTS = (
    "What is the capital of France?",
    "Tell me a long story about the sea, a ship and its old captain.",
    "Explain how rainbows form, in simple words.",
    "Write a Python function that reverses a list and explain it.",
    "Give me three tips for sleeping better.",
    "Who wrote Hamlet, and what is it about?",
)


class Rig:
    """One mode's scheduler, stepped by hand."""

    def __init__(self, mode: str, layout: Layout, text: Text, files: list[Path]) -> None:
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(mode, native())
        began = time.perf_counter()
        pack = packer(mode, self.dtype) if mode.startswith("int") else halves if mode == "halves" else None
        weights: Weights = load_weights(files, layout, self.dtype, pack=pack)
        self.seconds = time.perf_counter() - began
        self.resident = Resident("base", "base", weights, source=())
        self.events: list[tuple[Job, Event]] = []
        self.scheduler = Scheduler(Model(layout, 16, 1024, self.dtype), text, self.events.extend)

    def job(self, prompt: list[int], limit: int, seed: int, temperature: float = 1.0) -> Job:
        draw = Draw(temperature, 1.0, 0, random.Random(seed))
        return Job(prompt, self.resident, 0, lambda event: None, draw, limit)

    def step(self) -> None:
        self.scheduler._receive(block=False)
        self.scheduler.step()

    def finish(self, jobs: list[Job]) -> None:
        self.scheduler.submit(jobs)
        while not all(job.over for job in jobs):
            self.step()

    def drawn(self, job: Job) -> list[tuple[int, float]]:
        return [(e.token, e.logprob) for each, e in self.events if each is job and isinstance(e, Sampled)]

    def rate(self, prompt: list[int], answer: list[int]) -> list[float]:
        job = Job([*prompt, *answer], self.resident, 0, lambda event: None, start=len(prompt))
        self.finish([job])
        return next(e.logprobs for each, e in self.events if each is job and isinstance(e, Scored))


def speed(rigs: dict[str, Rig], counts: Sequence[int], rounds: int, steps: int) -> dict[str, list[float]]:
    """Tokens a second of all answers together while they run, by mode and number of answers; and of a prompt."""
    numbers, found = random.Random(0), dict[str, list[float]]()
    for number in range(rounds + 1):
        for count in counts:
            for mode, rig in rigs.items():
                prompts = [[numbers.randrange(100, 40000) for _ in range(128)] for _ in range(count)]
                jobs = [rig.job(prompt, 400, seed) for seed, prompt in enumerate(prompts)]
                rig.scheduler.submit(jobs)
                began = time.perf_counter()
                while any(len(job.ids) == 128 for job in jobs):
                    rig.step()
                prefill = 128 * count / (time.perf_counter() - began)
                times = list(stepped(rig, jobs, steps))
                for job in jobs:
                    rig.scheduler.cancel(job)
                rig.step()
                rig.events.clear()
                if number and times:  # the first round warms up
                    found.setdefault(f"decode_{mode}_{count}", []).append(count / statistics.median(times))
                    if count == 1:
                        found.setdefault(f"prefill_{mode}", []).append(prefill)
    return found


def stepped(rig: Rig, jobs: list[Job], steps: int) -> Iterator[float]:
    """Seconds of each step, as long as nobody has ended."""
    for _ in range(steps):
        began = time.perf_counter()
        rig.step()
        if any(job.over for job in jobs):
            return
        yield time.perf_counter() - began


def quality(rigs: dict[str, Rig], text: Text, limit: int) -> dict[str, list[float]]:
    found = dict[str, list[float]]()
    prompts = [text.encode(text.render([{"role": "user", "content": each}])) for each in PROMPTS]
    greedy = {mode: answers(rig, prompts, limit, 0.0) for mode, rig in rigs.items()}
    for mode, rig in rigs.items():
        if mode == "float32":
            continue
        off: list[float] = []
        for prompt, answer in zip(prompts, answers(rig, prompts, limit, 1.0), strict=True):
            exact = rigs["float32"].rate(prompt, [token for token, _ in answer])
            off += [abs(logprob - value) for (_, logprob), value in zip(answer, exact, strict=True)]
        found[f"logprob_off_{mode}"] = [statistics.mean(off)]
        found[f"logprob_most_off_{mode}"] = [max(off)]
        pairs = list(zip(greedy["float32"], greedy[mode], strict=True))
        same = sum(next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a[0] != b[0]),
                        min(len(one), len(other))) for one, other in pairs)  # fmt: skip
        found[f"greedy_agrees_{mode}"] = [same / sum(len(one) for one, _ in pairs)]
    return found


def answers(rig: Rig, prompts: list[list[int]], limit: int, temperature: float) -> list[list[tuple[int, float]]]:
    """One at a time, as the mode is made for."""
    found = []
    for seed, prompt in enumerate(prompts):
        job = rig.job(prompt, limit, seed, temperature)
        rig.finish([job])
        found.append(rig.drawn(job))
    return found


def moved(files: list[Path], place: Path) -> list[Path]:
    """The weights of the layers, each moved by about a thirtieth of their spread: off the grid of the 4-bit file that
    they came from, and hardly another model, which float32 computes too."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    seeded = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if any(linear in name for linear in LAYER_LINEARS):
            noise = torch.randn(tensor.shape, generator=seeded) * tensor.float().std() * 0.03
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, place / "model.safetensors")
    return [place / "model.safetensors"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--moved", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--only", choices=("speed", "quality"))
    given = parser.parse_args()
    folder = prepare("smollm2-135m").path
    layout, text, files = read_layout(folder), Text(folder), weight_files(folder)
    with tempfile.TemporaryDirectory() as place:
        files = moved(files, Path(place)) if given.moved else files
        rigs = {mode: Rig(mode, layout, text, files) for mode in MODES}
    figures: dict[str, list[float]] = {f"load_seconds_{mode}": [rig.seconds] for mode, rig in rigs.items()}
    if given.only != "quality":
        figures |= speed(
            {mode: rig for mode, rig in rigs.items() if mode != "float32"}, given.counts, given.rounds, given.steps
        )
    if given.only != "speed":
        figures |= quality(rigs, text, given.tokens)
    report(figures, given)


def report(figures: dict[str, Any], given: argparse.Namespace) -> None:
    baseline = json.loads(BASELINE.read_text())["figures"] if BASELINE.exists() else {}
    load = os.getloadavg()[0]
    print(f"{'figure':28} {'median':>9} {'lowest':>9} {'highest':>9} {'baseline':>9}   (load {load:.1f})")
    summary = {}
    for name, values in figures.items():
        middle = statistics.median(values)
        summary[name] = {"median": round(middle, 4), "lowest": round(min(values), 4), "highest": round(max(values), 4)}
        known = baseline.get(name, {}).get("median")
        shown = "" if known is None else format(known, ".3f")
        print(f"{name:28} {middle:9.3f} {min(values):9.3f} {max(values):9.3f} {shown:>9}")
    if given.write:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": round(load, 1)}
        settings = {"rounds": given.rounds, "steps": given.steps, "tokens": given.tokens}
        BASELINE.write_text(json.dumps({"settings": {**machine, **settings}, "figures": summary}, indent=2) + "\n")


if __name__ == "__main__":
    main()
