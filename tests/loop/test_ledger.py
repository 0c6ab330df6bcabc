"""The ledger: one fate a unit, one order a part, audit rows, and what survives a reopening."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import StoreError
from reef.core.nouns import Evaluation, Guard
from reef.core.wire import Step
from reef.experience.units import Drop
from reef.loop.ledger import Ledger, Look, Order, set_aside

STEP = Step(
    scenario="s", part="weights", line="abc-1", step=1, base_release="abc", base_step=0, objective="x:Y",
    options={"rate": 0.5}, batch_id="batch", unit_ids=["u:0", "u:1"], cursor=7, data=[],
)  # fmt: skip
ORDER = Order("weights", STEP, ("rep_1", "rep_2"), {"units": 2.0}, 0.5)
FATES = ["stale", "trained", "duplicate"]
LOOK = Look("s", "weights", "abc-1", 1, 1, "undecided", "not sure", "cand", timings={"gate": 2.0})


@pytest.fixture
def ledger(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Ledger(tmp_path / "learn.db")
    yield made
    made.close()


def test_an_order_stays_until_it_is_settled(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.order("s", "weights") is None
    ledger.reserve(ORDER)
    with pytest.raises(StoreError):
        ledger.reserve(replace(ORDER, waited=9.0))
    again = Ledger(tmp_path / "learn.db")
    assert again.order("s", "weights") == ORDER
    assert again.order("s", "harness") is None
    assert (ledger.retry(ORDER), ledger.retry(ORDER)) == (1, 2)
    again.settle(ORDER, "trained", {"loss": 0.5})
    again.close()
    assert ledger.order("s", "weights") is None
    assert ledger.fates("s", "weights") == {"trained": 2}
    assert ledger.trained("s", "weights", "abc-1", 1) == ("u:0", "u:1")
    assert ledger.cursor("s", "weights") == 7
    assert ledger.settled("s", "weights", "u:1") == "rep_2"
    assert ledger.fate("s", "u:0") == [("weights", "rep_1", "trained", "abc-1", 1)]
    ((line, step, metrics, at),) = ledger.metrics("s", "weights")
    assert (line, step, metrics, at > 0) == ("abc-1", 1, {"loss": 0.5}, True)


def test_a_freed_order_leaves_its_units_free(ledger: Ledger) -> None:
    ledger.reserve(ORDER)
    ledger.release(ORDER)
    assert ledger.settled("s", "weights", "u:0") is None
    assert (ledger.cursor("s", "weights"), ledger.fates("s", "weights")) == (0, {})


def test_the_cursor_never_goes_back(ledger: Ledger) -> None:
    ledger.advance("s", "weights", 9)
    ledger.advance("s", "weights", 4)
    assert (ledger.cursor("s", "weights"), ledger.cursor("s", "harness")) == (9, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("123"), st.sampled_from(FATES))))
def test_a_unit_has_at_most_one_fate_besides_duplicate(moves: list[tuple[str, str, str]]) -> None:
    ledger = Ledger(Path(":memory:"))
    for unit, report, fate in moves:
        if fate == "trained":
            ledger.restore("s", "weights", "line", 1, [unit])
        else:
            ledger.drop("s", "weights", [Drop(unit, report, fate)], 0)  # type: ignore[arg-type]
    for unit in "abc":
        fates = [fate for _, _, fate, _, _ in ledger.fate("s", unit) if fate != "duplicate"]
        assert len(fates) <= 1
        first = next((fate for name, _, fate in moves if name == unit and fate != "duplicate"), None)
        if fates and not any(fate == "duplicate" for name, _, fate in moves if name == unit):
            assert fates == [first]
    ledger.close()


def test_looks_are_kept_once_and_whole(ledger: Ledger) -> None:
    guards = (Guard("finite", True, 1.0, None, "ok"),)
    evaluation = Evaluation("guarded", "undecided", "not sure", "cand", "head", guards)
    ledger.audit(replace(LOOK, evaluation=evaluation))
    ledger.audit(replace(LOOK, reason="said again after a crash"))
    ledger.audit(replace(LOOK, step=2, look=2, verdict="accept", release="r1"))
    newest, oldest = ledger.looks("s", "weights", "abc-1")
    assert (oldest.reason, oldest.evaluation, oldest.timings) == ("not sure", evaluation, {"gate": 2.0})
    assert oldest.at > 0
    ledger.timed(newest, 0.25)
    assert ledger.looks("s", limit=1)[0].timings == {"gate": 2.0, "activation": 0.25}
    assert (ledger.knows("s", "r1"), ledger.knows("s", "r2"), ledger.knows("t", "r1")) == (True, False, False)
    assert ledger.looks("s", "harness") == []
    assert ledger.lines("s", "weights", "abc") == {"abc-1"}
    assert ledger.lines("s", "weights", "ab") == set()


def test_a_full_disk_is_a_store_error_and_nothing_is_half_written(ledger: Ledger) -> None:
    ledger.reserve(ORDER)
    ledger._base.execute("PRAGMA max_page_count=1")
    with pytest.raises(StoreError, match="cannot be written"):
        ledger.drop("s", "weights", [Drop(f"x{n}:0", "rep", "stale") for n in range(5000)], 99)
    ledger._base.execute("PRAGMA max_page_count=100000")
    assert (ledger.fates("s", "weights"), ledger.cursor("s", "weights")) == ({}, 0)
    ledger.settle(ORDER, "trained", {})
    assert ledger.fates("s", "weights") == {"trained": 2}


def test_a_file_of_a_newer_reef_or_no_database_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "learn.db").close()
    base = sqlite3.connect(tmp_path / "learn.db")
    base.execute("PRAGMA user_version=99")
    base.close()
    with pytest.raises(StoreError, match="newer"):
        Ledger(tmp_path / "learn.db")
    (tmp_path / "text.db").write_text("not a database at all, only some text that is long enough" * 20)
    with pytest.raises(StoreError, match="cannot be opened"):
        Ledger(tmp_path / "text.db")


def test_a_damaged_file_is_set_aside_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "learn.db"
    assert set_aside(path) is None
    path.write_bytes(b"garbage" * 5000)
    (tmp_path / "learn.db-wal").write_bytes(b"more")
    (tmp_path / "learn.db-shm").write_bytes(b"and more")
    aside = set_aside(path)
    assert aside is not None
    assert aside.name.startswith("learn.db.damaged-")
    assert aside.read_bytes() == b"garbage" * 5000
    assert (aside.parent / (aside.name + "-wal")).read_bytes() == b"more"
    assert not list(tmp_path.glob("learn.db-*"))
    assert "is damaged (it is not a database)" in caplog.text
    fresh = Ledger(path)
    fresh.reserve(ORDER)
    fresh.close()
    assert set_aside(path) is None, "a sound file stays"
    again = Ledger(path)
    assert again.order("s", "weights") == ORDER
    again.close()


def test_damage_in_the_middle_is_found(tmp_path: Path) -> None:
    path = tmp_path / "learn.db"
    ledger = Ledger(path)
    ledger.drop("s", "weights", [Drop(f"x{n}:0", "rep", "stale") for n in range(3000)], 9)
    ledger.close()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(data)
    writing = sqlite3.connect(path)  # a learner that is killed leaves its -wal
    writing.execute("CREATE TABLE more (x)")
    log = (tmp_path / "learn.db-wal").read_bytes()
    assert log
    aside = set_aside(path)
    assert aside is not None
    assert (tmp_path / (aside.name + "-wal")).read_bytes() == log
    assert aside.read_bytes() == data
    writing.close()


def test_a_file_that_is_in_use_is_not_set_aside(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "learn.db")
    ledger.reserve(ORDER)
    assert set_aside(tmp_path / "learn.db") is None
    assert ledger.order("s", "weights") == ORDER
    ledger.close()
