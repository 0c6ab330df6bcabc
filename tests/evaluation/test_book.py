"""What the gate must remember: exactly once, over crashes, in bounded space."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import StoreError
from reef.core.nouns import Cost
from reef.evaluation import book as module
from reef.evaluation.book import Book, Generation, Kept, digest, month


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gate.db"


@pytest.fixture
def book(path):
    found = Book(path)
    yield found
    found.close()


def again(book, path):
    book.close()
    return Book(path)


def test_scores_are_kept_by_scenario_side_task_and_seed(book, path):
    rows = [Kept("a", "t", 1, 0.25), Kept("a", "t", 2, 0.0, failed=True), Kept("b", "t", 1, 1.0)]
    book.keep("s", rows, Cost(3))
    book.keep("s", [Kept("a", "t", 1, 0.75)], Cost())
    book.keep("other", [Kept("a", "t", 9, 0.5)], Cost())
    book = again(book, path)
    assert book.scores("s", "a") == {("t", 1): rows[0], ("t", 2): rows[1]}
    assert book.scores("s", "b") == {("t", 1): rows[2]}
    assert book.scores("s", "c") == {}
    assert book.spent("s").calls == 3


def test_a_generation_ends_with_a_release(book):
    assert book.generation("s") == Generation(0, 0)
    assert book.use("s", "r0", "c1") == Generation(1, 1)
    assert book.use("s", "r0", "c1") == Generation(1, 1), "the same candidate is one use"
    assert book.use("s", "r0", "c2") == Generation(1, 2)
    assert book.use("other", "r0", "c2") == Generation(1, 1)
    assert book.use("s", "r1", "c2") == Generation(2, 1)
    assert book.use("s", "r0", "c1") == Generation(3, 1), "a rollback stands anew"
    assert book.generation("s") == Generation(3, 1)


def test_a_generation_that_served_for_many_is_over(book, monkeypatch):
    monkeypatch.setattr(module, "ROTATE", 3)
    found = [book.use("s", "r", name).number for name in ("a", "b", "a", "c", "b", "d", "d", "c")]
    assert found == [1, 1, 1, 1, 1, 2, 2, 2]


def test_the_order_of_a_generation_only_grows(book, path):
    book.use("s", "r", "c")
    book.draw("s", 1, [("b", None), ("a", "receipt")])
    book.draw("s", 1, [("c", None)])
    book = again(book, path)
    assert book.drawn("s", 1) == [("b", None), ("a", "receipt"), ("c", None)]
    assert book.asked("s", 1) == set()
    book.draw("s", 2, [("d", None)])
    assert book.asked("s", 3) == {"a", "b", "c", "d"}


def test_a_suites_candidates_are_counted(book):
    book.use("s", "r", "a")
    assert book.decisions("s", "qa@1") == 1
    book.use("s", "r", "a")
    book.use("s", "r", "b")
    book.use("s", "r2", "b")
    assert book.decisions("s", "qa@1") == 3
    assert book.decisions("s", "qa@2") == 1, "a suite with other tasks begins anew"


def test_the_file_stays_small(book):
    for number in range(40):
        generation = book.use("s", f"r{number}", "c").number
        book.keep("s", [Kept(f"side{number}", f"t{n}", n, 1.0) for n in range(20)], Cost())
        book.draw("s", generation, [(f"t{n}", None) for n in range(20)])
        book.turn("s", f"c{number}")
        book.won("s", f"c{number}")
    rows = {table: book._read(f"SELECT count(*) FROM {table}")[0][0] for table in ("scores", "drawn", "uses", "turns")}
    assert rows == {"scores": 40, "drawn": 120, "uses": 6, "turns": 1}
    assert len(book.scores("s", "side38")) == 20, "the generation before the last is kept"


def test_turns_are_counted_from_the_last_accepted_candidate(book, path):
    assert [book.turn("s", name) for name in ("a", "b", "a", "c", "b")] == [1, 2, 1, 3, 2]
    book.won("s", "c")
    book = again(book, path)
    assert book.turn("s", "c") == 3, "an accepted candidate that is looked at again is no new one"
    assert [book.turn("s", name) for name in ("d", "a", "d")] == [1, 2, 1]
    book.won("s", "c")
    assert book.turn("s", "e") == 3, "an acceptance counts once"
    book.won("s", "e")
    assert book.turn("s", "f") == 1
    assert book.turn("other", "f") == 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=30))
def test_turns_are_a_count_without_gaps(steps):
    """Against a plain model: what each candidate's place is, whatever is asked again and whoever wins."""
    book, places, winner, last = Book.memory(), {}, None, {}
    for name, wins in steps:
        wanted = last[name] if name == winner and name not in places else places.setdefault(name, len(places) + 1)
        assert book.turn("s", name) == wanted
        if wins and name != winner:
            last = {name: wanted}
            book.won("s", name)
            winner, places = name, {}
    book.close()


