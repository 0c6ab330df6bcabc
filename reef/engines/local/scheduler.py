"""Continuous batching: one thread steps the model over whatever is running, admitting and finishing between steps.

Knows: jobs (one choice to generate, or one sequence to rate), slots of the cache, priorities, and which prompts share a
beginning with tokens already in a slot.
Does not know: chat bodies, sockets, or how releases are found. Events go to `deliver`, called from the model's thread.

- A step computes one token of each running job and a bounded number of prompt tokens, so that a long prompt never holds
  up running answers for more than one chunk.
- Live jobs (priority 0) go first; all others together use at most their share of the slots, and while an answer to
  somebody live is under way at most TURN of the time.
- A cancelled job is out before the next step. A failed step fails its own jobs and nothing else.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reef.core.errors import EngineError, InputError, ReefError
from reef.engines.local.legal import Guide, unpack
from reef.engines.local.lora import Added, Alone, Mixer, Resident, Source
from reef.engines.local.model import Model, Run, Work
from reef.engines.local.sample import Draw, Drawn, sample
from reef.engines.local.text import Stream, Text

CHUNK = 128  # a prompt is computed in chunks that end at multiples of this, whoever else is running
BUSY, IDLE = 128, 512  # most prompt tokens in a step, with and without answers running
TURN = 0.3  # of the time, for what is not live while something live runs: live answers take half as long again at most
MEASURE = 8  # steps with both, after which one of live jobs alone is measured again
DEBT = 0.5  # seconds that either side may be ahead, so that a long chunk or a pause is not paid for ever after
WORTH = 16  # a shared beginning shorter than this is not worth looking for
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One more token of a job. `text` is what became certain with it, possibly nothing."""

    token: int
    logprob: float
    text: str
    top: list[tuple[int, float]]
    piece: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    reason: str  # stop | length


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Failed:
    error: ReefError


