"""The same learning in three places: does it matter to a recipe where tokens are drawn and where steps are made?

    python bench/places.py [--steps 6] [--seed 0] [--only local] [--write]

SAO on one-digit addition (recipes/sao/study.py): the same users, prompts, sampling seeds and rewards, one `reef serve`
after the other:

    local   the embedded engine, the embedded trainer
    vllm    vLLM on CPUs (.vllm/), the embedded trainer
    ray     the embedded engine, two Ray workers

Held-out score against optimizer steps, and what a step took. Every step is released (policy `always`): the gate is
another bench's, and rating tokens for its drift guard takes vLLM on CPUs minutes a look. A place whose parts are not
installed is left out and named. `--write` stores bench/places.json and bench/places.png. A step costs half a minute or
less on two threads, vLLM three gigabytes of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from recipes.sao.study import BATCH, SERVER, batch, learn, measure, report
from reef.study import Arm
from reef.study.canvas import INK, canvas, plain
from reef.study.run import Run

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".vllm" / "bin" / "python"
EVERY = 2  # steps between two measurements
SAMPLES = 2  # of each held-out prompt
START = 600.0  # seconds until vLLM must answer
GATE = {"policy": "always", "suite": None, "evaluate_every": 1}
COLOURS = {"local": "#1f77b4", "vllm": "#e07b39", "ray": "#2a9d62"}


@dataclass(frozen=True)
class Place:
    name: str
    engine: str
    trainer: str
    missing: Callable[[], str | None]  # what is not installed
    config: Callable[[str], dict[str, Any]]  # of the address of its engine's server
    server: Callable[[Path], contextlib.AbstractContextManager[str]]  # runs while it is measured; gives its address


def no_vllm() -> str | None:
    from reef.engines import ENGINES

    if "vllm" not in ENGINES:
        return "no engine of kind vllm"
    return None if PYTHON.exists() else f"{PYTHON.relative_to(ROOT)} (make vllm)"


def no_ray() -> str | None:
    from reef.trainers import WORKS

    if "ray" not in WORKS:
        return "no backend of the name ray"
    return None if importlib.util.find_spec("ray") else "the package ray (pip install 'reef-learn[ray]')"


@contextlib.contextmanager
def nothing(folder: Path) -> Iterator[str]:
    yield ""


@contextlib.contextmanager
def vllm(folder: Path) -> Iterator[str]:
    """A vLLM server on the embedded model, which takes LoRAs while it runs."""
    from reef.engines.local.folder import prepare
    from reef.engines.local.model import native

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [
        *("--model", str(prepare("smollm2-135m").path), "--served-model-name", "base"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--dtype", str(native()).removeprefix("torch.")),  # as the embedded engine computes on this processor
        *("--max-model-len", "1024", "--max-num-seqs", "32", "--generation-config", "vllm"),
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "16"),
        *("--logprobs-mode", "processed_logprobs"),
    ]
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags],
            cwd=folder,  # a folder named vllm beside it would be taken for the package
            env={**os.environ, **environment, "PYTHONPATH": ""},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START
        while not well(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too: a session of their own
        process.wait()


def well(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


PLACES = (
    Place("local", "embedded engine", "embedded trainer", lambda: None, lambda url: {}, nothing),
    Place(
        "vllm", "vLLM on CPUs", "embedded trainer", no_vllm,
        lambda url: {"reef": {"engine": "gpu"}, "engines": {"gpu": {"kind": "vllm", "url": url, "model": "base"}}},
        vllm,
    ),
    Place(
        "ray", "embedded engine", "Ray, two workers", no_ray,
        lambda url: {"training": {"backend": "ray", "options": {"workers": 2, "cpus": 1}}},
        nothing,
    ),
)  # fmt: skip


async def drive(run: Run, steps: int) -> dict[str, Any]:
    """Batches that train at once; the held-out score before, in between and after."""
    first = await measure(run, SAMPLES)
    scores, rewards, seconds, verdicts = [[0, first["score"]]], [], [], []
    for step in range(1, steps + 1):
        waiting = await batch(run, step - 1)
        await report(run, step - 1, waiting)
        told = await learn(run, step - 1)
        rewards.append([step, sum(score for _, score in waiting) / BATCH])
        seconds.append((told["timings"] or {}).get("training"))
        verdicts.append(told["verdict"])
        if step % EVERY == 0 or step == steps:
            scores.append([step, (await measure(run, SAMPLES))["score"]])
    return {
        "curve": scores,
        "rewards": rewards,
        "training_seconds": seconds,
        "accepted": verdicts.count("accept"),
        "answers": first["answers"],
        "lag": told["lag"],
    }


async def one(place: Place, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    with place.server(folder) as url:
        given = place.config(url)
        config = {**SERVER, "gate": GATE, **given, "reef": {**SERVER["reef"], **given.get("reef", {})}}
        run = Run(folder / "run", Arm(place.name, config), seed, show=lambda text: print(f"  {text}", flush=True))
        async with run.opened():
            began = time.monotonic()
            found = await drive(run, steps)
            found["seconds"] = time.monotonic() - began
        spent = {name: round(value, 1) for name, value in run.spent.items()}
    return {"engine": place.engine, "trainer": place.trainer, "spent": spent, **found}


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    with canvas(path, 130, ": pip install 'reef-learn[local]'") as pyplot:
        _, panel = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
        for name, found in results.items():
            steps = len(found["rewards"])
            label = f"{found['engine']}, {found['trainer']}: {found['seconds'] / steps:.0f} s a step"
            panel.plot(*zip(*found["rewards"], strict=True), color=COLOURS[name], linewidth=0.8, alpha=0.45)
            panel.plot(
                *zip(*found["curve"], strict=True), color=COLOURS[name], marker="o", markersize=4,
                linewidth=6.0 if name == "local" else 2.0,  # where curves are one, both are seen
                label=label,
            )  # fmt: skip
        panel.plot([], [], color=INK, linewidth=0.8, alpha=0.45, label="thin: while training")
        panel.legend(loc="upper left", frameon=False, fontsize=9)
        panel.set_ylim(-0.02, 1.02)
        plain(panel)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_xlabel("optimizer steps")
        panel.set_ylabel("held-out sums that are right and ended")
        panel.set_title("SAO in three places: the same users, the same rewards", loc="left", fontweight="bold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[place.name for place in PLACES])
    parser.add_argument("--write", action="store_true", help="store bench/places.json and bench/places.png")
    wanted = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="reef-places-") as folder:
        for place in PLACES:
            if wanted.only and place.name not in wanted.only:
                continue
            if missing := place.missing():
                left_out[place.name] = missing
                print(f"{place.name}: left out, {missing} is missing")
                continue
            print(f"{place.name}: {place.engine}, {place.trainer}", flush=True)
            results[place.name] = asyncio.run(one(place, wanted.steps, wanted.seed, Path(folder) / place.name))
            found = results[place.name]
            said = " ".join(f"{step}:{score:.3f}" for step, score in found["curve"])
            print(f"{place.name}: {said}; {found['seconds'] / wanted.steps:.1f} s a step", flush=True)
    if not results:
        raise SystemExit("no place could be measured")
    document = {"steps": wanted.steps, "seed": wanted.seed, "batch": BATCH, "left_out": left_out, "places": results}
    print(json.dumps({name: found["spent"] for name, found in results.items()}))
    if wanted.write:
        (ROOT / "bench" / "places.json").write_text(json.dumps(document, indent=1) + "\n")
        draw(results, ROOT / "bench" / "places.png")


if __name__ == "__main__":
    main()
