"""Seconds and tokens of one training step: Reef's own, beside TRL's, and what serving pays for it.

    .venv/bin/python bench/trainer.py                  a LoRA and full weights, bfloat16 and float32, and how far apart
    .venv/bin/python bench/trainer.py --setup-peers    TRL into `.bench-peers/trl`, once (torch, trl, peft: 1.5 GB)
    .venv/bin/python bench/trainer.py --peers          Reef and TRL in turns, the same sequences, 5 rounds
    .venv/bin/python bench/trainer.py --serving        tokens of the engine with and without a trainer beside it

The embedded model, a LoRA of rank 8 on all linears. A batch is 8 sequences of 256 or 128 tokens, half of each prompt,
half answer, no two prompts alike. `step` is what both make: forward, loss, backward, the gradient's norm, AdamW.
`whole` is Reef's durable step: the parent's files read and verified, the new ones written, hashed and synced. Tokens a
second count prompts and answers. The peer is TRL's GRPOTrainer (its own loop and compute_loss, no generation, no
reference model) or, with `--loss sft`, its SFTTrainer; without gradient checkpointing, which is its default and
`--checkpointing` brings back. Each trainer is a process that makes one step when it is asked, so that two never run at
once; both have as many threads (torch's default; OMP_NUM_THREADS changes it for both).

Figures are median, smallest and largest over the rounds; `busy` is the load before. `--write` keeps them in
`bench/trainer.json`, each mode beside the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # as the trainer's process has it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from kit.server import busy  # noqa: E402
from kit.table import quantile, ratios, shown, spread  # noqa: E402

from reef.core import wire  # noqa: E402
from reef.core.errors import WireError  # noqa: E402
from reef.core.rpc import Client  # noqa: E402
from reef.engines import WeightFiles  # noqa: E402
from reef.engines.local.folder import ModelFolder, prepare  # noqa: E402
from reef.engines.local.server import Options, run  # noqa: E402
from reef.engines.local.text import Text  # noqa: E402

BASELINE = Path(__file__).with_suffix(".json")
PEER = ROOT / ".bench-peers" / "trl"
PACKAGES = ("trl==1.16.0", "peft==0.21.2", "transformers==5.24.0")
CASES = ((8, 256), (8, 128))
DTYPES = ("bfloat16", "float32")
KINDS = tuple((kind, dtype) for kind in ("lora", "full") for dtype in DTYPES)
STRETCH = 8.0  # seconds of serving in one turn
CLIENTS, ANSWER = 4, 64


class Worker:
    """A process that does one thing when it is asked: a line of JSON in, a line of JSON out."""

    def __init__(self, command: Sequence[str], log: Path, nice: int = 0) -> None:
        place = {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"} if command[0] == sys.executable else {}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["nice", "-n", str(nice), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                cwd=log.parent,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | place,
            )

    def tell(self, **asked: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, **asked: Any) -> dict[str, float]:
        self.tell(**asked)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{asked} ended the worker; the end of its output:\n{self.log.read_text()[-3000:]}")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.contextmanager
def worker(command: Sequence[str], folder: Path, name: str, nice: int = 0) -> Iterator[Worker]:
    made = Worker(command, folder / f"{name}.log", nice)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@contextlib.contextmanager
def pupil(folder: Path, nice: int = 0) -> Iterator[Worker]:
    """Reef's trainer."""
    with worker([sys.executable, "-m", "kit.pupil", str(folder / "training")], folder, "reef", nice) as made:
        yield made


