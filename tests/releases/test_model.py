"""Any sequence of what moves a chain agrees with a plain list: publishes, stale ones, retries, rollbacks, candidates;
and, with kills in the middle, also promotions, rejections, pins, archiving and pruning."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reef.core import failpoint
from reef.core.errors import ConflictError, InputError, MissingError, PrunedError, StaleHead
from reef.core.nouns import Release
from reef.loop.audit import Audit
from reef.loop.ledger import Ledger, Look
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.releases.prune import Policy, prune
from reef.scenario import decide
from reef.scenario.learnt import Family
from reef.scenario.serving import (
    TOLD,
    align,
    archive,
    ensure,
    keep_pin,
    pin,
    restore,
    rollback,
    tell,
    unpin,
)

PARTS = st.sampled_from(["weights", "harness"])
STEPS = st.one_of(
    st.tuples(st.just("publish"), PARTS, st.integers(0, 5)),
    st.tuples(st.just("stale"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("retry"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("rollback"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("candidate"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("promote"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("reopen"), PARTS, st.just(0)),
)


def part(name: str, fill: int) -> NewPart:
    size = 70_000 if fill % 2 else 10  # both forms: LFS object and plain blob
    return NewPart("tree" if name == "harness" else "lora", {f"{name}.json": json.dumps(str(fill) * size).encode()})


@dataclass
class Model:
    """The list: per release what its parts must contain, and the draft and head it was made with."""

    releases: list[Release] = field(default_factory=list)
    contents: list[dict[str, bytes]] = field(default_factory=list)
    drafts: list[tuple[Draft, str | None]] = field(default_factory=list)
    candidates: list[tuple[Release, dict[str, bytes], Draft]] = field(default_factory=list)

    @property
    def head(self) -> Release:
        return self.releases[-1]

    def add(self, release: Release, content: dict[str, bytes], draft: Draft, expected: str | None) -> None:
        assert release.seq == len(self.releases)
        assert release.parent == expected
        self.releases.append(release)
        self.contents.append(content)
        self.drafts.append((draft, expected))


def bytes_of(new: NewPart) -> bytes:
    (content,) = new.files.values()
    assert isinstance(content, bytes)
    return content


def play(chain: GitChain, model: Model, step: tuple[str, str, int], number: int) -> None:
    kind, name, value = step
    new = part(name, value % 7)
    changed = {**model.contents[-1], name: bytes_of(new)}
    which = value % len(model.releases)
    if kind == "publish":
        draft = Draft("publish", {name: new}, step=number)
        model.add(chain.publish("a", draft, model.head.id), changed, draft, model.head.id)
    elif kind == "stale" and which < len(model.releases) - 1:
        with pytest.raises(StaleHead) as caught:
            chain.publish("a", Draft("publish", {name: new}, step=-number - 1), model.releases[which].id)
        assert caught.value.head == model.head.id
    elif kind == "retry":
        draft, expected = model.drafts[which]
        assert chain.publish("a", draft, expected) == model.releases[which]
    elif kind == "rollback":
        draft = Draft("rollback", {}, base=model.releases[which].id, step=number)
        model.add(chain.publish("a", draft, model.head.id), model.contents[which], draft, model.head.id)
    elif kind == "candidate":
        draft = Draft("candidate", {name: new}, base=model.releases[which].id)
        made = chain.publish("a", draft, None)
        known = [candidate for candidate, _, before in model.candidates if before == draft]
        assert known in ([], [made])
        if not known:
            model.candidates.append((made, {**model.contents[which], name: bytes_of(new)}, draft))
    elif kind == "promote" and model.candidates:
        candidate, content, _ = model.candidates[value % len(model.candidates)]
        draft = Draft("promote", {}, base=candidate.id, step=number)
        model.add(chain.publish("a", draft, model.head.id), content, draft, model.head.id)
    elif kind == "reopen":
        assert chain.open() == []


@settings(max_examples=12, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=12))
def test_the_chain_agrees_with_a_list(steps):
    with tempfile.TemporaryDirectory() as folder:
        chain = GitChain(Path(folder) / "releases.git")
        chain.open()
        model = Model()
        base = part("weights", 0)
        draft = Draft("create", {"weights": base})
        model.add(chain.publish("a", draft, None), {"weights": bytes_of(base)}, draft, None)
        for number, step in enumerate(steps):
            play(chain, model, step, number)
            assert chain.head("a") == model.head
        fresh = GitChain(Path(folder) / "releases.git")
        assert fresh.open() == []
        assert fresh.history("a", limit=100) == model.releases[::-1]
        assert {held.id for held in fresh.candidates("a")} == {held.id for held, _, _ in model.candidates}
        stored = [*zip(model.releases, model.contents, strict=True), *[(held, c) for held, c, _ in model.candidates]]
        for release, content in stored:
            assert set(release.parts) == set(content)
            for name, data in content.items():
                (file,) = fresh.files(release.id, name).values()  # type: ignore[arg-type]
                assert file.read_bytes() == data
        assert fresh.verify("a") == []


# --- everything that moves a scenario, and kills in the middle --------------------------------------------------------

POINTS = (
    "releases.lfs_temporary", "releases.blobs_written", "releases.trees_written", "releases.after_objects",
    "releases.before_ref", "releases.ref_unsynced", "releases.after_ref", "scenario.before_flip", "board.before_flip",
    "board.after_flip", "scenario.after_flip", "scenario.before_tell", "scenario.pinned", "scenario.rolled_back",
    "scenario.promoted", "scenario.archived", "scenario.restored", "releases.refs_pruned", "releases.pruned_listed",
    "releases.pruned_one",
)  # fmt: skip
DEATH = st.one_of(st.none(), st.none(), st.sampled_from(POINTS))
PLACE = st.integers(0, 99)
REFUSALS = (ConflictError, PrunedError, InputError, MissingError)
HOW = {"actor": "ada", "reason": "because"}


class Site:
    """One process's view of a state folder."""

    def __init__(self, folder: Path) -> None:
        self.chain = GitChain(folder / "releases.git")
        self.chain.open()
        self.board = Board(folder / "records.db")
        self.ledger = Ledger(folder / "learn.db")
        self.audit = Audit(folder / "learn.db")

    def close(self) -> None:
        self.ledger.close()
        self.board.close()


