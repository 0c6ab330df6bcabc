"""The queue of what people ask for: in order, once for each id, bounded, and seen by everybody."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reef.core import failpoint
from reef.core.errors import BusyError, ConflictError, InputError, MissingError
from reef.records import queue as room
from reef.records.board import Board
from reef.records.queue import STATES, Queue, is_ask

SAY = {"text": "Run the tests first."}


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path / "records.db")
    yield made
    made.close()


@pytest.fixture
def queue(board):
    return Queue(board)


def put(queue, name="work", **more):
    ask, duplicate = queue.put(name, "harness", "instruction", more.pop("body", SAY), **{"actor": "ada"} | more)
    assert duplicate is False
    return ask


def test_an_ask_is_what_was_put(queue):
    ask = put(queue)
    assert is_ask(ask.id)
    assert (ask.scenario, ask.part, ask.kind, ask.body, ask.actor) == ("work", "harness", "instruction", SAY, "ada")
    assert (ask.state, ask.said, ask.candidate, ask.release, ask.open) == ("queued", "", None, None, True)
    assert queue.get(ask.id) == ask
    assert queue.open("work") == queue.open("work", "harness") == queue.list("work") == [ask]
    assert queue.open("work", "weights") == queue.open("other") == []


def test_the_same_id_is_stored_once_and_other_content_is_refused(queue):
    ask = put(queue, id="ask_mine")
    again, duplicate = queue.put("work", "harness", "instruction", dict(SAY), actor="bob", id="ask_mine")
    assert (again, duplicate) == (ask, True)
    for other in (("work", "harness", "instruction", {"text": "else"}), ("else", "harness", "instruction", SAY)):
        with pytest.raises(ConflictError, match="other content"):
            queue.put(*other, actor="ada", id="ask_mine")
    for wrong in ("mine", "ask_", "ask_a b", "ask_" + "x" * 65, "ask_$(rm -rf ~)"):
        with pytest.raises(InputError):
            put(queue, id=wrong)
    with pytest.raises(MissingError):
        queue.get("ask_none")
    assert queue.list("work") == [ask]


def test_so_many_may_wait_and_no_more(queue):
    asks = [put(queue) for _ in range(room.MOST)]
    with pytest.raises(BusyError, match="reef propose --list"):
        put(queue)
    put(queue, "another")
    again, duplicate = queue.put("work", "harness", "instruction", SAY, actor="ada", id=asks[0].id)
    assert (again, duplicate) == (asks[0], True), "a retry is answered all the same"
    queue.tell(asks[0].id, "taken")
    with pytest.raises(BusyError):
        put(queue)
    queue.tell(asks[0].id, "done", "nothing to change")
    put(queue)


def test_what_is_settled_long_ago_makes_room(queue, monkeypatch):
    monkeypatch.setattr(room, "KEPT", 5)
    asks = [put(queue) for _ in range(4)]
    queue.tell(asks[0].id, "held", candidate="c0ffee")
    for ask in asks[1:]:
        queue.tell(ask.id, "done")
    asks += [put(queue) for _ in range(6)]
    left = {ask.id for ask in queue.list("work")}
    assert asks[0].id in left, "what waits for a person stays"
    assert not {ask.id for ask in asks[1:4]} & left
    assert {ask.id for ask in asks[4:]} <= left


def test_every_change_is_seen_by_another_process(queue, board, tmp_path):
    other = Board(tmp_path / "records.db")
    seen, ask = [other.version()], put(queue)
    seen.append(other.version())
    assert queue.tell(ask.id, "held", "wait", candidate="c0ffee") is True
    seen.append(other.version())
    assert queue.tell(ask.id, "held", "wait", candidate="c0ffee") is False, "nothing new"
    assert queue.tell("ask_gone", "done") is False
    assert other.version() == seen[-1]
    assert len(set(seen)) == 3
    assert Queue(other).get(ask.id).candidate == "c0ffee"
    other.close()


def test_sixteen_writers_at_once_lose_nothing_and_store_nothing_twice(board, queue, tmp_path):
    start = threading.Barrier(16)

    def write(number):
        own = Board(tmp_path / "records.db")
        mine, wall = Queue(own), []
        start.wait()
        for turn in range(3):
            mine.put(f"s{number}", "harness", "proposal", {"n": turn}, actor=f"w{number}", id=f"ask_{number}_{turn}")
            wall.append(mine.put("shared", "harness", "instruction", {"n": turn}, actor="all", id=f"ask_{turn}"))
        own.close()
        return wall

    with ThreadPoolExecutor(16) as pool:
        found = [pair for wall in pool.map(write, range(16)) for pair in wall]
    assert [ask.body["n"] for ask in queue.open("shared")] == sorted(ask.body["n"] for ask in queue.open("shared"))
    assert sum(not duplicate for _, duplicate in found) == 3
    for number in range(16):
        assert [ask.body["n"] for ask in queue.open(f"s{number}")] == [0, 1, 2]
    seqs = [ask.seq for number in range(16) for ask in queue.open(f"s{number}")]
    assert len(set(seqs)) == 48


def test_sixteen_writers_together_respect_the_bound(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MOST", 10)
    start = threading.Barrier(16)

    def write(number):
        own = Board(tmp_path / "records.db")
        start.wait()
        try:
            return bool(Queue(own).put("work", "harness", "instruction", SAY, actor=str(number)))
        except BusyError:
            return False
        finally:
            own.close()

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(write, range(16))) == 10
    assert len(queue.open("work")) == 10


@pytest.mark.parametrize("point", ["queue.in_put", "queue.stored", "queue.in_tell", "queue.told"])
def test_a_kill_beside_a_write_leaves_it_whole_or_not_at_all(tmp_path, point):
    path = tmp_path / "records.db"
    first = Board(path)
    Queue(first).put("work", "harness", "instruction", SAY, actor="ada", id="ask_first")
    first.close()
    if (child := os.fork()) == 0:
        try:
            failpoint.arm(point)
            own = Queue(Board(path))
            own.put("work", "harness", "instruction", SAY, actor="ada", id="ask_second")
            own.tell("ask_first", "held", "wait", candidate="c0ffee")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    after = Board(path)
    queue = Queue(after)
    assert [ask.id for ask in queue.list("work")] == (
        ["ask_first"] if point == "queue.in_put" else ["ask_second", "ask_first"]
    )
    told = queue.get("ask_first")
    assert (told.state, told.candidate) == (("held", "c0ffee") if point == "queue.told" else ("queued", None))
    again, duplicate = queue.put("work", "harness", "instruction", SAY, actor="ada", id="ask_second")
    assert (again.state, duplicate) == ("queued", point != "queue.in_put")
    after.close()


class Model(RuleBasedStateMachine):
    """Rows against a plain list of what was put and told."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.board = Board(Path(self.folder.name) / "records.db")
        self.queue = Queue(self.board)
        self.rows: dict[str, list] = {}

    def teardown(self):
        self.board.close()
        self.folder.cleanup()

    @rule(name=st.sampled_from("abcdef"), scenario=st.sampled_from(["one", "two"]), text=st.text(max_size=8))
    def put(self, name, scenario, text):
        body = {"text": text}
        try:
            ask, duplicate = self.queue.put(scenario, "harness", "instruction", body, actor="a", id=f"ask_{name}")
        except ConflictError:
            assert self.rows[f"ask_{name}"][:2] != [scenario, text]
            return
        assert duplicate == (ask.id in self.rows)
        self.rows.setdefault(ask.id, [scenario, text, "queued", ""])
        assert self.rows[ask.id][:2] == [scenario, text]

    @rule(name=st.sampled_from("abcdef"), state=st.sampled_from(STATES), said=st.text(max_size=4))
    def tell(self, name, state, said):
        known = self.rows.get(f"ask_{name}")
        told = self.queue.tell(f"ask_{name}", state, said)
        assert told == (known is not None and known[2:] != [state, said])
        if known is not None:
            known[2:] = [state, said]

    @invariant()
    def same(self):
        for scenario in ("one", "two"):
            want = [[name, *row[1:]] for name, row in self.rows.items() if row[0] == scenario]
            found = self.queue.list(scenario)[::-1]
            assert [[ask.id, ask.body["text"], ask.state, ask.said] for ask in found] == want
            assert [ask.id for ask in self.queue.open(scenario)] == [
                row[0] for row in want if row[2] in ("queued", "taken")
            ]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@settings(max_examples=20, deadline=None)
@given(states=st.sets(st.sampled_from(STATES)), limit=st.integers(1, 8))
def test_a_page_has_the_newest_of_the_wanted_states(tmp_path_factory, states, limit):
    board = Board(tmp_path_factory.mktemp("pages") / "records.db")
    queue = Queue(board)
    for number in range(10):
        queue.tell(put(queue, body={"n": number}).id, STATES[number % len(STATES)])
    wanted = [n for n in range(9, -1, -1) if not states or STATES[n % len(STATES)] in states]
    found, before = [], None
    while page := queue.list("work", limit, states=tuple(states), before=before):
        assert len(page) <= limit
        found += [ask.body["n"] for ask in page]
        before = page[-1].seq
    assert found == wanted
    board.close()
