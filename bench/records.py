"""Durable records a second and bytes a record, on this machine's disk: `python bench/records.py [--write]`.

Each record is a whole chat exchange of an embedded-model size (prompt and answer tokens with log-probs), committed with
a disk sync before it counts. `--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from reef.core.ids import new_receipt
from reef.core.nouns import Choice, Record, Sampling, Span, Timing, Usage
from reef.records.sqlite import SqliteStore

RELEASE = "0123456789abcdef0123456789abcdef01234567"
draw = random.Random(0)
WORDS = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]


def exchange() -> Record:
    question = " ".join(draw.choices(WORDS, k=12))
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": question}]
    ids = tuple(draw.randrange(49152) for _ in range(24))
    logprobs = tuple(-draw.getrandbits(20) / 2**18 for _ in ids)
    prompt = tuple(range(20)) + tuple(draw.randrange(49152) for _ in range(20))
    return Record(
        id=new_receipt(),
        scenario="default",
        release_id=RELEASE,
        purpose="live",
        dialect="chat",
        status="complete",
        request=json.dumps({"model": "smollm2-135m", "messages": messages, "max_tokens": 24}).encode(),
        timing=Timing(time.time(), 0.001, 0.05, 0.4),
        choices=(Choice(0, " ".join(draw.choices(WORDS, k=18)), "stop", ids, logprobs, (Span(RELEASE, 0, 24),)),),
        usage=Usage(40, 24),
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=24),
        model_asked="smollm2-135m",
        model_answered="smollm2-135m",
    )


async def rate(folder: Path, workers: int, seconds: float) -> tuple[float, float, float]:
    """Records a second, p99 of one append in ms, bytes a record in the file."""
    path = folder / f"{time.time_ns()}.db"
    store = SqliteStore(path, owner="bench")
    await store.start()
    waits: list[float] = []
    end = time.perf_counter() + seconds

    async def work() -> None:
        while (begin := time.perf_counter()) < end:
            await store.append(exchange())
            waits.append(time.perf_counter() - begin)

    await asyncio.gather(*(work() for _ in range(workers)))
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    waits.sort()
    return len(waits) / seconds, 1000 * waits[int(0.99 * len(waits))], path.stat().st_size / len(waits)


def fsync_ms(folder: Path) -> float:
    """The disk itself: one 4 KiB write and sync."""
    with (folder / "probe").open("wb", buffering=0) as file:
        took = []
        for _ in range(100):
            begin = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begin)
    return 1000 * statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures as the baseline")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    figures: dict[str, float | str] = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["fdatasync_ms"] = round(fsync_ms(folder), 3)
        for workers in (1, 16, 64):
            runs = [asyncio.run(rate(folder, workers, options.seconds)) for _ in range(3)]
            rates, p99s, sizes = zip(*runs, strict=True)
            figures[f"records_per_second_{workers}"] = round(statistics.median(rates), 1)
            figures[f"spread_{workers}"] = f"{min(rates):.0f}..{max(rates):.0f}"
            figures[f"append_p99_ms_{workers}"] = round(statistics.median(p99s), 2)
            figures["bytes_per_record"] = round(statistics.median(sizes), 1)
    print(json.dumps(figures, indent=2))
    if options.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
