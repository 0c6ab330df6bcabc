"""A server that a search can be killed beside: its reports are a file, so it is the same one in the search's next life.

Run as a program it makes a search of some steps in a folder: `python -m tests.recipes.kit_search FOLDER STEPS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.tttd.archive import File
from recipes.tttd.digits import Digits
from recipes.tttd.problems import Judged
from recipes.tttd.search import Search, Settings

GROUPS, ROLLOUTS = 3, 4


class Sums:
    """Digits that sum to 12; more digits are better, and three answers of ten are none."""

    name = "sums"
    max_tokens = 12

    def __init__(self) -> None:
        self.digits = Digits(12, 1, 9, 1, 12)
        self.calls: list[str] = []

    def start(self, numbers: random.Random) -> str:
        return self.digits.draw(numbers)

    def prompt(self, state: str, judged: Judged) -> str:
        return f"{state} {judged.value}"

    def parse(self, text: str) -> str | None:
        return self.digits.read(text)

    def verify(self, state: str) -> Judged:
        self.calls.append(state)
        return Judged(len(state) + int(state[0]) / 10, "9" not in state, state)

    def grammar(self) -> Any:
        return {"grammar": self.digits.grammar()}


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    receipt: str
    release_id: str


class Paper:
    """Answers depend on the served release and the seed. The release is how many whole grids were reported."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "reports.jsonl"
        self.asked: list[dict[str, Any]] = []

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def release(self) -> str:
        return f"r{len(self.reports) // (GROUPS * ROLLOUTS)}"

    async def ask(self, messages: str, *, seed: int, max_tokens: int, **body: Any) -> Answer:
        release = self.release
        self.asked.append({"prompt": messages, "seed": seed, **body})
        numbers = random.Random(f"{release}/{seed}/{messages}")
        text = Digits(12, 1, 9, 1, 12).draw(numbers) if numbers.random() < 0.7 else "I do not know."
        await asyncio.sleep(0)
        return Answer(text, hashlib.sha256(f"{release}/{seed}".encode()).hexdigest()[:32], release)

    async def report(self, receipt: str, score: float | None = None, **fields: Any) -> None:
        body = {"receipt": receipt, "score": score, **fields}
        if body not in self.reports:  # the same report is one
            with self.log.open("a") as file:
                file.write(json.dumps(body) + "\n")
                file.flush()
                os.fsync(file.fileno())
        await asyncio.sleep(0)

    async def learnt(self) -> Mapping[str, Any]:
        return {"metrics": {"grad_norm": 1.0}}


async def search(folder: Path, steps: int, **changed: Any) -> Search:
    folder.mkdir(parents=True, exist_ok=True)
    file = File(folder / "search.json")
    settings = Settings(**({"groups": GROUPS, "rollouts": ROLLOUTS} | changed))
    made = Search(Paper(folder), Sums(), settings, file.write, file.read())
    while len(made.state.history) < steps:
        await made.step()
    return made


if __name__ == "__main__":
    asyncio.run(search(Path(sys.argv[1]), int(sys.argv[2])))
