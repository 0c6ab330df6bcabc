"""The message that follows an answer: who speaks, what is said, and the report it amounts to."""

import json

from reef.core.nouns import Record, Timing
from reef.experience.next import report_of, words
from reef.experience.sessions import Pair
from tests.experience.talk import calling, chat, result


def said(body, dialect="chat"):
    return words(Record("0" * 32, "default", "r", "live", dialect, "complete", json.dumps(body).encode(), Timing(0.0)))


def test_a_user_or_a_tool_speaks():
    assert said(chat("u1", "a1", "u2")) == ("user", "u2")
    calls = calling(("c1", "ls", {}), ("c2", "cat", {}))
    assert said(chat("u1", calls, result("c1", "a.txt"))) == ("tool", "a.txt")
    assert said(chat("u1", calls, result("c1", "a.txt"), result("c2", "hello"))) == ("tool", "a.txt\n\nhello")
    assert said(chat("u1", calls, result("c1", "a"), {"role": "user", "content": "stop"})) == ("user", "a\n\nstop")


def test_blocks_of_messages():
    def of(*blocks):
        call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {}}
        turns = [("user", "u1"), ("assistant", [call]), ("user", list(blocks))]
        return said({"messages": [{"role": role, "content": content} for role, content in turns]}, "messages")

    done = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.txt"}]}
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"}
    assert of(done) == ("tool", "a.txt")
    assert of(done, reminder) == ("tool", "a.txt")
    assert of(done, reminder, {"type": "text", "text": "No, in /tmp"}) == ("user", "a.txt\n\nNo, in /tmp")
    assert of(reminder) is None


def test_items_of_responses():
    call = {"type": "function_call", "call_id": "c1", "name": "exec", "arguments": "{}"}
    items = [{"role": "user", "content": "u1"}, {"type": "reasoning", "summary": []}, call]
    output = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}
    assert said({"input": [*items, output]}, "responses") == ("tool", "a.txt")
    developer = {"role": "developer", "content": "rules"}
    assert said({"input": [*items, output, developer]}, "responses") == ("tool", "a.txt")
    assert said({"previous_response_id": "resp_1", "input": "and now?"}, "responses") == ("user", "and now?")


def test_nobody_speaks():
    assert said(chat("u1", "a1", {"role": "system", "content": "rules"})) is None
    assert said(chat(), "chat") is None
    assert said({"input": "x"}, "embeddings") is None


def test_its_report():
    report = report_of(Pair("a" * 32, "b" * 32, "tool", "a.txt", 2.5, 1), "work", 7.0)
    assert (report.id, report.scenario, report.references, report.created_at) == ("b" * 32, "work", ("a" * 32,), 7.0)
    assert (report.feedback, report.metadata, report.choice) == ("a.txt", {"role": "tool"}, 1)
    assert (report.score, report.demonstration) == (None, None)
