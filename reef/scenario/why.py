"""Why an answer is what it is: which release gave it, what that learnt from, was measured against, and who let it in.

Knows: how records, reports, units, audit rows, acts and releases hang together, forward and back.
Does not know: HTTP, tokens, terminals; or how a person names a thing (the asker finds the id first).

- Nothing is made up: what a lost file would have said is told as a sentence in `unknown`, and the rest is answered.
- The chain is walked once and then kept (`learnt.Family`); a question reads a few rows and the releases it shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from reef.core.errors import ChainError, MissingError, StoreError
from reef.core.nouns import Act, PartName, Record, Release, Report
from reef.records import RecordStore
from reef.records.journal import Journal
from reef.records.queue import Queue
from reef.releases import ReleaseChain
from reef.scenario import origin
from reef.scenario.audit import FATES, Audit, Fate, Ruling
from reef.scenario.learnt import Descent, Family, Node, consumers
from reef.scenario.origin import Origin
from reef.scenario.story import (
    SHOWN,
    Approval,
    Brief,
    Briefs,
    CandidateStory,
    Lesson,
    Page,
    RecordStory,
    ReleaseStory,
    ReportStory,
    Rivals,
    Source,
    Sources,
)

_Made = TypeVar("_Made", ReleaseStory, CandidateStory)
_WAITS = "it waits for a batch: what was said of it first counts"
_PENDING = "not trained yet: its turn has not come, or nothing here learns from such a report"


@dataclass(frozen=True, slots=True)
class Why:
    """Answers for one state folder. The methods may be awaited in any order."""

    chain: ReleaseChain
    store: RecordStore
    journal: Journal
    audit: Audit
    family: Family = field(repr=False)
    asks: Queue | None = None  # what people asked for

    async def find(self, release_id: str, within: Collection[str] | None = None) -> Release:
        """A release or candidate, by id or unique prefix; of these scenarios, if any are given."""
        return await asyncio.to_thread(self.chain.get, release_id, within)

    async def release(self, found: Release, page: Page) -> ReleaseStory | CandidateStory:
        if found.operation == "candidate":
            return await self._traced(await asyncio.to_thread(self._candidate, found, page))
        return await self._traced(await asyncio.to_thread(self._release, found, page))

    async def _traced(self, story: _Made) -> _Made:
        """The story of a release with where its harness comes from."""
        try:
            return replace(story, entries=await self.entries(story.release))
        except (ChainError, MissingError) as error:
            said = f"where the harness's entries come from is not known: {error.message}"
            return replace(story, unknown=(*story.unknown, said))

    async def entries(self, found: Release) -> tuple[Origin, ...]:
        """Where each entry of a release's tree comes from: releases, reports and people; and which of it was learnt
        from what has been erased since. ChainError or MissingError when the tree cannot be read."""
        origins = await asyncio.to_thread(origin.entries, self.chain, found)
        behind = await asyncio.to_thread(origin.behind, self.chain, self.audit, origins)
        gone = await self.forgotten(sorted({name for each in behind.values() for name in each.names}))
        brought = dict.fromkeys(one.release_id for one in origins)
        people = {name: await self._people(name, behind[name].units) for name in brought}
        named = [replace(one, reports=behind[one.release_id].reports, people=people[one.release_id]) for one in origins]
        return origin.marked(named, origin.lost(behind, gone))

    async def _people(self, release_id: str, units: Sequence[str]) -> tuple[str, ...]:
        """Who proposed what was promoted, and the names of the tokens that the records were asked with."""
        found = dict.fromkeys(await asyncio.to_thread(self._proposer, release_id))
        for unit in units[:SHOWN]:
            with contextlib.suppress(MissingError):
                (entry,) = await self.store.get([unit.partition(":")[0]])
                if isinstance(entry, Record) and (name := entry.tags.get("token")):
                    found[name] = None
        return tuple(found)

    def _proposer(self, release_id: str) -> list[str]:
        """The person whose proposal was promoted in this release."""
        release = self.chain.get(release_id)
        if release.operation == "promote" and release.evaluation is not None:
            with contextlib.suppress(MissingError):
                candidate = self.chain.get(release.evaluation.candidate_id)
                return [candidate.actor] if candidate.actor not in ("learner", release.actor) else []
        return []

    async def record(self, found: Record, page: Page) -> RecordStory:
        reports_on = getattr(self.store, "reports_on", None)  # a store need not be able to
        reports = tuple(await reports_on(found.id)) if reports_on is not None else ()
        told = await asyncio.to_thread(self._record, found.scenario, found.id, page, found, reports)
        try:
            release = await asyncio.to_thread(self.chain.get, found.release_id)
            story = await asyncio.to_thread(self._release, release, page)
        except MissingError:
            gone = f"the release {found.release_id} that answered is not in the chain"
            return replace(told, unknown=(*told.unknown, gone))
        unknown = tuple(dict.fromkeys((*told.unknown, *story.unknown)))
        return replace(told, release=story, unknown=unknown)

    async def forgotten(self, receipts: Sequence[str]) -> list[str]:
        """Those of these records that were erased on request."""
        erased = getattr(self.store, "erased", None)  # a store need not be able to tell
        return list(await erased(receipts)) if erased is not None else []

    async def erased(self, scenarios: Sequence[str], receipt: str, page: Page) -> RecordStory | None:
        """A record that is no more, if any of these scenarios ever learnt of it."""
        forgotten = bool(await self.forgotten([receipt]))

        def ask() -> RecordStory | None:
            try:
                places = [name for name in self.audit.where(receipt) if name in scenarios]
            except StoreError:
                places = list(scenarios) if forgotten else []  # the chains know; reading them all takes a while
            for name in places:
                told = self._record(name, receipt, page)
                if told.lessons:
                    return replace(told, erased=True)
            return None

        return await asyncio.to_thread(ask)

    async def report(self, found: Report, page: Page) -> ReportStory:
        records: dict[str, Record | None] = {}
        for receipt in found.references[page.units : page.units + page.limit]:
            records[receipt] = None
            with contextlib.suppress(MissingError):
                (entry,) = await self.store.get([receipt])
                records[receipt] = entry if isinstance(entry, Record) else None
        return await asyncio.to_thread(self._report, found, records, page)

    # --- a release ----------------------------------------------------------------------------------------------------

    def _release(self, found: Release, page: Page) -> ReleaseStory:
        descent, unknown = self.family.of(found.scenario), list[str]()
        place = descent.places[found.id]
        brought = descent.nodes[place]
        while brought.operation == "rollback" and (back := descent.places.get(brought.base or "")) is not None:
            brought = descent.nodes[back]
        measured = self.chain.get(brought.id).evaluation
        acts = self.journal.about(found.id)
        again = acts if brought.id == found.id else self.journal.about(brought.id)
        ids = [name for name in (found.id, brought.candidate if brought.id == found.id else None) if name is not None]
        looks: list[Ruling] = []
        rejected = Rivals()
        with self._audited(unknown) as audit:
            looks = audit.about(found.scenario, ids)
            if (before := descent.places.get(found.parent or "")) is not None:
                parent = descent.nodes[before]
                ends = (parent.id, parent.created_at), (found.id, found.created_at)
                count, rows = audit.between(found.scenario, *ends, page.limit)
                rejected = Rivals(count, tuple(rows))
            else:
                rejected = Rivals(0)
        return ReleaseStory(
            found.id,
            found.scenario,
            found,
            place == len(descent.nodes) - 1,
            _brief(descent, descent.places[brought.id]),
            _approval(found),
            measured,
            tuple(act for act in again if act.kind == "measure"),
            tuple(acts),
            tuple(looks),
            rejected,
            self._sources(descent, descent.ancestry(place), sum(descent.nodes[place].trained.values()), page),
            _page(descent, descent.ancestry(place)[1:], page),
            tuple(unknown),
        )

    def _candidate(self, found: Release, page: Page) -> CandidateStory:
        descent, unknown = self.family.of(found.scenario), list[str]()
        looks: list[Ruling] = []
        known = False
        with self._audited(unknown) as audit:
            looks, known = audit.about(found.scenario, [found.id]), True
        acts = self.journal.about(found.id)
        became = became_of(found, descent, looks)
        base = descent.places.get(found.base or "")
        ancestry = [] if base is None else descent.ancestry(base)
        own = [(unit, part) for part, held in found.consumed.items() for unit in reversed(held.units)]
        shown = [Source(unit, unit.partition(":")[0], part, found.id, found.seq) for unit, part in own]
        return CandidateStory(
            found.id,
            found.scenario,
            found,
            state_of(looks, acts, became, known=known),
            None if became is None else _brief(descent, descent.places[became.id]),
            tuple(looks),
            tuple(acts),
            Sources(len(own), len(own), tuple(shown[page.units : page.units + page.limit]), _next(len(own), page)),
            _page(descent, ancestry, page),
            tuple(unknown),
        )

    def _sources(self, descent: Descent, ancestry: Sequence[int], own: int, page: Page) -> Sources:
        """A page of the units that an ancestry learnt from. Only the releases it shows are read."""
        count, skip, found = 0, page.units, list[Source]()
        for place in ancestry:
            size = sum(descent.nodes[place].trained.values())
            count += size
            if not size or len(found) >= page.limit:
                continue
            if skip >= size:
                skip -= size
                continue
            release = self.chain.get(descent.nodes[place].id)
            units = [(unit, part) for part, held in release.consumed.items() for unit in reversed(held.units)]
            for unit, part in units[skip : skip + page.limit - len(found)]:
                found.append(Source(unit, unit.partition(":")[0], part, release.id, release.seq))
            skip = 0
        return Sources(own, count, tuple(found), _next(count, page))

    # --- records and reports ------------------------------------------------------------------------------------------

    def _record(
        self, scenario: str, receipt: str, page: Page, record: Record | None = None, reports: Sequence[Report] = ()
    ) -> RecordStory:
        descent, unknown = self.family.of(scenario), list[str]()
        lessons = self._lessons(scenario, descent, receipt, unknown)
        settled = any(lesson.fate != "duplicate" for lesson in lessons)
        lessons += self._counted(scenario, receipt, reports, lessons)
        if not settled:
            told = {lesson.report for lesson in lessons}
            waiting = [item for item in reports if item.id not in told]
            lessons += [_unsettled(receipt, item.id, unknown, record, item.choice or 0) for item in waiting]
        influenced = _page(descent, _touched(descent, lessons)[::-1], page)
        return RecordStory(
            receipt, scenario, record, False, tuple(reports), tuple(lessons), influenced, None, tuple(unknown)
        )

    def _report(self, found: Report, records: Mapping[str, Record | None], page: Page) -> ReportStory:
        descent, unknown = self.family.of(found.scenario), list[str]()
        lessons: list[Lesson] = []
        shown: list[Lesson] = []
        for receipt in found.references:
            rows = self._lessons(found.scenario, descent, receipt, unknown)
            mine = _own(found.id, rows)
            if receipt in records:
                shown += mine or [_unsettled(receipt, found.id, unknown, records[receipt], found.choice or 0)]
            lessons += mine
        touched = _touched(descent, lessons)
        return ReportStory(
            found.id, found.scenario, found, len(found.references), _next(len(found.references), page), records,
            tuple(shown), _page(descent, touched[::-1], page),
            bool(touched) and touched[-1] == len(descent.nodes) - 1, tuple(dict.fromkeys(unknown)),
        )  # fmt: skip

    def _lessons(self, scenario: str, descent: Descent, receipt: str, unknown: list[str]) -> list[Lesson]:
        """What became of one record's units: as the audit says, else as the chain does."""
        with self._audited(unknown) as audit:
            return [self._lesson(descent, fate, scenario, audit) for fate in audit.fates(scenario, receipt)]
        found = []
        for release in consumers(self.chain, scenario, [receipt]):
            for part, held in release.consumed.items():
                for unit in held.units:
                    if unit.partition(":")[0] == receipt:
                        place = descent.places[release.id]
                        said = f"trained in line {release.line}, released as {release.seq}"
                        brief = _brief(descent, place)
                        found.append(Lesson(unit, part, "trained", said, None, release.line, None, brief))
        return found

    def _counted(
        self, scenario: str, receipt: str, reports: Sequence[Report], lessons: Sequence[Lesson]
    ) -> list[Lesson]:
        """The units that wait for a batch, as far as what is written down shows it: they were assessed, or a later
        report on them was a duplicate."""
        waits: dict[tuple[str, PartName], str] = {}
        for row in lessons:
            if row.fate == "duplicate" and row.part is not None:
                waits[row.unit, row.part] = _WAITS
        with contextlib.suppress(StoreError):  # of a version that had none
            for part, unit, body in self.audit.assessed(scenario, receipt):
                waits[unit, part] = f"{_WAITS}; it was judged: {json.dumps(body, ensure_ascii=False)}"
        for row in lessons:
            if row.fate != "duplicate" and row.part is not None:
                waits.pop((row.unit, row.part), None)
        late = {(row.unit, row.part, row.report) for row in lessons}
        made = []
        for (unit, part), said in waits.items():
            index = int(unit.partition(":")[2] or 0)
            on_it = [item.id for item in reports if item.choice in (None, index) and (unit, part, item.id) not in late]
            made.append(Lesson(unit, part, "pending", said, on_it[0] if on_it else None))
        return made

    def _lesson(self, descent: Descent, fate: Fate, scenario: str, audit: Audit) -> Lesson:
        if fate.fate != "trained" or fate.line is None:
            said = f"not trained: {FATES.get(fate.fate, fate.fate)}"
            return Lesson(fate.unit, fate.part, fate.fate, said, fate.report or None, fate.line, fate.step)
        said, brief, candidate = f"trained in step {fate.step} of line {fate.line}", None, None
        place = descent.lines.get((fate.part, fate.line))
        if place is not None and self._holds(descent.nodes[place].id, fate):
            brief = _brief(descent, place)
            said += f", released as {brief.seq}"
        elif rows := audit.of_line(scenario, fate.part, fate.line):
            candidate = rows[0].candidate
            end = {"reject": "which was turned down", "hold": "which is held until somebody promotes it"}
            said += f", {end.get(rows[0].verdict, 'which is not released yet')}: {rows[0].reason}"
        else:
            said += ", which is not released yet"
        return Lesson(
            fate.unit, fate.part, "trained", said, fate.report or None, fate.line, fate.step, brief, candidate
        )

    def _holds(self, release: str, fate: Fate) -> bool:
        """Whether a release learnt from a unit: its line may have gone on after the step that was released."""
        held = self.chain.get(release).consumed.get(fate.part)
        return held is not None and fate.unit in held.units

    @contextlib.contextmanager
    def _audited(self, unknown: list[str]) -> Iterator[Audit]:
        """The audit. When it cannot be read, the block is left at that point and `unknown` says what is missing."""
        try:
            yield self.audit
        except StoreError:
            unknown.append(_UNREAD)


