"""How often does the gate release an edit that changes nothing? Candidates as good as what is served, by construction.

    python -m recipes.harness_evolve.null 200

Knows: a fake engine whose answers are right with the same chance whatever the rules say, the real policy `better`.
Does not know: models. Each candidate is the first of a scenario of its own, so each has the largest share of the error
budget that a candidate can have. Beside it stands what the naive rule, "more tasks won than lost", would have released
on the same answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from reef.core.nouns import Part, Release
from reef.engines.fake import FakeEngine
from reef.evaluation import Means, Sizes, Task
from reef.evaluation.ask import Asker, Question
from reef.evaluation.book import Book
from reef.evaluation.policies import Better
from reef.evaluation.scorers import make
from reef.evaluation.suite import GENERAL, Listed, Sources
from reef.evaluation.trial import Trial
from reef.harness.apply import Applied, Wish
from reef.harness.tree import Entry, write

RATE = 0.5
TASKS = 60
_RIGHT = (
    "The capital is Paris.", "It is blue.", "There are twelve.", "The opposite is cold.", "They speak Spanish.",
    "Shakespeare wrote it.", "It is the Pacific.", "They take in carbon dioxide.", "One says bonjour.", "It is Au.",
    "It is the Sun.", "Leonardo painted it.", "Cairo is in Egypt.", "A dragon slept under the hill.",
)  # fmt: skip
KNOWN = {json.loads(one.question.messages)[0]["content"]: said for one, said in zip(GENERAL, _RIGHT, strict=True)}


def answer(release_id: str, body: Mapping[str, Any]) -> str:
    """Right with the chance RATE, drawn from everything that was asked: rules change which answers are right, not how
    many."""
    asked = str(body["messages"][-1]["content"])
    if asked in KNOWN:
        return KNOWN[asked]
    drawn = hashlib.sha256(json.dumps([body["messages"], body.get("seed")]).encode()).digest()
    chance = int.from_bytes(drawn[:4], "big") / 2**32
    return f"The answer to {asked} is {'right' if chance < RATE else 'wrong'}."


def release(name: str, entries: tuple[Entry, ...]) -> Release:
    digest = hashlib.sha256(write(entries)).hexdigest()
    parts: Any = {
        "weights": Part("base", {"weights.json": ("0" * 64, 1)}),
        "harness": Part("tree", {"harness.json": (digest, 1)}),
    }
    return Release(
        name, 1, "null", "publish", None, parts, None, 0, None, None, None, {}, actor="null", reason="", created_at=0.0
    )


async def one(number: int) -> tuple[str, bool]:
    """The gate's verdict on a candidate, and whether the naive rule would have released it."""
    trees = {
        "served": (Entry("house", "rules", {"text": "Answer in one short sentence."}),),
        "candidate": (
            Entry("evolve-idle", "rules", {"text": f"The reader's number is {number}."}),
            Entry("house", "rules", {"text": "Answer in one short sentence."}),
        ),
    }
    scorer = make({"use": "contains", "answer": "is right"})
    tasks = [Task(f"task {n}", Question.of(f"question {n}", temperature=1.0, seed=n), scorer) for n in range(TASKS)]
    book, wish = Book.memory(), Wish(apply=True)
    means = Means(
        f"null-{number}", FakeEngine(reply=answer), "served",
        book=book, suite=Sources(f"null-{number}", [Listed("null", tasks)], book),
        renders=lambda asked: Applied.of(trees[asked.id], wish),
    )  # fmt: skip
    candidate, served = release("candidate", trees["candidate"]), release("served", trees["served"])
    found = await Better(means, Sizes(), {}).evaluate(candidate, served, 1)
    trial = await Trial.open(means, candidate, served, sizes=Sizes(repeats=1), asker=Asker.of(means), measure=True)
    while await trial.more(16):
        pass
    won = sum(ours > theirs[0] for ours, theirs in trial.rows)
    lost = sum(ours < theirs[0] for ours, theirs in trial.rows)
    return found.verdict, won > lost


async def run(count: int, first: int = 0) -> dict[str, int]:
    """The verdicts of so many candidates, and how many the naive rule would have released."""
    made = {"candidates": count, "accept": 0, "reject": 0, "undecided": 0, "naive": 0}
    for number in range(first, first + count):
        verdict, naive = await one(number)
        made[verdict] += 1
        made["naive"] += naive
    return made


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 200))))
