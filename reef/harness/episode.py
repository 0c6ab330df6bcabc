"""One episode: an agent works on a task in a throw-away home, and what came of it is scored.

Knows: the task, the files it begins with, the check that ends it; how a tree is installed in a room and its client run.
Does not know: suites, gates, why it is run.

The room it runs in (`room`) has no network but one way to Reef (`porter`), a read-only system, and limits on time,
memory, processes, output and disk. The client's token can only infer, as one release, for as long as the episode lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Protocol

from reef.core.errors import ReefError, StoreError
from reef.core.ids import new_receipt
from reef.core.nouns import Usage
from reef.harness import agents
from reef.harness.clients import Clients, Found
from reef.harness.porter import Porter
from reef.harness.room import GRACE, PORT, ROOM, START, Limits, Ran, Room, Trouble
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry

SETTLE = 0.3  # seconds after which every gateway knows a token that was just made
SAID = 4000  # characters of a check's output that are kept
log = logging.getLogger(__name__)
_ROOT = "home/agent"  # the client's config root, in the room


@dataclass(frozen=True, slots=True)
class Job:
    """A task for an agent. `files` are the work folder at the start, `{path: text}`. `check` is a shell command, run in
    the same room when the agent is done, of which exit status 0 is a pass; the files of `hidden` are there only then,
    so that an agent cannot read its exam. Without a check the last words are scored by whoever asked."""

    agent: str
    prompt: str
    files: Mapping[str, str] = field(default_factory=dict)
    check: str | None = None
    hidden: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 300.0

    @property
    def key(self) -> str:
        """The same for jobs that are the same."""
        parts = [self.agent, self.prompt, dict(self.files), self.check, dict(self.hidden), self.seconds]
        return json.dumps(parts, sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an episode. `score`: 1 or 0 by the check, None without one. `fault`: the agent's or the tree's own
    failure (it ran out of time, it crashed), which is a score of 0; `trouble`: the surroundings' (no sandbox, the
    endpoint was away), which says nothing of the tree. `calls` and `usage` are what was asked of Reef for it."""

    score: float | None = None
    trajectory: Trajectory | None = None
    said: str = ""  # by the check: the end of its output
    fault: str | None = None
    trouble: str | None = None
    seconds: float = 0.0
    calls: int = 0
    usage: Usage = field(default_factory=lambda: Usage(0, 0))


class Episodes(Protocol):
    """Who can run episodes. Several at once are its own affair: it queues what it has no room for."""

    async def run(self, job: Job, entries: Sequence[Entry], release_id: str) -> Outcome:
        """The job's agent with this tree installed, answered by this release. Never raises for what happens inside."""


