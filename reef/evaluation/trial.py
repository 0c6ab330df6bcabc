"""One look: the same tasks asked of candidate and incumbent, as many as are wanted, each answer scored.

Knows: which asks a task needs, in which order, what is kept of them, what they cost and when the budget is spent.
Does not know: what the scores decide. A policy asks for `more` until it knows enough.

- A task is asked of the candidate once and of the incumbent `repeats` times (once at temperature 0, and for scorers
  that compare). The candidate and the incumbent's first answer have the same seed. Which side goes first alternates.
- Scores are kept in the book by the content of a release's parts, the task and the seed: the incumbent answers once
  while it stands, and a look that was cut short goes on where it was. Each generation has its own seeds, so an accepted
  candidate's lucky answers are not met again as the incumbent's.
- A task that is an agent's job is worked on once by each side; its own check, where it has one, is its scorer.
- What the engine failed to answer for either side, after two retries of it, makes the task *missing*; what a scorer
  could not judge makes it *unjudged*. Neither is in `rows`. A request that a release makes impossible scores 0 and
  stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from reef.core.nouns import Cost, Release
from reef.evaluation import TOLD, Draw, Means, Score, Sizes, Task, Versus
from reef.evaluation.ask import Asker, Reply, Side
from reef.evaluation.book import Book, Kept, digest, month
from reef.evaluation.evidence import Row
from reef.evaluation.suite import task_key

NEXT = {"01": "February", "02": "March", "03": "April", "04": "May", "05": "June", "06": "July", "07": "August"}
NEXT |= {"08": "September", "09": "October", "10": "November", "11": "December", "12": "January"}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one task. `ours` and `theirs` are scores; with `missing` or `unjudged` they are not to be used."""

    task: Task
    ours: float | None = None
    theirs: tuple[float, ...] = ()
    missing: str | None = None  # why the engine gave no answer, on either side
    unjudged: str | None = None  # why an answer could not be judged
    failed: bool = False  # the candidate made the request impossible: a 0
    void: bool = False  # unjudged, and the incumbent's own answer is: there is nothing to compare with

    @property
    def id(self) -> str:
        return self.task.id

    @property
    def row(self) -> Row | None:
        if self.missing or self.unjudged or self.ours is None:
            return None
        return self.ours, self.theirs


