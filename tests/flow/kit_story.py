"""An operator's story on one state folder: learn, hold, promote, reject, pin, prune, push; and what must hold in it.

Knows: the deeds, each of which may be asked for again after it was cut short, as a person does who got no answer; what
must be true when the folder is opened again (`inspect`), after each deed (`served`) and at the end (`last`).
Does not know: what cuts a deed short: kills (`kit_lives`), a failing disk (`kit_trouble`), a power cut (`kit_power`).
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reef.cli import backup
from reef.core.errors import ConflictError, MissingError, PrunedError
from reef.core.nouns import Release, Timing
from reef.core.wire import Step
from reef.engines.fake import FakeEngine
from reef.evaluation import Means, Score, Sizes, Task
from reef.evaluation.ask import Question
from reef.evaluation.policies import Better
from reef.evaluation.suite import Listed, Sources
from reef.harness import tree
from reef.loop.audit import Audit
from reef.loop.update import ATTEMPTS, activate
from reef.records import keep
from reef.releases import Draft, NewPart, clone, marker
from reef.releases.chain import GitChain
from reef.releases.prune import Policy, prune
from reef.releases.remote import Remote
from reef.scenario import decide, serving
from reef.scenario.learnt import Family
from reef.trainers import folder
from reef.trainers.fake import FakeTrainer
from tests.evaluation.conftest import good
from tests.loop.kills import states
from tests.loop.kit import BASE, NAME, World, record, report

DEEDS = ("learn", "learn", "review", "decide", "decide", "rollback", "pin", "unpin", "archive", "note", "prune", "push")
RARE = ("backup", "note", "clone", "forget", "create", "migrate", "spoil")
SPOILT = "spoilt on purpose"
FIRST = (
    "learn",
    "review",
    "decide",
    "learn",
    "review",
    "decide",
    "rollback",
    "pin",
    "unpin",
    "archive",
    "note",
    "learn",
)
FIRST += ("learn", "learn", "push", "prune", "backup", "clone", "forget", "create", "migrate", "backup", "spoil")
"""The first life does each kind once, undisturbed, so that it passes every failpoint that the story has."""
TAUGHT = ("publish", "promote")
TASKS = 24


class Level:
    """What an answer is worth: the number in it."""

    name, key = "level", "1"

    async def score(self, task: Task, text: str) -> Score:
        return Score(float(text.split()[-1]))


def refuse(order: Step) -> str | None:
    """The trainer's word on an order: records with these numbers are what it cannot train."""
    numbers = [int(unit.partition(":")[0], 16) for unit in order.unit_ids]
    return SPOILT if any(number % 10 >= 7 for number in numbers) else None


def gate(world: World) -> Better:
    """The real policy with the real book. A step is better than those before it, but one in five ruins everything."""

    def reply(release_id: str, body: dict[str, Any]) -> str:
        question = body["messages"][-1]["content"]
        if not question.startswith("task "):
            return good(question)
        found = world.chain.get(release_id)
        digest = found.parts["weights"].files.get("adapter_model.safetensors", ("1", 0))[0]
        return f"level {0.0 if int(digest[:4], 16) % 5 == 0 else 1 - 0.9 ** (1 + found.step):.4f}"

    tasks = [Task(f"t{number}", Question.of(f"task {number}", temperature=1.0), Level()) for number in range(TASKS)]
    suite = Sources(NAME, [Listed("levels", tasks)], world.book)
    base = world.chain.history(NAME, 100_000)[-1].id
    means = Means(NAME, FakeEngine(reply=reply), base, book=world.book, suite=suite)
    return Better(means, Sizes(tasks=TASKS), {})


@dataclass
class Notes:
    """What the story knows beside the state folder, each a small file written whole."""

    place: Path

    def read(self, name: str, other: Any) -> Any:
        found = kept(self.place / f"{name}.json")
        return json.loads(found) if found else other

    def write(self, name: str, value: Any) -> None:
        temporary = self.place / f".{name}"
        temporary.write_text(json.dumps(value))
        temporary.replace(self.place / f"{name}.json")


