"""Records joined into trees: by session, by transcript, and what is kept out of them."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import StoreError
from reef.core.nouns import Choice
from reef.experience.sessions import UNREAD, Sessions
from reef.experience.tree import WINDOW
from reef.records import keep
from reef.records.sqlite import SqliteStore
from tests.experience.talk import TOOLS, World, calling, chat, result

ROOT = Path(__file__).parents[2]


def nested(levels):
    value = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


def brief(place):
    return place.kind, place.parent, place.segment, place.turn, place.branch


# --- pairing (unit test 3-E) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [None, "s1"])
async def test_the_next_message_answers_the_answer(world, session):
    first = await world.ask(chat("u1"), "a1", at=0, took=2, session=session)
    second = await world.ask(chat("u1", "a1", "u2"), "a2", at=30, session=session)
    pair = await world.pair(second)
    assert (pair.answer, pair.request, pair.role, pair.text, pair.seconds) == (first, second, "user", "u2", 28)
    assert await world.pair(first) is None
    assert world.sessions.children(first) == (second,)
    assert world.sessions.children(second) == (), "a last turn has no pair"
    assert (await world.place(first)).session == (await world.place(second)).session == (session or first)
    assert brief(await world.place(second)) == ("main", first, 0, 1, "")


@pytest.mark.parametrize("session", [None, "s1"])
async def test_a_request_that_comes_again_makes_no_second_pair(world, session):
    first = await world.ask(chat("u1"), "a1", session=session)
    second = await world.ask(chat("u1", "a1", "u2"), "a2", session=session)
    again = await world.ask(chat("u1", "a1", "u2"), "a2'", session=session)
    assert await world.pair(second) is None
    assert (await world.pair(again)).answer == first
    assert world.sessions.children(first) == (again,)
    place = await world.place(second)
    assert (place.kind, place.parent, place.note) == ("retry", first, f"asked again as {again}")


async def test_an_edited_beginning_is_another_session(world):
    first = await world.ask(chat("u1"), "a1")
    edited = await world.ask(chat("u1'", "a1", "u2"), "a2")
    assert (await world.place(edited)).session == edited
    assert (await world.place(edited)).parent is None
    assert await world.pair(edited) is None
    assert world.sessions.children(first) == ()


async def test_a_late_message_says_how_late_it_is(world):
    await world.ask(chat("u1"), "a1", at=0, took=1)
    assert (await world.pair(await world.ask(chat("u1", "a1", "u2"), "a2", at=902))).seconds == 901


async def test_a_tools_result_speaks_as_a_tool(world):
    calls = calling(("c1", "ls", '{"a": 1, "b": 2}'), ("c2", "cat", {}))
    await world.ask(chat("u1", tools=TOOLS), calls)
    back = calling(("c1", "ls", '{"b":2,"a":1}'), ("c2", "cat", {}))
    told = await world.ask(chat("u1", back, result("c2", "hello"), result("c1", "a.txt"), tools=TOOLS), "done")
    pair = await world.pair(told)
    assert (pair.role, pair.text) == ("tool", "hello\n\na.txt")


async def test_an_answer_that_was_changed_is_not_judged(world):
    first = await world.ask(chat("u1"), "a1", session="s")
    second = await world.ask(chat("u1", "something else", "u2"), "a2", session="s")
    place = await world.place(second)
    assert (place.parent, place.note) == (first, "its history has another answer than the recorded one")
    assert await world.pair(second) is None
    assert not world.sessions.path([first, second])
    third = await world.ask(chat("u1", "something else", "u2", "a2", "u3"), "a3", session="s")
    assert (await world.pair(third)).answer == second


async def test_turns_that_were_not_recorded_leave_no_pair(world):
    first = await world.ask(chat("u1"), "a1")
    later = await world.ask(chat("u1", "a1", "u2", "a2", "u3"), "a3")
    assert (await world.place(later)).parent == first
    assert (await world.place(later)).note == "turns before it were not recorded"
    assert await world.pair(later) is None


async def test_the_choice_that_was_gone_on_from(world):
    choices = [Choice(0, "a", "stop"), Choice(1, "b", "stop"), Choice(2, "c", "stop")]
    first = await world.ask(chat("u1"), choices=choices)
    pair = await world.pair(await world.ask(chat("u1", "b", "u2"), "a2"))
    assert (pair.answer, pair.choice) == (first, 1)


# --- records that cannot be taken -------------------------------------------------------------------------------------


def deep(levels):
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [100, 201, 600, 5000])
async def test_arguments_of_any_depth_are_an_answer_that_can_be_gone_on_from(world, levels):
    call = calling(("c1", "f", deep(levels)))
    first = await world.ask(chat("u1", tools=TOOLS), call)
    second = await world.ask(chat("u1", call, result("c1", "ok"), tools=TOOLS), "done")
    assert brief(await world.place(first))[:2] == ("main", None)
    assert (await world.pair(second)).answer == first


@pytest.mark.parametrize(
    "spoilt",
    [
        {"answer_id": "\ud800"},
        {"choices": [Choice(2**63, "x", "stop")]},
        {"choices": [Choice(0, "", "stop", message={"tool_calls": [{"function": {"arguments": nested(800)}}]})]},
    ],
)
async def test_a_record_that_cannot_be_taken_has_a_place_of_its_own_and_stops_nobody(world, spoilt, caplog):
    before = await world.ask(chat("u1"), "a1", session="s")
    bad = await world.ask(chat("u1", "a1", "u2"), "a2", session="s", **spoilt)
    after = await world.ask(chat("u1", "a1", "u3"), "a3", session="s")
    await world.read()
    assert (await world.place(after)).parent == before
    place = await world.place(bad)
    assert (place.session, place.parent, place.kind, place.note) == (bad, None, "side", UNREAD)
    assert await world.pair(bad) is None
    assert len(caplog.records) == 1, "said once, not at each look"
    assert world.sessions._read("SELECT count(*) FROM answers WHERE turn NOT IN (SELECT seq FROM turns)") == [(0,)]


async def test_trouble_of_the_file_is_no_records_own(world, monkeypatch):
    await world.ask(chat("u1"), "a1")

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(world.sessions, "add", full)
        with pytest.raises(StoreError, match="disk is full"):
            await world.read()
    assert world.sessions.cursor("default") == 0
    assert (await world.place(next(iter(world.records)))).kind == "main"


# --- branches, edits, compaction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [None, "s1"])
async def test_an_edited_message_is_a_new_branch_of_history(world, session):
    first = await world.ask(chat("u1"), "a1", session=session)
    second = await world.ask(chat("u1", "a1", "u2"), "a2", session=session)
    edited = await world.ask(chat("u1", "a1", "u2'"), "a2'", session=session)
    third = await world.ask(chat("u1", "a1", "u2'", "a2'", "u3"), "a3", session=session)
    back = await world.ask(chat("u1", "a1", "u2", "a2", "u3"), "a3", session=session)
    assert brief(await world.place(edited)) == ("main", first, 1, 1, "")
    assert "edited" in (await world.place(edited)).note
    assert brief(await world.place(third)) == ("main", edited, 1, 2, "")
    assert brief(await world.place(back)) == ("main", second, 0, 2, "")
    assert world.sessions.children(first) == (second, edited)
    assert world.sessions.path([first, edited, third])
    assert not world.sessions.path([first, third])
    assert not world.sessions.path([second, edited])
    assert not world.sessions.path([])
    assert world.sessions.path([first])


async def test_compaction_is_a_new_segment(world):
    said = ["u1", "a1", "u2", "a2", "u3", "a3"]
    one = await world.ask(chat(*said[:1], system="s", tools=TOOLS), "a1", session="s")
    two = await world.ask(chat(*said[:3], system="s", tools=TOOLS), "a2", session="s")
    three = await world.ask(chat(*said[:5], system="s", tools=TOOLS), "a3", session="s")
    short = await world.ask(chat("summary: u1 to u3", system="s", tools=TOOLS), "a4", session="s")
    then = await world.ask(chat("summary: u1 to u3", "a4", "u5", system="s", tools=TOOLS), "a5", session="s")
    assert [brief(await world.place(each))[2:4] for each in (one, two, three, short, then)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 3),
        (1, 4),
    ]
    place = await world.place(short)
    assert (place.kind, place.parent) == ("main", None)
    assert "compacted" in place.note
    assert await world.pair(short) is None
    assert (await world.pair(then)).answer == short


async def test_results_find_their_call_behind_a_compacted_history(world):
    """Old results are cleared in place; the newest ones still answer the last calls."""
    one, two = calling(("toolu_000001", "ls", {})), calling(("toolu_000002", "cat", {"f": "a"}))
    start = ["u1", one]
    await world.ask(chat("u1", tools=TOOLS), one, session="s")
    second = await world.ask(chat(*start, result("toolu_000001", "long"), tools=TOOLS), two, session="s")
    cleared = chat(*start, result("toolu_000001", "[cleared]"), two, result("toolu_000002", "hello"), tools=TOOLS)
    third = await world.ask(cleared, "done", session="s")
    place = await world.place(third)
    assert (place.parent, place.segment, place.kind) == (second, 1, "main")
    pair = await world.pair(third)
    assert (pair.answer, pair.role, pair.text) == (second, "tool", "hello")


# --- side calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["title", "turn"])
async def test_a_title_that_is_asked_for_beside_the_first_turn(world, first):
    """Both in one session, at the same time; either may be recorded first."""
    title = chat("Generate a title for this conversation:", {"role": "user", "content": "hello"}, system="You name.")
    asks = {"title": (title, "Greeting"), "turn": (chat("hello", system="You code.", tools=TOOLS), "Hi.")}
    order = [first, *(name for name in asks if name != first)]
    ids = {name: await world.ask(*asks[name], at=0, took=2, session="ses_1") for name in order}
    place = await world.place(ids["title"])
    assert place.kind == "side"
    assert place.note == "offers no tools, and is no part of the session's transcript"
    assert (await world.place(ids["turn"])).kind == "main"
    then = await world.ask(chat("hello", "Hi.", "go", system="You code.", tools=TOOLS), "ok", session="ses_1")
    assert (await world.pair(then)).answer == ids["turn"]
    assert await world.pair(ids["title"]) is None


@pytest.mark.parametrize("first", ["title", "turn"])
async def test_a_title_in_a_session_without_any_tools(world, first):
    """What the conversation goes on from decides which of them was a part of it."""
    asks = {
        "title": (chat("hello", system="You name."), "Greeting"),
        "turn": (chat("hello", system="You talk."), "Hi."),
    }
    order = [first, *(name for name in asks if name != first)]
    ids = {name: await world.ask(*asks[name], at=0, took=2, session="s") for name in order}
    then = await world.ask(chat("hello", "Hi.", "go", system="You talk."), "ok", session="s")
    assert (await world.pair(then)).answer == ids["turn"]
    assert [(await world.place(ids[name])).kind for name in ("title", "turn")] == ["side", "main"]
    assert (await world.place(ids["title"])).note.startswith("has another system prompt")


async def test_a_summary_of_the_conversation_is_no_next_message(world):
    main = {"system": "You code.", "tools": TOOLS}
    first = await world.ask(chat("u1", **main), "a1", session="s")
    summary = await world.ask(chat("u1", "a1", "Summarise this.", system="You sum up."), "It was short.", session="s")
    then = await world.ask(chat("u1", "a1", "u2", **main), "a2", session="s")
    assert (await world.place(summary)).kind == "side"
    assert (await world.place(summary)).parent == first
    assert await world.pair(summary) is None
    assert brief(await world.place(then)) == ("main", first, 0, 1, "")
    assert world.sessions.children(first) == (then,)


async def test_a_last_step_without_tools_was_no_side_call_if_it_is_gone_on_from(world):
    first = await world.ask(chat("u1", tools=TOOLS), "a1", session="s")
    bare = await world.ask(chat("u1", "a1", "u2"), "a2", session="s")
    assert (await world.place(bare)).kind == "side"
    then = await world.ask(chat("u1", "a1", "u2", "a2", "u3", tools=TOOLS), "a3", session="s")
    assert brief(await world.place(bare)) == ("main", first, 0, 1, "")
    assert (await world.pair(then)).answer == bare
    assert world.sessions.path([first, bare, then])


async def test_an_agent_that_has_no_name_is_a_branch_of_its_own(world):
    other = [{"type": "function", "function": {"name": "search"}}]
    first = await world.ask(chat("u1", system="main", tools=TOOLS), "a1", session="s")
    sub = await world.ask(chat("find it", system="sub", tools=other), "found", session="s")
    more = await world.ask(chat("find it", "found", "more", system="sub", tools=other), "ok", session="s")
    then = await world.ask(chat("u1", "a1", "u2", system="main", tools=TOOLS), "a2", session="s")
    branch = (await world.place(sub)).branch
    assert branch.startswith("agent-")
    assert brief(await world.place(more)) == ("main", sub, 0, 1, branch)
    assert (await world.place(sub)).note == "a sub-agent's turn"
    assert await world.pair(more) is None, "a sub-agent's user is the main agent"
    assert brief(await world.place(then)) == ("main", first, 0, 1, "")


async def test_what_is_no_conversation_is_a_side_call(world):
    counted = await world.ask({"input": "hi"}, dialect="embeddings")
    broken = await world.ask(b"no json", "a", session="s")
    kind = await world.ask(chat("u1"), "a1", session="t", tags={"request-kind": "compact"})
    for receipt in (counted, broken, kind):
        assert (await world.place(receipt)).kind == "side"
        assert (await world.place(receipt)).note


@pytest.mark.parametrize("purpose", ["evaluation", "probe", "self"])
async def test_only_live_records_have_a_place(world, purpose):
    first = await world.ask(chat("u1"), "a1", purpose=purpose)
    second = await world.ask(chat("u1", "a1", "u2"), "a2")
    assert (await world.place(second)).parent is None
    assert world.sessions.place(first) is None


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [None, "s1"])
@pytest.mark.parametrize("status", ["failed", "aborted", "interrupted"])
async def test_the_last_answered_of_equal_requests_counts(world, session, status):
    one = await world.ask(chat("u1"), "", status=status, session=session, choices=())
    two = await world.ask(chat("u1", stream=False, temperature=0.5), "a1", session=session)
    three = await world.ask(chat("u1"), "", status=status, session=session, choices=())
    await world.read()
    assert [(await world.place(each)).kind for each in (one, two, three)] == ["retry", "main", "retry"]
    then = await world.ask(chat("u1", "a1", "u2"), "a2", session=session)
    assert (await world.pair(then)).answer == two
    assert {(await world.place(each)).session for each in (one, two, three, then)} == {session or one}


async def test_the_one_that_is_gone_on_from_counts(world):
    one = await world.ask(chat("u1"), "a1", session="s")
    two = await world.ask(chat("u1"), "another", session="s")
    then = await world.ask(chat("u1", "a1", "u2"), "a2", session="s")
    assert [(await world.place(each)).kind for each in (one, two, then)] == ["main", "retry", "main"]
    assert (await world.place(two)).note == f"the conversation went on from {one}"
    assert (await world.pair(then)).answer == one


async def test_equal_requests_long_after_one_another_are_none(world):
    one = await world.ask(chat("u1"), "a1", at=0, took=1)
    two = await world.ask(chat("u1"), "a1", at=1 + WINDOW + 1)
    assert [(await world.place(each)).kind for each in (one, two)] == ["main", "main"]
    assert (await world.place(two)).session == two


async def test_samples_at_the_same_time_are_no_retries(world):
    ids = [await world.ask(chat("u1"), f"a{n}", at=0, took=5) for n in range(4)]
    assert [(await world.place(each)).kind for each in ids] == ["main"] * 4
    cut = await world.ask(chat("u2"), "", at=10, took=5, status="aborted", choices=())
    again = await world.ask(chat("u2"), "a", at=12, took=5)
    assert [(await world.place(each)).kind for each in (cut, again)] == ["retry", "main"]


async def test_two_conversations_that_begin_alike_part_when_both_go_on(world):
    one = await world.ask(chat("hello"), "Hi, Ann.")
    two = await world.ask(chat("hello"), "Hi, Bob.")
    left = await world.ask(chat("hello", "Hi, Ann.", "u2"), "a")
    right = await world.ask(chat("hello", "Hi, Bob.", "u2"), "b")
    assert [(await world.place(each)).session for each in (one, left)] == [one, one]
    assert [(await world.place(each)).session for each in (two, right)] == [two, two]
    assert {(await world.place(each)).kind for each in (one, two, left, right)} == {"main"}
    assert (await world.pair(right)).answer == two


async def test_a_tie_goes_to_the_conversation_that_was_active_last(world):
    one = await world.ask(chat("hello"), "Hi.", at=0, took=5)
    two = await world.ask(chat("hello"), "Hi.", at=1, took=5)
    then = await world.ask(chat("hello", "Hi.", "u2"), "a", at=20)
    assert (await world.place(then)).parent == two
    assert (await world.place(one)).kind == "main"


# --- what never joins -------------------------------------------------------------------------------------------------


async def test_nothing_crosses_scenarios_clients_or_sessions(world):
    await world.ask(chat("u1"), "a1")
    more = chat("u1", "a1", "u2")
    for fields in ({"scenario": "other"}, {"client": "another/2"}, {"session": "s"}):
        other = await world.ask(more, "a2", **fields)
        assert (await world.place(other)).parent is None, fields
        assert await world.pair(other) is None
    await world.ask(chat("v1"), "b1", session="s")
    for fields in ({"scenario": "other", "session": "s"}, {"session": "t"}):
        other = await world.ask(chat("v1", "b1", "v2"), "b2", **fields)
        assert (await world.place(other)).parent is None, fields


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_a_forgotten_record_leaves_nothing(world, tmp_path):
    secret = "the secret word is xylophone"
    first = await world.ask(chat(secret), "a1", session="s")
    second = await world.ask(chat(secret, "a1", "u2"), "a2", session="s")
    await world.pair(second)
    data = b"".join(path.read_bytes() for path in tmp_path.glob("sessions.db*"))
    assert b"xylophone" not in data
    world.sessions.forget([first])
    assert world.sessions.place(first) is None
    place = await world.place(second)
    assert (place.parent, place.note) == (None, "what it follows was forgotten")
    assert await world.pair(second) is None
    data = b"".join(path.read_bytes() for path in tmp_path.glob("sessions.db"))
    world.sessions._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = b"".join(path.read_bytes() for path in tmp_path.glob("sessions.db*"))
    assert first.encode() not in data


async def test_what_the_store_lost_is_tidied_away(world, tmp_path):
    ids = [await world.ask(chat(f"u{n}"), "a1", session=f"s{n}") for n in range(3)]
    await world.read()
    keep.forget(tmp_path / "records.db", ids[:2])
    assert await world.sessions.tidy("default", world.store) == 2
    assert [world.sessions.place(each) is None for each in ids] == [True, True, False]
    assert await world.sessions.tidy("default", world.store) == 0


async def test_a_record_that_was_forgotten_before_it_was_read(world, tmp_path):
    ids = [await world.ask(chat(f"u{n}"), "a1") for n in range(3)]
    keep.forget(tmp_path / "records.db", ids[1:2])
    assert [(await world.place(each)).turn for each in (ids[0], ids[2])] == [0, 0]
    assert world.sessions.place(ids[1]) is None


async def test_a_damaged_file_is_made_again(world, tmp_path):
    first = await world.ask(chat("u1"), "a1")
    await world.read()
    world.sessions.close()
    for path in tmp_path.glob("sessions.db*"):
        path.unlink()
    (tmp_path / "sessions.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError):
        Sessions(tmp_path / "sessions.db")
    world.sessions = Sessions.open(tmp_path / "sessions.db")
    assert (await world.place(first)).turn == 0


async def test_another_process_only_looks(world, tmp_path):
    with pytest.raises(StoreError):
        Sessions(tmp_path / "nothing.db", reading=True)
    assert not (tmp_path / "nothing.db").exists()
    first = await world.ask(chat("u1"), "a1")
    await world.read()
    other = Sessions(tmp_path / "sessions.db", reading=True)
    assert other.place(first) == world.sessions.place(first)
    with pytest.raises(StoreError):
        other.forget([first])
    other.close()


async def test_two_readers_of_one_file_take_each_record_once(world):
    for n in range(250):
        await world.ask(chat(f"u{n}"), "a")
    await asyncio.gather(*(world.sessions.read("default", world.store) for _ in range(4)))
    assert world.sessions._read("SELECT count(*) FROM turns") == [(250,)]


async def test_sessions_are_listed(world):
    first = await world.ask(chat("u1"), "a1")
    await world.ask(chat("u1", "a1", "u2"), "a2")
    await world.ask(chat("v1", tools=TOOLS), "b1", session="s")
    await world.ask(chat("title"), "b2", session="s")
    await world.read()
    named, unnamed = world.sessions.listed("default", None, 9)
    assert (named.session, named.count, named.named, named.sides) == ("s", 2, True, 1)
    assert (unnamed.session, unnamed.count, unnamed.named, unnamed.branches) == (first, 2, False, 1)
    assert [each.session for each in world.sessions.listed("default", named.last, 9)] == [first]
    assert [each.session for each in world.sessions.listed("default", None, 9, unnamed=True)] == [first]
    assert world.sessions.about("default", "s") == named
    assert world.sessions.about("other", "s") is None


KILLED = """
import asyncio
from pathlib import Path
from reef.experience.sessions import UNREAD, Sessions
from reef.records.sqlite import SqliteStore