@dataclass(slots=True)
class Trial:
    """Made by `open`. `key` is the candidate's, by content: what the error budget counts it as."""

    means: Means
    sizes: Sizes
    draw: Draw
    key: str
    results: list[Result] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    capped: str = ""  # why no more is asked, though there are tasks: a sentence
    faults: list[str] = field(
        default_factory=list
    )  # why episodes of the candidate failed by themselves, those run here
    _asker: Asker = field(kw_only=True)
    _book: Book = field(kw_only=True)
    _sides: tuple[Side, Side] = field(kw_only=True)  # candidate, incumbent
    _salt: str = field(kw_only=True)
    _kept: dict[tuple[str, str, int], Kept] = field(kw_only=True, default_factory=dict)
    _next: int = 0
    _done: int = 0  # answers that are judged
    _total: int = -1  # of so many in the whole draw; not counted yet

    @classmethod
    async def open(
        cls,
        means: Means,
        candidate: Release,
        incumbent: Release,
        *,
        sizes: Sizes,
        limit: int | None = None,
        avoid: Collection[str] = (),
        asker: Asker | None = None,
        measure: bool = False,
    ) -> Trial:
        """A look with at most `limit` tasks (default: `sizes.tasks`), without those in `avoid`.

        `asker` keeps answers in memory from look to look; give a policy's own. `measure` (and any `avoid`) is for
        measuring a release that was decided: it is no use of the suite and moves no generation, and has seeds of its
        own. Without a suite there are no tasks.
        """
        # Another look may be on its way (an old release is measured beside a new candidate): each pays its own.
        asker, book = asker.apart() if asker else Asker.of(means), means.book or Book.memory()
        ours, theirs = await asker.side(candidate), await asker.side(incumbent)
        key, limit = digest(ours.key), sizes.tasks if limit is None else limit
        measure = measure or bool(avoid)
        if not measure:
            book.use(means.scenario, incumbent.id, key)
        draw = Draw((), "", 0, 0, "there is no suite")
        if means.suite is not None:
            draw = await means.suite.draw(limit, avoid=avoid)
        salt = f"measure {candidate.id}" if measure else str(draw.generation)
        made = cls(
            means, sizes, draw, key, _asker=asker, _book=book, _sides=(ours, theirs), _salt=salt
        )  # fmt: skip
        for side in {*made._keys, made._both}:
            for (task, seed), kept in book.scores(means.scenario, side).items():
                made._kept[side, task, seed] = kept
        return made

    # --- what a policy reads ------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks of the draw, in the order they are asked."""
        return self.draw.tasks

    @property
    def rows(self) -> list[Row]:
        """The candidate's score and the incumbent's, of each task that has them, in order."""
        return [row for result in self.results if (row := result.row) is not None]

    @property
    def missing(self) -> int:
        return sum(result.missing is not None for result in self.results)

    @property
    def unjudged(self) -> int:
        return sum(result.unjudged is not None for result in self.results)

    @property
    def candidate_failures(self) -> int:
        """Tasks whose request the candidate made impossible."""
        return sum(result.failed for result in self.results)

    async def more(self, n: int) -> bool:
        """Ask the next `n` tasks of both sides. False: nothing was asked; there are no more tasks, or it is capped."""
        wanted = self.tasks[self._next : self._next + n]
        wanted = wanted[: self._allowed([self._calls(task) for task in wanted])]
        self._tell()
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._one(task, self._next + at)) for at, task in enumerate(wanted)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._settle([], Cost())
        self.results += [one.result() for one in asked]
        self._next += len(wanted)
        return bool(wanted)

    async def repeat(self, task: Task, answers: int) -> tuple[list[float], list[float]] | None:
        """Scores of so many more answers on each side, with seeds of their own. None: one of them is missing or could
        not be judged, or the budget does not allow them."""
        key, salt = task_key(task), f"{self._salt} again"
        seeds = [self._seed(task, salt, answer) for answer in range(answers)]
        wanted = [(side, seed) for seed in seeds for side in (0, 1)]
        open_ = [one for one in wanted if (self._keys[one[0]], key, one[1]) not in self._kept]
        if not self._allowed([len(open_)]):
            return None
        try:
            judged = await asyncio.gather(*(self._judge(task, key, side, seed) for side, seed in open_))
        finally:
            self._settle([], Cost())
        for one in judged:
            if isinstance(one, str):
                return None
            self._kept[one.side, key, one.seed] = one
        ours, theirs = ([self._kept[side, key, seed].value for seed in seeds] for side in self._keys)
        return ours, theirs

    # --- one task -----------------------------------------------------------------------------------------------------

    async def _one(self, task: Task, place: int) -> Result:
        if hasattr(task.scorer, "compare"):
            return await self._compared(task, place)
        seeds, key = self._seeds(task), task_key(task)
        wanted = [(0, seeds[0]), *((1, seed) for seed in seeds)]
        if (place + self._start) % 2:  # who goes first alternates
            wanted[:2] = wanted[1::-1]
        kept = [self._kept.get((self._keys[side], key, seed)) for side, seed in wanted]
        open_ = [at for at, one in enumerate(kept) if one is None]
        judged = await asyncio.gather(*(self._judge(task, key, *wanted[at]) for at in open_))
        for at, one in zip(open_, judged, strict=True):
            if isinstance(one, Kept):
                kept[at] = one
        if lost := [one for one in judged if isinstance(one, str)]:
            sides = {wanted[at][0] for at, one in zip(open_, judged, strict=True) if isinstance(one, str)}
            return _lost(task, lost, void=1 in sides)
        scores = [one for one in kept if one is not None]
        ours = next(one for (side, _), one in zip(wanted, scores, strict=True) if side == 0)
        theirs = tuple(one.value for (side, _), one in zip(wanted, scores, strict=True) if side == 1)
        return Result(task, ours.value, theirs, failed=ours.failed)

    async def _judge(self, task: Task, key: str, side: int, seed: int) -> Kept | str:
        """The score of one answer, kept; or why there is none."""
        reply = await self._asker.reply(self._sides[side], replace(task.question, seed=seed))
        if reply.missing is not None:
            return _MISSING + reply.missing
        if side == 0 and reply.outcome is not None and reply.impossible is not None:
            self.faults.append(reply.impossible)
        score = await _scored(task, reply)
        if score.value is None:
            self._settle([], score.cost)
            return score.note or "the scorer gave no score"
        kept = Kept(self._keys[side], key, seed, score.value, reply.impossible is not None)
        self._settle([kept], score.cost)
        self._done += 1
        self._tell()
        return kept

    async def _compared(self, task: Task, place: int) -> Result:
        """A task whose scorer compares two answers: the row is what each side won of it."""
        scorer, seed, key = cast(Versus, task.scorer), self._seeds(task)[0], task_key(task)
        kept = self._kept.get((self._both, key, seed))
        if kept is None:
            question = replace(task.question, seed=seed)
            order = (1, 0) if (place + self._start) % 2 else (0, 1)
            replies = await asyncio.gather(*(self._asker.reply(self._sides[side], question) for side in order))
            ours, theirs = replies if order == (0, 1) else reversed(replies)
            if lost := [_MISSING + reply.missing for reply in (ours, theirs) if reply.missing is not None]:
                return _lost(task, lost)
            score = _forfeit(ours, theirs) or await scorer.compare(task, ours.text, theirs.text)
            if score.value is None:
                self._settle([], score.cost)
                return _lost(task, [score.note or "the scorer gave no score"])
            kept = Kept(self._both, key, seed, score.value, ours.impossible is not None)
            self._settle([kept], score.cost)
        return Result(task, kept.value, (1 - kept.value,), failed=kept.failed)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> tuple[str, str]:
        return self.key, digest(self._sides[1].key)

    @property
    def _both(self) -> str:
        """What comparisons of the two are kept under."""
        return digest(*self._keys)

    @property
    def _start(self) -> int:
        """Which side begins: 0 or 1, by chance, the same in a look that is taken up again."""
        return int(digest(self.means.scenario, self._salt, self.key, "first")[0], 16) % 2

    def _seeds(self, task: Task) -> list[int]:
        once = task.question.temperature == 0 or hasattr(task.scorer, "compare")
        return [self._seed(task, self._salt, answer) for answer in range(1 if once else self.sizes.repeats)]

    def _seed(self, task: Task, salt: str, answer: int) -> int:
        return int(digest(self.means.scenario, salt, task.id, task.question.seed, answer)[:8], 16) % 2**31

    def _settle(self, kept: Sequence[Kept], judging: Cost) -> None:
        """Write scores down, with what was spent since the last writing."""
        cost = self._asker.bill() + judging
        if kept or cost != Cost():
            self._book.keep(self.means.scenario, kept, cost)
            self.cost += cost

    def _tell(self) -> None:
        """Say how far the look is, in answers or episodes."""
        if self._total < 0:
            self._total = sum(2 if hasattr(one.scorer, "compare") else 1 + len(self._seeds(one)) for one in self.tasks)
            self._done += self._total - sum(self._calls(one) for one in self.tasks)
        stage = "episodes" if any(task.job is not None for task in self.tasks) else "answers"
        TOLD.get()(stage, min(self._total, self._done), self._total)

    def _calls(self, task: Task) -> int:
        """Asks that a task still needs, without its scorer's."""
        key, seeds = task_key(task), self._seeds(task)
        if hasattr(task.scorer, "compare"):
            return 2 * ((self._both, key, seeds[0]) not in self._kept)
        ours, theirs = self._keys
        needed = [(ours, key, seeds[0]), *((theirs, key, seed) for seed in seeds)]
        return sum(one not in self._kept for one in needed)

    def _allowed(self, needed: Sequence[int]) -> int:
        """How many of these, each needing so many calls, may be asked. `capped` then says why not the others."""
        calls_so_far = max(1, self._book.spent(self.means.scenario).calls)
        allowed = len(needed)
        for what, done, cap in _used(self._book, self.means.scenario, self.sizes):
            each = 1.0 if what == "calls" else done / calls_so_far
            room, fits = cap - done, 0
            for calls in needed:
                if calls and (room <= 0 or room < calls * each):
                    break
                room, fits = room - calls * each, fits + 1
            if fits < allowed:
                allowed = fits
                self.capped = _cap(self.means, what, done, cap)
        return allowed


