"""Whole updates on real records, chain and board: accept, reject, undecided, hold, two parts, rollback, faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from reef.core.errors import ConflictError, EngineError, MissingError, StoreError, TeacherError, TrainError, WireError
from reef.core.nouns import Candidate, Evaluation, Release
from reef.core.wire import Progress, Step, Stepped
from reef.harness import tree
from reef.loop.audit import Audit
from reef.loop.update import ATTEMPTS
from reef.records import keep
from reef.releases import Draft, NewPart
from reef.scenario import decide
from reef.scenario.learnt import Family
from reef.scenario.serving import align, pin, promote, rollback, unpin
from reef.trainers import folder
from reef.trainers.fake import FakeTrainer
from tests.loop.kit import NAME, Rules, Score, World, record, report


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()


def serving(world: World) -> str:
    now = world.board.get(NAME)
    assert now is not None
    return now.release_id


async def test_reports_become_a_served_release(world: World) -> None:
    base = world.head
    receipts = await world.say(2)
    assert await world.settle() == 1
    head = world.head
    assert (head.seq, head.parent, head.base, head.step, head.operation) == (1, base.id, base.id, 1, "publish")
    assert (head.line, head.actor, head.recipe) == (f"{base.id[:12]}-1", "learner", "test:Score")
    assert head.reason == "the script says accept"
    assert set(head.consumed["weights"].units) == {f"{receipt}:0" for receipt in receipts}
    assert head.parts["weights"].kind == "lora"
    assert serving(world) == head.id
    assert world.engine.loaded[-1] == head.id
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    shown = world.works["weights"].shown()
    assert (shown["state"], shown["pending"], shown["trained"], shown["error"]) == ("waiting", 0, 2, None)
    assert shown["last"]["verdict"] == "accept"
    assert shown["last"]["release_id"] == head.id
    assert all(shown["last"]["timings"][name] >= 0 for name in ("waiting", "training", "gate", "activation"))
    assert shown["metrics"]["lag_max"] == 0
    order = world.trainer.orders[0]
    assert [datum.tokens[:3] for datum in order.data] == [[1, 2, 3], [1, 2, 3]]
    assert order.cursor == 4 == head.consumed["weights"].cursor


async def test_nothing_happens_without_enough_experience(world: World) -> None:
    await world.say(1)
    assert await world.settle() == 0
    assert world.head.seq == 0
    await world.say(1)
    assert await world.settle() == 1
    assert world.head.seq == 1


@pytest.mark.parametrize("what", ["record", "report"])
async def test_what_was_erased_since_it_was_read_never_trains(world: World, tmp_path: Path, what: str) -> None:
    (erased,) = await world.say(1)
    assert await world.settle() == 0  # it is ready, in the learner's memory
    (told,) = await world.store.reports_on(erased)
    gone = ([erased], None, []) if what == "record" else ([], None, [told.id])
    await asyncio.to_thread(keep.forget, world.store._path, *gone)
    kept = await world.say(1)
    assert await world.update() is False  # a batch of both, but for what was erased
    assert world.trainer.orders == []
    kept += await world.say(1)
    assert await world.settle() == 1
    assert set(world.head.consumed["weights"].units) == {f"{receipt}:0" for receipt in kept}


async def test_a_second_report_on_a_unit_never_trains(world: World) -> None:
    (receipt,) = await world.say(1)
    await world.store.append(report(100, receipt, score=-1.0))
    await world.say(1)
    await world.settle()
    await world.store.append(report(101, receipt, score=-1.0))
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2, "duplicate": 2}
    assert [datum.reward for datum in world.trainer.orders[0].data] == [1.0, 1.0]


async def test_reject_changes_nothing_that_is_served_and_starts_a_new_line(world: World) -> None:
    world.evaluator.verdicts = ["reject"]
    base = world.head
    await world.say(2)
    await world.settle()
    assert (world.head, serving(world)) == (base, base.id)
    (look,) = world.ledger.looks(NAME)
    assert (look.verdict, look.line, look.step, look.release) == ("reject", f"{base.id[:12]}-1", 1, None)
    assert look.evaluation is not None
    assert look.evaluation.candidate_id == look.candidate
    await world.say(2)
    await world.settle()
    assert (world.head.line, world.head.step) == (f"{base.id[:12]}-2", 1)


async def test_undecided_goes_on_until_patience_ends(world: World) -> None:
    world.options = {"patience": 3}
    world.evaluator.verdicts = ["undecided"] * 3
    base = world.head
    for _ in range(3):
        await world.say(2)
        await world.settle()
    looks = world.ledger.looks(NAME)[::-1]
    assert [(look.verdict, look.look, look.step) for look in looks] == [
        ("undecided", 1, 1), ("undecided", 2, 2), ("reject", 3, 3),
    ]  # fmt: skip
    assert "after 3 looks" in looks[-1].reason
    assert [look for _, _, look in world.evaluator.looked] == [1, 2, 3]
    assert world.head == base


async def test_a_line_that_is_accepted_late_carries_all_it_learnt(world: World) -> None:
    world.evaluator.verdicts = ["undecided"]
    first = await world.say(2)
    await world.settle()
    second = await world.say(2)
    await world.settle()
    assert world.head.step == 2
    assert set(world.head.consumed["weights"].units) == {f"{receipt}:0" for receipt in first + second}
    third = await world.say(2)
    await world.settle()
    assert set(world.head.consumed["weights"].units) == {f"{receipt}:0" for receipt in third}
    assert (world.head.step, world.head.line) == (3, f"{world.head.parent[:12]}-1")


async def test_the_gate_looks_every_so_many_steps(world: World) -> None:
    world.options = {"evaluate_every": 3}
    for steps, looks in ((1, 0), (2, 0), (3, 1), (4, 1)):
        await world.say(2)
        await world.settle()
        assert (len(world.trainer.orders), len(world.evaluator.looked)) == (steps, looks)
    assert world.head.step == 3
    assert world.works["weights"].step == 4
    assert [[datum.lag for datum in order.data] for order in world.trainer.orders] == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert world.works["weights"].shown()["metrics"]["lag_max"] == 0.0


async def test_samples_too_old_or_foreign_are_dropped_and_said(world: World) -> None:
    world.options = {"patience": 1}  # the bound is 1
    base = world.head
    for _ in range(2):
        await world.say(2)
        await world.settle()
    second = world.head
    assert second.step == 2
    await world.say(1, release=base.id)
    await world.say(1, release=world.chain.get(second.parent or "").id)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 4, "stale": 1}
    rollback(NAME, base.id, world.chain, world.board, actor="test", reason="try again")
    await world.say(1, release=second.id)
    await world.say(2, release=base.id)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 6, "stale": 1, "foreign": 2}
    assert world.trainer.orders[-1].base_step == 0


async def test_untrainable_answers_are_dropped_and_do_not_block(world: World) -> None:
    plain = record(50, world.head.id, untrainable="a tool was called")
    await world.store.append(plain)
    await world.store.append(report(50, plain.id, score=1.0))
    await world.say(2)
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2, "untrainable": 1}
    assert world.works["weights"].shown()["dropped"] == {"untrainable": 1}


async def test_review_holds_for_a_person(world: World) -> None:
    world.options = {"mode": "review"}
    base = world.head
    await world.say(2)
    await world.settle()
    (look,) = world.ledger.looks(NAME)
    assert (look.verdict, world.head, serving(world)) == ("hold", base, base.id)
    await world.say(2)
    assert await world.settle() == 0  # the line waits
    assert look.candidate is not None
    held = world.chain.get(look.candidate)
    draft = Draft("promote", {}, base=held.id, step=held.step, line=held.line, actor="ada", reason="looks good")
    world.chain.publish(NAME, draft, base.id)
    world.options = {}
    await world.settle()
    assert (world.head.seq, world.head.step) == (2, 2)
    assert serving(world) == world.head.id


async def test_a_held_line_ends_by_a_persons_reject(world: World) -> None:
    world.options = {"mode": "review"}
    await world.say(2)
    await world.settle()
    (held,) = world.ledger.looks(NAME)
    assert held.candidate is not None
    with pytest.raises(MissingError):
        world.ledger.overrule(NAME, "f" * 40, "ada", "not this one")
    world.ledger.overrule(NAME, held.candidate, "ada", "not this one")
    with pytest.raises(MissingError):
        world.ledger.overrule(NAME, held.candidate, "ada", "again")
    assert [(look.verdict, look.actor) for look in world.ledger.looks(NAME)] == [("reject", "ada"), ("hold", "learner")]
    world.options = {}
    await world.say(2)
    await world.settle()
    assert world.head.line == f"{held.line[:-1]}2"


async def hold(world: World) -> str:
    """Learn a step that is held; returns the candidate."""
    await world.say(2)
    await world.settle()
    newest = world.ledger.looks(NAME, limit=1)[0]
    assert (newest.verdict, newest.candidate is not None) == ("hold", True)
    assert newest.candidate is not None
    return newest.candidate


async def test_several_are_held_in_turn(world: World) -> None:
    """One is turned down, two are promoted; each time the line goes on from what is served, and all of it is told."""
    world.options = {"mode": "review"}
    audit, family, base = Audit(world.folder / "learn.db"), Family(world.chain), world.head
    one = await hold(world)
    decide.reject(NAME, one, world.chain, world.board, audit, family, actor="ada", reason="not this one")
    two = await hold(world)
    assert world.chain.get(two).line == f"{base.id[:12]}-2"
    first = decide.promote(NAME, two, world.chain, world.board, audit, actor="ada", reason="good")
    three = await hold(world)
    held = world.chain.get(three)
    assert (held.base, held.line, held.step) == (first.id, f"{first.id[:12]}-1", 2)
    second = decide.promote(NAME, three, world.chain, world.board, audit, actor="bob", reason="better")
    assert await world.settle() == 0
    assert (world.head, serving(world), second.step) == (second, second.id, 2)
    assert [release.operation for release in world.chain.history(NAME)] == ["promote", "promote", "create"]
    units = [set(release.consumed["weights"].units) for release in (second, first)]
    assert [len(names) for names in units] == [2, 2]
    assert not units[0] & units[1]
    assert world.ledger.fates(NAME, "weights") == {"trained": 6}
    told = [(act.kind, act.ref, act.actor) for act in world.journal.after(0) if act.kind != "create"]
    assert told == [
        ("hold", one, "learner"), ("reject", one, "ada"), ("hold", two, "learner"), ("promote", first.id, "ada"),
        ("hold", three, "learner"), ("promote", second.id, "bob"),
    ]  # fmt: skip


async def test_a_promotion_keeps_what_came_to_the_head_meanwhile(world: World) -> None:
    world.options = {"mode": "review"}
    candidate = await hold(world)
    rules = world.note("Stay calm.")
    await world.say(2)
    assert await world.settle() == 0  # another part's release does not end the wait
    audit = Audit(world.folder / "learn.db")
    made = decide.promote(NAME, candidate, world.chain, world.board, audit, actor="ada", reason="good")
    assert made.parts["harness"] == rules.parts["harness"]
    assert made.parts["weights"] == world.chain.get(candidate).parts["weights"]
    world.options = {}
    await world.settle()
    assert (world.head.step, world.head.line) == (2, f"{made.id[:12]}-1")
    assert world.head.parts["harness"] == rules.parts["harness"]


async def test_a_rollback_ends_the_wait_of_a_held_line(world: World) -> None:
    base = world.head
    await world.say(2)
    await world.settle()
    world.options = {"mode": "review"}
    candidate = await hold(world)
    back = rollback(NAME, base.id, world.chain, world.board, actor="ada", reason="start again")
    again = await hold(world)
    assert world.chain.get(again).line == f"{back.id[:12]}-1"
    audit = Audit(world.folder / "learn.db")
    with pytest.raises(ConflictError, match="other weights since"):
        decide.promote(NAME, candidate, world.chain, world.board, audit, actor="ada", reason="late")
    made = decide.promote(NAME, again, world.chain, world.board, audit, actor="ada", reason="good")
    await world.settle()
    assert (world.head, serving(world)) == (made, made.id)


async def test_a_pinned_scenario_holds_what_the_gate_accepts(world: World) -> None:
    base = world.head
    pin(NAME, base.id, world.chain, world.board, actor="ada", reason="a demonstration")
    candidate = await hold(world)
    (look,) = world.ledger.looks(NAME)
    assert look.reason.startswith(f"Held, because ada pinned the scenario to {base.id[:12]}: a demo")
    assert [act.kind for act in world.journal.about(candidate)] == ["hold"]
    assert (world.head, serving(world)) == (base, base.id)
    audit = Audit(world.folder / "learn.db")
    with pytest.raises(ConflictError, match="reef pin --off"):
        decide.promote(NAME, candidate, world.chain, world.board, audit, actor="ada", reason="good")
    unpin(NAME, world.board, actor="ada", reason="it is over")
    assert await world.settle() == 0  # a person decides about what was held
    decide.promote(NAME, candidate, world.chain, world.board, audit, actor="ada", reason="good")
    await world.say(2)
    await world.settle()
    assert [release.operation for release in world.chain.history(NAME)] == ["publish", "promote", "create"]


async def test_a_release_that_was_on_its_way_when_a_pin_came_is_taken_back(world: World) -> None:
    """The pin comes after the gate's verdict was looked at, before the release: nobody can order those two."""
    base, publish = world.head, world.chain.publish

    def late(scenario: str, draft: Draft, expected: str | None) -> Release:
        if draft.operation == "publish":
            world.journal.pin(NAME, base.id, actor="ada", reason="stop")
        return publish(scenario, draft, expected)

    world.chain.publish = late  # type: ignore[method-assign]
    await world.say(2)
    await world.settle()
    assert [release.operation for release in world.chain.history(NAME)] == ["rollback", "publish", "create"]
    assert (world.head.base, world.head.actor, serving(world)) == (base.id, "ada", world.head.id)
    assert sorted(act.kind for act in world.journal.after(0)) == ["create", "pin", "release", "rollback"]