async def main():
    folder = Path({folder!r})
    store = SqliteStore(folder / "records.db", owner="reader")
    await store.start()
    await Sessions(folder / "sessions.db").read("default", store)

asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["sessions.half_read", "sessions.half_read:2", "sessions.after_page:2"])
async def test_a_kill_costs_nothing(world, tmp_path, point):
    for n in range(120):
        await world.ask(chat("u", "a", f"u{n}"), f"a{n}", session=f"s{n % 7}")
        await world.ask(chat("u", "a", f"u{n}", f"a{n}", "more"), "end", session=f"s{n % 7}")
    world.sessions.close()
    for path in tmp_path.glob("sessions.db*"):
        path.unlink()
    program = [sys.executable, "-c", KILLED.format(folder=str(tmp_path))]
    done = subprocess.run(program, cwd=ROOT, env={**os.environ, "REEF_FAILPOINT": point}, check=False)
    assert done.returncode == -signal.SIGKILL
    world.sessions = Sessions(tmp_path / "sessions.db")
    await world.read()
    rows = world.dump()
    world.sessions.close()
    world.sessions = Sessions(tmp_path / "whole.db")
    await world.read()
    assert world.dump() == rows
    assert len(rows) == 480


# --- any trees, in any order ------------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """Turns of several sessions as (session, parent, message), each behind its parent, interleaved at random. Messages
    are distinct within a parent, so that each tree can be told from its requests."""
    turns, seed = [], draw(st.integers(0, 2**32))
    for session in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(1, 8))):
            parent = draw(st.integers(0, number - 1)) if number else None
            turns.append((session, number, parent))
    rng, done, order = random.Random(seed), set(), []
    waiting = list(turns)
    while waiting:
        ready = [each for each in waiting if each[2] is None or (each[0], each[2]) in done]
        chosen = rng.choice(ready)
        waiting.remove(chosen)
        done.add(chosen[:2])
        order.append(chosen)
    return order, draw(st.booleans()), draw(st.integers(1, 20))


def said_in(session, number, parents):
    """The whole transcript of a turn's request. Sessions say the same words; only their answers differ."""
    path = [number]
    while parents[session, path[-1]] is not None:
        path.append(parents[session, path[-1]])
    said = []
    for each in reversed(path):
        said += [f"message {each}" if each else "hello", f"answer {session} {each}"]
    return said[:-1]


