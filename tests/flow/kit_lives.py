"""The operator's story killed again and again, each life in a process of its own.

Run as a program, so that the parent that forks has no threads: `python -m tests.flow.kit_lives FOLDER SEED KILLS`. A
life opens the folder as a restart would, checks it, and goes on with the deed that the last one did not finish. Deaths:
at a failpoint's passing by count, at a chosen failpoint, or at any instant together with its git children. Prints one
JSON object; the same SEED is the same story, with the same deaths as far as the machine's timing allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from reef.core import failpoint
from tests.flow.kit_story import FIRST, SPOILT, Notes, Story, kept, last, served
from tests.loop.kills import bury, tell

LONGEST = 60.0  # seconds of one life, after which it counts as hung


class Doom(dict[str, int]):
    """Stands in for the armed failpoints: sees each passing, and kills at the one that was drawn for this life."""

    def __init__(self, place: Path, draw: random.Random, mode: str) -> None:
        super().__init__()
        self.place, self.armed, self.passed = place, False, 0
        self.seen: dict[str, int] = json.loads(kept(place / "seen.json") or "{}")
        self.killed = Counter(json.loads(kept(place / "kills.json") or "{}"))
        known = sorted(self.seen, key=lambda name: (self.killed[name], draw.random()))
        self.target = known[0] if known and mode == "point" else None
        self.due = draw.randint(1, 2) if self.target else draw.randint(1, 45) if mode == "count" else 0

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        if not self.armed:
            return False
        if name not in self.seen:
            self.seen[name] = 1
            (self.place / "seen.json").write_text(json.dumps(self.seen))
        self.passed += self.target in (None, name)
        if self.due and self.passed == self.due:
            self.killed[name] += 1
            (self.place / "kills.json").write_text(json.dumps(self.killed))
            os.kill(os.getpid(), signal.SIGKILL)
        return False


async def live(story: Story, doom: Doom, most: int) -> None:
    """Finish the deed that was begun, then do others until `most` are done."""
    doom.armed = True
    if story.notes.read("deed", None) and random.Random(f"{story.seed}/{doom.killed.total()}").random() < 0.5:
        await story.rest()  # else the person is quicker than the learner
    for _ in range(most):
        deed = story.notes.read("deed", None)
        if deed is None:
            number = story.notes.read("done", 0)
            story.notes.write("deed", deed := story.plan(number))
        await story.do(deed)
        doom.armed = False
        story.wrong += served(story)
        story.notes.write("done", deed["number"] + 1)
        (story.place / "deed.json").unlink()
        doom.armed = True


def child(place: Path, seed: int, life: int, mode: str, most: int) -> None:
    """One life, in a process of its own; its end is in `wrong.json` when it was not killed."""
    os.setsid()
    signal.alarm(int(LONGEST))
    doom = Doom(place, random.Random(f"{seed}:{life}"), mode)
    story = Story(place, seed)
    failpoint._armed = doom
    bury(place / "state")
    tell(place)

    async def whole() -> None:
        await story.open()
        await live(story, doom, most)
        doom.armed = False
        if mode == "none":
            story.wrong += await last(story)
        await story.close()

    try:
        asyncio.run(whole())
        wrong = story.wrong
    except BaseException as error:
        wrong = [*story.wrong, f"{type(error).__name__}: {error}"]
    if (place / "failures").exists():
        wrong += [said for said in (place / "failures").read_text().splitlines() if SPOILT not in said]
    if wrong:
        story.notes.write("wrong", [f"life {life} ({mode}), deed {story.notes.read('deed', None)}: {w}" for w in wrong])
    os._exit(0)


def life(place: Path, seed: int, number: int, mode: str, most: int, after: float | None = None) -> bool:
    """Whether this life was killed. `after`: so many seconds, with its git children."""
    if (made := os.fork()) == 0:
        child(place, seed, number, mode, most)
    if after is not None:
        time.sleep(after)
        for kill in (os.killpg, os.kill):  # before its setsid there is no such group
            with contextlib.suppress(ProcessLookupError):
                kill(made, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(made, 0)[1])
    if status not in (0, -signal.SIGKILL):
        Notes(place).write("wrong", [f"life {number} ended with {status}"])
    return status == -signal.SIGKILL


def main() -> None:
    place, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    began, draw, notes = time.monotonic(), random.Random(seed), Notes(place)
    (place / "state").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", "--bare", str(place / "remote.git")], check=True)
    done, any_instant, lives, spread = 0, 0, 0, 0.5
    life(place, seed, 0, "none", len(FIRST))
    while done < kills and lives < 5 * kills and not (place / "wrong.json").exists():
        lives += 1
        mode = draw.choices(("count", "point", "instant"), (4, 4, 2))[0]
        before = notes.read("done", 0)
        killed = life(place, seed, lives, mode, 4, draw.uniform(0.02, spread) if mode == "instant" else None)
        done += killed
        if mode == "instant":
            any_instant += killed
            spread = min(10.0, spread * (1.3 if notes.read("done", 0) == before else 0.9))
    life(place, seed, lives + 1, "none", 2)
    told = {
        "seed": seed, "kills": done, "at_failpoints": notes.read("kills", {}), "any_instant": any_instant,
        "seen": sorted(notes.read("seen", {})), "lives": lives, "deeds": notes.read("done", 0),
        "wrong": notes.read("wrong", []), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
