"""A scripted user with one preference: chats, checks the answers, reports scores, waits until they were learnt from.

Knows: the public HTTP contract, nothing else of the server; a preference; how a wave of chats is counted.
Does not know: how any of it is shown (`teach`), drawn (`curve`), or how the server learns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from reef.cli.api import WAYS
from reef.cli.preferences import Preference, Prompt
from reef.core.errors import InputError, TrainError, WireError
from reef.study import door
from reef.study.door import AWAY

SMALLEST = 8  # chats a wave has at least, so that its score means something
QUIET = 15.0  # seconds without any change after which the learner has nothing more to do
STALLED = 900.0  # seconds without any change while it should be learning
EXAMPLES = 3
NEEDS = "`reef teach` needs a model of Reef's own (engine: local) and a recipe that trains it (recipe: sao)"


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave: chats at once, a report each, and what the learner made of them."""

    number: int
    reports: int  # in all, with this wave
    score: float  # mean of this wave
    release_id: str  # most of its answers came from this release
    loss: float | None
    looks: int  # of the gate at candidates, in all
    seconds: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A release that began to be served, after so many reports."""

    reports: int
    release_id: str
    seq: int
    timings: dict[str, float]  # seconds of waiting, training, gate, activation


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate said at one look at a candidate, after so many reports."""

    reports: int
    step: int
    verdict: str  # accept | reject | undecided | hold
    reason: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Held-out prompts answered by one pinned release."""

    release_id: str
    seq: int
    score: float
    answers: int
    examples: tuple[tuple[str, str, float], ...]  # prompt, answer, score


@dataclass(slots=True)
class Lesson:
    """What has happened so far; the screen reads it, `teach` changes it."""

    preference: Preference
    scenario: str
    seed: int
    planned: int = 0  # waves
    size: int = 0  # chats a wave
    stage: str = "starting"
    reports: int = 0
    answered: int = 0  # of the present wave or measure
    waves: list[Wave] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)  # one for each look of the gate
    part: dict[str, Any] = field(default_factory=dict)  # the learner's own words, last heard
    base: Measure | None = None
    before: Measure | None = None
    after: Measure | None = None
    releases: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def counts(self) -> dict[str, int]:
        """How many looks of the gate ended how; `accept` and `reject` are always there."""
        said = [one.verdict for one in self.verdicts]
        return {name: said.count(name) for name in dict.fromkeys(["accept", "reject", *said])}

    @property
    def left(self) -> float | None:
        """Seconds the waves still to come will take, by those that are done."""
        if not self.waves or self.ended is not None:
            return None
        return (self.planned - len(self.waves)) * sum(wave.seconds for wave in self.waves) / len(self.waves)


Watch = Callable[[Lesson], None]


class Teacher:
    """Teaches one lesson over a client of the server. `watch` is called whenever the lesson changed."""

    def __init__(self, client: httpx.AsyncClient, lesson: Lesson, *, samples: int, abreast: int, watch: Watch) -> None:
        self._client = client
        self._lesson = lesson
        self._samples = samples
        self._abreast = asyncio.Semaphore(abreast)
        self._watch = watch
        self._draw = random.Random(lesson.seed)
        self._deck: list[Prompt] = []
        self._starting_total = 0

    async def teach(self, *, updates: int | None, reports: int, fresh: bool) -> None:
        """The whole lesson. `fresh`: the scenario must be new; its name gets a number until it is."""
        lesson = self._lesson
        await self._create(fresh)
        shown = (await self._send("GET", "/reef/status")).json()["scenarios"].get(lesson.scenario) or {}
        if shown.get("recipe") == "record":
            raise InputError(f"the scenario {lesson.scenario} of this server learns nothing; {NEEDS}")
        chain = await self._releases()
        present = next(release for release in chain if release["current"])
        await self._plan(updates, reports)
        self._say("measuring the base")
        lesson.base = await self.measure(chain[-1])
        lesson.before = lesson.base
        if present["release_id"] != chain[-1]["release_id"]:
            self._say("measuring what is served")
            lesson.before = await self.measure(present)
        for number in range(1, lesson.planned + 1):
            await self._wave(number)
        lesson.releases = await self._releases()
        present = next(release for release in lesson.releases if release["current"])
        self._say("measuring what was learnt")
        lesson.after = lesson.before
        if present["release_id"] != lesson.before.release_id:
            lesson.after = await self.measure(present)
        lesson.ended = time.monotonic()
        self._say("done")

    async def measure(self, release: dict[str, Any]) -> Measure:
        """Held-out prompts, several samples each, always the same seeds, from this release."""
        prompts = self._lesson.preference.held_out
        self._lesson.answered = 0
        tasks = []
        for number, prompt in enumerate(prompts):
            for sample in range(self._samples):
                seed = 1_000_003 * (number + 1) + sample
                tasks.append(self._chat(prompt, seed=seed, pin=release["release_id"]))
        chats = await asyncio.gather(*tasks)
        scores = [chat.score for chat in chats]
        firsts = chats[:: self._samples]
        shown = [firsts[len(firsts) * i // EXAMPLES] for i in range(min(EXAMPLES, len(firsts)))]
        examples = tuple((chat.prompt.text, chat.text, chat.score) for chat in shown)
        return Measure(release["release_id"], release["seq"], sum(scores) / len(scores), len(scores), examples)

    # --- one wave -----------------------------------------------------------------------------------------------------

    async def _wave(self, number: int) -> None:
        lesson = self._lesson
        begin = time.monotonic()
        lesson.answered = 0
        self._say(f"wave {number}: chatting")
        chats = await asyncio.gather(*(self._exchange(number, place) for place in range(lesson.size)))
        self._say(f"wave {number}: learning")
        await self._learnt()
        releases = [chat.release_id for chat in chats]
        loss = lesson.part.get("metrics", {}).get("loss")
        wave = Wave(
            number,
            lesson.reports,
            sum(chat.score for chat in chats) / len(chats),
            max(set(releases), key=releases.count),
            None if loss is None else float(loss),
            len(lesson.verdicts),
            time.monotonic() - begin,
        )
        lesson.waves.append(wave)
        self._say(lesson.stage)

    async def _exchange(self, wave: int, place: int) -> Chat:
        """Ask, check, report."""
        lesson = self._lesson
        chat = await self._chat(self._next(), seed=(lesson.seed * 1_000 + wave) * 10_000 + place)
        name = f"rep_{uuid.uuid4().hex}"  # ours, so that sending it again is harmless
        body = {"score": chat.score, "references": [chat.receipt], "agent_record_id": name}
        await self._send("POST", "/reef/report", json=body)
        lesson.reports += 1
        return chat

    def _next(self) -> Prompt:
        """Every training prompt once, shuffled, before any comes again."""
        if not self._deck:
            self._deck = list(self._lesson.preference.train)
            self._draw.shuffle(self._deck)
        return self._deck.pop()

    async def _chat(self, prompt: Prompt, *, seed: int, pin: str | None = None) -> Chat:
        preference = self._lesson.preference
        headers = {"x-reef-scenario": self._lesson.scenario} | ({"x-reef-release": pin} if pin else {})
        body = {
            "model": "reef",
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": preference.max_tokens,
            "temperature": 1.0,
            "seed": seed % 2**31,
        }
        async with self._abreast:
            answer = await self._send("POST", "/v1/chat/completions", json=body, headers=headers)
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] or ""
        score = float(preference.check(prompt, text, choice["finish_reason"]))
        self._lesson.answered += 1
        self._watch(self._lesson)
        receipt = answer.headers.get("x-reef-agent-record-id", "")
        return Chat(prompt, text, score, receipt, answer.headers.get("x-reef-release-id", ""))

    # --- the learner --------------------------------------------------------------------------------------------------

    async def _learnt(self) -> None:
        """Wait until the learner used what was reported, judged it, and has nothing more to do with it."""
        before = self._words()
        changed = time.monotonic()
        while True:
            part = await self._look()
            if part.get("state") in ("failed", "blocked"):
                raise TrainError(f"the learner failed: {part.get('error') or 'see the server logs'}")
            if self._words() != before:
                before, changed = self._words(), time.monotonic()
            quiet = time.monotonic() - changed
            waiting = part.get("state") == "waiting" and _pending(part) < (part.get("batch_size") or 1)
            seen = _total(part) - self._starting_total >= self._lesson.reports
            if waiting and (seen or quiet > QUIET):
                return
            if quiet > STALLED:
                raise WireError(f"the learner did nothing for {STALLED / 60:.0f} minutes; see the server's logs")
            await asyncio.sleep(0.25)

    async def _look(self) -> dict[str, Any]:
        """What the learner says of the weights now. A restarting learner keeps its last words."""
        lesson = self._lesson
        shown = (await self._send("GET", "/reef/status")).json()["scenarios"][lesson.scenario]
        parts = (shown.get("learner") or {}).get("parts") or {}
        if parts:
            self._hear(dict(parts.get("weights") or next(iter(parts.values()))))
        known = lesson.marks[-1].seq if lesson.marks else None
        if shown["seq"] is not None and shown["seq"] != known:
            last = lesson.part.get("last") or {}
            mine = last.get("release_id") == shown["release_id"]
            timings = {k: v for k, v in (last.get("timings") or {}).items() if v is not None} if mine else {}
            lesson.marks.append(Mark(lesson.reports, shown["release_id"], shown["seq"], timings))
        elif lesson.marks and not lesson.marks[-1].timings:
            last = lesson.part.get("last") or {}
            if last.get("release_id") == lesson.marks[-1].release_id and last.get("timings"):
                lesson.marks[-1] = dataclasses.replace(lesson.marks[-1], timings=dict(last["timings"]))
        self._watch(lesson)
        return lesson.part

    def _hear(self, part: dict[str, Any]) -> None:
        before, self._lesson.part = self._lesson.part, part
        last = part.get("last")
        if before and last and _case(last) != _case(before.get("last") or {}):
            step = int(last.get("step") or 0)
            self._lesson.verdicts.append(Verdict(self._lesson.reports, step, last["verdict"], last["reason"]))

    def _words(self) -> tuple[Any, ...]:
        part = self._lesson.part
        return tuple(
            str(part.get(name)) for name in ("state", "pending", "step", "looks", "trained", "dropped", "last")
        )

    async def _plan(self, updates: int | None, reports: int) -> None:
        lesson = self._lesson
        deadline = time.monotonic() + AWAY
        while not (part := await self._look()):
            if time.monotonic() > deadline:
                raise WireError(
                    "no learner answers for this scenario; does its recipe learn? `reef scenarios` shows it"
                )
            await asyncio.sleep(0.25)
        batch = part.get("batch_size") or 1
        self._starting_total = _total(part)
        lesson.size = batch * max(1, -(-SMALLEST // batch))
        wanted = reports if updates is None else min(updates * batch, reports)
        lesson.planned = wanted // lesson.size
        if lesson.planned == 0:
            raise InputError(f"{wanted} reports are less than one wave of {lesson.size}; allow more with --reports")

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _create(self, fresh: bool) -> None:
        lesson = self._lesson
        name = lesson.scenario
        for number in range(1, 1000):
            body = {"name": lesson.scenario, **lesson.preference.settings}
            try:
                answer = await self._send("POST", "/reef/scenarios", json=body, good=(409,))
            except InputError as error:
                if "trains weights" in error.message:
                    raise InputError(f"this server's model is a provider's; {NEEDS}") from None
                raise
            if answer.status_code != 409 or not fresh:
                return
            lesson.scenario = f"{name}-{number + 1}"
        raise InputError(f"there are a thousand scenarios named {name} already; choose one with --scenario")

    async def _releases(self) -> list[dict[str, Any]]:
        """The whole chain, newest first."""
        return await door.chain(self._client, self._lesson.scenario)

    async def _send(self, method: str, path: str, *, good: Sequence[int] = (), **more: Any) -> httpx.Response:
        return await door.send(self._client, method, path, good=good, unauthorized=WAYS, **more)

    def _say(self, stage: str) -> None:
        self._lesson.stage = stage
        self._watch(self._lesson)


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: Prompt
    text: str
    score: float
    receipt: str
    release_id: str


def _case(last: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one look from the next. Its activation is timed later, so that does not count."""
    seconds = [(last.get("timings") or {}).get(name) for name in ("waiting", "training", "gate")]
    return (last.get("step"), last.get("verdict"), last.get("reason"), last.get("release_id"), *seconds)


def _pending(part: dict[str, Any]) -> int:
    return int(part.get("pending") or 0)


def _total(part: dict[str, Any]) -> int:
    """Every unit the learner has seen: trained, dropped, or kept for a batch."""
    return int((part.get("trained") or 0) + sum((part.get("dropped") or {}).values()) + _pending(part))
