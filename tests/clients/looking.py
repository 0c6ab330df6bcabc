"""One look with real episodes: `python looking.py ADDRESS STATE FOLDER RELEASE TASKS`, to be killed and run again.

Both sides are answered by the same release; they differ in a rule of their trees, which the provider sees.
"""

import asyncio
import json
import sys
from pathlib import Path

from reef.core.nouns import Part, Release
from reef.engines.fake import FakeEngine
from reef.evaluation import TOLD, Means, Sizes
from reef.evaluation.book import Book
from reef.evaluation.scorers import Reach
from reef.evaluation.suite import Judging, Listed, Sources, load_suite
from reef.evaluation.trial import Trial
from reef.harness.apply import Applied, Wish
from reef.harness.clients import Clients
from reef.harness.episode import Rooms
from reef.harness.tree import Entry
from reef.records.board import Board
from reef.records.tokens import TokenTable

SCENARIO = "native"


def side(release, name):
    parts = {"weights": Part("lora", {"w": (name, 1)})}
    return Release(
        release,
        1,
        SCENARIO,
        "publish",
        None,
        parts,
        None,
        0,
        None,
        None,
        None,
        {},
        actor="t",
        reason="",
        created_at=0.0,
    )


def tree(release):
    name = release.parts["weights"].files["w"][0]
    return Applied.of([Entry("side", "rules", {"text": f"You are the {name}."})], Wish())


async def main(address, state, folder, release, tasks):
    clients = Clients(Path(__file__).parents[2] / ".clients" / "node")
    rooms = Rooms(address, TokenTable(Board(Path(state) / "records.db")).episode, Path(folder) / "rooms", clients, 1)
    book = Book(Path(folder) / "gate.db")
    listed = Listed("work", load_suite(tasks, Judging({}, Reach(), clients)))
    means = Means(
        SCENARIO, FakeEngine(), release, book=book, suite=Sources(SCENARIO, [listed], book), renders=tree,
        episodes=rooms.of(SCENARIO, "reef-model"),
    )  # fmt: skip
    TOLD.set(lambda stage, done, total: print(f"{stage} {done} of {total}", flush=True))
    sizes = Sizes(tasks=8, least=1)
    trial = await Trial.open(means, side(release, "candidate"), side(release, "incumbent"), sizes=sizes)
    while await trial.more(2):
        pass
    missing = [one.missing for one in trial.results if one.missing]
    rows = {one.id: [one.ours, *one.theirs] for one in trial.results}
    cost = [trial.cost.calls, trial.cost.prompt_tokens]
    print(json.dumps({"rows": rows, "missing": missing, "cost": cost}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
