"""Why a record did not train (or that it did): one true sentence for any record, from what is on disk.

Knows: fates, orders, the pool as the learner would find it now, sessions, and what each recipe learns from.
Does not know: terminals, how the state folder was found; it writes nothing and needs no learner.

Where a scenario has two recipes each part is told of: what trained before what waits, that before what never will.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from reef.core.errors import StoreError
from reef.core.nouns import Json, PartName, Record, Release, Report, Unit
from reef.experience.holdout import Holdout
from reef.experience.lag import judge
from reef.experience.pool import Pool
from reef.experience.sessions import UNREAD, Sessions
from reef.experience.units import SIGNALS, Drop, build, join
from reef.loop.ledger import Ledger
from reef.loop.line import Line, find, root
from reef.recipe import Recipe
from reef.records import RecordStore
from reef.releases import ReleaseChain
from reef.scenario.audit import FATES
from reef.scenario.story import DONE, NEVER, OPEN, WAITS, Told


@dataclass(frozen=True, slots=True)
class Ground:
    """What a state folder has of one scenario. `bound`: the largest lag of a sample, unless its recipe names one."""

    scenario: str
    store: RecordStore
    chain: ReleaseChain
    ledger: Ledger | None  # None: nothing was learnt here yet
    training: Path
    recipes: Mapping[PartName, Recipe]
    bound: int
    holdout: Holdout | None = None
    sessions: Sessions | None = None
    patience: float = 900.0


class Untrained:
    """Opened once (`open`), then asked about any number of records."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._views: list[_View] = []
        self._releases: dict[tuple[str, str], Release] = {}  # by part and line

    @classmethod
    async def open(cls, ground: Ground) -> Untrained:
        made = cls(ground)
        head = await asyncio.to_thread(ground.chain.head, ground.scenario)
        for part in ground.recipes:
            view = _View(ground, part)
            await view.look(head)
            made._views.append(view)
        before: str | None = None
        while page := await asyncio.to_thread(ground.chain.history, ground.scenario, 200, before):
            for release in page:
                for part in release.consumed if release.operation in ("publish", "promote") else ():
                    if release.line is not None and release.consumed[part].units:
                        made._releases.setdefault((part, release.line), release)
            before = page[-1].id
        return made

    async def why(self, record: Record) -> Told:
        """One sentence on this record."""
        if record.purpose != "live":
            what = {"evaluation": "evaluation traffic", "probe": "a probe", "self": "Reef's own traffic"}
            return Told(record.id, what[record.purpose], f"it is {what[record.purpose]}, and only live answers train")
        settled = self._settled(record)
        open_ones = [view for view in self._views if view.part not in settled or settled[view.part].rank != DONE]
        reports_on = getattr(self._ground.store, "reports_on", None)  # a store need not be able to
        reports = list(await reports_on(record.id)) if reports_on is not None and open_ones else []
        told = dict(settled)
        for view in open_ones:
            found, known = view.why(record, reports), settled.get(view.part)
            if found is not None and (known is None or found.rank >= known.rank):
                told[view.part] = found
        if told:
            return _joined(told)
        return Told(record.id, "records only", "its scenario only keeps records: no recipe learns from them")

    def _settled(self, record: Record) -> dict[str, Told]:
        """What the ledger says became of it, for each part."""
        ledger = self._ground.ledger
        if ledger is None:
            return {}
        found: dict[str, list[Told]] = {}
        for unit in [f"{record.id}:{index}" for index in sorted({0, *(one.index for one in record.choices)})]:
            for part, report, fate, line, step in ledger.fate(self._ground.scenario, unit):
                if fate == "trained":
                    found.setdefault(part, []).append(self._trained(record.id, part, line, step))
                    continue
                said = FATES.get(fate, fate)
                if fate == "untrainable":
                    said = build(record, record.choices[0] if record.choices else None, None)[1] or said
                by = f" (report {report})" if report.startswith("rep_") else ""
                rank = OPEN if fate == "duplicate" else NEVER
                found.setdefault(part, []).append(Told(record.id, fate, f"{said}{by}", rank))
        return {part: max(told, key=lambda one: one.rank) for part, told in found.items()}

    def _trained(self, receipt: str, part: str, line: str | None, step: int | None) -> Told:
        """Where it trained, and what became of that."""
        ground, release = self._ground, self._releases.get((part, line or ""))
        said = f"step {step} of line {line}" if line else "a step that is not known any more"
        said = f"it trained the {part}: {said}"
        if release is not None:
            return Told(receipt, "trained", f"{said}, release {release.seq}", DONE)
        looks = ground.ledger.looks(ground.scenario, cast(PartName, part), line, 1) if ground.ledger and line else []
        if looks and looks[0].verdict == "reject":
            return Told(receipt, "turned down", f"{said}, which was turned down: {looks[0].reason}", DONE)
        if looks and looks[0].verdict == "hold":
            said = f"{said}, which is held for a person (`reef candidates`): {looks[0].reason}"
            return Told(receipt, "trained", said, DONE)
        return Told(receipt, "trained", f"{said}, which no release has yet", DONE)


