"""Durable records a second and bytes a record, on this machine's disk: `python bench/records.py [--write]`.

Two kinds: a whole chat exchange of an embedded-model size (prompt and answer tokens with log-probs), and what a gateway
relays (no tokens): small, streamed (opened, then closed), tagged, and with bodies of 17 and 400 KB of a session that
grows. Each is committed with a disk sync before it counts. CPU is user and system time of the whole process a record,
event loop included and the making of the record taken off. `--write` stores the figures beside this file as the
baseline; `--folder` puts the files elsewhere (/dev/shm: what the disk does not cost).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import random
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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


QUESTION = "Please tell me in one short sentence what the number of the day means to you, and why it does."
ANSWER = "The number means a lot of things to many people, so here is one sentence of a hundred letters about."


def small(number: int) -> Record:
    """A request of 0.2 KB and an answer of 100 characters."""
    message = {"role": "user", "content": f"{number} {QUESTION}"}
    request = json.dumps({"model": "gpt-5-mini", "messages": [message], "max_tokens": 64, "temperature": 0.7}).encode()
    return Record(
        id=new_receipt(),
        scenario="default",
        release_id=RELEASE,
        purpose="live",
        dialect="chat",
        status="complete",
        request=request.ljust(200),
        timing=Timing(time.time(), 0.0001, 0.012, 0.034),
        choices=(Choice(0, ANSWER, "stop"),),
        usage=Usage(23, 24),
        model_asked="gpt-5-mini",
        model_answered="gpt-5-mini-2025-08-07",
        answer_id=f"chatcmpl-{number:029d}",
        untrainable="the provider gave no tokens",
    )


def grown(kilobytes: int) -> Callable[[int], Record]:
    """Requests that resend a transcript of this size, each with another end."""
    turns = [{"role": "user", "content": f"{n} " + " ".join(draw.choices(WORDS, k=90))} for n in range(2 * kilobytes)]
    text = json.dumps({"model": "m", "messages": turns}).encode()[: 1024 * kilobytes].rpartition(b", {")[0]
    return lambda n: dataclasses.replace(small(n), request=text + b', {"role": "user", "content": "%d"}]}' % n)


def tagged(number: int) -> Record:
    return dataclasses.replace(small(number), tags={"team": "blue", "run": str(number % 10)}, session="s-1")


Make = Callable[[int], Record]


async def whole(store: SqliteStore, record: Record) -> None:
    await store.append(record)


async def streamed(store: SqliteStore, record: Record) -> None:
    await store.append(dataclasses.replace(record, status="open", choices=(), usage=None, answer_id=None))
    await store.append(record)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


Append = Callable[[SqliteStore, Record], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    rate: float  # records a second
    p50: float  # of one append, ms
    p99: float
    size: float  # bytes a record in the file
    cpu: float  # microseconds a record
    batch: float  # appends a commit


async def measure(folder: Path, make: Make, append: Append, workers: int, seconds: float) -> Run:
    path = folder / f"{time.time_ns()}.db"
    store = SqliteStore(path, owner="bench")
    await store.start()
    waits: list[float] = []
    begin = cpu()
    for number in range(1000):
        make(number)
    making = (cpu() - begin) / 1000
    start, end = cpu(), time.perf_counter() + seconds

    async def work() -> None:
        while (begin := time.perf_counter()) < end:
            record = make(len(waits))
            await append(store, record)
            waits.append(time.perf_counter() - begin)

    await asyncio.gather(*(work() for _ in range(workers)))
    used = 1e6 * ((cpu() - start) / len(waits) - making)
    commits = store.commits
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    waits.sort()
    p50, p99 = (1000 * waits[int(share * len(waits))] for share in (0.5, 0.99))
    size = path.stat().st_size / len(waits)
    path.unlink()
    return Run(len(waits) / seconds, p50, p99, size, used, len(waits) / commits)


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
    parser.add_argument("--folder", type=Path, help="where the files are written")
    options = parser.parse_args()
    figures: dict[str, float | str] = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    kinds: list[tuple[str, Make, Append, tuple[int, ...]]] = [
        ("", lambda _: exchange(), whole, (1, 16, 64)),
        ("small_", small, whole, (1, 16, 64)),
        ("streamed_", small, streamed, (64,)),
        ("tagged_", tagged, whole, (64,)),
        ("17k_", grown(17), whole, (16,)),
        ("400k_", grown(400), whole, (16,)),
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        figures["fdatasync_ms"] = round(fsync_ms(folder), 3)
        for kind, make, append, crowds in kinds:
            for workers in crowds:
                runs = [asyncio.run(measure(folder, make, append, workers, options.seconds)) for _ in range(3)]
                rates = [run.rate for run in runs]
                figures[f"{kind}records_per_second_{workers}"] = round(statistics.median(rates), 1)
                figures[f"{kind}spread_{workers}"] = f"{min(rates):.0f}..{max(rates):.0f}"
                figures[f"{kind}append_p50_ms_{workers}"] = round(statistics.median(run.p50 for run in runs), 2)
                figures[f"{kind}append_p99_ms_{workers}"] = round(statistics.median(run.p99 for run in runs), 2)
                figures[f"{kind}cpu_us_per_record_{workers}"] = round(statistics.median(run.cpu for run in runs), 1)
                figures[f"{kind}appends_per_commit_{workers}"] = round(statistics.median(run.batch for run in runs), 1)
                figures[f"{kind}bytes_per_record"] = round(statistics.median(run.size for run in runs), 1)
    print(json.dumps(figures, indent=2))
    if options.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
