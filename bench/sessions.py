"""What it costs to join a turn to a session of 2 turns and of 200: `python bench/sessions.py [--write]`.

In one run, on one store: many sessions of 2 turns and a few of 200, of the same messages, every one unnamed, so that
all are found by their transcripts. The last turns of each kind are read by the learner's own code, a page at a time, in
turns with the other kind, and the time of each part is taken: the look into the log, the records from the store, the
request as a transcript, the join, and the rest (the commit with its disk sync, a page's, spread over its turns).

`ratio_…` is 200 turns against 2. `again_…` is the first turn of
each long session after a restart, with nothing remembered. `bytes_…` is what a
turn costs in sessions.db. `--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef.core.ids import new_receipt
from reef.core.nouns import Choice, Record, Timing
from reef.experience.reader import Reader
from reef.experience.sessions import PAGE, Sessions
from reef.records.sqlite import SqliteStore

SCENARIO, LONG, SHORT, FEW = "default", 200, 2, 4
draw = random.Random(0)
WORDS = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]
TOOLS = [{"type": "function", "function": {"name": f"tool{n}", "description": "word " * 80}} for n in range(12)]


class Talk:
    """One conversation: its turns as records, each with the whole transcript before it."""

    def __init__(self, number: int) -> None:
        system = {"role": "system", "content": "You are an agent. " + "rule " * 400}
        self.messages: list[dict[str, str]] = [system]
        self.number = number

    def turn(self, at: float) -> Record:
        said, told = (" ".join(draw.choices(WORDS, k=60)) for _ in range(2))
        self.messages.append({"role": "user", "content": f"{self.number} {said}"})
        body = json.dumps({"model": "m", "messages": self.messages, "tools": TOOLS}).encode()
        self.messages.append({"role": "assistant", "content": told})
        answer, timing = (Choice(0, told, "stop"),), Timing(at, last=1.0)
        return Record(
            new_receipt(), SCENARIO, "c0ffee", "live", "chat", "complete", body, timing, choices=answer, client="a/1"
        )


class Timed:
    """The store and the parts of Sessions, with a clock on each."""

    def __init__(self, store: SqliteStore, sessions: Sessions) -> None:
        self._store = store
        self.took: dict[str, float] = defaultdict(float)
        for place, name in ((sessions, "add"), (sessions._reader, "read")):
            setattr(place, name, self._clock(getattr(place, name), {"add": "join", "read": "transcript"}[name]))

    def _clock(self, of: Any, name: str) -> Any:
        def timed(*given: Any) -> Any:
            begin = time.process_time()
            made = of(*given)
            self.took[name] += time.process_time() - begin
            return made

        return timed

    async def events(self, *given: Any) -> Any:
        begin = time.process_time()
        found = await self._store.events(*given)
        self.took["log"] += time.process_time() - begin
        return found

    async def exchanges(self, *given: Any) -> Any:
        begin = time.process_time()
        found = await self._store.exchanges(*given)
        self.took["records"] += time.process_time() - begin
        return found


async def taken(store: SqliteStore, sessions: Sessions, records: list[Record]) -> dict[str, float]:
    """Append these turns, then read them as the learner does; microseconds a turn, by part."""
    for record in records:
        await store.append(record)
    timed = Timed(store, sessions)
    begin = time.process_time()
    await sessions.read(SCENARIO, timed)  # type: ignore[arg-type]
    took: Mapping[str, float] = {**timed.took, "whole": time.process_time() - begin}
    rest = took["whole"] - sum(value for name, value in took.items() if name != "whole")
    return {name: 1e6 * value / len(records) for name, value in {**took, "rest": rest}.items()}


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    store, sessions = SqliteStore(folder / "records.db", owner="bench"), Sessions(folder / "sessions.db")
    await store.start()
    clock = iter(range(10**9))
    long = [Talk(n) for n in range(FEW)]
    every = rounds * PAGE // FEW
    for _ in range(LONG - every // 2):
        for talk in long:
            await store.append(talk.turn(next(clock)))
    await sessions.read(SCENARIO, store)
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        short = [Talk(1000 + number * PAGE + n) for n in range(PAGE)]
        for talk in short:
            await store.append(talk.turn(next(clock)))
        await sessions.read(SCENARIO, store)
        runs["2"].append(await taken(store, sessions, [talk.turn(next(clock)) for talk in short]))
        turns = [talk.turn(next(clock)) for _ in range(PAGE // FEW) for talk in long]
        runs["200"].append(await taken(store, sessions, turns))
        await store.close()
        store = SqliteStore(folder / "records.db", owner="bench")
        await store.start()
        sessions._reader = Reader()
        again = [talk.turn(next(clock)) for talk in long]
        runs["again_200"].append(await taken(store, sessions, again))
    count = sessions._read("SELECT count(*) FROM turns")[0][0]
    late = sessions._read("SELECT count(*) FROM turns WHERE parent IS NOT NULL")[0][0]
    assert count - late == rounds * PAGE + FEW, "not every turn found the one before it"
    sessions._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    figures: dict[str, float] = {"bytes_a_turn": round((folder / "sessions.db").stat().st_size / count, 1)}
    for kind, found in runs.items():
        for part in ("log", "records", "transcript", "join", "rest", "whole"):
            figures[f"{part}_us_{kind}"] = round(statistics.median(run[part] for run in found), 1)
    for part in ("records", "transcript", "join", "whole"):
        figures[f"ratio_{part}"] = round(figures[f"{part}_us_200"] / figures[f"{part}_us_2"], 2)
    figures["body_bytes_200"] = float(len(turns[-1].request))
    figures["turns_of_the_longest"] = float(len(long[0].messages) // 2)
    await store.close()
    sessions.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures as the baseline")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(measure(Path(name), options.rounds))
    shown: dict[str, float | str] = {"python": platform.python_version(), **figures}
    print(json.dumps(shown, indent=2))
    if options.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(shown, indent=2) + "\n")


if __name__ == "__main__":
    main()
