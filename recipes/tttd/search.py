"""The search: parents from the archive, a grid of rollouts at one release, their values reported, the archive grown.

Knows: the order of a step, and what is durable after each part of it. Does not know: HTTP, problems, the loss.

    committed(k) -> ask, verify -> pending(k): receipts and values -> report, wait for the learner -> committed(k + 1)

- Each arrow ends with one write of the whole state. Killed in between, a search goes on from the last one: a pending
  step is reported again, which the server knows by the reports' ids; its expansions count with the commit, once.
- A step that was asked for but is not pending is asked again; its answers were never reported, so they never train.
- A verifier is asked once for each state.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from reef.core.errors import InputError, ReefError, StoreError
from reef.core.failpoint import failpoint

from .archive import Archive, Found
from .problems import Judged, Problem

TRIES: Final = 5  # of a step's rollouts, while the served release changes under them
FORMAT: Final = 1


class Said(Protocol):
    """An answer, as `reef.study.run.Answer` is one."""

    text: str
    receipt: str
    release_id: str


class Server(Protocol):
    """What a search needs of a server; `reef.study.run.Run` and `client.Client` are such."""

    async def ask(self, messages: str, *, seed: int, max_tokens: int, **body: Any) -> Any:
        """A `Said`, recorded and sampled plainly by what is served."""

    async def report(self, receipt: str, score: float | None = None, **fields: Any) -> None:
        """Feedback on one answer; the same again is one report."""

    async def learnt(self) -> Mapping[str, Any]:
        """Wait until what was reported is settled, and what came of it is served."""


@dataclass(frozen=True, slots=True)
class Settings:
    groups: int = 4
    rollouts: int = 8
    c: float = 1.0  # how much PUCT explores
    seed: int = 0
    frozen: bool = False  # nothing is reported, so the policy stays as it is: the control
    constrained: bool = True  # answers are limited to the problem's grammar, where it has one

    def __post_init__(self) -> None:
        if not (self.groups >= 1 and self.rollouts >= 2 and self.groups * self.rollouts <= 4096 and self.c >= 0):
            raise InputError("a step has at least 1 group of at least 2 rollouts, 4096 in all, and c is at least 0")


@dataclass(slots=True)
class State:
    """Everything a search knows. `document` is what is kept of it."""

    phase: str = "committed"  # or pending: the cells of `step` are verified, perhaps reported, not yet in the archive
    step: int = 1  # the next one, or the one that is pending
    archive: Archive = field(default_factory=Archive)
    known: dict[str, Judged] = field(default_factory=dict)  # by state: every verifier call that was made
    curve: list[float] = field(default_factory=list)  # the best value after each of them
    cells: list[dict[str, Any]] = field(default_factory=list)  # of the pending step
    history: list[dict[str, Any]] = field(default_factory=list)  # figures of each committed step

    def document(self, about: Mapping[str, Any]) -> dict[str, Any]:
        known = {state: [one.value, one.valid, one.key, one.note] for state, one in self.known.items()}
        return {
            "format": FORMAT, "about": dict(about), "phase": self.phase, "step": self.step,
            "archive": self.archive.document(), "known": known, "curve": self.curve, "cells": self.cells,
            "history": self.history,
        }  # fmt: skip

    @classmethod
    def of(cls, document: Mapping[str, Any], about: Mapping[str, Any]) -> State:
        """StoreError when it is of another search."""
        if document.get("format") != FORMAT or document.get("about") != about:
            raise StoreError(
                f"the kept search is another one ({document.get('about')}, not {dict(about)}); give the same options, "
                "or another file"
            )
        try:
            made = cls(
                document["phase"], document["step"], Archive.of(document["archive"]),
                {state: Judged(*one) for state, one in document["known"].items()},
                document["curve"], document["cells"], document["history"],
            )  # fmt: skip
            why = _damage(made, about)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            raise StoreError(f"the kept search is damaged ({why}); move its file away to search from the start")
        return made


def _damage(state: State, about: Mapping[str, Any]) -> str:
    """What is wrong with a state that was kept; empty when it can go on. Errors of the kinds above say so, too."""
    archive = state.archive
    numbers = [one.value for one in state.known.values()] + state.curve
    numbers += [number for entry in archive.entries.values() for number in (entry.value, entry.best or 0.0)]
    if not all(math.isfinite(number) for number in numbers):
        return "a value is no finite number"
    if state.step != len(state.history) + 1 or archive.expansions < 0:
        return f"it is at step {state.step} after {len(state.history)} steps"
    if any(not isinstance(figures, dict) for figures in state.history):
        return "a step has no figures"
    if lost := [entry.id for entry in archive.entries.values() if entry.state not in state.known]:
        return f"nothing is known of the state of entry {lost[0]}"
    if state.phase == "committed":
        return "cells without a step" if state.cells else ""
    if state.phase != "pending":
        return f"there is no phase {state.phase!r}"
    grid = [(group, rollout) for group in range(about["groups"]) for rollout in range(about["rollouts"])]
    if [(cell["group"], cell["rollout"]) for cell in state.cells] != grid:
        return f"step {state.step} is pending without all of its cells"
    for cell in state.cells:
        known = cell["state"] is None or cell["state"] in state.known
        if not known or cell["parent"] not in archive.entries or not (cell["receipt"] and cell["release"]):
            return f"a cell of step {state.step} names what is not there"
    return ""


Keep = Callable[[dict[str, Any]], None]
"""Make a document durable, in the place of the one before."""


class Search:
    """Goes on from a kept document, or begins. `step` makes one step and returns its figures."""

    def __init__(
        self, server: Server, problem: Problem, settings: Settings, keep: Keep, kept: Mapping[str, Any] | None = None
    ) -> None:
        self.server, self.problem, self.settings, self._keep = server, problem, settings, keep
        own = asdict(settings)
        self._about = {"problem": problem.name, **own}
        self.name = f"{problem.name} seed={settings.seed}"  # in every report: cells of two searches never meet
        self.state = State() if kept is None else State.of(kept, self._about)

    async def step(self) -> dict[str, Any]:
        """One step, or the rest of the one that was pending."""
        state = self.state
        if not state.archive.entries:
            await self._begin()
        if state.phase == "committed":
            state.cells = await self._rollouts()
            state.phase = "pending"
            self._save()
        failpoint("tttd.pending")
        words: Mapping[str, Any] = {}
        if not self.settings.frozen:
            await self._report()
            failpoint("tttd.reported")
            words = await self.server.learnt()
            failpoint("tttd.learnt")
        return self._commit(words)

    # --- a step -------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """The archive's seeds: as many legal states as a step has groups, drawn without the model."""
        numbers = random.Random(f"{self.settings.seed}/seeds")
        for _ in range(16 * self.settings.groups):  # a problem may have fewer different ones
            if len(self.state.archive.entries) == self.settings.groups:
                break
            start = self.problem.start(numbers)
            (judged,) = await self._verify([start])
            if judged.valid:
                self.state.archive.seed(Found(start, judged.value, judged.key, judged.note))
        if not self.state.archive.entries:
            raise ReefError(f"{self.problem.name} has no valid state to begin with")

    async def _rollouts(self) -> list[dict[str, Any]]:
        """The step's cells, verified, all answered by one release."""
        state, settings = self.state, self.settings
        parents = state.archive.choose(settings.groups, settings.c)
        places = [(group, rollout) for group in range(settings.groups) for rollout in range(settings.rollouts)]
        for attempt in range(TRIES):
            answers = await all_or_none(self._ask(parents[group], group, rollout, attempt) for group, rollout in places)
            if len({answer.release_id for answer in answers}) == 1:
                break
        else:
            raise ReefError("the served release changed in the middle of every try; does something else train here?")
        texts = [self.problem.parse(answer.text) for answer in answers]
        await self._verify([text for text in texts if text is not None])
        return [
            {
                "group": group, "rollout": rollout, "parent": parents[group], "receipt": answer.receipt,
                "release": answer.release_id, "state": text,
            }
            for (group, rollout), answer, text in zip(places, answers, texts, strict=True)
        ]  # fmt: skip

    async def _ask(self, parent: int, group: int, rollout: int, attempt: int) -> Said:
        entry = self.state.archive.entries[parent]
        limit = self.problem.grammar() if self.settings.constrained else None
        body: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
        body |= {"structured_outputs": limit} if limit is not None else {}
        place = f"{self.settings.seed}/{self.state.step}/{attempt}/{group}/{rollout}"
        said: Said = await self.server.ask(
            self.problem.prompt(entry.state, self.state.known[entry.state]),
            seed=random.Random(place).randrange(2**31),
            max_tokens=self.problem.max_tokens,
            **body,
        )
        return said

    async def _report(self) -> None:
        """The value of every cell, 0 where the answer was no construction or an invalid one."""
        settings, state = self.settings, self.state
        shape = {"groups_per_step": settings.groups, "rollouts_per_group": settings.rollouts}
        await all_or_none(
            self.server.report(
                cell["receipt"],
                self._value(cell),
                metadata={
                    "search": self.name, "step": state.step, "group": cell["group"], "rollout": cell["rollout"], **shape
                },
            )
            for cell in state.cells
        )  # fmt: skip

    def _commit(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """The expansions and the step's figures, in one write."""
        state = self.state
        for group in range(self.settings.groups):
            cells = [cell for cell in state.cells if cell["group"] == group]
            judged = [(cell["state"], state.known[cell["state"]]) for cell in cells if cell["state"] is not None]
            children = [Found(text, one.value, one.key, one.note) for text, one in judged if one.valid]
            state.archive.expand(cells[0]["parent"], children)
        figures = self._figures(words)
        state.history.append(figures)
        state.phase, state.step, state.cells = "committed", state.step + 1, []
        self._save()
        return figures

    def _figures(self, words: Mapping[str, Any]) -> dict[str, Any]:
        state, many = self.state, self.settings.groups
        rewards = [self._value(cell) for cell in state.cells]
        mean = math.fsum(rewards) / len(rewards)
        groups = [{self._value(cell) for cell in state.cells if cell["group"] == group} for group in range(many)]
        metrics = words.get("metrics") or {}
        return {
            "step": state.step,
            "mean": mean,
            "max": max(rewards),
            "std": math.sqrt(math.fsum((one - mean) ** 2 for one in rewards) / len(rewards)),
            "zeros": sum(one == 0 for one in rewards),
            "constant_groups": sum(len(one) == 1 for one in groups),
            "distinct": len({cell["state"] for cell in state.cells} - {None}),
            "calls": len(state.known),
            "best": state.archive.best().value,
            "release": state.cells[0]["release"],
            **{name: metrics[name] for name in ("drift", "grad_norm", "beta", "mismatch") if name in metrics},
        }

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, cell: Mapping[str, Any]) -> float:
        return 0.0 if cell["state"] is None else self.state.known[cell["state"]].value

    async def _verify(self, states: Sequence[str]) -> list[Judged]:
        """What is known of these states; new ones are verified, in turn."""
        state = self.state
        for one in states:
            if one not in state.known:
                judged = await asyncio.to_thread(self.problem.verify, one)
                if not math.isfinite(judged.value):
                    judged = Judged(0.0, False, judged.key, judged.note)
                state.known[one] = judged
                best = state.curve[-1] if state.curve else 0.0
                state.curve.append(max(best, judged.value) if judged.valid else best)
        return [state.known[one] for one in states]

    def _save(self) -> None:
        self._keep(self.state.document(self._about))


async def all_or_none(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What all of them return. At the first error the others are stopped, and it is raised."""

    async def run(call: Awaitable[Any]) -> Any:
        return await call

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