async def test_what_happens_is_told_once_with_its_evidence(world: World) -> None:
    world.evaluator.verdicts = ["reject", "accept"]
    for _ in range(2):
        await world.say(2)
        await world.settle()
    _, reject, release = world.journal.after(0)
    looks = world.ledger.looks(NAME)
    assert (reject.kind, reject.ref, reject.reason) == ("reject", looks[1].candidate, "the script says reject")
    assert (release.kind, release.ref, release.actor) == ("release", world.head.id, "learner")
    assert release.detail == {
        "seq": 1, "base": world.head.base, "parent": world.head.parent, "step": 1, "line": world.head.line, "units": 2,
        "parts": ["weights"], "candidate": looks[0].candidate, "verdict": "accept", "policy": "scripted", "metrics": {},
    }  # fmt: skip
    before = world.journal.last()
    await world.close()
    await world.open()
    await world.settle()
    assert world.journal.last() == before


async def test_trouble_is_told_once_for_each_cause(world: World) -> None:
    world.tools = replace(world.tools, trainer=Flaky(world.trainer, ["full"] * 8 + ["before"] * 4))
    await world.say(2)
    for _ in range(12):
        await world.update()
    told = [act for act in world.journal.after(0) if act.kind == "trouble"]
    assert [(act.detail["part"], act.detail["failures"]) for act in told] == [("weights", 3), ("weights", 9)]
    assert "no space left" in told[0].reason
    assert "went away" in told[1].reason
    await world.settle()
    assert world.head.step == 1


