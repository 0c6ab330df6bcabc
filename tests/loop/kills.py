"""Kill a learner at its durable steps, again and again, until all its work is done; then check what is on disk.

Run as a program, so that the parent that forks has no threads: `python -m tests.loop.kills FOLDER SEED BUDGET`. A child
is one life of a learner on the state folder. At each failpoint it passes it may die (SIGKILL): always while the
point's budget lasts when SEED is 0, else by chance. Prints one JSON object: kills by failpoint, and what was wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from reef.core import failpoint
from reef.core.nouns import Batch, Candidate, Evaluation, Release, Timing, Unit
from reef.core.wire import Progress, Step, Stepped
from reef.evaluation.policies import Gain
from reef.harness import tree
from reef.loop import failures, update
from reef.loop.binding import Watching, Work
from reef.loop.gain import Scales
from reef.loop.watch import Vigil
from reef.recipe import Asking
from reef.releases import Draft, NewPart
from reef.scenario.serving import rollback
from reef.trainers import folder
from reef.trainers.fake import FakeTrainer
from tests.loop.kit import NAME, Rules, Score, World, record, report

SCORED, LATER, LIVES = 10, 4, 400
LIKED, SPOILT = 20, 12


class Doom(dict[str, int]):
    """Stands in for the armed failpoints: decides at each passing, and writes the kill down before it happens."""

    def __init__(self, place: Path, seed: int, budget: int) -> None:
        super().__init__()
        self.place, self.seed, self.budget = place, seed, budget
        seen = place.with_name("seen.json")
        self.seen = set(json.loads(seen.read_text())) if seen.exists() else set()
        self.killed = Counter(json.loads(place.read_text())) if place.exists() else Counter()
        self.chance = random.Random(seed * 1000 + self.killed.total())

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        if name not in self.seen:
            self.seen.add(name)
            (self.place.parent / "seen.json").write_text(json.dumps(sorted(self.seen)))
        if self.killed[name] < self.budget and (self.seed == 0 or self.chance.random() < 0.25):
            self.killed[name] += 1
            self.place.write_text(json.dumps(self.killed))
            os.kill(os.getpid(), signal.SIGKILL)
        return False


@dataclass(frozen=True, slots=True)
class Lottery(Score):
    """Chooses by lot, so that nothing but the written order makes a repeated step the same step. Asks about each unit
    first."""

    async def assess(self, unit: Unit, ask: Asking) -> Any:
        return {"said": await ask(None, {"messages": [unit.id]})}

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        if strange := [unit.id for unit in units if unit.assessment != {"said": unit.id}]:
            raise AssertionError(f"{strange} were not assessed")
        return Score.batch(self, random.SystemRandom().sample(list(units), len(units)))


class Survivor:
    """A trainer in a process of its own: an order it was given is finished even when the learner that gave it died."""

    def __init__(self, trainer: FakeTrainer, inbox: Path) -> None:
        self.trainer, self.inbox = trainer, inbox

    async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        if self.inbox.exists():
            doom, failpoint._armed = failpoint._armed, {}  # that process is not the one that is killed
            async for _ in self.trainer.step(msgspec.json.decode(self.inbox.read_bytes(), type=Step)):
                pass
            failpoint._armed = doom
        self.inbox.write_bytes(msgspec.json.encode(order))
        async for item in self.trainer.step(order):
            if isinstance(item, Stepped):
                self.inbox.unlink()
            yield item

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None


class Judge:
    """Verdicts that depend on the candidate only, so that a look that is repeated ends the same way."""

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        lines = {"1": {1: "undecided", 3: "reject"}}
        number = (candidate.line or "").rpartition("-")[2]
        changed = "weights" if candidate.parts["weights"] != incumbent.parts["weights"] else "harness"
        verdict: Any = lines.get(number, {}).get(candidate.step, "accept") if changed == "weights" else "accept"
        return Evaluation("scripted", verdict, f"always {verdict} here", candidate.id, incumbent.id)

    async def remeasure(self, release: Release, before: Release) -> Gain:
        return Gain(0.1, 0.05, 0.15, 20, True)


async def prepare(place: Path) -> None:
    world = await World(place).open()
    base = world.head.id
    for number in range(SCORED):
        await world.store.append(record(number, base))
        await world.store.append(report(number, f"{number:032x}", score=1.0))
    late = record(98, base)
    await world.store.append(record(99, base, untrainable="a tool was called"))
    await world.store.append(report(99, f"{99:032x}", f"{0:032x}", score=0.0, feedback="Be brief and kind."))
    await world.store.append(late)
    (place / "began").write_text(str(time.time()))
    await world.store.append(report(98, late.id, feedback="Answer in one word."))
    rule = {"op": "create", "id": "asked", "kind": "rules", "config": {"text": "Name the source of each number."}}
    world.propose(rule, reason="asked", actor="eve")
    world.propose({"op": "remove", "id": "none"}, reason="odd", actor="eve")
    await world.close()


async def live(place: Path, *, back: bool) -> list[str]:
    """One life: recover, learn until nothing moves, and check. Returns what is wrong."""
    world = await World(place).open()
    world.recipes = {"weights": Lottery(), "harness": Rules()}
    world.options = {"patience": 9, "ask": echo}
    world.evaluator = Judge()  # type: ignore[assignment]
    world.tools = replace(world.tools, trainer=Survivor(world.trainer, place / "inbox.json"))
    folder.sweep(world.training)  # the trainer's part of a restart
    await world.settle()
    marker = place / "went-back"
    if back and not marker.exists():
        base = world.chain.history(NAME)[-1]
        rollback(NAME, base.id, world.chain, world.board, actor="ada", reason="start again")
        for number in range(SCORED, SCORED + LATER):
            await world.store.append(record(number, base.id, timing=Timing(0.0)))
            await world.store.append(report(number, f"{number:032x}", score=1.0, created_at=0.0))
        marker.touch()
        await world.settle()
    await spoil(world)
    await world.settle()
    watch, scales = Vigil(world.tools, NAME, Watching()), Scales(world.tools)
    while await watch.look():
        await world.settle()
    await scales.look(world.binding)
    await failures.asked(world.tools, NAME)
    wrong = [*check(world, back=back)]
    if (place / "failures").exists():
        wrong += (place / "failures").read_text().splitlines()
    await world.close()
    return wrong


async def echo(engine: str | None, body: Any) -> str:
    """Whom the recipe asks."""
    return str(body["messages"][0])


async def spoil(world: World) -> None:
    """Somebody publishes rules that users do not like."""
    marker = world.folder / "spoilt"
    if marker.exists():
        return
    if world.head.reason != "bad":
        await Scales(world.tools).look(world.binding)  # the last release of the learner's own
        data = tree.write((tree.Entry("bad", "rules", {"text": "Be rude."}),))
        parts: Any = {"harness": NewPart("tree", {tree.FILE: data})}
        draft = Draft("publish", parts, base=world.head.id, step=world.head.step, actor="ada", reason="bad")
        world.chain.publish(NAME, draft, world.head.id)
    bad = world.head
    assert bad.parent is not None
    began = float((world.folder / "began").read_text())
    for number in range(200, 200 + LIKED + SPOILT):
        liked = number < 200 + LIKED
        answer = record(number, bad.parent if liked else bad.id, timing=Timing(began), untrainable="a tool was called")
        told: Any = {"promote": True} if number == 200 else None
        await world.store.append(answer)
        await world.store.append(
            report(number, answer.id, score=float(liked), created_at=began + number / 1000, metadata=told)
        )
    marker.touch()


def check(world: World, *, back: bool) -> Iterator[str]:
    for part, work in world.works.items():
        if work.error is not None:
            yield f"{part} ended with the error {work.error}"
        if world.ledger.order(NAME, part) is not None:
            yield f"{part} has an order that nobody settled"
        if left := world.ledger.assessments(NAME, part):
            yield f"{part} has assessments of settled units: {left}"
    steps = [state for place in states(world.folder) if (state := folder.read(place)) is not None]
    trained = Counter((state.part, unit) for state in steps for unit in state.unit_ids)
    for (part, unit), times in trained.items():
        if times > 1:
            yield f"{part} trained {unit} {times} times"
    for state in steps:
        for unit in state.unit_ids:
            known = world.ledger.fate(NAME, unit)
            fates = [(fate, *where) for part, _, fate, *where in known if (part, fate) == (state.part, "trained")]
            if fates != [("trained", state.line, state.step)]:
                yield f"{state.part} {unit} was trained at {state.line} {state.step}; the ledger says {fates}"
    weights, harness = world.ledger.fates(NAME, "weights"), world.ledger.fates(NAME, "harness")
    # The reports 99 quote answer 0 too: a duplicate for weights, a unit of its own for the harness.
    if weights != {"trained": SCORED + LATER * back, "untrainable": 1 + LIKED + SPOILT, "duplicate": 1}:
        yield f"the fates of weights units are {weights}"
    if harness != {"trained": 3}:
        yield f"the fates of harness units are {harness}"
    yield from world.chain.verify(NAME)
    history = world.chain.history(NAME)
    head, serving = history[0], world.board.get(NAME)
    if serving is None or serving.release_id != head.id:
        yield f"the board serves {serving}, the head is {head.id}"
    if [release.seq for release in history] != list(range(len(history)))[::-1]:
        yield "the chain is not linear"
    operations = Counter(release.operation for release in history)
    if operations != Counter({"create": 1, "publish": 8 + back, "rollback": 1 + back}):
        yield f"the chain has {operations}"
    if (head.step, len(steps)) != ((2, 11) if back else (4, 9)):
        yield f"the head is at step {head.step}; {len(steps)} steps were made"
    accepted = [look.release for look in world.ledger.looks(NAME) if look.verdict == "accept"]
    published = [release.id for release in history if release.operation == "publish" and release.actor != "ada"]
    if sorted(accepted, key=str) != sorted(published):
        yield f"{len(accepted)} looks accepted, {len(published)} releases were published"
    named = Counter(unit for release in history for part in release.consumed.values() for unit in part.units)
    if doubles := [unit for unit, times in named.items() if times > 2]:  # weights and harness may share one
        yield f"releases name {doubles} again"
    asked = [release for release in history if release.actor == "eve"]
    rows = [(ask.state, ask.release) for ask in world.tools.queue.list(NAME)]
    if len(asked) != 1 or rows != [("refused", None), ("accepted", asked[0].id)]:
        yield f"what eve asked for made {len(asked)} releases; her rows are {rows}"
    if (refused := [one.reason for one in world.ledger.rejected(NAME)]) != ["odd"]:
        yield f"refused were {refused}"
    yield from untold(world, history)


def untold(world: World, history: Sequence[Release]) -> Iterator[str]:
    """What the journal lacks, or has twice."""
    acts = world.journal.after(0, 1000)
    for kind, operation in (("create", "create"), ("release", "publish"), ("rollback", "rollback")):
        told = [act.ref for act in acts if act.kind == kind]
        if told != [release.id for release in history[::-1] if release.operation == operation]:
            yield f"of {operation} the journal has {told}"
    rejected = [look.candidate for look in world.ledger.looks(NAME)[::-1] if look.verdict == "reject"]
    if (told := [act.ref for act in acts if act.kind == "reject"]) != rejected:
        yield f"of rejections the journal has {told}, the ledger {rejected}"
    (head, bad), alarms = history[:2], [act for act in acts if act.kind == "alarm"]
    if (head.actor, head.base, bad.reason) != ("watch", bad.parent, "bad") or [act.ref for act in alarms] != [bad.id]:
        yield f"the watch gave {alarms} and the head is {head}"
    if (told := [act.ref for act in acts if act.kind == "measure"]) != [bad.parent]:
        yield f"measured again were {told}"
    failed = {one.receipt for one in world.book.failures(NAME)}
    if f"{200:032x}" not in failed or len(failed) < 8:
        yield f"{len(failed)} failures became tasks"


def states(place: Path) -> list[Path]:
    """Every step folder that ever was durable: those in place, and what pruning removed (only its state is kept)."""
    found = {}
    for root in (place / "graves", place / "training"):
        whole = (state.parent for state in root.glob("*/*/*/[0-9]*/state.json"))  # a draft is none
        found |= {place.relative_to(root): place for place in whole}
    return list(found.values())


def bury(place: Path) -> None:
    """Before each pruning, keep the state of every step: the evidence of what was trained."""
    prune = folder.prune

    def wrapped(training: Path, *rest: Any) -> Any:
        for found in training.glob("*/*/*/*/state.json"):
            grave = place / "graves" / found.relative_to(training)
            grave.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, grave)
        return prune(training, *rest)

    update.folder.prune = wrapped  # type: ignore[assignment]


def tell(place: Path) -> None:
    """Keep every failure an update reports: a kill must not lead to one, not even to one that heals itself."""
    failed = Work.failed

    def wrapped(self: Work, error: Exception, *, longest: float) -> None:
        with (place / "failures").open("a") as file:
            file.write(f"{self.part} {type(error).__name__}: {error}\n")
        failed(self, error, longest=longest)

    Work.failed = wrapped  # type: ignore[method-assign]


def child(place: Path, seed: int, budget: int) -> None:
    failpoint._armed = Doom(place / "kills.json", seed, budget)
    bury(place)
    tell(place)
    try:
        wrong = asyncio.run(live(place, back=seed % 2 == 1))
    except BaseException as error:
        wrong = [f"{type(error).__name__}: {error}"]
    (place / "wrong.json").write_text(json.dumps(wrong))
    os._exit(0)


def main() -> None:
    place, seed, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    began = time.monotonic()
    if (made := os.fork()) == 0:
        asyncio.run(prepare(place))
        os._exit(0)
    os.waitpid(made, 0)
    lives = 0
    while not (place / "wrong.json").exists() and lives < LIVES:
        lives += 1
        if (made := os.fork()) == 0:
            child(place, seed, budget)
        os.waitpid(made, 0)
    wrong = json.loads((place / "wrong.json").read_text()) if (place / "wrong.json").exists() else ["it never ended"]
    kills = json.loads((place / "kills.json").read_text()) if (place / "kills.json").exists() else {}
    seen = json.loads((place / "seen.json").read_text()) if (place / "seen.json").exists() else []
    print(
        json.dumps({"kills": kills, "seen": seen, "lives": lives, "wrong": wrong, "seconds": time.monotonic() - began})
    )


if __name__ == "__main__":
    main()
