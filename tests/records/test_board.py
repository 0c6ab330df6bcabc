"""The board: what is served, seen by every process, cheap to follow."""

import sqlite3
import threading

import pytest

from reef.core.errors import MissingError, StoreError
from reef.core.nouns import Serving
from reef.records.board import Board


@pytest.fixture
def boards(tmp_path):
    pair = Board(tmp_path / "records.db"), Board(tmp_path / "records.db")
    yield pair
    for board in pair:
        board.close()


def test_a_flip_is_seen_by_others_and_moves_the_version(boards):
    here, there = boards
    before = here.version(), there.version()
    assert here.get("a") is None
    assert here.flip("a", "r1") == Serving("a", "r1", 1)
    assert there.get("a") == Serving("a", "r1", 1)
    assert here.version() > before[0]
    assert there.version() > before[1]
    assert here.version() == there.version()
    assert there.flip("a", "r2") == Serving("a", "r2", 2)
    here.flip("b", "r1")
    assert here.all() == there.all() == {"a": Serving("a", "r2", 2), "b": Serving("b", "r1", 1)}


def test_the_same_release_again_changes_nothing(boards):
    here, there = boards
    first = here.flip("a", "r1")
    version = there.version()
    assert there.flip("a", "r1") == here.flip("a", "r1") == first
    assert there.version() == here.version() == version


async def test_records_do_not_move_the_version(boards, store, record):
    version = boards[0].version()
    await store.append(record())
    assert boards[0].version() == version


def test_concurrent_flips_count_each_once(boards):
    def flips(board, name):
        for number in range(40):
            board.flip("a", f"{name}{number}")

    threads = [threading.Thread(target=flips, args=(boards[i % 2], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert boards[0].get("a").epoch == 160


def test_scenarios_come_go_and_come_back(boards):
    here, there = boards
    assert here.create_scenario("a", {"recipe": "sao", "batch_size": 32})
    assert not there.create_scenario("a", {"recipe": "record"})
    assert there.create_scenario("b", {})
    assert list(here.scenarios().items()) == [("a", {"recipe": "sao", "batch_size": 32}), ("b", {})]
    here.change_scenario("a", {"recipe": "record"})
    here.flip("a", "r1")
    version = here.version()
    there.archive("a")
    assert here.version() > version
    assert list(here.scenarios()) == ["b"]
    assert here.get("a") is None
    assert here.all() == {}
    for act in (lambda: here.archive("a"), lambda: here.change_scenario("a", {}), lambda: here.archive("c")):
        with pytest.raises(MissingError, match="reef scenarios"):
            act()
    assert here.create_scenario("a", {"recipe": "sao"})
    assert there.scenarios()["a"] == {"recipe": "sao"}
    assert there.get("a") == Serving("a", "r1", 1)


def test_a_new_board_has_what_the_old_one_had(boards, tmp_path):
    boards[0].create_scenario("a", {"x": [1, None]})
    boards[0].flip("a", "r9")
    fresh = Board(tmp_path / "records.db")
    assert fresh.scenarios() == {"a": {"x": [1, None]}}
    assert fresh.get("a").release_id == "r9"
    fresh.close()


def test_probe_writes_and_changes_nothing(tmp_path):
    board = Board(tmp_path / "records.db")
    before = board.version()
    board.probe()
    assert board.version() == before
    board.close()


def test_probe_of_a_store_that_cannot_be_written(tmp_path):
    board = Board(tmp_path / "records.db", busy=0.1)
    other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        board.probe()
    other.execute("ROLLBACK")
    board.probe()
    other.close()
    board.close()