def kept(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


# --- deeds ------------------------------------------------------------------------------------------------------------


class Story:
    """One life of an operator and a learner."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.notes = Notes(place)
        self.world = World(place / "state")
        self.wrong: list[str] = []

    async def open(self) -> None:
        await self.world.open()
        trainer = FakeTrainer(self.world.training, refuse=refuse)
        self.world.tools = replace(self.world.tools, trainer=trainer)
        self.audit, self.family = Audit(self.world.folder / "learn.db"), Family(self.world.chain)
        self.world.evaluator = gate(self.world)  # type: ignore[assignment]
        self.wrong += inspect(self)
        folder.sweep(self.world.training)

    def plan(self, number: int) -> dict[str, Any]:
        """What is done next, with all that a person says when asking again."""
        draw = random.Random(f"{self.seed}-{number}")
        kind = draw.choice(DEEDS) if number % 8 else draw.choice(RARE)
        kind = FIRST[number] if number < len(FIRST) else kind
        head = self.world.chain.head(NAME)
        assert head is not None
        deed = {"number": number, "kind": kind, "head": head.id, "step": head.step, "seq": head.seq, "at": time.time()}
        if kind in ("rollback", "pin"):
            deed["release"] = draw.choice(self.world.chain.history(NAME, 8)).id
        if kind == "decide":
            held = self.held()
            deed |= {"candidate": draw.choice(held) if held else None, "yes": draw.random() < 0.6 or number == 2}
            deed["force"] = draw.random() < 0.3
        return deed

    def held(self) -> list[str]:
        """The candidates that wait for a person."""
        looks: dict[str, str] = {}
        for look in reversed(self.world.ledger.looks(NAME, limit=100_000)):
            if look.candidate is not None:
                looks[look.candidate] = look.verdict
        lifted = {
            release.evaluation.candidate_id
            for release in self.world.chain.history(NAME, 100_000)
            if release.operation == "promote" and release.evaluation
        }
        return [name for name, verdict in looks.items() if verdict == "hold" and name not in lifted]

    async def do(self, deed: dict[str, Any]) -> None:
        with contextlib.suppress(ConflictError, PrunedError, MissingError):  # an answer like another
            await getattr(self, deed["kind"])(deed)
        await self.rest()

    async def rest(self) -> None:
        """The learner until nothing moves."""
        if not self.world.board.archived(NAME):
            await self.world.settle()

    async def say(self, deed: dict[str, Any], at: int = 0) -> None:
        head, first = self.world.chain.get(deed["head"]), 10 * deed["number"] + at
        for number in (first, first + 1):
            made = record(number, head.id, timing=Timing(deed["at"]))
            await self.world.store.append(made)
            await self.world.store.append(report(number, made.id, score=1.0, created_at=deed["at"]))

    async def learn(self, deed: dict[str, Any]) -> None:
        await self.say(deed)

    async def spoil(self, deed: dict[str, Any]) -> None:
        """A batch that no trainer can train is given up."""
        await self.say(deed, at=7)
        for _ in range(ATTEMPTS + 1):
            await self.rest()

    async def review(self, deed: dict[str, Any]) -> None:
        await self.say(deed)
        self.world.options = {"mode": "review"}
        try:
            await self.rest()
        finally:
            self.world.options = {}

    async def decide(self, deed: dict[str, Any]) -> None:
        if (candidate := deed["candidate"]) is None:
            return
        world, how = self.world, {"actor": "ada", "reason": f"deed {deed['number']}"}
        if deed["yes"]:
            decide.promote(
                NAME, candidate, world.chain, world.board, self.audit, expected=deed["head"], force=deed["force"], **how
            )
        else:
            decide.reject(NAME, candidate, world.chain, world.board, self.audit, self.family, **how)

    async def rollback(self, deed: dict[str, Any]) -> None:
        serving.rollback(
            NAME, deed["release"], self.world.chain, self.world.board, expected=deed["head"], actor="ada", reason="back"
        )

    async def pin(self, deed: dict[str, Any]) -> None:
        serving.pin(NAME, deed["release"], self.world.chain, self.world.board, actor="ada", reason="stay")

    async def unpin(self, deed: dict[str, Any]) -> None:
        serving.unpin(NAME, self.world.board, actor="ada", reason="go on")

    async def archive(self, deed: dict[str, Any]) -> None:
        """A scenario without a row is made one first, as `reef scenarios` does."""
        board, how = self.world.board, {"actor": "ada", "reason": "away"}
        board.create_scenario(NAME, {})
        if not board.archived(NAME):
            serving.archive(NAME, self.world.chain, board, **how)
        serving.restore(NAME, self.world.chain, board, **how)

    async def note(self, deed: dict[str, Any]) -> None:
        """Somebody else publishes rules on the head that was seen."""
        world, reason = self.world, f"note {deed['number']}"
        data = tree.write((tree.Entry(f"note-{deed['number']}", "rules", {"text": "Stay calm."}),))
        parts: Any = {"harness": NewPart("tree", {tree.FILE: data})}
        draft = Draft("publish", parts, base=deed["head"], step=deed["step"], actor="bob", reason=reason)
        made = world.chain.publish(NAME, draft, deed["head"])
        serving.align(NAME, world.chain, world.board)
        serving.tell(made, world.board)

    async def prune(self, deed: dict[str, Any]) -> None:
        pin = self.world.journal.pinned(NAME)
        pins = frozenset([pin.release_id] if pin else [])
        prune(self.world.chain, Policy(5, 3, pins, frozenset(self.held())))

    async def push(self, deed: dict[str, Any]) -> None:
        marks = {f"refs/reef/{NAME}/candidates/{name}": name for name in self.held()}
        state = Remote(self.world.chain.path, str(self.place / "remote.git")).push(marks)
        if state.condition != "in step":
            self.wrong.append(f"the remote is {state.condition}: {state.error}")

    async def backup(self, deed: dict[str, Any]) -> None:
        target = self.place / f"backup-{deed['number']}{'.tar' if deed['number'] % 2 else ''}"
        if not target.exists():
            backup.backup(self.world.folder, target, lambda text: None)
        found = backup.check(target, lambda text: None)
        self.wrong += [f"the backup: {sentence}" for sentence in found["wrong"]]
        target.unlink() if target.is_file() else shutil.rmtree(target)

    async def clone(self, deed: dict[str, Any]) -> None:
        """A fresh Reef begins from the remote alone."""
        await self.push(deed)
        place = self.place / "fresh" / f"{deed['number']}.git"
        clone.begin(place, str(self.place / "remote.git"))
        fresh = GitChain(place)
        self.wrong += [f"the clone: {said}" for said in [*fresh.open(), *fresh.verify(NAME)]]
        if fresh.head(NAME) != self.world.head:
            self.wrong.append("the clone has another head")
        shutil.rmtree(place)

    async def forget(self, deed: dict[str, Any]) -> None:
        """A record is erased on request."""
        made = record(10 * deed["number"] + 5, deed["head"], timing=Timing(deed["at"]))
        if not keep.erased(self.world.folder / "records.db", [made.id]):
            await self.world.store.append(made)
            keep.forget(self.world.folder / "records.db", [made.id])
        if await self.world.store.known([made.id]):
            self.wrong.append(f"{made.id} was erased and is there")

    async def create(self, deed: dict[str, Any]) -> None:
        """Another scenario begins."""
        name, world = f"side-{deed['number']}", self.world
        now = serving.ensure(name, world.chain, world.board, BASE, "fake")
        head = world.chain.head(name)
        if head is None or head.id != now.release_id or head.seq != 0:
            self.wrong.append(f"{name} serves {now}, its head is {head}")

    async def migrate(self, deed: dict[str, Any]) -> None:
        """The repository is one that an older Reef made."""
        marker.write(self.world.chain.path, 1)
        self.world.chain.open()
        if marker.read(self.world.chain.path) != marker.FORMAT:
            self.wrong.append("the repository was not brought up to date")

    async def close(self) -> None:
        await self.world.close()


# --- what must hold ---------------------------------------------------------------------------------------------------


def inspect(story: Story) -> Iterator[str]:
    """At the start of each life, before anything was repaired but the chain itself."""
    world, notes = story.world, story.notes
    head, now = world.head, world.board.get(NAME)
    if now is not None and now.release_id not in (head.id, head.parent):
        yield f"release {now.release_id} is served; the head is {head.id}, before it {head.parent}"
    if locks := world.chain.git.locks():
        yield f"lock files are left: {locks}"
    if left := [path.name for path in (world.chain.path / "reef/tmp").iterdir()]:
        yield f"temporary files are left: {left}"
    held, deed = set(story.held()), notes.read("deed", None)
    for name in notes.read("held", []):
        if name not in held:
            if deed is None or deed.get("candidate") != name:
                yield f"candidate {name} was held and is not any more, which nobody decided"
            continue
        if name not in {candidate.id for candidate in world.chain.candidates(NAME)}:
            yield f"the held candidate {name} has no ref any more"
        world.chain.files(name, "weights")
    yield from spent(story)


def spent(story: Story) -> Iterator[str]:
    """The error budget: a candidate has one number in its era, a number one candidate, and none is left out."""
    with contextlib.closing(sqlite3.connect(story.world.folder / "gate.db")) as base:
        rows = base.execute("SELECT candidate, era, turn FROM turns").fetchall()
    known = story.notes.read("turns", {})
    for candidate, era, turn in rows:
        if known.get(f"{era}/{candidate}", turn) != turn:
            yield f"candidate {candidate} had number {known[f'{era}/{candidate}']} and now {turn}"
        known[f"{era}/{candidate}"] = turn
    by_era: dict[str, list[int]] = {}
    for key, turn in known.items():
        by_era.setdefault(key.partition("/")[0], []).append(turn)
    for era, turns in by_era.items():
        if len(set(turns)) != len(turns):
            yield f"of era {era} the numbers {sorted(turns)} were given"
    story.notes.write("turns", known)


def served(story: Story) -> Iterator[str]:
    """After a deed: the head is served, releases are told once, promotions are whole, nothing is trained twice."""
    world = story.world
    head, now = world.head, world.board.get(NAME)
    if now is None or now.release_id != head.id:
        yield f"after {story.notes.read('done', 0)} deeds the head is {head.id} and {now} is served"
    pin = world.journal.pinned(NAME)
    if pin is not None and pin.release_id not in (head.id, head.base):
        yield f"pinned to {pin.release_id}, and the head is {head.id}"
    history = world.chain.history(NAME, 100_000)
    told = Counter((act.kind, act.ref) for act in world.journal.after(0, 100_000))
    for release in history:
        count = told[serving.TOLD[release.operation], release.id]
        if count != 1:
            yield f"of {release.operation} {release.seq} the journal tells {count} times"
        if release.operation == "promote":
            yield from lifted(world, release)
    for (kind, ref), count in told.items():
        if kind in ("reject", "hold") and count > 1:
            yield f"the journal tells {kind} of {ref} {count} times"
    if [release.seq for release in history] != list(range(len(history)))[::-1]:
        yield "the chain is not linear"
    steps = [state for each in states(world.folder) if (state := folder.read(each)) is not None]
    trained = Counter((state.part, unit) for state in steps for unit in state.unit_ids)
    yield from (f"{part} trained {unit} {times} times" for (part, unit), times in trained.items() if times > 1)
    learnt = [held.units for one in history if one.operation in TAUGHT for held in one.consumed.values()]
    named = Counter(unit for units in learnt for unit in units)
    yield from (f"{times} releases name {unit}" for unit, times in named.items() if times > 1)
    story.notes.write("held", story.held())
    yield from spent(story)


def lifted(world: World, release: Release) -> Iterator[str]:
    """A promotion has the candidate's part, its units, and the other parts of the head it was put on."""
    assert release.evaluation is not None
    candidate = world.chain.get(release.evaluation.candidate_id)
    if release.parts["weights"] != candidate.parts["weights"]:
        yield f"promotion {release.seq} has other weights than its candidate"
    if release.consumed["weights"].units != candidate.consumed["weights"].units:
        yield f"promotion {release.seq} names other units than its candidate"
    before = world.chain.get(release.parent or "")
    if release.parts.get("harness") != before.parts.get("harness"):
        yield f"promotion {release.seq} changed the harness too"


async def last(story: Story) -> list[str]:
    """The end: everything whole, no unit lost, the remote in step."""
    world = story.world
    serving.unpin(NAME, world.board, actor="ada", reason="the end")
    await story.rest()
    wrong = [*served(story), *world.chain.verify(NAME)]
    said = [int(path) for (path,) in _rows(world.folder / "records.db", "SELECT id FROM reports")]
    pool = world.works["weights"].pool
    await pool.read(world.store)  # while a candidate is held, the learner does not
    ready = set(pool.ready)
    for number in said:
        unit = f"{number:032x}:0"
        if not world.ledger.fate(NAME, unit) and unit not in ready:
            wrong.append(f"unit {unit} is lost")
    await activate(world.tools, world.binding)
    await story.push({})
    at = subprocess.run(
        ["git", "rev-parse", f"refs/heads/{NAME}"], cwd=story.place / "remote.git", capture_output=True, text=True
    )
    if at.stdout.strip() != world.head.id:
        wrong.append(f"the remote is at {at.stdout.strip()}, the head is {world.head.id}")
    return wrong


def _rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as base:
        return [(str(int(row[0].removeprefix("rep_"), 16)),) for row in base.execute(sql).fetchall()]