async def test_what_could_not_be_told_is_told_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records' disk is full for a moment, just when a rejection is told."""
    world.evaluator.verdicts = ["reject"]

    def full(*args: object, **rest: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(world.journal, "tell", full)
        await world.say(2)
        await world.update()
        assert world.works["weights"].error == "the disk is full"
    await world.settle()
    assert [act.kind for act in world.journal.after(0)] == ["create", "reject"]


async def test_steps_without_a_gradient_are_no_candidates(world: World) -> None:
    """They make the line no older, so what was answered before them still trains."""
    world.tools = replace(world.tools, trainer=Still(world.trainer, 4))
    for _ in range(5):
        await world.say(2)
        await world.settle()
    assert len(world.evaluator.looked) == 1
    assert (world.head.seq, world.head.step) == (1, 5)
    assert world.ledger.fates(NAME, "weights") == {"trained": 10}
    assert len(world.head.consumed["weights"].units) == 10


def text(entry: tree.Entry) -> str:
    """A rule as it was reported, without the number that `Rules` gives it."""
    return str(entry.config["text"]).rpartition(" (")[0]


async def test_weights_and_harness_go_the_same_way(world: World) -> None:
    world.recipes = {"weights": Score(), "harness": Rules()}
    base = world.head
    await world.say(2, feedback="Answer in one word.")
    await world.settle()
    chain = world.chain.history(NAME)[::-1]
    assert [sorted(release.parts) for release in chain] == [["weights"], ["weights"], *[["harness", "weights"]] * 2]
    assert [release.step for release in chain] == [0, 1, 1, 1]
    assert serving(world) == world.head.id
    files = world.chain.files(world.head.id, "harness")
    assert [text(entry) for entry in tree.read(files[tree.FILE].read_bytes())] == ["Answer in one word."] * 2
    assert world.head.parts["weights"] == chain[1].parts["weights"]
    rollback(NAME, base.id, world.chain, world.board, actor="test", reason="undo all")
    assert "harness" not in world.head.parts
    await world.say(2, feedback="Be kind.")
    await world.settle()
    files = world.chain.files(world.head.id, "harness")
    assert [text(entry) for entry in tree.read(files[tree.FILE].read_bytes())] == ["Be kind."] * 2
    assert world.head.step == 1


async def test_a_harness_release_does_not_disturb_the_weights_line(world: World) -> None:
    world.recipes = {"weights": Score(), "harness": Rules()}
    world.evaluator.verdicts = ["undecided"]
    base = world.head
    await world.say(2)
    await world.settle()
    assert world.works["weights"].step == 1
    await world.say(1, feedback="Be kind.", score=None)
    await world.settle()
    middle = world.head
    assert (middle.seq, sorted(middle.parts)) == (1, ["harness", "weights"])
    await world.say(2)
    await world.settle()
    assert (world.head.line, world.head.step, world.head.base) == (f"{base.id[:12]}-1", 2, middle.id)
    assert world.head.parts["harness"] == middle.parts["harness"]


async def test_edits_that_come_to_nothing_are_accounted_for(world: World) -> None:
    world.recipes = {"harness": Rules()}
    for feedback in ("nothing", "bad", "Be kind."):
        await world.say(1, feedback=feedback)
    await world.settle()
    assert world.ledger.fates(NAME, "harness") == {"no edit": 1, "refused": 1, "trained": 1}
    assert (world.head.seq, world.works["harness"].error) == (1, None)


async def test_a_rollback_during_the_look_wins(world: World) -> None:
    """The operator goes back while the gate is at work: the candidate is not published, the line starts again."""
    await world.say(2)
    await world.settle()
    first = world.head
    base = world.chain.get(first.parent or "")

    def interrupt(candidate: Candidate, incumbent: Release) -> None:
        if incumbent.id == first.id:
            rollback(NAME, base.id, world.chain, world.board, actor="ada", reason="no")

    world.evaluator.before = interrupt
    await world.say(2)
    await world.settle()
    back = world.head
    assert (back.operation, back.seq, serving(world)) == ("rollback", 2, back.id)
    await world.say(2)
    await world.settle()
    assert (world.head.parent, world.head.step, world.head.line) == (back.id, 1, f"{back.id[:12]}-1")
    assert world.ledger.fates(NAME, "weights")["trained"] == 6


async def test_a_rollback_while_a_step_runs_wins(world: World) -> None:
    await world.say(2)
    await world.settle()
    first = world.head
    world.trainer._delay = 0.3
    await world.say(2)
    running = asyncio.create_task(world.update())
    await asyncio.sleep(0.15)
    back = rollback(NAME, first.parent or "", world.chain, world.board, actor="ada", reason="no")
    await running
    await world.settle()
    assert (world.head, serving(world)) == (back, back.id)
    assert world.ledger.fates(NAME, "weights") == {"trained": 4}  # finished, though its line is over
    assert len(world.evaluator.looked) == 1


async def test_another_parts_release_during_the_look_means_looking_again(world: World) -> None:
    world.recipes = {"weights": Score(), "harness": Rules()}
    edits = iter(range(2))

    def publish(candidate: Candidate, incumbent: Release) -> None:
        number = next(edits, None)
        if number is not None:
            publish_note(world, number, incumbent)

    world.evaluator.before = publish
    await world.say(2)
    await world.settle()
    assert [release.operation for release in world.chain.history(NAME)] == ["publish"] * 3 + ["create"]
    assert (world.head.step, sorted(world.head.parts)) == (1, ["harness", "weights"])
    incumbents = [incumbent.seq for _, incumbent, _ in world.evaluator.looked]
    assert incumbents == [0, 1, 2]
    assert {look for _, _, look in world.evaluator.looked} == {1}


def publish_note(world: World, number: int, incumbent: Release) -> None:
    """Somebody else publishes a harness."""
    data = tree.write((tree.Entry(f"note-{number}", "rules", {"text": "Stay calm."}),))
    draft = Draft("publish", {"harness": NewPart("tree", {tree.FILE: data})}, base=incumbent.id, step=incumbent.step)
    world.chain.publish(NAME, draft, incumbent.id)


async def test_a_head_that_never_stays_is_given_up_for_now(world: World) -> None:
    count = 0

    def publish(candidate: Candidate, incumbent: Release) -> None:
        nonlocal count
        count += 1
        if count <= 4:
            publish_note(world, count, incumbent)

    world.evaluator.before = publish
    await world.say(2)
    assert await world.update()
    assert count == 3
    assert world.ledger.looks(NAME) == []
    await world.settle()
    assert (count, world.head.step) == (5, 1)


class Still:
    """A trainer whose first steps change nothing."""

    def __init__(self, inner: FakeTrainer, steps: int) -> None:
        self.inner, self.steps = inner, steps

    async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        async for item in self.inner.step(order):
            if isinstance(item, Stepped):
                norm = 0.0 if order.step <= self.steps else 0.5
                item = msgspec.structs.replace(item, metrics=item.metrics | {"grad_norm": norm})
            yield item

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None


class Flaky:
    """A trainer whose process dies: before the step, after it, or that refuses."""

    def __init__(self, inner: object, faults: list[str]) -> None:
        self.inner, self.faults = inner, faults

    async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "before":
            raise WireError("trainer went away before it answered")
        if fault == "refuse":
            raise TrainError("loss is not finite")
        if fault == "teacher":
            raise TeacherError("the teacher t is not there")
        if fault == "surprise":
            raise OverflowError("math range error")
        if fault == "full":
            raise StoreError("cannot write: no space left")
        async for item in self.inner.step(order):  # type: ignore[attr-defined]
            if fault == "silent":
                return
            if fault != "after" or not isinstance(item, Stepped):
                yield item
        if fault == "after":
            raise WireError("trainer went away before it answered")

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("faults", [["before"], ["after"], ["silent"], ["before", "after"], ["refuse", "refuse"]])
async def test_a_trainer_that_dies_loses_nothing(world: World, faults: list[str]) -> None:
    world.tools = replace(world.tools, trainer=Flaky(world.trainer, list(faults)))
    receipts = await world.say(2)
    for _ in faults:
        assert not await world.update()
        work = world.works["weights"]
        assert work.shown()["state"] == "failed"
        assert work.error is not None
        assert work.rest_until > 0
        await world.say(1)  # more experience meanwhile: the order stays what it was
    await world.settle()
    assert world.chain.history(NAME)[-2].step == 1
    units = world.chain.history(NAME)[-2].consumed["weights"].units
    assert set(units) == {f"{receipt}:0" for receipt in receipts}
    assert world.works["weights"].error is None


@pytest.mark.parametrize(("fault", "words"), [("refuse", "not finite"), ("surprise", "OverflowError: math range")])
async def test_a_batch_that_cannot_be_trained_is_given_up(world: World, fault: str, words: str) -> None:
    world.tools = replace(world.tools, trainer=Flaky(world.trainer, [fault] * ATTEMPTS))
    await world.say(2)
    for _ in range(ATTEMPTS):
        assert world.ledger.fates(NAME, "weights") == {}
        await world.update()
    assert world.ledger.fates(NAME, "weights") == {"failed": 2}
    (look,) = world.ledger.looks(NAME)
    assert (look.verdict, words in look.reason) == ("reject", True)
    await world.say(2)
    await world.settle()
    assert (world.head.step, world.head.line) == (1, f"{look.line[:-1]}2")


@pytest.mark.parametrize("fault", ["full", "before"])
async def test_trouble_that_is_not_the_batchs_is_waited_out(world: World, fault: str) -> None:
    world.tools = replace(world.tools, trainer=Flaky(world.trainer, [fault] * (ATTEMPTS + 2)))
    await world.say(2)
    for _ in range(ATTEMPTS + 2):
        await world.update()
        assert world.works["weights"].error
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}


