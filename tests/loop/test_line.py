"""Where a line stands: found from ledger, folders and chain, whatever happened before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.core.nouns import Part, Release
from reef.loop.ledger import Ledger, Look
from reef.loop.line import find, root

W0, W1, H0 = Part("base", {}), Part("lora", {"a": ("0" * 64, 1)}), Part("tree", {"harness.json": ("1" * 64, 1)})


def release(name: str, parent: str | None, operation: Any, step: int, **parts: Part) -> Release:
    before = parent and parent * 40
    return Release(
        name * 40, 0, "s", operation, before, parts, before, step, None, None, None, {}, "x", "", 0.0  # type: ignore[arg-type]
    )  # fmt: skip


CHAIN = {
    made.id: made
    for made in (
        release("a", None, "create", 0, weights=W0),
        release("b", "a", "publish", 1, weights=W1),
        release("c", "b", "publish", 1, weights=W1, harness=H0),
        release("d", "c", "rollback", 1, weights=W1),
        release("e", "d", "publish", 1, weights=W1, harness=H0),
        release("f", "e", "publish", 2, weights=W1, harness=H0),  # a step that changed no byte
        release("0", "f", "promote", 2, weights=W1, harness=H0),
    )
}


@pytest.mark.parametrize(
    ("head", "weights", "harness"),
    ["aaa", "bba", "cbc", "ddd", "ede", "ffe", "000"],
)
def test_the_root_is_the_release_that_brought_the_part(head: str, weights: str, harness: str) -> None:
    assert root(CHAIN.__getitem__, CHAIN[head * 40], "weights").id == weights * 40
    assert root(CHAIN.__getitem__, CHAIN[head * 40], "harness").id == harness * 40


def step(training: Path, line: str, *numbers: int) -> None:
    for number in numbers:
        place = training / "s" / "weights" / line / str(number)
        place.mkdir(parents=True)
        (place / "state.json").write_text("{}")


def test_a_line_is_found_again_and_a_new_one_begins_when_it_ended(tmp_path: Path) -> None:
    ledger, base = Ledger(tmp_path / "learn.db"), CHAIN["b" * 40]
    one, two, three = (f"{'b' * 12}-{n}" for n in (1, 2, 3))

    def now() -> tuple[str, int, int, int, bool]:
        line = find(ledger, tmp_path, "s", "weights", base)
        return line.name, line.step, line.looks, line.looked, line.held

    assert now() == (one, 1, 0, 1, False)
    step(tmp_path, one, 2, 3)
    step(tmp_path, f"{'c' * 12}-7", 9)
    assert now() == (one, 3, 0, 1, False)
    look = Look("s", "weights", one, 3, 1, "undecided", "?")
    ledger.audit(look)
    assert now() == (one, 3, 1, 3, False)
    step(tmp_path, one, 4)
    line = find(ledger, tmp_path, "s", "weights", base)
    assert [line.due(every) for every in (1, 2, 3)] == [True, False, True]
    ledger.audit(replace(look, step=4, look=2, verdict="reject"))
    assert now() == (two, 1, 0, 1, False)
    step(tmp_path, two, 2)
    assert now() == (two, 2, 0, 1, False)
    ledger.audit(replace(look, line=two, step=2, verdict="hold"))
    assert now() == (two, 2, 0, 1, True)
    assert not find(ledger, tmp_path, "s", "weights", base).due(1)
    ledger.audit(replace(look, line=two, step=2, verdict="reject", actor="ada"))
    assert now() == (three, 1, 0, 1, False)
    assert find(ledger, tmp_path, "s", "harness", base).base_step == 0
    ledger.close()


def test_steps_that_changed_nothing_are_not_due_and_age_nothing(tmp_path: Path) -> None:
    ledger, base, name = Ledger(tmp_path / "learn.db"), CHAIN["b" * 40], f"{'b' * 12}-1"

    def take(number: int, **metrics: float) -> None:
        step(tmp_path, name, number)
        ledger.restore("s", "weights", name, number, [f"unit {number}"], batch=f"batch {number}", metrics=metrics)

    take(2, grad_norm=0.0)
    take(3, grad_norm=0.0)
    line = find(ledger, tmp_path, "s", "weights", base)
    assert (line.step, line.age, line.due(1), line.due(2)) == (3, 1, False, False)
    take(4, grad_norm=1e-30)
    take(5, grad_norm=0.0)
    line = find(ledger, tmp_path, "s", "weights", base)
    assert (line.step, line.age, line.due(1), line.due(2)) == (5, 2, True, True)
    ledger.audit(Look("s", "weights", name, 5, 1, "undecided", "?"))
    take(6, grad_norm=0.0)
    assert not find(ledger, tmp_path, "s", "weights", base).due(1)
    take(7)  # a trainer that measures no gradient
    assert find(ledger, tmp_path, "s", "weights", base).due(1)
    ledger.close()
