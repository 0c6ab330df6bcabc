"""kill -9 at every durable step of publish, candidate, rollback and ensure, and at random moments.

After each kill: the chain opens, the head is the old one or the new one, a retry makes exactly one release, every file
is whole, and the board is the head after `align`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reef.core import failpoint
from reef.core.errors import ConflictError, PrunedError, StaleHead
from reef.core.nouns import Consumed, Release
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.releases.prune import Policy, prune
from reef.scenario.serving import TOLD, align, ensure, keep_pin, pin, promote, rollback, tell, unpin

BASE = NewPart("base", {"weights.json": b'{"kind":"base"}'}, {"kind": "base"})
OBJECTS = [
    "releases.blobs_written",
    "releases.trees_written",
    "releases.after_objects",
    "releases.before_ref",
    "releases.ref_unsynced",
    "releases.after_ref",
]
LARGE = ["releases.lfs_temporary", "releases.lfs_written"]
FLIP = ["scenario.before_flip", "board.before_flip", "board.after_flip", "scenario.after_flip"]


def weights(fill: int) -> NewPart:
    header = json.dumps({"a": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    model = struct.pack("<Q", len(header)) + header + fill.to_bytes(2, "big") * 2048
    return NewPart("lora", {"weights.json": b'{"n":%d}' % fill, "adapter_model.safetensors": model}, {"n": fill})


def killed(work: Callable[[], object], armed: str | None = None, after: float | None = None) -> bool:
    """Run `work` in a forked child that dies at a failpoint, or `after` seconds with its git children.

    True when it was killed, False when it finished first. A child that fails in any other way fails the test.
    """
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setsid()
            if armed:
                failpoint.arm(armed)
            work()
            status = 0
        os._exit(status)
    if after is not None:
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):  # before its setsid there is no such group
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child failed with {code}"
    return code != 0


class Site:
    """The state folder of one scenario `a`, opened afresh as a restarted process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chain = self.open()

    def open(self) -> GitChain:
        chain = GitChain(self.folder / "releases.git")
        chain.open()
        self.chain = chain
        return chain

    @contextlib.contextmanager
    def board(self):
        board = Board(self.folder / "records.db")
        try:
            yield board
        finally:
            board.close()

    def settle(self) -> Release:
        """Align, then check that board and head agree and everything is whole. Returns the head."""
        with self.board() as board:
            align("a", self.chain, board)
            head = self.chain.head("a")
            assert head is not None
            assert board.get("a").release_id == head.id
        assert self.chain.verify("a") == []
        seqs = [release.seq for release in self.chain.history("a", limit=1000)]
        assert seqs == list(range(len(seqs)))[::-1]
        return head


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    with site.board() as board:
        ensure("a", site.chain, board, BASE, None)
    return site


def test_publish_killed_at_every_step(site):
    for number, armed in enumerate([*LARGE, *OBJECTS] * 3):
        head = site.chain.head("a")
        consumed = {"weights": Consumed(number, (f"r{number}:0",))}
        draft = Draft("publish", {"weights": weights(number)}, base=head.id, step=number, line="l", consumed=consumed)
        assert killed(lambda draft=draft, head=head: site.open().publish("a", draft, head.id), armed)
        now = site.open().head("a")
        assert now == head or (now.parent == head.id and now.step == number)
        assert (now == head) == (armed not in ("releases.ref_unsynced", "releases.after_ref"))
        made = site.chain.publish("a", draft, head.id)
        assert made.parent == head.id
        assert site.chain.publish("a", draft, head.id) == made
        assert site.settle() == made


def test_candidate_killed_at_every_step(site):
    head = site.chain.head("a")
    for number in range(4):
        site.chain.publish("a", Draft("candidate", {"weights": weights(1000 + number)}, base=head.id), None)
    policy = Policy(candidates=4)

    def propose(draft):
        site.open().publish("a", draft, None)
        prune(site.open(), policy)

    for number, armed in enumerate([*LARGE, *OBJECTS, "releases.refs_pruned", "releases.pruned_listed"] * 2):
        draft = Draft("candidate", {"weights": weights(number)}, base=head.id, step=number)
        assert killed(lambda draft=draft: propose(draft), armed)
        chain = site.open()
        made = chain.publish("a", draft, None)
        held = chain.candidates("a")
        assert [candidate for candidate in held if candidate.step == number and number] == ([made] if number else [])
        assert made in held
        assert chain.files(made.id, "weights")
        assert site.settle() == head
    prune(site.chain, policy)
    assert len(site.chain.candidates("a")) == 4, "the next run prunes what killed ones did not"


def test_rollback_killed_at_every_step(site):
    first = site.chain.head("a")
    other = site.chain.publish("a", Draft("publish", {"weights": weights(1)}), first.id)
    site.settle()
    for number, armed in enumerate([*OBJECTS, "scenario.rolled_back", *FLIP] * 2):
        head = site.chain.head("a")
        target = (first, other)[number % 2]

        def roll(target=target, head=head) -> Release:
            with site.board() as board:
                return rollback("a", target.id, site.open(), board, actor="x", reason="r", expected=head.id)

        assert killed(roll, armed)
        now = site.open().head("a")
        assert now == head or (now.parent == head.id and now.base == target.id)
        back = roll()
        assert roll() == back
        assert (back.parent, back.base, back.parts) == (head.id, target.id, target.parts)
        assert site.settle() == back