async def test_a_teacher_that_cannot_be_used_blocks_and_costs_nothing(world: World) -> None:
    """No unit is given up, however often; the order is made anew, as its teacher may be another by then; it is told."""
    whole = world.tools
    world.tools = replace(whole, trainer=Flaky(world.trainer, ["teacher"] * 2 * ATTEMPTS))
    receipts = await world.say(2)
    for _ in range(2 * ATTEMPTS):
        assert not await world.update()
        shown = world.works["weights"].shown()
        assert (shown["state"], shown["error"]) == ("blocked", "the teacher t is not there")
        assert shown["pending"] == 2
        assert world.works["weights"].rest_until > 0
        assert world.ledger.order(NAME, "weights") is None
    assert world.ledger.fates(NAME, "weights") == {}
    told = [act for act in whole.journal.newest(20, NAME) if act.kind == "trouble"]
    assert [act.reason for act in told] == ["the teacher t is not there"]
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    assert set(world.head.consumed["weights"].units) == {f"{receipt}:0" for receipt in receipts}
    assert world.works["weights"].shown()["state"] == "waiting"


async def test_an_engine_that_is_gone_delays_only(world: World) -> None:
    class Broken:
        async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
            raise EngineError("the engine is not ready")

    whole = world.evaluator
    world.evaluator = Broken()  # type: ignore[assignment]
    await world.say(2)
    await world.update()
    assert world.works["weights"].error == "the engine is not ready"
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}
    world.evaluator = whole
    await world.settle()
    assert world.head.step == 1