def _joined(told: Mapping[str, Told]) -> Told:
    """What there is to say of each part as one: the reason of what settles most, and every sentence."""
    ranked = sorted(told.items(), key=lambda item: -item[1].rank)
    said: dict[str, str] = {}  # sentence to part
    for part, one in ranked:
        said.setdefault(one.sentence, part)
    words = list(said)
    if len(words) > 1:
        words = [text if part in text else f"for the {part}: {text}" for text, part in said.items()]
    return replace(ranked[0][1], sentence="; ".join(words))


class _View:
    """One part, as its learner would find it now."""

    def __init__(self, ground: Ground, part: PartName) -> None:
        self._ground, self.part = ground, part
        recipe = self._recipe = ground.recipes[part]
        named = getattr(recipe, "signals", None)
        self._signals = SIGNALS[part] if named is None else named
        ledger, name = ground.ledger, ground.scenario
        self.pool = Pool(
            name,
            part,
            self._signals,
            (lambda unit: ledger.settled(name, part, unit)) if ledger is not None else lambda _: None,
            ledger.cursor(name, part) if ledger is not None else 0,
            ground.holdout,
            sessions=ground.sessions,
            merges=bool(getattr(recipe, "merge", False)),
            patience=ground.patience,
        )
        self._within: dict[str, Unit] = {}  # by receipt
        self._gone: dict[str, str] = {}  # receipt to the reason of a drop that no learner wrote down yet
        self._ordered: dict[str, str] = {}  # receipt to the step that it is in
        self._line: Line | None = None
        self._assessed: Mapping[str, Json] = {}

    async def look(self, head: Release | None) -> None:
        ground, ledger = self._ground, self._ground.ledger
        await self.pool.read(ground.store)
        units = self.pool.units()
        if ledger is not None and head is not None:
            base = await asyncio.to_thread(root, ground.chain.get, head, self.part)
            self._line = find(ledger, ground.training, ground.scenario, self.part, base)
            if (order := ledger.order(ground.scenario, self.part)) is not None:
                said = f"step {order.message.step} of line {order.message.line}"
                self._ordered = {unit.partition(":")[0]: said for unit in order.message.unit_ids}
            try:
                self._assessed = ledger.assessments(ground.scenario, self.part)
            except StoreError:  # of a version that had none
                self._assessed = {}
        bound = ground.bound if self._recipe.max_staleness is None else self._recipe.max_staleness
        ages = self.part == "weights" and getattr(self._recipe, "ages", True)
        if ages and head is not None and units:
            age = self._line.age if self._line is not None else head.step
            lags = await asyncio.to_thread(judge, ground.chain.get, head, age, units, bound)
            old = [(unit, lag) for unit in units if isinstance(lag := lags[unit.id], str)]
            self.pool.drop([Drop(unit.id, unit.report.id, reason) for unit, reason in old])
        drops = sorted(self.pool.dropped, key=lambda drop: drop.reason != "duplicate")  # what settled it is told
        self._gone = {drop.unit.partition(":")[0]: drop.reason for drop in drops}
        for unit in self.pool.ready.values():
            for name in (*unit.turns, unit.id):
                self._within[name.partition(":")[0]] = unit

    def why(self, record: Record, reports: list[Report]) -> Told | None:
        """What this part has to say of a record that is not settled."""
        name, size = record.id, getattr(self._recipe, "batch_size", None)
        if name in self._ordered:
            return Told(name, "in training", f"it is in {self._ordered[name]}, which is being made", WAITS)
        if name in self._within:
            return self._ready(record, self._within[name], size)
        if name in self._gone:
            reason = self._gone[name]
            return Told(name, reason, FATES.get(reason, reason), OPEN if reason == "duplicate" else NEVER)
        if self._settled(record):
            return None
        if record.status == "open":
            return Told(name, "open", "its answer has not ended yet", WAITS)
        speaks = [one for one in reports if join(0, one, record, self.part, self._signals)]
        if speaks:
            if self.pool.waits(name):
                return Told(name, "open", "its report waits until every answer that it quotes has ended", WAITS)
            return Told(name, "new", "its report has not been looked at yet", WAITS)
        return self._unreported(record, reports)

    def _settled(self, record: Record) -> bool:
        ledger = self._ground.ledger
        units = [f"{record.id}:{choice.index}" for choice in record.choices] or [f"{record.id}:0"]
        return ledger is not None and any(
            ledger.settled(self._ground.scenario, self.part, unit) is not None for unit in units
        )

    def _ready(self, record: Record, unit: Unit, size: int | None) -> Told:
        count = len(self.pool.ready)
        if hasattr(self._recipe, "assess") and unit.id not in self._assessed:
            return Told(record.id, "to be judged", "it waits until the recipe's judge has looked at it", WAITS)
        if unit.id in self._assessed and self._assessed[unit.id] is None:
            return Told(record.id, "unjudged", FATES["unjudged"])
        if self._line is not None and self._line.held:
            said = "it waits: a candidate is held for a person (`reef candidates`), and nothing trains until then"
            return Told(record.id, "waits for a person", said, WAITS)
        of = f"{count} of {size} units are ready" if size else f"{count} units are ready"
        return Told(record.id, "waits for a batch", f"it waits for a batch of the {self.part}: {of}", WAITS)

    def _unreported(self, record: Record, reports: list[Report]) -> Told:
        """Nothing that this recipe learns from was said of it."""
        name = record.id
        why = build(record, record.choices[0] if record.choices else None, None)[1]
        if self.part == "weights" and why is not None and "demonstration" not in self._signals:
            return Told(name, "untrainable", why)
        if "next" in self._signals:
            return self._unanswered(record)
        if reports:
            wanted = " or ".join(sorted(self._signals))
            return Told(
                name,
                "other signals",
                f"the recipe for the {self.part} learns from {wanted}, and no report on it has that",
                OPEN,
            )
        return Told(name, "waits for a report", "no report has come on it", WAITS)

    def _unanswered(self, record: Record) -> Told:
        """No next message said anything of it."""
        name, sessions = record.id, self._ground.sessions
        place = sessions.place(name) if sessions is not None else None
        if sessions is None or place is None:
            return Told(name, "no session", "it has no place in a session: its request is no conversation")
        if place.note == UNREAD:
            return Told(name, "no session", place.note)
        if place.kind == "side":
            return Told(name, "side", f"it is a side call of its client: {place.note}")
        if place.kind == "retry":
            return Told(name, "retry", f"it is a retry, or was retried: {place.note}")
        if place.branch:
            return Told(name, "sub-agent", "it is a sub-agent's turn, and nobody's next message is about it")
        if sessions.children(name):
            said = "the conversation went on, and what came next says nothing about it or follows another answer"
            return Told(name, "nothing said", said)
        ended = record.timing.received_at + (record.timing.last or 0.0)
        if time.time() - ended <= self._ground.patience:
            return Told(name, "waits for the next message", "nobody has said anything after it yet", WAITS)
        return Told(
            name,
            "last turn",
            f"it is the last turn of its session: no message followed within {self._ground.patience:g} s",
        )