def test_ensure_killed_at_every_step(tmp_path):
    steps = ["scenario.before_create", *OBJECTS, "scenario.created", *FLIP]
    for number, armed in enumerate(steps):
        folder = tmp_path / str(number)
        folder.mkdir()
        Board(folder / "records.db").close()

        def start(folder=folder) -> None:
            site = Site(folder)
            with site.board() as board:
                ensure("a", site.chain, board, BASE, "sao")

        assert killed(start, armed)
        start()
        head = Site(folder).settle()
        assert (head.seq, head.operation) == (0, "create")


def test_opening_killed_at_random_moments(tmp_path):
    dice = random.Random(7)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed(lambda folder=folder: GitChain(folder / "releases.git").open(), after=dice.uniform(0.0, 0.05))
        site = Site(folder)
        made = site.chain.publish("a", Draft("create", {"weights": BASE}), None)
        assert site.settle() == made


def test_publishing_killed_at_random_moments_with_its_git(site):
    """Steps 1, 2, 3 … are published in turn by processes that die at any instant: none is lost, none made twice."""
    dice = random.Random(3)

    def work() -> None:
        chain = site.open()
        with site.board() as board:
            while True:
                head = chain.head("a")
                chain.publish("a", Draft("publish", {"weights": weights(head.step + 1)}, step=head.step + 1), head.id)
                align("a", chain, board)

    spread = 0.1  # seconds; grows until about every second child gets a publish done, however slow the machine is
    for _ in range(30):
        before = site.chain.head("a")
        assert killed(work, after=dice.uniform(0.01, spread))
        site.open()
        head = site.settle()
        assert head.step >= before.step
        spread *= 1.3 if head == before else 0.9
    steps = [release.step for release in site.chain.history("a", limit=1000)]
    assert steps == list(range(len(steps)))[::-1]
    assert len(steps) > 5, "the children had time to publish"
    with pytest.raises(StaleHead):
        site.chain.publish("a", Draft("publish", {"weights": weights(0)}, step=-1), site.chain.history("a")[3].id)


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_every_operation_killed_at_random_moments(site, kills):
    """Publishes, candidates, promotions, rollbacks, pins and prunes in any order, by processes that die at any instant:
    what is served is the head, every kept release is whole, no unit is in two releases of one line, and what the
    journal misses can be told."""
    dice = random.Random(11)
    policy = Policy(releases=3, candidates=3)

    def work(seed: int) -> None:
        luck, chain = random.Random(seed), site.open()
        with site.board() as board:
            while True:
                step = chain.head("a").step + 1
                head = keep_pin("a", chain, board) or chain.head("a")
                consumed = {"weights": Consumed(step, (f"r{head.seq + 1}:0",))}
                part = {"weights": weights(luck.randrange(5000))}
                proposal = Draft("candidate", part, base=head.id, step=step, line="l", consumed=consumed)
                kind = luck.choice(["publish", "promote", "rollback", "pin", "prune"])
                with contextlib.suppress(PrunedError, ConflictError):
                    if kind == "publish" and Journal(board).pinned("a") is None:
                        made = chain.publish("a", replace(proposal, operation="publish"), head.id)
                        align("a", chain, board)
                        tell(made, board)
                    elif kind == "promote":
                        held = chain.publish("a", proposal, None)
                        promote("a", held.id, chain, board, actor="x", reason="")
                    elif kind == "rollback":
                        rollback("a", luck.choice(chain.history("a", 6)).id, chain, board, actor="x", reason="")
                    elif kind == "pin":
                        pin("a", luck.choice(chain.history("a", 3)).id, chain, board, actor="x", reason="")
                        unpin("a", board, actor="x", reason="")
                    else:
                        pinned = Journal(board).pinned("a")
                        prune(chain, replace(policy, pinned=frozenset({pinned.release_id} if pinned else ())))

    spread = 0.2
    for number in range(kills):
        before = site.chain.head("a")
        assert killed(lambda number=number: work(number), after=dice.uniform(0.02, spread))
        site.open()
        site.settle()
        with site.board() as board:
            unpin("a", board, actor="x", reason="")
            history = site.chain.history("a", 10_000)
            for release in history[: history[0].seq - before.seq + 1]:
                tell(release, board)
            told = {(act.kind, act.ref) for act in Journal(board).after(0, 100_000)}
        assert told >= {(TOLD[release.operation], release.id) for release in history}
        for release in history[:3]:
            assert site.chain.files(release.id, "weights")
        spread = min(2.0, spread * (1.3 if history[0] == before else 0.9))
    units = [unit for release in history for consumed in release.consumed.values() for unit in consumed.units]
    assert len(units) == len(set(units)), "no unit is in two releases"
    assert len(history) > kills / 3, "the children had time to work"
    prune(site.chain, policy)
    assert site.settle() == history[0]