async def test_a_release_the_engine_cannot_load_yet_is_served_later(world: World) -> None:
    async def refuse(release_id: str) -> None:
        if world.chain.get(release_id).operation != "candidate":
            raise EngineError("out of memory")

    base = world.head
    load, world.engine.load = world.engine.load, refuse  # type: ignore[method-assign]
    await world.say(2)
    await world.update()
    assert (world.head.seq, serving(world)) == (1, base.id)
    assert world.works["weights"].error == "out of memory"
    world.engine.load = load  # type: ignore[method-assign]
    await world.settle()
    assert serving(world) == world.head.id


async def test_a_head_without_its_files_is_served_when_they_are_back(world: World) -> None:
    """Case 55: also by an engine that does not read them."""
    base = world.head
    align(NAME, world.chain, world.board)
    files: dict[str, Path | bytes] = {"weights.json": b"{}", "tokens.txt": b"t" * 70_000}
    head = world.chain.publish(NAME, Draft("publish", {"weights": NewPart("lora", files)}, step=1), base.id)
    place = world.chain.objects.place(head.parts["weights"].files["tokens.txt"][0])
    kept = place.rename(world.folder / "kept")
    for _ in range(2):
        await world.update()
        assert serving(world) == base.id
        assert "tokens.txt" in (world.works["weights"].error or "")
    kept.rename(place)
    await world.update()
    assert (serving(world), world.works["weights"].error) == (head.id, None)


