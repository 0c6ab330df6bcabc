"""One update: from new events to a served release. Read `update_once` first; it is the whole of learning.

Knows: the order of things, and what is durable after each of them.
Does not know: losses, guards, models, git, HTTP: each is behind the seam it is handed.

- A step is written down as an order, carried out, then settled. A crash in between repeats the same order, and a step
  that exists is answered from disk: so no unit trains twice, and none is lost.
- Weights and harness differ in who makes the step (a trainer, or cordis); gate, chain and rollback are the same.
- Only `publish` with the expected head moves the chain. Whoever else moved it was right: the line starts again there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from reef.core.errors import ReefError, StaleHead, StoreError, TeacherError, TrainError
from reef.core.failpoint import failpoint
from reef.core.nouns import Batch, Consumed, Evaluation, PartName, Release
from reef.evaluation import TOLD, check
from reef.experience import fair
from reef.harness import tree
from reef.loop import asks, assess, ready, tell
from reef.loop.binding import Binding, Tools, Work
from reef.loop.edit import Written, acting, because, beside, edit, forget, written
from reef.loop.ledger import Look, Order, Ruling
from reef.loop.line import Line, find, root
from reef.loop.step import Unmade, order, train, unfit
from reef.records.queue import Ask, is_ask
from reef.releases import Draft, NewPart
from reef.scenario.serving import align, keep_pin, whole
from reef.trainers import folder

TRIES: Final = 3
"""Evaluations of one look when the head keeps moving."""
ATTEMPTS: Final = 3
"""Failures of one order before its units are given up. Trouble that is not the batch's own (a full disk, a process that
is gone) does not count: it is waited out."""
LONGEST_REST: Final = 60.0

log = logging.getLogger(__name__)


async def update_once(tools: Tools, binding: Binding, works: Mapping[PartName, Work]) -> bool:
    """Serve each part's recipe once, in turn. True when something moved, so that looking again at once is worth it.

    A part that fails rests for a while, longer each time; its error is in its `Work`. The other part goes on.
    """
    moved = False
    for part in binding.recipes:
        work = works[part]
        if time.monotonic() < work.rest_until or work.busy:
            continue
        try:
            made = await _Update(tools, binding, work).run()
            work.well()
            work.rests += not made
            moved |= made
        except Exception as error:
            work.failed(error, longest=LONGEST_REST)
            known = isinstance(error, ReefError)
            log.log(
                logging.WARNING if known else logging.ERROR, "%s %s: %s", binding.scenario, part, error,
                exc_info=None if known else error,
            )  # fmt: skip
            often = tell.TROUBLE if work.state == "blocked" else work.failures  # what only a person can end: at once
            with contextlib.suppress(StoreError):  # the disk may be the trouble
                await asyncio.to_thread(tell.trouble, tools, binding.scenario, part, work.error or "", often)
    return moved


async def activate(tools: Tools, binding: Binding) -> Release | None:
    """Serve the chain's head: the engine loads and probes it, then the board flips. None: there is no chain yet.

    Does nothing when it is served already, so every update begins with it; that repairs what a crash left. A release
    that was on its way when a pin came is taken back.
    """
    before = tools.board.get(binding.scenario)
    head = await asyncio.to_thread(keep_pin, binding.scenario, tools.chain, tools.board)
    head = head or await tools.head(binding.scenario)
    if head is None:
        return None
    serving = tools.board.get(binding.scenario)
    if serving is None or serving.release_id != head.id:
        await asyncio.to_thread(whole, tools.chain, head)  # the engine need not read every part
        await binding.engine.load(head.id)
        failpoint("loop.before_flip")
        await asyncio.to_thread(align, binding.scenario, tools.chain, tools.board)
        failpoint("loop.after_flip")
        head = await tools.head(binding.scenario)
    if before is None or head is None or before.release_id != head.id:
        await asyncio.to_thread(tell.releases, tools, binding.scenario)
        failpoint("loop.after_tell")
    return head


@dataclass(slots=True)
class _Update:
    """One part of one scenario, for the time of one update."""

    tools: Tools
    binding: Binding
    work: Work
    assessed: int = 0  # units that somebody was asked about

    async def run(self) -> bool:
        """The whole of it. True when a step or a look was made, or units were assessed."""
        every, ledger = self.binding.evaluate_every, self.tools.ledger
        head = await activate(self.tools, self.binding)
        if head is None:
            return False
        if self.work.failures:  # the last update did not end: perhaps before it told what it did
            await tell.missed(self.tools, self.work.scenario)
        line = await self._line(head)
        await asks.follow(self.tools, self.binding, line, self.work.error)
        asked = ledger.order(self.work.scenario, self.work.part)  # an order given before a crash or a failure
        if asked is not None:
            await ready.read(self.tools, self.binding, self.work)
        elif not line.held and not line.due(every):
            asked = await self._order(head, line)  # 1, 2
        if asked is not None:
            if not await self._advance(asked, head, line):  # 3
                return True  # a search goes on
            head = await self.tools.head(self.work.scenario) or head
            line = await self._line(head)
        if line.due(every):
            await self._look(head, line)  # 4, 5, 6
        elif asked is None and not self.assessed:
            return False
        if self.tools.queue.open(self.work.scenario, self.work.part):
            head = await self.tools.head(self.work.scenario) or head
            await asks.follow(self.tools, self.binding, await self._found(head))
        return True

    # --- 1, 2: experience and batch -----------------------------------------------------------------------------------

    async def _order(self, head: Release, line: Line) -> Order | None:
        """The next step: what a person asked for comes first; experience makes one unless only people may."""
        ask = asks.following(self.tools, self.binding, self.work.part)
        if ask is not None and ask.kind == "proposal":
            await ready.read(self.tools, self.binding, self.work)
            return await self._reserve(None, line, ask)
        if not await self._fits(head, line):
            return None
        batch = None
        if ask is None and self.binding.trigger == "manual":
            await ready.read(self.tools, self.binding, self.work)
            ready.save(self.tools, self.work)
        elif ask is None or self.work.part == "weights" or "session" not in ask.body:
            batch = await self._batch(head, line)
        if batch is not None or (ask is not None and self.work.part == "harness"):
            return await self._reserve(batch, line, ask)
        return None

    async def _fits(self, head: Release, line: Line) -> bool:
        """Whether a step can be made from these weights. If not, the units wait for a person; the status says why."""
        work, tools, before = self.work, self.tools, self.work.blocked
        work.blocked = await asyncio.to_thread(unfit, tools.training, self.binding.recipes[work.part], head, line)
        if work.blocked is None:
            return True
        await ready.read(self.tools, self.binding, self.work)
        if work.blocked != before:
            log.warning("%s: %s", work.scenario, work.blocked)
            await asyncio.to_thread(tell.trouble, tools, work.scenario, work.part, work.blocked, tell.TROUBLE)
        return False

    async def _batch(self, head: Release, line: Line) -> Batch | None:
        """The units to learn from next, as the recipe chooses them among those that are ready, fresh and assessed, in
        the order that is fair; of those that age the newest first, so that falling behind costs the old ones."""
        work, pool = self.work, self.work.pool
        await ready.read(self.tools, self.binding, self.work)
        fresh = await ready.discard(self.binding, work, await ready.fresh(self.tools, self.binding, work, head, line))
        ages = self.binding.bound(work.part) is not None
        units = fair.order(fresh, self.binding.client_share, work.batch_size, newest=ages)
        ready.save(self.tools, work)
        units, away, self.assessed = await assess.assessed(self.tools, self.binding, work, units)
        ready.save(self.tools, work)
        batch = await asyncio.to_thread(self.binding.recipes[work.part].batch, units) if units else None
        if batch is None or not batch.units:
            if away is not None:
                raise away  # the loop rests, and the status says who is away
            return None
        if gone := await ready.forgotten(self.tools, batch):
            self.tools.ledger.unassess(work.scenario, work.part, gone)
            pool.take(gone)  # erased on request since they were read: the next look chooses without them
            return None
        given_up = {"discarded": float(work.discarded)} if work.discarded else {}
        return replace(batch, metrics=dict(batch.metrics) | pool.lost(batch.units) | given_up)

    async def _reserve(self, batch: Batch | None, line: Line, ask: Ask | None) -> Order:
        """Write the step down before it is asked for."""
        cursor = self.work.pool.low(without={unit.id for unit in batch.units} if batch is not None else ())
        made = order(self.binding, batch, line, cursor, ask)
        self.tools.ledger.reserve(made)
        self.work.discarded = 0
        failpoint("loop.after_reserve")
        await asks.follow(self.tools, self.binding, line)
        return made

    # --- 3: one step --------------------------------------------------------------------------------------------------

    async def _advance(self, order: Order, head: Release, line: Line) -> bool:
        """Carry an order out, durably, and settle its units. False: a search for it goes on. An order of a line that is
        over is finished all the same: a trainer may be at work on it, and units must not be free while that can still
        end well."""
        tools, work, step = self.tools, self.work, order.message
        work.enter("training")
        work.line, work.step = step.line, step.step - 1
        began = time.monotonic()
        made: Mapping[str, float] | Unmade | None
        try:
            if work.part == "weights":
                made = await train(tools, work, order)
            else:
                made = await edit(tools, self.binding, work, order, head, line)
        except TeacherError:
            tools.ledger.release(order)  # the units wait; the next order names whatever teacher is set then
            raise
        except Exception as error:
            if isinstance(error, (ReefError, OSError)) and not isinstance(error, TrainError):
                raise  # the surroundings' fault, not the batch's
            if tools.ledger.retry(order) < ATTEMPTS:
                raise
            made = await self._give_up(order, error)
        if made is None:
            work.state = "searching"
            return False
        if isinstance(made, Unmade):
            log.info("%s %s: step %d of line %s: %s", work.scenario, work.part, step.step, step.line, made.why)
            if made.fate is None:
                tools.ledger.release(order)
            else:
                self._settle(order, made.fate, {}, made)
                work.decided("reject", made.why, None, step.step)
            return True
        failpoint("loop.before_settle")
        work.metrics = dict(order.metrics) | dict(made)
        self._settle(order, "trained", work.metrics)
        work.step = step.step
        work.timings = {"waiting": order.waited, "training": time.monotonic() - began}
        if work.part == "weights":
            await self._slim(step.line, step.step)
        return True

    def _settle(self, order: Order, fate: str, metrics: Mapping[str, float], unmade: Unmade | None = None) -> None:
        """The order is done; its units met this fate."""
        work, count = self.work, sum(not is_ask(name) for name in order.message.unit_ids)
        if unmade is None:
            self.tools.ledger.settle(order, fate, metrics)
        else:
            self.tools.ledger.settle(order, fate, metrics, proposed=unmade.proposed, why=unmade.why)
        failpoint("loop.after_settle")
        if work.part == "harness":
            forget(self.tools.training, work.scenario)
        work.pool.take(order.message.unit_ids)
        work.saved = max(work.saved, order.message.cursor)
        if fate == "trained":
            work.trained += count
        else:
            work.dropped[fate] = work.dropped.get(fate, 0) + count

    async def _give_up(self, order: Order, error: Exception) -> Unmade:
        """A step that fails again and again: its units never train, and the line goes back to the head."""
        work, step = self.work, order.message
        said = error.message if isinstance(error, ReefError) else f"{type(error).__name__}: {error}"
        reason = f"training failed {ATTEMPTS} times: {said}"
        look = Look(work.scenario, work.part, step.line, step.step, 0, "reject", reason)
        self.tools.ledger.audit(look)
        failpoint("loop.before_give_up")
        await asyncio.to_thread(tell.ruling, self.tools, look)
        return Unmade("failed", reason)

    # --- 4, 5, 6: gate, publish, activate -----------------------------------------------------------------------------

    async def _look(self, head: Release, line: Line) -> None:
        """The gate looks at the line's newest step. Accepted, it is published and served."""
        work, tools = self.work, self.tools
        work.enter("evaluating")
        began = time.monotonic()
        wanted = written(tools.training, work.scenario, line) if line.part == "harness" else []
        draft = await self._draft(line, wanted)
        for _ in range(TRIES):
            consumed = {part: Consumed(held.cursor) for part, held in head.consumed.items()} | dict(draft.consumed)
            step = line.step if line.part == "weights" else head.step
            draft = replace(draft, base=head.id, step=step, consumed=consumed)
            candidate = await asyncio.to_thread(tools.chain.publish, work.scenario, draft, None)
            failpoint("loop.after_candidate")
            evaluation = await self._evaluate(candidate, head, line)
            failpoint("loop.after_evaluate")
            work.timings["gate"] = time.monotonic() - began
            evaluation = beside(wanted, evaluation)
            ruling, evaluation = await self._rule(evaluation, line, await acting(tools, head, line))
            if ruling != "accept":
                look = self._audit(line, ruling, evaluation, candidate, wanted=wanted)
                failpoint("loop.after_audit")
                await asyncio.to_thread(tell.ruling, tools, look)
                failpoint("loop.after_ruling")
                if ruling == "reject":
                    await self._forget()
                return
            work.enter("publishing")
            draft = replace(draft, operation="publish", evaluation=evaluation, reason=because(wanted, evaluation))
            try:
                release = await asyncio.to_thread(tools.chain.publish, work.scenario, draft, head.id)
            except StaleHead:
                # Somebody published or rolled back meanwhile. Another part's release: judge again beside it.
                work.enter("evaluating")
                head = await tools.head(work.scenario) or head
                if (await self._line(head)).name != line.name:
                    return  # the line stands on a release that is no longer served; the next one starts from the head
                draft = replace(draft, operation="candidate", evaluation=None, reason=because(wanted))
                continue
            failpoint("loop.after_publish")
            look = self._audit(line, "accept", evaluation, candidate, release, wanted=wanted)
            failpoint("loop.after_audit")
            await self._serve(look)
            return

    async def _evaluate(self, candidate: Release, head: Release, line: Line) -> Evaluation:
        """What the policy says of a candidate that the engine holds; one that it cannot load is rejected unseen, also
        by a policy that looks at nothing."""
        if (broken := await check.load(self.binding.engine, candidate.id)) is not None:
            return Evaluation("loads", "reject", f"Rejected: {broken.note}", candidate.id, head.id, (broken,))
        TOLD.set(lambda stage, done, total: setattr(self.work, "progress", (stage, done, total)))
        return await self.binding.evaluator.evaluate(candidate, head, line.looks + 1)

    async def _draft(self, line: Line, wanted: Sequence[Written]) -> Draft:
        """The line's newest step as a candidate; base, step and the other parts' cursors are the head's."""
        work, tools = self.work, self.tools
        place = folder.path(tools.training, work.scenario, work.part, line.name, line.step)
        state = await asyncio.to_thread(folder.read, place)
        if state is None:
            raise TrainError(f"{place} vanished; the line starts again from the head")
        if work.part == "weights":
            kind, files, meta = await asyncio.to_thread(folder.part_files, place)
            new = NewPart(kind, files, meta)
        else:
            await asyncio.to_thread(folder.verify, place, state)
            new = NewPart("tree", {tree.FILE: place / tree.FILE})
        units = tools.ledger.trained(work.scenario, work.part, line.name, line.step)
        return Draft(
            "candidate",
            {work.part: new},
            line=line.name,
            recipe=asks.NAME if state.objective == asks.NAME else self.binding.names[work.part],
            consumed={work.part: Consumed(state.cursor, units)},
            actor=(wanted[-1].actor if wanted else None) or "learner",
            reason=because(wanted),
        )

    async def _rule(self, evaluation: Evaluation, line: Line, acts: Sequence[str]) -> tuple[Ruling, Evaluation]:
        """What follows from a verdict: patience ends, and what is pinned or in review holds what it would accept. What
        acts on a machine is held for a person, and so is what a person asked for and the gate cannot decide."""
        evaluation = replace(evaluation, looks=line.looks + 1)
        asked = line.asked > line.looked
        if acts and (evaluation.verdict == "accept" or (asked and evaluation.verdict == "undecided")):
            evaluation = replace(evaluation, reason=f"Held for a person: {'; '.join(acts)}. {evaluation.reason}")
        if asked and evaluation.verdict == "undecided":
            return "hold", replace(evaluation, reason=f"Undecided, so a person decides. {evaluation.reason}")
        if evaluation.verdict == "accept":
            if (pin := await asyncio.to_thread(self.tools.journal.pinned, self.work.scenario)) is not None:
                said = f": {pin.reason}" if pin.reason else ""
                held = f"Held, because {pin.actor} pinned the scenario to {pin.release_id[:12]}{said}"
                return "hold", replace(evaluation, reason=f"{held}. {evaluation.reason}")
            if acts:
                return "hold", evaluation
            if self.binding.mode == "review":
                return "hold", replace(evaluation, reason=f"Held, because a person reviews. {evaluation.reason}")
        if evaluation.verdict == "undecided" and evaluation.looks >= self.binding.patience:
            reason = f"{evaluation.reason} (still undecided after {evaluation.looks} looks)"
            return "reject", replace(evaluation, verdict="reject", reason=reason)
        return evaluation.verdict, evaluation

    def _audit(
        self,
        line: Line,
        ruling: Ruling,
        evaluation: Evaluation,
        candidate: Release,
        release: Release | None = None,
        *,
        wanted: Sequence[Written] = (),
    ) -> Look:
        work, proposed = self.work, because(wanted)
        reason = f"{evaluation.reason} (proposed: {proposed})" if proposed else evaluation.reason
        look = Look(
            work.scenario, work.part, line.name, line.step, line.looks + 1, ruling, reason,
            candidate.id, release.id if release else None, evaluation, timings=dict(work.timings),
        )  # fmt: skip
        down = [(one.batch, one.ask, one.proposed) for one in wanted] if ruling in ("reject", "hold") else []
        self.tools.ledger.audit(look, down)
        work.looks = look.look
        work.decided(ruling, evaluation.reason, look.release, look.step)
        log.info("%s %s: %s at step %d: %s", work.scenario, work.part, ruling, line.step, evaluation.reason)
        return look

    async def _serve(self, look: Look) -> None:
        """Activate what was published."""
        work, tools = self.work, self.tools
        began = time.monotonic()
        await activate(tools, self.binding)
        work.timings["activation"] = time.monotonic() - began
        tools.ledger.timed(look, work.timings["activation"])
        work.decided(look.verdict, look.reason, look.release, look.step)
        await self._forget()

    async def _forget(self) -> None:
        """A line has ended: drop the step folders that neither the head nor the three releases before it came from."""
        work, tools = self.work, self.tools
        recent = await asyncio.to_thread(tools.chain.history, work.scenario, 4)
        keep = {(release.line, release.step) for release in recent if release.line is not None}
        await asyncio.to_thread(folder.prune, tools.training, work.scenario, work.part, keep, None)
        failpoint("loop.after_prune")

    async def _slim(self, line: str, step: int) -> None:
        """Earlier steps of the line are not needed any more, but for one that a person made the head."""
        work, tools = self.work, self.tools
        head = await tools.head(work.scenario)
        keep = {head.step} if head is not None and head.line == line else set()
        await asyncio.to_thread(folder.slim, tools.training, work.scenario, work.part, line, step, keep)
        failpoint("loop.after_slim")

    async def _line(self, head: Release) -> Line:
        line = await self._found(head)
        self.work.line, self.work.step, self.work.looks = line.name, line.step, line.looks
        return line

    async def _found(self, head: Release) -> Line:
        base = await asyncio.to_thread(root, self.tools.chain.get, head, self.work.part)
        return find(self.tools.ledger, self.tools.training, self.work.scenario, self.work.part, base)