class Scenario(RuleBasedStateMachine):
    """A scenario beside a plain list of what each of its releases must contain. A rule may die at a failpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.folder, self.made, self.archived = Path(self.place.name), 0, False
        self.pinned: str | None = None
        self.held: dict[str, str] = {}  # by candidate: held, rejected, promoted
        self.asked: dict[str, bytes] = {}  # what each candidate's weights are
        self.site = Site(self.folder)
        ensure("a", self.site.chain, self.site.board, part("weights", 0), None)
        self.contents = [{"weights": bytes_of(part("weights", 0))}]
        self.releases = [self.head]

    @property
    def head(self) -> Release:
        found = self.site.chain.head("a")
        assert found is not None
        return found

    def attempt(self, work: Callable[[Site], object], death: str | None, *allowed: dict[str, bytes]) -> bool:
        """Do it, or die on the way and restart; then at most one release more is there, with contents that are
        allowed. Whether it was done for sure."""
        before, done = self.releases[-1], True
        if death is None:
            try:
                work(self.site)
            except REFUSALS:
                done = False
        else:
            self.site.close()
            done = self.die(work, death)
            self.site = Site(self.folder)
            keep_pin("a", self.site.chain, self.site.board)
            align("a", self.site.chain, self.site.board)
            tell(self.head, self.site.board)
        now = self.head
        if now != before:
            assert (now.parent, now.seq) == (before.id, before.seq + 1)
            content = self.read(now)
            assert content in allowed
            self.releases.append(now)
            self.contents.append(content)
        return done

    def die(self, work: Callable[[Site], object], death: str) -> bool:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                site = Site(self.folder)
                failpoint.arm(death)
                try:
                    work(site)
                    status = 0
                except REFUSALS:
                    status = 3
            os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 3, -signal.SIGKILL), f"the child failed with {code}"
        return code == 0

    def read(self, release: Release) -> dict[str, bytes]:
        found = {}
        for name in release.parts:
            (file,) = self.site.chain.files(release.id, name).values()
            found[name] = file.read_bytes()
        return found

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(name=PARTS, fill=st.integers(1, 6), death=DEATH)
    def publish(self, name: Any, fill: int, death: str | None) -> None:
        if self.pinned or self.archived:
            return
        self.made += 1
        new, head, step = part(name, fill), self.releases[-1], self.made

        def work(site: Site) -> None:
            made = site.chain.publish("a", Draft("publish", {name: new}, base=head.id, step=step), head.id)
            align("a", site.chain, site.board)
            tell(made, site.board)

        self.attempt(work, death, {**self.contents[-1], name: bytes_of(new)})

    @rule(fill=st.integers(10, 16), death=DEATH)
    def propose(self, fill: int, death: str | None) -> None:
        """A candidate that waits for a person."""
        self.made += 1
        new, head, step = part("weights", fill), self.releases[-1], self.made
        draft = Draft("candidate", {"weights": new}, base=head.id, step=step)

        def work(site: Site) -> None:
            made = site.chain.publish("a", draft, None)
            site.ledger.audit(Look("a", "weights", f"line-{step}", step, 1, "hold", "looks well", made.id))

        self.attempt(work, death)
        for look in self.site.ledger.looks("a", limit=1000):
            if look.candidate and look.candidate not in self.held:
                self.held[look.candidate], self.asked[look.candidate] = "held", bytes_of(new)

    @precondition(lambda self: self.held and not self.archived)
    @rule(which=PLACE, force=st.booleans(), death=DEATH)
    def promote(self, which: int, force: bool, death: str | None) -> None:
        candidate = sorted(self.held)[which % len(self.held)]
        expected = self.releases[-1].id
        content = {**self.contents[-1], "weights": self.asked[candidate]}

        def work(site: Site) -> None:
            decide.promote(
                "a", candidate, site.chain, site.board, site.audit, expected=expected, force=force, **HOW
            )  # fmt: skip

        before = len(self.releases)
        self.attempt(work, death, content)
        if len(self.releases) > before:
            assert (force, self.held[candidate]) != (False, "rejected")
            assert self.pinned is None
            assert self.head.operation == "promote"
            self.held[candidate] = "promoted"

    @precondition(lambda self: self.held)
    @rule(which=PLACE, death=DEATH)
    def reject(self, which: int, death: str | None) -> None:
        candidate = sorted(self.held)[which % len(self.held)]

        def work(site: Site) -> None:
            decide.reject("a", candidate, site.chain, site.board, site.audit, Family(site.chain), **HOW)

        done = self.attempt(work, death)
        assert not (done and self.held[candidate] == "promoted" and self.stands(candidate))
        rows = self.site.audit.about("a", [candidate])
        if rows[0].verdict == "reject" and self.held[candidate] == "held":
            self.held[candidate] = "rejected"

    def stands(self, candidate: str) -> bool:
        found = [one.evaluation.candidate_id for one in self.releases if one.operation == "promote" and one.evaluation]
        return candidate in found

    @rule(which=PLACE, death=DEATH)
    def rollback(self, which: int, death: str | None) -> None:
        which %= len(self.releases)
        target, expected = self.releases[which], self.releases[-1].id

        def work(site: Site) -> None:
            rollback("a", target.id, site.chain, site.board, expected=expected, **HOW)

        self.attempt(work, death, self.contents[which])

    @rule(which=PLACE, death=DEATH)
    def pin(self, which: int, death: str | None) -> None:
        which %= len(self.releases)
        target = self.releases[which]
        self.attempt(lambda site: pin("a", target.id, site.chain, site.board, **HOW), death, self.contents[which])
        held = Journal(self.site.board).pinned("a")
        assert (held and held.release_id) in (self.pinned, target.id)
        self.pinned = held.release_id if held else None

    @rule(death=DEATH)
    def unpin(self, death: str | None) -> None:
        self.attempt(lambda site: unpin("a", site.board, **HOW), death)
        held = Journal(self.site.board).pinned("a")
        self.pinned = held.release_id if held else None

    @rule(death=DEATH)
    def away(self, death: str | None) -> None:
        """Archived, or back."""

        def work(site: Site) -> None:
            site.board.create_scenario("a", {}) if not self.archived else None
            move = restore if self.archived else archive
            move("a", site.chain, site.board, **HOW)

        self.attempt(work, death)
        self.archived = self.site.board.archived("a")

    @rule(count=st.integers(2, 4), death=DEATH)
    def prune(self, count: int, death: str | None) -> None:
        waiting = frozenset(name for name, state in self.held.items() if state == "held")
        policy = Policy(count, 2, frozenset([self.pinned] if self.pinned else []), waiting)
        self.attempt(lambda site: prune(site.chain, policy), death)
        for release in [*self.releases[-2:], *map(self.site.chain.get, [*policy.pinned, *waiting])]:
            self.read(release)

    # --- always ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_chain_is_the_list(self) -> None:
        head, serving = self.head, self.site.board.get("a")
        assert head == self.releases[-1]
        assert self.site.chain.history("a", 1000) == self.releases[::-1]
        assert serving is None if self.archived else serving is not None and serving.release_id == head.id
        assert self.pinned is None or self.pinned in (head.id, head.base)
        assert self.site.chain.git.locks() == []
        assert self.read(head) == self.contents[-1]
        told = Counter(act.ref for act in Journal(self.site.board).after(0, 10_000) if act.kind in TOLD.values())
        assert told == Counter(release.id for release in self.releases)

    def teardown(self) -> None:
        wrong = self.site.chain.verify("a")
        self.site.close()
        self.place.cleanup()
        assert wrong == []


class Longer(Scenario):
    """More of the same."""


TestScenario = Scenario.TestCase
TestScenario.settings = settings(
    max_examples=5, stateful_step_count=14, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLonger = pytest.mark.soak(Longer.TestCase)
TestLonger.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