async def test_old_step_folders_are_forgotten(world: World) -> None:
    world.evaluator.verdicts = ["accept"] * 5 + ["reject"]
    for _ in range(6):
        await world.say(2)
        await world.settle()
    kept = [place for place in world.training.glob(f"{NAME}/weights/*/*") if folder.read(place)]
    assert len(kept) <= 5
    head = world.head
    assert folder.path(world.training, NAME, "weights", head.line or "", head.step) in kept


@dataclass(frozen=True, slots=True)
class Full(Score):
    train: str = "full"


@dataclass(frozen=True, slots=True)
class Small(Score):
    train: str = "lora"


def full(world: World) -> None:
    """A release with full weights, as an earlier configuration made it."""
    draft = Draft("publish", {"weights": NewPart("full", {"weights.json": b"{}"}, {"kind": "full"})}, step=1)
    world.chain.publish(NAME, draft, world.head.id)


async def test_a_recipe_that_does_not_fit_the_head_takes_no_units(world: World) -> None:
    base = world.head
    full(world)
    world.recipes = {"weights": Small()}
    await world.say(5, release=base.id)
    for _ in range(3):
        assert not await world.update()
        shown = world.works["weights"].shown()
        assert (shown["state"], shown["pending"], shown["trained"]) == ("blocked", 5, 0)
        assert shown["error"] == (
            "release 1 has full weights and the recipe trains a LoRA, so reports wait: set train: full, or roll back "
            "to the base (reef rollback 0)"
        )
    assert world.ledger.fates(NAME, "weights") == {}
    assert world.trainer.orders == []
    told = [act.reason for act in world.journal.newest(50, NAME) if act.kind == "trouble"]
    assert told == [shown["error"]]
    rollback(NAME, base.id, world.chain, world.board, actor="ana", reason="")
    await world.settle()
    shown = world.works["weights"].shown()
    assert (shown["state"], shown["error"], shown["trained"]) == ("waiting", None, 4)