def test_costs_are_by_month_and_a_missing_price_is_not_zero(book, monkeypatch):
    monkeypatch.setattr(module, "month", lambda: "2026-10")
    book.charge("s", Cost(1, 10, 5, 0.5, 0.25))
    monkeypatch.setattr(module, "month", lambda: "2026-11")
    assert book.spent("s") == Cost()
    book.charge("s", Cost(2, 20, 6, 1.5, 0.5))
    book.charge("s", Cost(1, 1, 1, 1.0, None))
    assert book.spent("s") == Cost(3, 21, 7, 2.5, None)
    assert book.paid("s") == 0.5
    assert book.spent("s", "2026-10") == Cost(1, 10, 5, 0.5, 0.25)
    assert book.spent("other") == Cost()


def test_months_are_utc():
    assert month(0) == "1970-01"
    assert month(1764547199) == "2025-11"
    assert month(1764547200) == "2025-12"


def test_failures_are_promoted_and_taken_back(book, path):
    assert book.promote("s", "r1", "p1", actor="watch", reason="worse")
    assert not book.promote("s", "r1", "p1", actor="me")
    book.promote("s", "r2", "p2", actor="me")
    book = again(book, path)
    assert {one.receipt for one in book.failures("s")} == {"r1", "r2"}
    assert [(one.actor, one.reason) for one in book.failures("s") if one.receipt == "r1"] == [("watch", "worse")]
    assert book.failed("s", "p1")
    assert not book.failed("other", "p1")
    assert book.demote("s", "r1")
    assert not book.demote("s", "r1")
    assert not book.failed("s", "p1")


def test_a_key_depends_on_every_word_and_their_borders():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("a", 1) == digest("a", 1)
    assert len(digest("ü\ud800")) == 32


def test_damage_is_set_aside(path, caplog):
    path.write_bytes(b"this is no database, it is a letter")
    book = Book.open(path)
    assert book.turn("s", "a") == 1
    book.close()
    assert "gate.db is damaged" in caplog.text
    assert "counted from zero" in caplog.text
    assert len(list(path.parent.glob("gate.db.damaged-*"))) == 1
    Book.open(path).close()
    assert len(list(path.parent.glob("gate.db.damaged-*"))) == 1, "a sound file stays"


def test_others_only_look(path):
    with pytest.raises(StoreError, match="cannot be opened"):
        Book(path, reading=True)
    assert not path.exists()
    book = Book(path)
    book.charge("s", Cost(3))
    other = Book(path, reading=True)
    assert other.spent("s").calls == 3
    book.charge("s", Cost(4))
    assert other.spent("s").calls == 7
    with pytest.raises(StoreError, match="cannot be written"):
        other.charge("s", Cost(1))
    other.close()
    book.close()


def test_a_newer_file_and_one_that_cannot_be_written_say_so(path, tmp_path):
    Book(path).close()
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version=99")
    with pytest.raises(StoreError, match="newer Reef"):
        Book(path)
    with pytest.raises(StoreError, match="check permissions"):
        Book(tmp_path / "no" / "gate.db")
    with pytest.raises(StoreError, match=r"cannot be written .*free space"):
        book = Book(tmp_path / "locked.db")
        book._base.execute("PRAGMA query_only=ON")
        book.charge("s", Cost(1))


WORK = """
import sys
from reef.core.nouns import Cost
from reef.evaluation.book import Book, Kept
book = Book(sys.argv[1])
for number in range(20):
    book.use("s", "r", f"c{number}")
    book.keep("s", [Kept(f"c{number}", f"t{n}", n, 1.0) for n in range(4)], Cost(4))
    print(number, flush=True)
"""


@pytest.mark.parametrize("failpoint", ["book.in_use:7", "book.in_keep:7", "book.after_keep:7"])
def test_a_kill_loses_nothing_that_was_promised_and_halves_nothing(path, failpoint):
    environment = os.environ | {"REEF_FAILPOINT": failpoint}
    done = subprocess.run([sys.executable, "-c", WORK, str(path)], env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    promised = len(done.stdout.split())
    assert promised == 6
    book = Book(path)
    kept = [len(book.scores("s", f"c{number}")) for number in range(20)]
    whole = 7 if failpoint == "book.after_keep:7" else 6
    assert kept == [4] * whole + [0] * (20 - whole)
    assert book.spent("s").calls == 4 * whole
    assert book.generation("s").uses == (6 if failpoint == "book.in_use:7" else 7)
    book.close()
