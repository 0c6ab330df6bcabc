"""Transcripts of each client, shortened to what is read of them, and the trajectories they become."""

import json
import os
import sqlite3

import pytest

from reef.core.nouns import Usage
from reef.harness.agents import Door, agent, render
from reef.harness.trajectory import Move, ToolCall, Trajectory

FIRST, SECOND = "0" * 31 + "a", "0" * 31 + "b"
SESSION = "01a22abe-dc1b-73b1-be26-206c945ad914"

PI = [
    {"type": "session", "version": 3, "id": SESSION, "cwd": "/work"},
    {"type": "model_change", "provider": "reef", "modelId": "reef"},
    {"type": "message", "message": {"role": "user", "content": [{"type": "text", "text": "Run it."}]}},
    {"type": "custom", "customType": "reef", "data": {"receipt": FIRST}},
    {
        "type": "message",
        "message": {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "toolCall", "id": "call_1", "name": "bash", "arguments": {"command": "false"}},
                {"type": "toolCall", "id": "call_2", "name": "read", "arguments": {"path": "a"}},
            ],
            "usage": {"input": 100, "output": 7, "cacheRead": 20, "cacheWrite": 0},
            "stopReason": "toolUse",
            "responseId": "chatcmpl-of-a-provider",
        },
    },
    {
        "type": "message",
        "message": {"role": "toolResult", "toolCallId": "call_1", "content": [{"type": "text", "text": "Command exited "
        "with code 1"}], "isError": True},
    },
    {
        "type": "message",
        "message": {
            "role": "assistant",
            "content": [{"type": "text", "text": "It failed."}],
            "usage": {"input": 120, "output": 9},
            "stopReason": "stop",
            "responseId": f"chatcmpl-{SECOND}",
        },
    },
]  # fmt: skip
CLAUDE = [
    {"type": "queue-operation", "operation": "enqueue", "sessionId": SESSION},
    {"type": "user", "sessionId": SESSION, "message": {"role": "user", "content": "Run it."}},
    {"type": "user", "sessionId": SESSION, "isSidechain": True, "message": {"role": "user", "content": "Elsewhere."}},
    {
        "type": "assistant", "sessionId": SESSION, "requestId": FIRST,
        "message": {"id": "msg_1", "content": [{"type": "tool_use", "id": "call_1", "name": "Bash",
        "input": {"command": "false"}}], "usage": {"input_tokens": 120, "output_tokens": 1}},
    },
    {
        "type": "assistant", "sessionId": SESSION, "requestId": FIRST,
        "message": {"id": "msg_1", "content": [{"type": "tool_use", "id": "call_2", "name": "Read",
        "input": {"path": "a"}}], "usage": {"input_tokens": 100, "cache_read_input_tokens": 20, "output_tokens": 7}},
    },
    {
        "type": "user", "sessionId": SESSION,
        "message": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "is_error": True,
        "content": "Exit code 1"}]},
    },
    {
        "type": "assistant", "sessionId": SESSION, "message": {"id": f"msg_{SECOND}",
        "content": [{"type": "text", "text": "It failed."}], "usage": {"input_tokens": 120, "output_tokens": 9}},
    },
]  # fmt: skip


def _item(**payload):
    return {"type": "response_item", "payload": payload}


def _used(receipt, asked, told):
    usage = {"input_tokens": asked, "output_tokens": told}
    return {"type": "token_usage_record", "payload": {"response_id": f"resp_{receipt}", "usage": usage}}


CODEX = [
    {"type": "session_meta", "payload": {"id": SESSION, "cwd": "/work"}},
    _item(type="message", role="user", content=[{"type": "input_text", "text": "Run it."}]),
    {"type": "event_msg", "payload": {"type": "task_started"}},
    _item(type="reasoning", summary=[]),
    _item(type="function_call", call_id="call_1", name="exec_command", arguments='{"command": "false"}'),
    _item(type="function_call", call_id="call_2", name="read", arguments='{"path": "a"}'),
    _used(FIRST, 120, 7),
    _item(type="function_call_output", call_id="call_1", output="Wall time: 0\nProcess exited with code 1\nOutput:\n"),
    _item(type="message", role="assistant", content=[{"type": "output_text", "text": "It failed."}]),
    _used(SECOND, 120, 9),
]


def lines(found):
    return "".join(json.dumps(line) + "\n" for line in found)


def test_pi(tmp_path):
    read = told(tmp_path, "pi", "sessions/--work--/2026_a.jsonl", lines(PI))
    assert read == expected("pi", "bash", "Command exited with code 1")


def test_claude(tmp_path):
    read = told(tmp_path, "claude", f"projects/-work/{SESSION}.jsonl", lines(CLAUDE))
    assert read == expected("claude", "Bash", "Exit code 1", "Read")


def test_codex(tmp_path):
    read = told(tmp_path, "codex", "sessions/2026/11/30/rollout-a.jsonl", lines(CODEX))
    assert read == expected("codex", "exec_command", CODEX[7]["payload"]["output"])


def told(root, name, path, text):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return agent(name).read(root)


def expected(name, tool, result, other="read"):
    """One session in all of them: two calls at once, of which one fails and one never returns, and a last word."""
    calls = (ToolCall("call_1", tool, {"command": "false"}, result, True), ToolCall("call_2", other, {"path": "a"}))
    moves = (
        Move("user", "Run it."),
        Move("assistant", "", calls, FIRST, Usage(120, 7)),
        Move("assistant", "It failed.", (), SECOND, Usage(120, 9)),
    )
    return Trajectory(name, SESSION, moves)