def exhausted(means: Means, sizes: Sizes) -> str:
    """Why nothing more may be asked this month, as a sentence; empty: something may."""
    if means.book is None:
        return ""
    spent = [one for one in _used(means.book, means.scenario, sizes) if one[1] >= one[2]]
    return _cap(means, *spent[0]) if spent else ""


def _used(book: Book, scenario: str, sizes: Sizes) -> list[tuple[str, float, float]]:
    """(what, how much of it was used this month, the cap) of each cap there is."""
    spent = book.spent(scenario)
    used = (
        ("calls", float(spent.calls), sizes.calls),
        ("tokens", float(spent.prompt_tokens + spent.output_tokens), sizes.tokens),
        ("money", book.paid(scenario), sizes.money),
    )
    return [(what, done, cap) for what, done, cap in used if cap is not None]


def _cap(means: Means, what: str, done: float, cap: float) -> str:
    now = month()
    words = (
        f"this month's evaluation budget of {cap:,.15g} {what} is used up ({done:,.15g} spent); it begins anew on "
        f"1 {NEXT[now[5:]]}; raise gate.{what} to go on before"
    )
    if means.capped is not None:
        means.capped(now, words)
    return words


_MISSING = "\0"


async def _scored(task: Task, reply: Reply) -> Score:
    """What an answer is worth: 0 when the release made it impossible; by an episode's own check, where it had one."""
    if reply.impossible is not None:
        return Score(0.0, reply.impossible)
    if reply.outcome is not None and reply.outcome.score is not None:
        return Score(reply.outcome.score, reply.outcome.said)
    return await task.scorer.score(task, reply.text)


def _lost(task: Task, reasons: Sequence[str], *, void: bool = False) -> Result:
    missing = next((why[1:] for why in reasons if why.startswith(_MISSING)), None)
    if missing is not None:
        return Result(task, missing=missing)
    return Result(task, unjudged=reasons[0], void=void)


def _forfeit(ours: Reply, theirs: Reply) -> Score | None:
    """A side that could not be asked loses; None when both were."""
    if ours.impossible is None and theirs.impossible is None:
        return None
    if ours.impossible is not None and theirs.impossible is not None:
        return Score(0.5)
    return Score(0.0 if ours.impossible is not None else 1.0)