_UNREAD = "the learner's audit cannot be read: what was turned down, and why a unit did not train, is not known"


def became_of(candidate: Release, descent: Descent, looks: Sequence[Ruling]) -> Node | None:
    """The release that a candidate was made into."""
    for look in looks:
        if look.candidate == candidate.id and (place := descent.places.get(look.release or "")) is not None:
            return descent.nodes[place]
    base = descent.places.get(candidate.base or "", 0)
    return next((node for node in descent.nodes[base:] if node.candidate == candidate.id), None)


def state_of(looks: Sequence[Ruling], acts: Sequence[Act], became: Node | None, *, known: bool) -> str:
    """What a candidate is now: released, promoted, held, rejected, undecided, open, or unknown."""
    if became is not None:
        return "promoted" if became.operation == "promote" else "released"
    if looks:
        return {"hold": "held", "reject": "rejected", "accept": "released"}.get(looks[0].verdict, looks[0].verdict)
    if not known:
        told = [act.kind for act in acts if act.kind in ("hold", "reject")]
        return {"hold": "held", "reject": "rejected"}[told[-1]] if told else "unknown"
    return "open"


def _approval(found: Release) -> Approval:
    by = {"create": "creation", "publish": "gate"}.get(found.operation, "person")
    if found.operation == "rollback" and found.actor in ("watch", "learner"):
        by = "watch"
    return Approval(by, found.actor, found.reason, found.created_at)


