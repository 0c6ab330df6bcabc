"""Speed of the embedded engine through its scheduler and its socket, beside this machine's limits.

    .venv/bin/python bench/engine.py             print the figures beside `bench/engine.json` (four minutes), or
                                                 `bench/engine_avx2.json` on a processor of that kind
    .venv/bin/python bench/engine.py --write     and make them the baseline
    .venv/bin/python bench/engine.py --busy      the same beside a process that multiplies matrices all the time
    .venv/bin/python bench/engine.py --short     without prompts of 2,000 and 8,000 tokens
    .venv/bin/python bench/engine.py --peers     in the same rounds transformers, and vLLM's CPU build if it is there;
                                                 `--peers vllm vllm-float32` that one alone, in both types

Prompts are different and answered at temperature 1. Decode counts tokens between the moment all answers have begun and
the moment the first ends. `mixed` answers come from eight releases with a rank-8 LoRA each, two answers of each.

Limits are measured in the same run: a step reads every weight once and multiplies each by every row, so no engine with
these weights is faster than the memory stream allows or the matrix product does. Ratios are of neighbouring rounds;
peers have the same environment. Medians of the rounds, lowest and highest. Run it on a quiet machine, or say with
--busy that it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from peers.generate import Transformers
from peers.vllm_cpu import Vllm

from reef.core import wire
from reef.core.errors import WireError
from reef.core.rpc import Client
from reef.engines import WeightFiles
from reef.engines.local.folder import ModelFolder, prepare
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path, read_layout
from reef.engines.local.server import PAGES, Options, run
from reef.engines.local.text import Text

ROOT = Path(__file__).parent.parent
FLOORS = {1: 33.0, 4: 126.0, 16: 334.0}  # decode tokens per second of vLLM's CPU build, AVX-512, a quiet machine
MIXED = 1.4  # the most that answers over eight LoRAs may cost beside answers without
PROMPT, LONG = 128, (2000, 8000)
PEERS = ("transformers", "vllm", "vllm-float32")
LORAS = [f"lora{number}" for number in range(8)]
Figures = dict[str, list[float]]
Times = list[list[float]]  # of each answer: when it was asked for, and when each token came


class Engine(Protocol):
    """What answers: many prompts at once, each with its messages and its tokens."""

    name: str

    def answers(self, prompts: Sequence[str], ids: Sequence[Sequence[int]], tokens: int) -> Times: ...


# --- prompts and rates ------------------------------------------------------------------------------------------------


class Prompts:
    """Messages whose whole prompts have a number of tokens, each with a beginning of its own."""

    def __init__(self, model: ModelFolder) -> None:
        self._text, self._numbers, self._lengths = Text(model.path), itertools.count(), dict[int, int]()

    def make(self, count: int, size: int = PROMPT) -> tuple[list[str], list[list[int]]]:
        found = [self._words(size) for _ in range(count)]
        return found, [self._ids(words) for words in found]

    def _words(self, size: int) -> str:
        words = f"{next(self._numbers):06} " + "Tell me a long story about the sea, a ship and its captain. " * (
            size // 8
        )
        if size not in self._lengths:
            self._lengths[size] = (
                bisect.bisect(range(len(words)), size, key=lambda end: len(self._ids(words[:end]))) - 1
            )
        return words[: self._lengths[size]]

    def _ids(self, words: str) -> list[int]:
        return self._text.encode(self._text.render([{"role": "user", "content": words}]))


def rate(times: Times) -> float:
    """Tokens a second of all answers together, while all of them were under way; what ended by itself at once, as
    answers sampled from noise may, is left out."""
    longest = max(len(each) for each in times)
    times = [each for each in times if 2 * len(each) > longest]
    begun, ended = max(each[1] for each in times), min(each[-1] for each in times)
    if begun >= ended:
        raise SystemExit("one answer ended before another began; measure with more --tokens")
    return sum(begun < moment <= ended for each in times for moment in each[1:]) / (ended - begun)


def first(times: Times) -> float:
    return statistics.median(each[1] - each[0] for each in times)


def gap(times: Times) -> float:
    return max(after - before for each in times for before, after in itertools.pairwise(each[1:]))


# --- what is measured -------------------------------------------------------------------------------------------------


class Reef:
    """The engine in a process of its own, behind its socket, with the base and eight LoRAs as releases."""

    name = "reef"

    def __init__(self, model: ModelFolder, place: Path, dtype: str, threads: int | None) -> None:
        self._path, self._seeds = place / "engine.sock", itertools.count()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(64)
        layout = read_layout(model.path)

        def resolve(release: str) -> WeightFiles:
            return make_lora(layout, place / release) if release in LORAS else WeightFiles("base", {}, {})

        options = Options(dtype=dtype, model=model.name, threads=threads)
        self._process = child(run, listener, model.path, resolve, options)
        self._loop = asyncio.new_event_loop()
        self._client = Client(self._path)

    def ready(self) -> float:
        """Seconds until it answers."""
        began = time.perf_counter()
        while True:
            try:
                self._loop.run_until_complete(self._client.call(wire.Ping(), timeout=30))
                break
            except WireError:
                time.sleep(0.02)
        took = time.perf_counter() - began
        for release in LORAS:
            self._loop.run_until_complete(self._client.call(wire.Load(release_id=release), timeout=60))
        return took

    def answers(
        self,
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
        tokens: int,
        releases: Sequence[str] = ("base",),
    ) -> Times:
        async def together() -> Times:
            names = itertools.cycle(releases)
            return list(await asyncio.gather(*(self._answer(prompt, next(names), tokens) for prompt in prompts)))

        return self._loop.run_until_complete(together())

    async def _answer(self, prompt: str, release: str, tokens: int) -> list[float]:
        fields = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "seed": next(self._seeds)}
        times = [time.perf_counter()]
        async for message in self._client.stream(wire.Generate(release_id=release, body=json.dumps(fields).encode())):
            if isinstance(message, wire.Delta):
                times += [time.perf_counter()] * len(message.ids)
        return times

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
        self._process.terminate()
        self._process.join()


def make_lora(layout: Layout, folder: Path) -> WeightFiles:
    """A random LoRA of rank 8 on every linear. Called in the engine's process: this one stays free of torch."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    tensors = {}
    for layer in range(layout.layers):
        for name in LAYER_LINEARS:
            tall, wide = layout.linear_shape(name)
            path = f"base_model.model.{linear_path(layer, name)}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, wide) * 0.01
            tensors[f"{path}.lora_B.weight"] = torch.randn(tall, 8) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    return WeightFiles("lora", {path.name: path for path in folder.iterdir()}, {})


