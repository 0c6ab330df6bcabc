"""The stories that `why` tells: of a record, a report, a release or a candidate, as data.

Knows: what each of them says. Does not know: where any of it comes from, or how it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reef.core.nouns import Act, Evaluation, PartName, Record, Release, Report
from reef.records.queue import Ask
from reef.scenario.audit import Ruling
from reef.scenario.origin import Origin

SHOWN = 20
MOST = 500
STATES = ("held", "rejected", "undecided", "released", "promoted", "open", "unknown")
"""Of a candidate; see `state_of`."""
BECAME = {"promoted": "accepted", "released": "accepted", "rejected": "rejected"}
"""A held candidate's state, as its ask's: a person has decided."""


@dataclass(frozen=True, slots=True)
class Page:
    """How many of each list are shown, and where the two that page begin."""

    limit: int = SHOWN
    units: int = 0
    releases: int = 0


@dataclass(frozen=True, slots=True)
class Brief:
    """A release in a list."""

    release_id: str
    seq: int
    operation: str
    actor: str
    reason: str
    created_at: float
    step: int
    line: str | None
    trained: Mapping[PartName, int]
    current: bool


@dataclass(frozen=True, slots=True)
class Briefs:
    """A page of releases, newest first; `next` is where it goes on."""

    count: int = 0
    releases: tuple[Brief, ...] = ()
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """One unit, what became of it, and the release that learnt from it. `report` None: not known which."""

    unit: str
    part: PartName | None
    fate: str
    said: str
    report: str | None = None
    line: str | None = None
    step: int | None = None
    release: Brief | None = None
    candidate: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A unit that a release learnt from, and the release of the ancestry that did."""

    unit: str
    agent_record_id: str
    part: PartName
    release_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Sources:
    """`own` units since its base; `count` in all of its ancestry, of which a page is shown, newest first."""

    own: int = 0
    count: int = 0
    units: tuple[Source, ...] = ()
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Rivals:
    """Candidates that were turned down since the parent. None: the audit cannot be read."""

    count: int | None = None
    newest: tuple[Ruling, ...] = ()


@dataclass(frozen=True, slots=True)
class Approval:
    """Who let it in: `gate` by itself, or a `person`; the base is there because the scenario was made."""

    by: str
    actor: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ReleaseStory:
    """`brought`: the release that brought its parts (for a rollback, the one that came back). `measured` is that's.
    `entries`: of its harness tree, where each comes from."""

    id: str
    scenario: str
    release: Release
    current: bool
    brought: Brief
    approved: Approval
    measured: Evaluation | None
    remeasured: tuple[Act, ...]
    acts: tuple[Act, ...]
    looks: tuple[Ruling, ...]
    rejected: Rivals
    learnt: Sources
    ancestry: Briefs
    unknown: tuple[str, ...]
    kind: str = "release"
    entries: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidateStory:
    """`state`: released, promoted, held, rejected, undecided, open (no verdict yet) or unknown."""

    id: str
    scenario: str
    release: Release
    state: str
    became: Brief | None
    looks: tuple[Ruling, ...]
    acts: tuple[Act, ...]
    learnt: Sources
    ancestry: Briefs
    unknown: tuple[str, ...]
    kind: str = "candidate"
    entries: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordStory:
    """`record` None: it was erased; what learnt from it is still known."""

    id: str
    scenario: str
    record: Record | None
    erased: bool
    reports: tuple[Report, ...]
    lessons: tuple[Lesson, ...]
    influenced: Briefs
    release: ReleaseStory | None
    unknown: tuple[str, ...]
    kind: str = "record"


@dataclass(frozen=True, slots=True)
class ReportStory:
    """`records`: of the `quoted` answers a page, None for one that was erased; `lessons` are of that page, and
    `influenced` of all. `served`: what is served now comes from it."""

    id: str
    scenario: str
    report: Report
    quoted: int
    next: int | None
    records: Mapping[str, Record | None]
    lessons: tuple[Lesson, ...]
    influenced: Briefs
    served: bool
    unknown: tuple[str, ...]
    kind: str = "report"


@dataclass(frozen=True, slots=True)
class AskStory:
    """What a person asked for. `state` and `said` are what came of it, also what a person decided since; `candidate`
    is the edit that was made, if it is kept."""

    id: str
    scenario: str
    ask: Ask
    state: str
    said: str
    candidate: CandidateStory | None
    release: Brief | None
    unknown: tuple[str, ...]
    kind: str = "ask"


OPEN, NEVER, WAITS, DONE = range(4)
"""How much a sentence settles, where a record has several: it trained, it waits, it never will, or less."""


@dataclass(frozen=True, slots=True)
class Told:
    """Why a record did not train, or that it did. `reason`: a word or two that records have in common; `sentence`: what
    is true of this one."""

    record: str
    reason: str
    sentence: str
    rank: int = NEVER


Story = ReleaseStory | CandidateStory | RecordStory | ReportStory | AskStory