def database(root, sessions, messages, parts):
    with sqlite3.connect(root / "opencode.db") as kept:
        kept.execute("CREATE TABLE session (id, parent_id, time_created)")
        kept.execute("CREATE TABLE message (id, session_id, time_created, data)")
        kept.execute("CREATE TABLE part (id, message_id, time_created, data)")
        kept.executemany("INSERT INTO session VALUES (?, ?, ?)", sessions)
        kept.executemany("INSERT INTO message VALUES (?, ?, ?, ?)", messages)
        kept.executemany("INSERT INTO part VALUES (?, ?, ?, ?)", parts)
    kept.close()


def test_opencode(tmp_path):
    tokens = {"input": 100, "output": 7, "cache": {"read": 20, "write": 0}}
    failed = {"message": "wrong key", "responseHeaders": {"x-reef-agent-record-id": SECOND}}
    messages = [
        {"role": "user"},
        {"role": "assistant", "tokens": tokens},
        {"role": "assistant", "tokens": {"input": 0, "output": 0}, "error": {"name": "APIError", "data": failed}},
    ]
    done = {"status": "completed", "input": {"command": "false"}, "output": "", "metadata": {"exit": 1}}
    begun = {"status": "running", "input": {"path": "a"}}
    parts = [
        (0, {"type": "text", "text": "Run it."}),
        (1, {"type": "step-start"}),
        (1, {"type": "tool", "callID": "call_1", "tool": "bash", "state": done}),
        (
            1,
            {
                "type": "tool",
                "callID": "call_2",
                "tool": "read",
                "state": begun,
            },
        ),
        (1, {"type": "text", "text": "Look.", "metadata": {"reef": {"responseId": f"resp_{FIRST}"}}}),
    ]
    database(
        tmp_path,
        [("ses_old", None, 1), ("ses_new", None, 2), ("ses_below", "ses_new", 3)],
        [(f"msg_{at}", "ses_new", at, json.dumps(each)) for at, each in enumerate(messages)]
        + [("msg_x", "ses_old", 9, "{}")],
        [(f"prt_{at}", f"msg_{of}", at, json.dumps(each)) for at, (of, each) in enumerate(parts)],
    )
    calls = (ToolCall("call_1", "bash", {"command": "false"}, "", True), ToolCall("call_2", "read", {"path": "a"}))
    moves = (
        Move("user", "Run it."),
        Move("assistant", "Look.", calls, FIRST, Usage(120, 7)),
        Move("assistant", receipt=SECOND, error="wrong key"),
    )
    assert agent("opencode").read(tmp_path) == Trajectory("opencode", "ses_new", moves)


def test_what_opencode_has_not_written_back_yet_is_read(tmp_path):
    kept = sqlite3.connect(tmp_path / "opencode.db")
    kept.execute("PRAGMA journal_mode = WAL")
    kept.execute("CREATE TABLE session (id, parent_id, time_created)")
    kept.execute("CREATE TABLE message (id, session_id, time_created, data)")
    kept.execute("CREATE TABLE part (id, message_id, time_created, data)")
    kept.execute("INSERT INTO session VALUES ('ses_1', NULL, 1)")
    kept.commit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "opencode.db-wal" in before
    assert agent("opencode").read(tmp_path) == Trajectory("opencode", "ses_1", ())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    kept.close()


FAILED = [
    ("pi", "sessions/--work--/a.jsonl", [{"type": "message", "message": {"role": "assistant", "content": [],
     "usage": {"input": 0, "output": 0}, "stopReason": "error", "errorMessage": "503 busy"}}]),
    ("claude", "projects/-work/a.jsonl", [{"type": "assistant", "isApiErrorMessage": True, "message": {"id": "x",
     "content": [{"type": "text", "text": "503 busy"}], "usage": {"input_tokens": 0, "output_tokens": 0}}}]),
    ("codex", "sessions/2026/11/30/a.jsonl", [{"type": "event_msg", "payload": {"type": "task_complete",
     "error": {"message": "503 busy"}}}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "found"), FAILED)
def test_errors_are_moves_without_usage(tmp_path, name, path, found):
    read = told(tmp_path, name, path, lines(found))
    assert read.moves == (Move("assistant", error="503 busy"),)
    assert read.errors == ("503 busy",)
    assert read.final == ""


def test_the_newest_session_counts(tmp_path):
    for number, (day, said) in enumerate([("01", "Old."), ("03", "Newest."), ("02", "Between.")]):
        place = f"sessions/2026/11/{day}/rollout.jsonl"
        told(tmp_path, "codex", place, lines([CODEX[0], _item(type="message", role="user", content=said)]))
        os.utime(tmp_path / place, (number if said != "Newest." else 9, number if said != "Newest." else 9))
    assert agent("codex").read(tmp_path).moves == (Move("user", "Newest."),)


def test_results_that_nobody_asked_for_are_counted(tmp_path):
    twice = [*PI, PI[5]]
    assert told(tmp_path, "pi", "sessions/--work--/a.jsonl", lines(twice)).unread == 1
    alone = [_item(type="function_call_output", call_id="call_9", output="x")]
    assert told(tmp_path, "codex", "sessions/1/2/3/a.jsonl", lines(alone)).unread == 1


def test_pi_in_a_small_context_keeps_less_free():
    for context, found in ((8192, {"reserveTokens": 2048, "keepRecentTokens": 2048}), (128_000, None)):
        files = render(agent("pi"), [], Door("http://127.0.0.1:1", "demo", context=context))
        assert json.loads(files["settings.json"]).get("compaction") == found