def flaw(path: str) -> str | None:
    """What is wrong with the path of a job's file, as the end of a sentence; None: nothing."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or len(path) > 500 or len(parts) > 16:
        return "must be relative, with / between its parts and no . or .. among them"
    return None


@dataclass(slots=True)
class Rooms:
    """Runs episodes in rooms, `width` at a time over all scenarios.

    `address` is a gateway's; `token` makes the secret of (scenario, release, seconds) and `ended` takes it back; both
    may block. `folder` is for transcripts on their way: it is emptied here, so one process at a time has it. `usage`
    says what answers with these receipts cost, where that is known.
    """

    address: str
    token: Callable[[str, str, float], str]
    folder: Path
    clients: Clients = field(default_factory=Clients)
    width: int = 2
    limits: Limits = field(default_factory=Limits)
    usage: Callable[[Sequence[str]], Awaitable[Usage]] | None = None
    ended: Callable[[str], None] = lambda _: None
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.width)
        shutil.rmtree(self.folder, ignore_errors=True)  # what a killed process left

    def of(self, scenario: str, model: str | None = None) -> Episodes:
        """Those of one scenario. `model` is what its clients ask for."""
        door = agents.Door(f"http://127.0.0.1:{PORT}", scenario)
        return _Scenario(self, door if model is None else replace(door, model=model))


@dataclass(frozen=True, slots=True)
class _Scenario:
    rooms: Rooms
    door: agents.Door

    async def run(self, job: Job, entries: Sequence[Entry], release_id: str) -> Outcome:
        async with self.rooms._free:
            began = time.monotonic()
            try:
                agent = agents.agent(job.agent)
                found = await asyncio.to_thread(self.rooms.clients.find, agent)
                try:
                    files = agents.render(agent, entries, self.door)
                except Exception as error:  # whatever an adapter makes of a strange tree
                    return Outcome(0.0, fault=f"the tree cannot be installed for {agent.name}: {error}")
                return await _Episode(self.rooms, agent, job, found).run(files, self.door.scenario, release_id)
            except (Trouble, ReefError, OSError) as error:
                return Outcome(trouble=str(error) or type(error).__name__, seconds=time.monotonic() - began)


@dataclass(slots=True)
class _Episode:
    """One run of a client in a room of its own."""

    rooms: Rooms
    agent: agents.Agent
    job: Job
    found: Found

    async def run(self, tree: Mapping[str, str], scenario: str, release_id: str) -> Outcome:
        began = time.monotonic()
        lasts = self.job.seconds + START + GRACE
        token = await asyncio.to_thread(self.rooms.token, scenario, release_id, lasts)
        try:
            return await self._run(tree, token, began)
        finally:
            with contextlib.suppress(StoreError):  # it ends by itself, later
                await asyncio.to_thread(self.rooms.ended, token)

    async def _run(self, tree: Mapping[str, str], token: str, began: float) -> Outcome:
        job, limits, made = self.job, self.rooms.limits, time.monotonic()
        files = {f"{_ROOT}/{path}": text for path, text in tree.items()}
        files |= {f"work/{path}": text for path, text in job.files.items()}
        porter = Porter(self.rooms.address, limits.calls)
        async with Room.open(self.found.reads, limits) as room:
            try:
                await porter.open(room.listener)
                await asyncio.sleep(max(0.0, made + SETTLE - time.monotonic()))
                ran = await room.run(*self._launch(token), files, _ROOT, job.seconds)
            finally:
                await porter.close()
            trajectory = await self._read(room)
            outcome = self._judge(ran, porter) or await self._check(room)
        if porter.troubles and not _well(outcome, trajectory):
            outcome = Outcome(trouble=porter.troubles[-1])
        return replace(
            outcome,
            trajectory=trajectory,
            seconds=time.monotonic() - began,
            calls=porter.calls,
            usage=await self._usage(porter.receipts, trajectory),
        )

    def _launch(self, token: str) -> tuple[list[str], dict[str, str]]:
        launch = self.agent.launch(Path(ROOM, _ROOT), self.job.prompt)
        environment = {
            **self._environment("home"),
            **launch.environment,
            agents.TOKEN: token,
            agents.SESSION: new_receipt(),
        }
        return [self.found.program, *launch.arguments], environment

    def _environment(self, home: str) -> dict[str, str]:
        path = ":".join((*self.found.path, "/usr/local/bin", "/usr/bin", "/bin"))
        fixed = {"LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent", "SHELL": "/bin/sh", "NO_PROXY": "127.0.0.1"}
        return {"PATH": path, "HOME": f"{ROOM}/{home}", "TMPDIR": f"{ROOM}/tmp", **fixed}  # noqa: S108 - the room's own

    def _judge(self, ran: Ran, porter: Porter) -> Outcome | None:
        """The agent's own failure, if it failed."""
        name = self.agent.name
        if porter.spent:
            return Outcome(0.0, fault=f"{name} asked more than {porter.most} times")
        if ran.fault is not None:
            return Outcome(0.0, fault=f"{name} {ran.fault}")
        if ran.status:
            last = next(iter(reversed((ran.err.strip() or ran.out.strip()).splitlines())), "")[-300:]
            last = "".join(each if each.isprintable() else " " for each in last)  # it goes to logs and reasons
            how = f"ended with {ran.status}" if ran.status > 0 else f"was ended by signal {-ran.status}"
            return Outcome(0.0, fault=f"{name} {how}: {last}" if last else f"{name} {how}")
        return None

    async def _check(self, room: Room) -> Outcome:
        """The score by the job's check; none without one."""
        job = self.job
        if job.check is None:
            return Outcome()
        hidden = {f"work/{path}": text for path, text in job.hidden.items()}
        ran = await room.check(["/bin/sh", "-c", job.check], self._environment("exam"), hidden, self.rooms.limits.check)
        said = (ran.out + ran.err)[-SAID:]
        if ran.fault is not None:
            return Outcome(0.0, said=f"{said}\nthe check {ran.fault}".strip())
        return Outcome(float(ran.status == 0), said=said)

    async def _read(self, room: Room) -> Trajectory | None:
        """The transcript, from a copy of what the client left in its config root."""
        self.rooms.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(dir=self.rooms.folder))
        try:
            async for name, data in room.files(self.rooms.limits.copied):
                await asyncio.to_thread(_write, folder, name, data)
            return await asyncio.to_thread(self.agent.read, folder)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # an adapter's own fault
            log.warning("a transcript of %s cannot be read", self.agent.name, exc_info=error)
            return None
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _usage(self, receipts: Sequence[str], trajectory: Trajectory | None) -> Usage:
        """By the records of the answers; else as the transcript says."""
        if self.rooms.usage is not None:
            with contextlib.suppress(ReefError):  # the store is away: no reason to run it again
                return await self.rooms.usage(receipts)
        used = [move.usage for move in trajectory.moves if move.usage is not None] if trajectory is not None else []
        return Usage(sum(one.prompt_tokens for one in used), sum(one.completion_tokens for one in used))


def _well(outcome: Outcome, trajectory: Trajectory | None) -> bool:
    """Whether an episode ended as if nothing had gone wrong around it: it passed, or said its last words."""
    if outcome.score is not None or outcome.fault is not None:
        return bool(outcome.score)
    return trajectory is not None and bool(trajectory.final) and trajectory.moves[-1].error is None


def _write(folder: Path, name: str, data: bytes) -> None:
    """A file of a room, in a folder of ours. The name is the room's word: Trouble when it leads elsewhere."""
    if flaw(name) is not None:
        raise Trouble(f"the room names a file {name[:80]!r}")
    place = folder / PurePosixPath(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        number = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "wb") as file:
            file.write(data)
