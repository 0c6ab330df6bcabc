"""Speed of the embedded engine through its scheduler and its socket, beside a committed baseline.

    .venv/bin/python bench/engine.py             print the figures beside `bench/engine.json`
    .venv/bin/python bench/engine.py --write     and make them the baseline
    .venv/bin/python bench/engine.py --loras     every answer from a release with a rank-8 LoRA

Prompts are 128 tokens, different, and answered at temperature 1. Decode counts tokens between the moment all answers
have begun and the moment the first ends. Medians of the rounds, lowest and highest. Run it on a quiet machine.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from reef.core import wire
from reef.core.errors import WireError
from reef.core.rpc import Client
from reef.engines import WeightFiles
from reef.engines.local.folder import ModelFolder, prepare
from reef.engines.local.layout import LAYER_LINEARS, linear_path, read_layout
from reef.engines.local.server import Options, run
from reef.engines.local.text import Text

BASELINE = Path(__file__).with_suffix(".json")
FLOORS = {1: 32.0, 4: 86.0, 16: 252.0}  # decode tokens per second of the prototype, on a quiet machine
PROMPT = 128


def make_prompts(model: ModelFolder, count: int) -> list[str]:
    """Different messages whose whole prompts are 128 tokens."""
    text, found = Text(model.path), []
    for number in range(count):
        words = f"Story {number}: " + "Tell me a long story about the sea, a ship and its old captain. " * 20
        while len(text.encode(text.render([{"role": "user", "content": words}]))) > PROMPT:
            words = words[:-1]
        found.append(words)
    return found


async def answer(client: Client, prompt: str, seed: int, tokens: int) -> list[float]:
    """Seconds since the request at which each token arrived."""
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "seed": seed}).encode()
    started, times = time.perf_counter(), []
    async for message in client.stream(wire.Generate(release_id="release", body=body)):
        if isinstance(message, wire.Delta):
            times += [time.perf_counter()] * len(message.ids)
    return [started, *times]


async def measure(path: Path, model: ModelFolder, rounds: int, tokens: int) -> dict[str, Any]:
    client, began = Client(path), time.perf_counter()
    while True:
        try:
            await client.call(wire.Ping(), timeout=30)
            break
        except WireError:
            await asyncio.sleep(0.02)
    figures: dict[str, Any] = {"ready_seconds": [time.perf_counter() - began]}
    seeds = iter(range(1 << 30))
    for count in FLOORS:
        rates, firsts, gaps = [], [], []
        for _ in range(rounds + 1):
            prompts = make_prompts(model, count)
            # A word of its own in front, else the second round would find its prompts in the cache.
            prompts = [f"{next(seeds)} {prompt}"[: len(prompt)] for prompt in prompts]
            times = await asyncio.gather(*(answer(client, prompt, next(seeds), tokens) for prompt in prompts))
            begun, ended = max(each[1] for each in times), min(each[-1] for each in times)
            rates.append(sum(begun < moment <= ended for each in times for moment in each[1:]) / (ended - begun))
            firsts.append(statistics.median(each[1] - each[0] for each in times))
            gaps.append(max(b - a for each in times for a, b in itertools.pairwise(each[1:])))
        figures[f"decode_{count}"] = rates[1:]  # the first round warms up
        figures[f"first_token_{count}"] = firsts[1:]
        figures[f"longest_gap_{count}"] = gaps[1:]
    await client.close()
    return figures


def make_lora(model: ModelFolder, folder: Path) -> WeightFiles:
    import torch
    from safetensors.torch import save_file

    layout, tensors = read_layout(model.path), {}
    for layer in range(layout.layers):
        for name in LAYER_LINEARS:
            tall, wide = layout.linear_shape(name)
            path = f"base_model.model.{linear_path(layer, name)}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, wide) * 0.01
            tensors[f"{path}.lora_B.weight"] = torch.randn(tall, 8) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    return WeightFiles("lora", {path.name: path for path in folder.iterdir()}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--loras", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    model = prepare("smollm2-135m")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "engine.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        (Path(place) / "lora").mkdir()
        files = make_lora(model, Path(place) / "lora") if given.loras else WeightFiles("base", {}, {})
        options = Options(dtype=given.dtype, model=model.name)
        arguments = (listener, model.path, lambda _: files, options)
        process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
        process.start()
        try:
            figures = asyncio.run(measure(path, model, given.rounds, given.tokens))
        finally:
            process.terminate()
            process.join()
    report(figures, given)


def report(figures: dict[str, Any], given: argparse.Namespace) -> None:
    baseline = json.loads(BASELINE.read_text())["figures"] if BASELINE.exists() else {}
    load = os.getloadavg()[0]
    print(f"{'figure':18} {'median':>9} {'lowest':>9} {'highest':>9} {'baseline':>9} {'floor':>7}   (load {load:.1f})")
    summary = {}
    for name, values in figures.items():
        middle = statistics.median(values)
        summary[name] = {"median": round(middle, 4), "lowest": round(min(values), 4), "highest": round(max(values), 4)}
        floor = FLOORS.get(int(name.rpartition("_")[2])) if name.startswith("decode") else None
        known = baseline.get(name, {}).get("median")
        print(
            f"{name:18} {middle:9.3f} {min(values):9.3f} {max(values):9.3f} "
            f"{'' if known is None else format(known, '.3f'):>9} {'' if floor is None else format(floor, '.0f'):>7}"
        )
    if given.write:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": round(load, 1)}
        settings = {"dtype": given.dtype, "loras": given.loras, "rounds": given.rounds, "tokens": given.tokens}
        BASELINE.write_text(json.dumps({"settings": {**machine, **settings}, "figures": summary}, indent=2) + "\n")


if __name__ == "__main__":
    main()