@dataclass(frozen=True, slots=True)
class Sized(Small):
    rank: int = 8
    alpha: float = 16.0


async def test_a_lora_of_another_size_takes_no_units(world: World) -> None:
    meta = {"kind": "lora", "rank": 8, "alpha": 16.0}
    draft = Draft("publish", {"weights": NewPart("lora", {"weights.json": b"{}"}, meta)}, step=1)
    world.chain.publish(NAME, draft, world.head.id)
    world.recipes = {"weights": Sized(rank=4)}
    await world.say(2)
    assert await world.settle() == 0
    assert world.works["weights"].shown()["error"] == (
        "release 1 has a LoRA of rank 8 and alpha 16 and the recipe says rank 4 and alpha 16, so reports wait: set "
        "them back, or roll back to the base (reef rollback 0)"
    )
    assert world.ledger.fates(NAME, "weights") == {}
    world.recipes, world.works = {"weights": Sized()}, {}
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 2}


async def test_full_weights_do_not_go_on_from_a_lora(world: World) -> None:
    world.recipes = {"weights": Small()}
    await world.say(2)
    await world.settle()
    assert world.head.parts["weights"].kind == "lora"
    world.recipes, world.works = {"weights": Full()}, {}
    await world.say(2)
    assert await world.settle() == 0
    assert "release 1 has a LoRA and the recipe trains full weights" in world.works["weights"].shown()["error"]
    world.recipes, world.works = {"weights": Small()}, {}
    await world.settle()
    assert world.ledger.fates(NAME, "weights") == {"trained": 4}