def _brief(descent: Descent, place: int) -> Brief:
    node = descent.nodes[place]
    return Brief(
        node.id, node.seq, node.operation, node.actor, node.reason, node.created_at, node.step, node.line,
        dict(node.trained), place == len(descent.nodes) - 1,
    )  # fmt: skip


def _page(descent: Descent, places: Sequence[int], page: Page) -> Briefs:
    shown = tuple(_brief(descent, place) for place in places[page.releases : page.releases + page.limit])
    after = page.releases + page.limit
    return Briefs(len(places), shown, after if after < len(places) else None)


def _next(count: int, page: Page) -> int | None:
    return page.units + page.limit if page.units + page.limit < count else None


def _touched(descent: Descent, lessons: Collection[Lesson]) -> list[int]:
    """The releases that come from any of these lessons, oldest first."""
    taught = {lesson.release.release_id for lesson in lessons if lesson.fate == "trained" and lesson.release}
    return descent.descendants([descent.places[name] for name in taught if name in descent.places])


def _own(report: str, rows: Sequence[Lesson]) -> list[Lesson]:
    """What became of one report, of all that is known of its answer: where another one counted, that is said."""
    mine = [row for row in rows if row.report in (report, None)]
    settled = {(row.unit, row.part) for row in mine}
    for row in rows:
        if row.report not in (report, None) and row.fate != "duplicate" and (row.unit, row.part) not in settled:
            said = f"not trained: the report {row.report} on this answer counted ({row.fate})"
            mine.append(Lesson(row.unit, row.part, "duplicate", said, row.report))
    return mine


def _unsettled(
    receipt: str, report: str, unknown: Sequence[str], record: Record | None = None, choice: int = 0
) -> Lesson:
    """A report of which nothing is written down."""
    fate, said = "pending", _PENDING
    if unknown:
        fate, said = "unknown", "whether it trained is not known"
    elif record is not None and record.purpose != "live":
        fate, said = "never", f"never trains: only live answers do, and this was one of {record.purpose}"
    return Lesson(f"{receipt}:{choice}", None, fate, said, report)