def child(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Forked while this process has no torch, so that each has threads of its own."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


# --- limits of the machine --------------------------------------------------------------------------------------------


def limits(answer: Any) -> None:
    """In a child: bytes a second that a product with one row streams, and operations a second of a large product."""
    import torch

    from reef.engines.local.halves import halves
    from reef.engines.local.model import linear, native

    count, tall, wide, dtype = 200, 1536, 576, native()  # 354 MB of matrices like the model's: none is still in a cache
    pack = partial(halves, "limit") if dtype == torch.float32 else partial(linear, packed=True)
    matrices = [pack(torch.randn(tall, wide, dtype=dtype)) for _ in range(count)]
    row, large = torch.randn(1, wide, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    streams, products = [], []
    for _ in range(4):
        began = time.perf_counter()
        for matrix in matrices:
            matrix(row)
        streams.append(count * tall * wide * 2 / (time.perf_counter() - began))
        began = time.perf_counter()
        torch.mm(large, large)
        products.append(2 * large.shape[0] ** 3 / (time.perf_counter() - began))
    answer.send((max(streams), max(products), torch.backends.cpu.get_cpu_capability()))


def look(figures: Figures) -> str:
    """Measure the limits; returns what the processor has (AVX2, AVX512, DEFAULT, …)."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = child(limits, there)
    stream, product, capability = here.recv()
    process.join()
    figures.setdefault("stream_gb_s", []).append(stream / 1e9)
    figures.setdefault("product_gflop_s", []).append(product / 1e9)
    return str(capability)


def bound(figures: Figures, count: int, layout: Layout, bytes_each: int) -> float:
    """Tokens a second that the limits allow for `count` answers at once; keys and values are not counted."""
    weights = sum(tall * wide for tall, wide in (shape for shape in layout.shapes().values() if len(shape) == 2))
    stream, product = (1e9 * statistics.median(figures[name]) for name in ("stream_gb_s", "product_gflop_s"))
    return min(count * stream / (weights * bytes_each), product / (2 * weights))


# --- a busy neighbour -------------------------------------------------------------------------------------------------


def spin() -> None:
    while True:
        sum(range(1000))


def multiply() -> None:
    import torch

    from reef.engines.local.model import native

    torch.set_num_threads(1)
    matrix = torch.randn(512, 512, dtype=native())
    while True:
        torch.mm(matrix, matrix)


NEIGHBOURS: dict[str, Callable[[], None]] = {"spin": spin, "multiply": multiply}


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(figures: Figures, reef: Reef, others: Sequence[Engine], prompts: Prompts, given: argparse.Namespace) -> str:

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)
        print(f"{name} {value:.2f}", file=sys.stderr)

    for count in FLOORS:
        look(figures)
        for turn in range(given.rounds + 1):  # the first round warms up
            mine = reef.answers(*prompts.make(count), given.tokens)
            if turn:
                note(f"decode_{count}", rate(mine))
                note(f"first_token_{count}", first(mine))
                note(f"longest_gap_{count}", gap(mine))
            for other in others:
                theirs = other.answers(*prompts.make(count), given.tokens)
                if turn:
                    note(f"{other.name}_decode_{count}", rate(theirs))
                    note(f"{other.name}_first_token_{count}", first(theirs))
                    note(f"decode_{count}_by_{other.name}", rate(mine) / rate(theirs))
    for turn in range(given.rounds + 1):
        plain = reef.answers(*prompts.make(16), given.tokens)
        mixed = reef.answers(*prompts.make(16), given.tokens, LORAS)
        if turn:
            note("decode_mixed", rate(mixed))
            note("mixed_cost", rate(plain) / rate(mixed))
    for size in (PROMPT,) if given.short else (PROMPT, *LONG):
        for _ in range(min(given.rounds, 3) if size < LONG[-1] else 2):
            note(f"first_token_of_{size}", first(reef.answers(*prompts.make(1, size), 2)))
            for other in others if size < LONG[-1] else ():
                note(f"{other.name}_first_token_of_{size}", first(other.answers(*prompts.make(1, size), 2)))
    return look(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--busy", nargs="?", const="multiply", choices=NEIGHBOURS)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="without a name: the first two")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="of the engine; without, what torch takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    model = prepare("smollm2-135m")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        neighbour = child(NEIGHBOURS[given.busy]) if given.busy else None
        reef = Reef(model, Path(place), given.dtype, given.threads)
        stack.callback(reef.close)
        figures: Figures = {"ready_seconds": [reef.ready()]}
        try:
            others = [] if given.peers is None else list(peers(model.path, stack, given.peers))
            capability = measure(figures, reef, others, Prompts(model), given)
        finally:
            if neighbour is not None:
                neighbour.kill()
    layout = read_layout(model.path)
    for count in FLOORS:
        most = bound(figures, count, layout, 4 if given.dtype == "float32" else 2)
        figures[f"decode_{count}_of_limit"] = [value / most for value in figures[f"decode_{count}"]]
    report(figures, given, capability)


def peers(folder: Path, stack: contextlib.ExitStack, chosen: Sequence[str]) -> Iterator[Engine]:
    for name in chosen or PEERS[:2]:
        if name == "transformers":
            yield stack.enter_context(Transformers(folder))
        elif Vllm.python(ROOT).exists():
            yield stack.enter_context(Vllm(ROOT, folder, "float32" if name.endswith("float32") else "bfloat16"))
        else:
            print(f"without vLLM: there is no {Vllm.python(ROOT)} (`make vllm` installs it)")


def report(figures: Figures, given: argparse.Namespace, capability: str) -> None:
    path = Path(__file__).with_suffix(".json")
    kind = "" if capability.startswith("AVX512") else f"_{capability.lower()}"  # each has a baseline of its own
    path = path.with_stem(path.stem + kind + ("_busy" if given.busy else ""))
    baseline = json.loads(path.read_text())["figures"] if path.exists() else {}
    floors = {"mixed_cost": MIXED}
    if not kind:
        floors |= {f"decode_{count}": floor for count, floor in FLOORS.items()}
    load = os.getloadavg()[0]
    print(f"{'figure':32} {'median':>9} {'lowest':>9} {'highest':>9} {'baseline':>9} {'floor':>7}   (load {load:.1f})")
    summary = {}
    for name, values in figures.items():
        middle, known, floor = statistics.median(values), baseline.get(name, {}).get("median"), floors.get(name)
        summary[name] = {"median": round(middle, 4), "lowest": round(min(values), 4), "highest": round(max(values), 4)}
        print(
            f"{name:32} {middle:9.3f} {min(values):9.3f} {max(values):9.3f} "
            f"{'' if known is None else format(known, '.3f'):>9} {'' if floor is None else format(floor, 'g'):>7}"
        )
    if given.write:
        machine = {
            "machine": platform.machine(),
            "capability": capability,
            "cpus": os.cpu_count(),
            "load": round(load, 1),
        }
        machine |= {"busy": given.busy, "peers": given.peers}
        settings = {"dtype": given.dtype, "threads": given.threads, "rounds": given.rounds, "tokens": given.tokens}
        path.write_text(json.dumps({"settings": {**machine, **settings}, "figures": summary}, indent=2) + "\n")


if __name__ == "__main__":
    if not PAGES.keys() <= os.environ.keys():  # `reef serve` starts the engine in this environment
        os.execve(sys.executable, [sys.executable, *sys.argv], {**PAGES, **os.environ})
    main()