def sequences(model: ModelFolder, count: int, length: int) -> list[list[int]]:
    """Real text in pieces, none of them alike."""
    text = Text(model.path)
    ids = text.encode("\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("[a-e]*.md"))))
    return [ids[start : start + length] for start in range(0, count * length, length)]


# --- Reef alone -------------------------------------------------------------------------------------------------------


def alone(model: ModelFolder, folder: Path, rounds: int) -> dict[str, Any]:
    """Each kind of training on 8 x 256 tokens, in turns; and how far bfloat16 is from float32."""
    figures: dict[str, Any] = {}
    count, length = CASES[0]
    asked = {"tokens": sequences(model, count, length), "prompt": length // 2, "loss": "grpo"}
    seen: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for kind, dtype in KINDS:  # a process each, so that the most memory is its own
        with pupil(folder) as reef:
            for _ in range(rounds + 1):
                seen[kind, dtype].append(reef.ask(do="step", kind=kind, dtype=dtype, **asked))
    print(f"{count} x {length} tokens{'':8}{'step s':28}{'whole s':28}{'tokens/s':28}peak GB")
    for (kind, dtype), found in seen.items():
        steps, whole = ([one[name] for one in found[1:]] for name in ("step", "whole"))
        rate = spread([count * length / one for one in steps])
        name, peak = f"{kind} {dtype}", round(found[-1]["peak"], 2)
        row = {"step_s": spread(steps), "whole_s": spread(whole), "tokens_s": rate}
        figures[name] = row | {"peak_gb": peak}
        print(f"{name:21}{shown(row['step_s'], 6, 2)}{shown(row['whole_s'], 6, 2)}{shown(rate, 6, 0)}{peak}")
    with pupil(folder) as reef:
        for kind in ("lora", "full"):
            apart = reef.ask(do="exact", kind=kind, **asked)
            figures[f"{kind} bfloat16 against float32"] = {name: round(value, 6) for name, value in apart.items()}
            print(f"{kind}, bfloat16 against float32:", ", ".join(f"{name} {one:.6f}" for name, one in apart.items()))
    return figures


# --- beside TRL -------------------------------------------------------------------------------------------------------


def setup() -> None:
    """TRL's virtual environment: torch first and alone, as `make setup` does it."""
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
    pins = str(ROOT / "constraints.txt")
    torch = next(line for line in Path(pins).read_text().splitlines() if line.startswith("torch=="))
    index = ["--extra-index-url", os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")]
    for packages in ([torch, *index], PACKAGES):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)


def beside(
    model: ModelFolder, folder: Path, rounds: int, loss: str, checkpoint: bool, dtypes: Sequence[str]
) -> dict[str, Any]:
    """Reef and the peer in turns on the same sequences; ratios are taken round by round."""
    python = PEER / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"TRL is not in {PEER}; bench/trainer.py --setup-peers installs it")
    figures: dict[str, Any] = {}
    command = [str(python), str(ROOT / "bench" / "peers" / "tuned.py"), str(model.path)]
    print(f"{'':24}{'Reef s':28}{'TRL s':28}{'times faster':26}Reef whole s", flush=True)
    with pupil(folder) as reef, worker(command, folder, "trl") as trl:
        for dtype, (count, length) in itertools.product(dtypes, CASES):
            batch = {"tokens": sequences(model, count, length), "prompt": length // 2, "loss": loss, "dtype": dtype}
            mine, theirs = [], []
            for _ in range(rounds + 1):  # the first round warms up
                mine.append(reef.ask(do="step", kind="lora", **batch))
                theirs.append(trl.ask(checkpoint=checkpoint, **batch)["step"])
            steps, whole = ([one[name] for one in mine[1:]] for name in ("step", "whole"))
            name = f"{dtype} {count} x {length}"
            row = {
                "reef_s": spread(steps), "trl_s": spread(theirs[1:]), "times": ratios(theirs[1:], steps),
                "reef_whole_s": spread(whole), "reef_tokens_s": spread([count * length / one for one in steps]),
                "trl_tokens_s": spread([count * length / one for one in theirs[1:]]),
            }  # fmt: skip
            figures[name] = row
            print(
                f"{name:24}{shown(row['reef_s'], 6, 2)}{shown(row['trl_s'], 6, 2)}{shown(row['times'], 6, 2)}"
                f"{shown(row['reef_whole_s'], 6, 2)}",
                flush=True,
            )
    return figures


# --- serving beside a trainer -----------------------------------------------------------------------------------------


def served(model: ModelFolder, folder: Path, rounds: int) -> dict[str, Any]:
    """The engine's process and four clients; in every second turn a trainer steps beside it, else it is stopped."""
    path = folder / "engine.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    arguments = (listener, model.path, lambda _: WeightFiles("base", {}, {}), Options(model=model.name))
    engine = multiprocessing.get_context("fork").Process(target=run, args=arguments)
    engine.start()
    count, length = CASES[0]
    batch = {"tokens": sequences(model, count, length), "prompt": length // 2, "loss": "grpo"}
    try:
        with pupil(folder, nice=19) as reef:
            reef.ask(do="step", kind="lora", dtype="bfloat16", **batch)
            reef.tell(do="train", kind="lora", dtype="bfloat16", **batch)
            return asyncio.run(turns(path, reef.process.pid, rounds))
    finally:
        engine.terminate()
        engine.join()


async def turns(path: Path, trainer: int, rounds: int) -> dict[str, Any]:
    client = Client(path)
    while True:
        with contextlib.suppress(WireError):
            await client.call(wire.Ping(), timeout=30)
            break
        await asyncio.sleep(0.05)
    seen: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    seeds = itertools.count()
    for number in range(rounds + 1):
        for name, order in (("alone", signal.SIGSTOP), ("beside", signal.SIGCONT)):
            os.kill(trainer, order)
            found = await stretch(client, seeds)
            if number:  # the first round warms up
                seen[name].append(found)
    os.kill(trainer, signal.SIGCONT)
    await client.close()
    figures = {}
    print(f"{'':24}{'tokens/s':28}{'gap p50 ms':28}gap p99 ms")
    for name, found in seen.items():
        row = {key: spread([one[key] for one in found]) for key in ("tokens_s", "gap_p50_ms", "gap_p99_ms")}
        figures[name] = row
        print(f"{name:24}" + "".join(shown(one, 6, 1) for one in row.values()))
    kept = ratios(*([one["tokens_s"] for one in seen[name]] for name in ("beside", "alone")))
    figures["tokens kept"] = kept
    print(f"{'tokens kept':24}{shown(kept, 6, 2)}")
    return figures


async def stretch(client: Client, seeds: Iterator[int]) -> dict[str, float]:
    """Clients that ask again as soon as they are answered, for a while: tokens a second, and times between tokens."""
    gaps: list[float] = []
    tokens, began = 0, time.perf_counter()

    async def user() -> None:
        nonlocal tokens
        while time.perf_counter() < began + STRETCH:
            seed = next(seeds)
            told = {"role": "user", "content": f"Story {seed}: tell me of the sea, a ship and its old captain. " * 6}
            body = json.dumps({"messages": [told], "max_tokens": ANSWER, "seed": seed}).encode()
            last = None
            async for message in client.stream(wire.Generate(release_id="release", body=body)):
                if isinstance(message, wire.Delta):
                    now = time.perf_counter()
                    tokens += len(message.ids)
                    if last is not None:
                        gaps.append(now - last)
                    last = now

    await asyncio.gather(*(user() for _ in range(CLIENTS)))
    gaps.sort()
    return {
        "tokens_s": tokens / (time.perf_counter() - began),
        "gap_p50_ms": 1e3 * quantile(gaps, 0.5),
        "gap_p99_ms": 1e3 * quantile(gaps, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--serving", action="store_true")
    parser.add_argument("--loss", choices=("grpo", "sft"), default="grpo", help="of --peers")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="of --peers")
    parser.add_argument("--checkpointing", action="store_true", help="TRL's default: it recomputes activations")
    parser.add_argument("--rounds", type=int, default=0, help="3 alone, 5 beside TRL and in serving")
    parser.add_argument("--note", default="", help="what else the machine did, kept with the figures")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.setup_peers:
        return setup()
    load, model = busy(), prepare("smollm2-135m")
    with tempfile.TemporaryDirectory() as place:
        if given.peers:
            name = f"peers {given.loss}" + (", checkpointing" if given.checkpointing else "")
            figures = beside(model, Path(place), given.rounds or 5, given.loss, given.checkpointing, given.dtype)
        elif given.serving:
            name, figures = "serving", served(model, Path(place), given.rounds or 5)
        else:
            name, figures = "alone", alone(model, Path(place), given.rounds or 3)
    print(f"busy before: {load:.0%}")
    if given.write:
        kept = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
        about = {"machine": platform.machine(), "cpus": os.cpu_count(), "busy": round(load, 2), "note": given.note}
        kept[name] = {"about": about, **figures}
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
