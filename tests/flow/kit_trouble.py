"""The operator's story on a disk that fails in the middle of each durable step, and works again: no process is killed.

Run as a program: `python -m tests.flow.kit_trouble FOLDER SEED ROUNDS FAULT`. Each round is a deed of the story; at a
failpoint that was hit least the fault begins and stays. The deed must end with an error of Reef's own that says what to
do (or well), and what is served must be the release before or the deed's own. Then the fault ends, and the same deed
must succeed. Prints one JSON object. FAULT: see `kit_faults.FAULTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from reef.core import failpoint
from reef.core.errors import ConflictError, MissingError, PrunedError, ReefError
from reef.trainers import folder
from tests.flow.kit_faults import FAULTS
from tests.flow.kit_story import SPOILT, Story, last, served
from tests.loop.kit import NAME

FULL, BARRED = re.compile(r"free some (disk )?space|check .*space"), re.compile(r"rights|write access|permissions")


class Trouble(dict[str, int]):
    """Stands in for the armed failpoints: at the drawn passing of the drawn point the fault begins."""

    def __init__(self) -> None:
        super().__init__()
        self.hit: Counter[str] = Counter()
        self.reached: dict[str, set[str]] = {}  # by kind of deed
        self.kind = ""
        self.target: str | None = None
        self.begin: Any = None
        self.begun = ""
        self.left = 0

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        self.hit.setdefault(name, 0)
        self.reached.setdefault(self.kind, set()).add(name)
        if self.begin is None or self.begun or (self.target is not None and name != self.target):
            return False
        self.left -= 1
        if self.left <= 0:
            self.begun = name
            self.hit[name] += 1
            self.begin()
        return False


class Round:
    """One deed, disturbed and then not."""

    def __init__(self, story: Story, trouble: Trouble, fault: str, draw: random.Random) -> None:
        self.story, self.trouble, self.draw = story, trouble, draw
        self.fault, self.advice = FAULTS[fault], BARRED if fault == "barred" else FULL
        self.said: list[str] = []

    async def run(self, deed: dict[str, Any]) -> list[str]:
        world, trouble = self.story.world, self.trouble
        before, wrong = world.head, []
        for part in before.parts:
            world.chain.files(before.id, part)  # as the engine did that serves it
        trouble.kind = deed["kind"]
        known = sorted(trouble.reached.get(trouble.kind, ()), key=lambda name: (trouble.hit[name], self.draw.random()))
        trouble.target = known[0] if known and self.draw.random() < 0.8 else None
        trouble.left = 1 if trouble.target else self.draw.randint(1, 30)
        trouble.begun = ""
        with contextlib.ExitStack() as stack:
            trouble.begin = lambda: stack.enter_context(self.fault(world.folder))
            wrong += [f"during the trouble: {said}" for said in await self.suffer(deed)]
            trouble.begin = None
            if trouble.begun:
                head, now = world.head, world.board.get(NAME)
                if now is not None and now.release_id not in (before.id, head.id, head.parent):
                    wrong.append(f"during the trouble {now.release_id} is served")
                if not all(world.chain.files(before.id, part) for part in before.parts):
                    wrong.append("the release before cannot be read")
        await self.story.do(deed)  # over: the same again
        errors = [work.error for work in world.works.values() if work.error and SPOILT not in work.error]
        wrong += [f"afterwards: {said}" for said in [*errors, *served(self.story)]]
        return [f"deed {deed['number']} {deed['kind']} at {trouble.begun}: {said}" for said in wrong]

    async def suffer(self, deed: dict[str, Any]) -> list[str]:
        """The deed while the fault comes; what is wrong with how it ended."""
        try:
            await getattr(self.story, deed["kind"])(deed)
            await self.story.rest()
        except (ConflictError, PrunedError, MissingError) as error:
            return [] if not self.trouble.begun or error.message else ["no reason is given"]
        except ReefError as error:
            self.said.append(error.message)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        self.said += [work.error for work in self.story.world.works.values() if work.error]
        self.said = [said for said in self.said if SPOILT not in said]
        return [f"{said!r} does not say what to do" for said in self.said if not self.advice.search(said)]


async def run(place: Path, seed: int, rounds: int, fault: str) -> dict[str, Any]:
    began, draw = time.monotonic(), random.Random(seed)
    story, trouble = Story(place, seed), Trouble()
    await story.open()
    folder.sweep(story.world.training)
    await story.rest()
    failpoint._armed = trouble
    told = Counter[str]()
    wrong: list[str] = []
    number = done = 0
    while done < rounds and number < 4 * rounds and not wrong:
        one = Round(story, trouble, fault, draw)
        story.notes.write("done", number)
        wrong += await one.run(story.plan(number))
        number += 1
        done += bool(trouble.begun)
        told.update(re.sub(r"[0-9a-f]{7,}|/[^ ,:;)]+|\d+", "…", said) for said in one.said)
    failpoint._armed = {}
    wrong += [] if wrong else await last(story)
    await story.close()
    return {
        "seed": seed, "fault": fault, "rounds": done, "deeds": number, "points": dict(trouble.hit), "wrong": wrong,
        "told": dict(told), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> None:
    place, seed, rounds, fault = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    (place / "state").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", "--bare", str(place / "remote.git")], check=True)
    if fault == "barred":
        from tests.gateway.worker import give_up_rights

        give_up_rights()
    print(json.dumps(asyncio.run(run(place, seed, rounds, fault))))


if __name__ == "__main__":
    main()