@settings(max_examples=60, deadline=None)
@given(trees())
def test_any_trees_are_found_again(tmp_path_factory, drawn):
    order, named, page = drawn
    parents = {(session, number): parent for session, number, parent in order}
    folder = tmp_path_factory.mktemp("trees")

    async def check():
        store = SqliteStore(folder / "records.db", owner="test")
        await store.start()
        world = World(store, Sessions(folder / "sessions.db"))
        ids = {}
        for place, (session, number, _) in enumerate(order):
            body = chat(*said_in(session, number, parents))
            name = f"s{session}" if named else None
            answer = f"answer {session} {number}"
            ids[session, number] = await world.ask(body, answer, at=3 * place, took=1, session=name)
            if place % page == 0:
                await world.read()
        await world.read()
        for (session, number), receipt in ids.items():
            parent = parents[session, number]
            place = world.sessions.place(receipt)
            assert place.parent == (None if parent is None else ids[session, parent])
            lone = parent is None and not world.sessions.children(receipt)
            assert place.kind == "main" or (lone and not named), "one of equal requests that nothing followed"
            if place.kind == "main" and not lone:
                assert place.session == (f"s{session}" if named else ids[session, 0])
            pair = await world.sessions.pair(receipt, store)
            assert (pair and pair.answer) == place.parent
            expected = [ids[key] for key in ids if key[0] == session and parents[key] == number]
            assert list(world.sessions.children(receipt)) == expected
        rows = world.dump()
        world.sessions.close()
        world.sessions = Sessions(folder / "again.db")
        await world.read()
        assert world.dump() == rows
        world.sessions.close()
        await store.close()

    asyncio.run(check())