async def test_a_line_is_ended_by_the_recipe_that_began_it(world: World) -> None:
    world.evaluator.verdicts = ["undecided"]
    world.recipes = {"weights": Small()}
    await world.say(2)
    await world.settle()
    world.recipes, world.works = {"weights": Full()}, {}
    await world.say(2)
    assert await world.settle() == 0
    assert "which is not decided, has a LoRA" in world.works["weights"].shown()["error"]


async def test_a_line_keeps_its_newest_step_and_what_a_person_took_from_it(world: World) -> None:
    """Earlier steps leave their acknowledgement. One that was promoted while the next was being made stays whole: the
    line that begins there goes on from its optimizer."""
    world.options = {"patience": 9}
    world.evaluator.verdicts = ["undecided"] * 4
    for _ in range(3):
        await world.say(2)
        await world.settle()
    line = f"{world.head.id[:12]}-1"

    def whole() -> list[int]:
        places = {step: folder.path(world.training, NAME, "weights", line, step) for step in range(1, 5)}
        return [step for step, place in places.items() if (state := folder.read(place)) and state.files]

    assert whole() == [3]
    newest = world.ledger.looks(NAME)[0].candidate

    class Meanwhile:
        async def step(self, order: Step) -> AsyncIterator[Progress | Stepped]:
            promote(NAME, newest, world.chain, world.board, actor="ana", reason="good enough")
            async for item in world.trainer.step(order):
                yield item

    world.tools = replace(world.tools, trainer=Meanwhile())  # type: ignore[arg-type]
    await world.say(2)
    await world.update()
    assert (world.head.operation, world.head.line, world.head.step) == ("promote", line, 3)
    assert whole() == [3, 4]