Event = Sampled | Ended | Scored | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One sequence. With `draw` it is continued by at most `limit` tokens; without, it is rated from `start` on."""

    prompt: list[int]
    resident: Resident
    priority: int
    sink: Callable[[Event], None]
    draw: Draw | None = None
    limit: int = 0
    stream: Stream | None = None
    pieces: bool = False
    start: int = 0
    guide: Guide | None = None  # limits which tokens may be drawn
    after: Job | None = None  # wait until this one's prompt is computed, then share it
    cancelled: bool = False
    ids: list[int] = field(default_factory=list)  # prompt and answer
    done: int = 0  # tokens in the cache
    slot: int = -1
    cached: int = 0  # tokens that the cache had when the job began
    order: int = 0
    over: bool = False
    scores: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.ids) - self.done

    @property
    def rating(self) -> bool:
        return self.draw is None

    @property
    def ready(self) -> bool:
        """Whether the whole prompt is in the cache (or never will be)."""
        return self.over or self.cancelled or (self.slot >= 0 and self.done >= len(self.prompt))


@dataclass(slots=True)
class Slot:
    """What the cache holds: keys and values of the first `length` of `ids`, made by the weights called `key`."""

    ids: list[int] = field(default_factory=list)
    length: int = 0
    key: Source | None = None
    job: Job | None = None
    asked: int = 0  # of `ids`, those that came with the request
    lower: bool = False  # the job is, or was, not live
    used: int = 0  # when the job left, as a number that grows

    def ends(self, shared: int) -> bool:
        """Whether one who shares so much leaves nothing of worth behind: it knows more than was asked here, so it goes
        on with this conversation, or all there is. Others only began alike, and leave the conversation where it is."""
        return shared > 0 and (shared > self.asked or self.length - shared <= 1)


class Scheduler:
    """Start it, submit jobs from any thread, stop it. `share` is the part of the slots that priority > 0 may use."""

    def __init__(
        self,
        model: Model,
        text: Text,
        deliver: Callable[[list[tuple[Job, Event]]], None],
        *,
        share: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._text, self._deliver = model, text, deliver
        self._clock = clock
        self._owed = 0.0  # seconds that jobs which are not live may still take beside live ones
        self._alone = math.inf  # seconds of a usual step with live jobs only; not measured yet
        self._together = 0  # steps with both since the last measurement
        self._ends = frozenset(model.layout.ends)
        self._mixer = Mixer()
        self._slots = [Slot() for _ in range(model.cache.slots)]
        self._share = max(1, int(share * len(self._slots)))
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._events: list[tuple[Job, Event]] = []
        self._orders = itertools.count()
        self._leaves = itertools.count(1)
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.ids, job.order = list(job.prompt), next(self._orders)
            self._inbox.put(job)

    def cancel(self, job: Job) -> None:
        """Take a job out before the next step; no more events follow after that. Does nothing to one that is over."""
        if not job.over:
            job.cancelled = True
            self._inbox.put(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._inbox.qsize()

    @property
    def running(self) -> int:
        return len(self._running)

    def _loop(self) -> None:
        while not self._stopping:
            self._receive(block=not self._running and not self._waiting)
            try:
                self.step()
            except BaseException:  # also what libraries in Rust raise when they panic
                log.critical("the model's thread failed; the process ends, and is started anew", exc_info=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                job = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if job is not None:
                self._waiting.append(job)

    def step(self) -> None:
        """Drop, admit, compute, tell. One pass of the model over everything that is running, per weight set."""
        self._drop()
        self._admit()
        live = any(job.priority <= 0 for job in self._running)
        lower = any(job.priority > 0 for job in self._running)
        both = live and lower and self._owed >= 0 and math.isfinite(self._alone) and self._together < MEASURE
        began = self._clock()
        for jobs in self._plan(lower=not live or both):
            try:
                self._compute(jobs)
            except Exception as error:  # out of memory, a bug: these jobs fail, the engine goes on
                log.exception("a step of %d jobs failed", len(jobs))
                for job in [job for job, _ in jobs if not job.over]:  # a rating may be done before a draw fails
                    self._end(job, Failed(EngineError(f"the engine failed: {type(error).__name__}: {error}")))
        if live and lower:
            self._account(self._clock() - began, both)
        else:
            self._owed = 0.0
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _account(self, seconds: float, both: bool) -> None:
        """Who used a step's time when live jobs and others run: what a step of live jobs alone would not have taken."""
        if not both:
            usual = self._alone if math.isfinite(self._alone) else seconds
            self._alone, self._together = usual + 0.2 * (seconds - usual), 0
        mine = min(seconds, self._alone) if both else seconds
        self._together += both
        self._owed += mine * TURN / (1 - TURN) - (seconds - mine)
        self._owed = min(DEBT, max(-DEBT, self._owed))

    # --- who runs -----------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            if job.done < len(job.ids) and not self._model.cache.finite(job.slot, job.done):
                self._forget(job)  # half a prompt, whose first token would have shown it
            self._leave(job)
        self._waiting = [job for job in self._waiting if not job.cancelled]

    def _admit(self) -> None:
        """Give waiting jobs free slots: live ones first, each kind in order of arrival."""
        self._waiting.sort(key=lambda job: (job.priority, job.order))
        lower = sum(job.priority > 0 for job in self._running)
        left = []
        for job in self._waiting:
            free = [number for number, slot in enumerate(self._slots) if slot.job is None]
            held = job.after is not None and not job.after.ready
            if not free or held or (job.priority > 0 and lower >= self._share):
                left.append(job)
                continue
            self._place(job, free)
            self._running.append(job)
            lower += job.priority > 0
        self._waiting = left

    def _place(self, job: Job, free: Sequence[int]) -> None:
        """Let a job go on in the slot of its own conversation, else in one that is missed least; a longer beginning
        that another slot has is copied."""
        lengths = [self._shared(job, slot) for slot in self._slots]
        source = longest(lengths)
        own = [number for number in free if self._slots[number].ends(lengths[number])]
        number = max(own, key=lambda each: lengths[each]) if own else self._spare(job, free, lengths)
        length = lengths[number]
        if lengths[source] >= length + WORTH:
            length = lengths[source]
            self._model.cache.copy(source, number, length)
        job.slot, job.done, job.cached = number, length, length
        self._slots[number] = Slot(job.ids, length, job.resident.key, job, len(job.prompt), job.priority > 0)

    def _shared(self, job: Job, slot: Slot) -> int:
        """Tokens of a job's beginning that a slot has; few are none. The last one is always computed: it is asked."""
        if slot.key != job.resident.key or slot.ids[:WORTH] != job.prompt[:WORTH]:
            return 0
        most = max(0, job.start - 1) if job.rating else len(job.prompt) - 1
        found = common(slot.ids[: slot.length], job.prompt[:most])
        return found if found >= WORTH else 0

    def _spare(self, job: Job, free: Sequence[int], lengths: list[int]) -> int:
        """The free slot whose tokens were not needed for longest, and are not by those who wait."""
        if len(free) == 1:
            return free[0]
        waiting = [other for other in self._waiting if other.slot < 0 and other is not job and not other.cancelled]
        next_ones = [[self._shared(other, slot) for slot in self._slots] for other in waiting[: len(self._slots)]]
        needed = {longest(each) for each in (lengths, *next_ones) if any(each)}
        lower = [number for number, slot in enumerate(self._slots) if slot.lower]
        if job.priority > 0 and len(lower) >= self._share:  # else one evaluation would drive out every conversation
            needed |= set(free).difference(lower)

        def missed(number: int) -> tuple[bool, bool, int]:
            slot = self._slots[number]
            return slot.length > 0, number in needed, slot.used

        return min(free, key=missed)

    def _leave(self, job: Job) -> None:
        job.over = True
        self._running.remove(job)
        slot = self._slots[job.slot]
        slot.job, slot.used = None, next(self._leaves)

    def _end(self, job: Job, event: Event) -> None:
        if isinstance(event, Failed) or (isinstance(event, Scored) and not math.isfinite(sum(event.logprobs))):
            self._forget(job)
        self._leave(job)
        self._events.append((job, event))

    def _forget(self, job: Job) -> None:
        """What is not finite must not reach the next one in a job's slot."""
        self._slots[job.slot].length = 0
        self._model.cache.clear(job.slot, len(job.ids))

    # --- what a step computes -----------------------------------------------------------------------------------------

    def _plan(self, *, lower: bool = True) -> list[list[tuple[Job, int]]]:
        """(job, number of tokens) for this step, by weight set: decode rows by length, then prompt chunks.

        Without `lower`, live jobs only."""
        running = [job for job in self._running if lower or job.priority <= 0]
        decode = [job for job in running if job.left == 1 and not job.rating]
        decode.sort(key=lambda job: (job.done, job.slot))
        plan = [(job, 1) for job in decode]
        chunks = [job for job in running if job.left > 1 or job.rating]
        # A few answers can wait a little longer for many prompts; many answers are not held up for a few prompts.
        budget = min(IDLE, BUSY * max(1, len(chunks) // len(decode))) if decode else IDLE
        # What is not live gets short steps: a live request that comes now must not find a long one under way.
        rest = BUSY // 2 if any(job.priority <= 0 for job in running) else BUSY
        for job in sorted(chunks, key=lambda job: (job.priority, job.order)):
            count = min(job.left, CHUNK - job.done % CHUNK)
            if count > budget:
                break
            if job.priority > 0:
                if rest <= 0:
                    break
                rest -= count  # below zero for one chunk, so that the longest one has its turn as well
            budget -= count
            plan.append((job, count))
        sets: dict[int, list[tuple[Job, int]]] = {}
        for job, count in plan:
            sets.setdefault(id(job.resident.weights), []).append((job, count))
        return list(sets.values())

    def _compute(self, jobs: Sequence[tuple[Job, int]]) -> None:
        """One forward pass over jobs of one weight set, then the next token of each whose tokens are all computed."""
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []  # rows whose next token is drawn
        rated: list[int] = []  # rows whose next token is known and rated
        targets: list[int] = []
        for job, count in jobs:
            if job.rating:
                first, last = max(job.start - 1, job.done), min(job.done + count, len(job.ids) - 1)
                rated += range(len(ids) + first - job.done, len(ids) + last - job.done)
                targets += job.ids[first + 1 : last + 1]
            elif job.left == count:
                wanted.append(len(ids) + count - 1)
            ids += job.ids[job.done : job.done + count]
            slots += [job.slot] * count
            positions += range(job.done, job.done + count)
        places = torch.tensor(positions)
        work = Work(
            ids=torch.tensor(ids),
            positions=places,
            places=self._model.cache.rows(torch.tensor(slots), places),
            runs=self._runs(jobs),
            wanted=torch.tensor(wanted + rated, dtype=torch.long),
            added=self._added(jobs),
        )
        logits = self._model.forward(jobs[0][0].resident.weights, work)
        drawing = [job for job, count in jobs if not job.rating and job.left == count]
        rates = _rate(logits[len(wanted) :], targets)
        for job, count in jobs:
            if job.rating:
                number = max(0, min(job.done + count, len(job.ids) - 1) - max(job.start - 1, job.done))
                job.scores += rates[:number]
                del rates[:number]
            job.done += count
            self._slots[job.slot].length = job.done
            if job.rating and not job.left:
                self._end(job, Scored(job.scores))
        draws = [job.draw for job in drawing if job.draw is not None]
        if draws:
            for job, drawn in zip(drawing, sample(logits[: len(draws)], draws, _legal(drawing)), strict=True):
                self._advance(job, drawn)

    def _runs(self, jobs: Sequence[tuple[Job, int]]) -> tuple[Run, ...]:
        decode = [job for job, _ in jobs if job.left == 1 and not job.rating]
        runs = list(self._model.decode_runs([job.slot for job in decode], [job.done + 1 for job in decode]))
        row = len(decode)
        for job, count in jobs[len(decode) :]:
            runs.append(self._model.chunk_run(job.slot, job.done, count, row))
            row += count
        return tuple(runs)

    def _added(self, jobs: Sequence[tuple[Job, int]]) -> tuple[Added, ...]:
        """What LoRAs add: for decode rows together, for each chunk of a prompt alone."""
        decode = [job.resident.lora for job, _ in jobs if job.left == 1 and not job.rating]
        row = len(decode)
        found = self._mixer.mix(decode, whole=row == len(jobs))
        for job, count in jobs[row:]:
            if job.resident.lora is not None:
                found.append(Alone(job.resident.lora, slice(row, row + count)))
            row += count
        return tuple(found)

    def _advance(self, job: Job, drawn: Drawn) -> None:
        """Take a drawn token: its text, and whether it ends the job."""
        if not math.isfinite(drawn.logprob):
            self._end(job, Failed(EngineError("these weights gave values that are not finite")))
            return
        job.ids.append(drawn.token)
        ended = drawn.token in self._ends
        stream = job.stream
        text = "" if ended or stream is None else stream.push(drawn.token)
        reason = "stop" if ended or (stream is not None and stream.stopped) else None
        try:
            if reason is None and job.guide is not None and job.guide.take(drawn.token):
                reason = "stop"  # nothing can follow: the token that ends the turn is not drawn
        except InputError as error:  # it is the form that cannot go on
            self._end(job, Failed(error))
            return
        if reason is None and len(job.ids) - len(job.prompt) >= job.limit:
            reason = "length"
        if reason is not None and stream is not None:
            text += stream.finish()
            if stream.stopped:
                reason = "stop"
        piece = self._text.piece(drawn.token) if job.pieces else None
        self._events.append((job, Sampled(drawn.token, drawn.logprob, text, drawn.top, piece)))
        if reason is not None:
            self._end(job, Ended(reason))
        elif job.guide is not None:
            try:
                job.guide.look()
            except InputError as error:
                self._end(job, Failed(error))


def longest(lengths: list[int]) -> int:
    """Where the greatest is; the first of several."""
    return lengths.index(max(lengths))


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences share from their beginning. Halves the question instead of walking in Python."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _rate(logits: Tensor, targets: Sequence[int]) -> list[float]:
    """Log-probability of each row's target, a few rows at a time: a row of float32 is as wide as the vocabulary."""
    found: list[float] = []
    for start in range(0, len(targets), CHUNK):
        wanted = torch.tensor(targets[start : start + CHUNK])[:, None]
        rows = torch.log_softmax(logits[start : start + CHUNK].float(), -1)
        found += rows.gather(1, wanted)[:, 0].tolist()
    return found


def _legal(jobs: Sequence[Job]) -> dict[int, Tensor]:
    """What may be drawn, by row, for the jobs that are limited: [vocab] bool."""
    return {
        row: torch.from_numpy(unpack(job.guide.bits, job.guide.vocab))
        for row, job in enumerate(jobs)
        if job.guide is not None
    }
