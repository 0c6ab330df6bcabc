"""What long sessions and repeated payloads cost in the file, in every dialect, and that all comes back exactly."""

import base64
import dataclasses
import json
import random
import sqlite3

import pytest

from reef.core.nouns import Choice

draw = random.Random(11)
WORDS = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(4000)]


def say(size):
    text = ""
    while len(text) < size:
        text += draw.choice(WORDS) + draw.choice([" ", " ", " ", ", ", '"', "\n", "\u00e9 "])
    return text[:size]


def parameters():
    named = {name: {"type": "string", "description": say(80)} for name in draw.sample(WORDS, 4)}
    return {"type": "object", "properties": named, "required": list(named)[:2]}


SYSTEM = say(4096)
TOOLS = [(name, say(300), parameters()) for name in draw.sample(WORDS, 12)]
TURNS = [(draw.choice(TOOLS)[0], say(60), say(draw.randint(512, 4096))) for _ in range(50)]


def chat():
    """Requests, replies, and what was said, as a chat client sends them again and again."""
    tools = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": say(300)}]
    for number, (name, argument, result) in enumerate(TURNS):
        request = {"model": "m", "messages": messages, "tools": tools, "stream": True}
        call = {"id": f"call_{number:024d}", "type": "function"}
        call["function"] = {"name": name, "arguments": json.dumps({"command": argument})}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = {"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        yield request, reply, message
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]


def messages():
    """The messages form, whose mark for the provider's cache moves on with each turn."""
    tools = [{"name": n, "description": d, "input_schema": p} for n, d, p in TOOLS]
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": SYSTEM, **mark}]
    turns = [{"role": "user", "content": [{"type": "text", "text": say(300)}]}]
    for number, (name, argument, result) in enumerate(TURNS):
        last = turns[-1] | {"content": [*turns[-1]["content"][:-1], turns[-1]["content"][-1] | mark]}
        request = {"model": "m", "max_tokens": 900, "system": system, "messages": [*turns[:-1], last], "tools": tools}
        call = {"type": "tool_use", "id": f"toolu_{number:024d}", "name": name, "input": {"command": argument}}
        content = [{"type": "text", "text": f"Turn {number}."}, call]
        yield request, {"id": f"msg_{number}", "role": "assistant", "content": content}, None
        turns.append({"role": "assistant", "content": content})
        answer = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": result}]}
        turns.append({"role": "user", "content": [answer]})


def responses():
    tools = [{"type": "function", "name": n, "description": d, "parameters": p, "strict": False} for n, d, p in TOOLS]
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": say(300)}]}]
    for number, (name, argument, result) in enumerate(TURNS):
        request = {"model": "m", "instructions": SYSTEM, "input": items, "tools": tools, "store": False}
        call = {"type": "function_call", "call_id": f"call_{number:024d}", "name": name}
        call["arguments"] = json.dumps({"command": argument})
        yield request, {"id": f"resp_{number}", "object": "response", "output": [call | {"id": f"fc_{number}"}]}, None
        items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": result}]


def file_size(store):
    with sqlite3.connect(store._path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store._path.stat().st_size


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", [chat, messages, responses])
async def test_an_agent_session_costs_its_new_text(store, record, form, streamed):
    empty, raw, entries = file_size(store), 0, []
    for request, reply, message in form():
        body, answer = json.dumps(request).encode(), json.dumps(reply).encode()
        raw += len(body) + len(answer)
        opened = record("open", request=body, session="s", dialect=form.__name__)
        fields = {"reply": None if message else answer, "choices": (Choice(0, "", "tool_calls", message=message),)}
        entries.append(
            record(id=opened.id, request=body, session="s", dialect=form.__name__, prompt_ids=None, **fields)
        )
        if streamed:
            await store.append(opened)
        await store.append(entries[-1])
    grown = file_size(store) - empty
    assert await store.get([entry.id for entry in entries]) == entries
    assert grown < raw / 24, f"1/{raw / grown:.1f} of {raw} bytes"


async def test_an_image_sent_again_and_again_is_stored_once(store, record):
    image = base64.b64encode(random.Random(2).randbytes(5 * 1024 * 1024 * 3 // 4)).decode()
    shapes = {
        "chat": lambda: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        "responses": lambda: {"type": "input_image", "image_url": f"data:image/png;base64,{image}"},
    }
    empty, turns, names, digests = file_size(store), [], [], []
    for number in range(20):
        dialect = ("chat", "responses")[number % 2]
        parts = [shapes[dialect](), {"type": "text", "text": f"What is this, asked for the {number}. time?"}]
        turns = [{"role": "user", "content": parts}, *({"role": "user", "content": say(50)} for _ in range(number))]
        one = record(request=json.dumps({"model": "m", "messages": turns}).encode(), dialect=dialect)
        await store.append(one)
        names.append(one.id)
        digests.append(hash(one.request))
    assert file_size(store) - empty < 1.2 * len(image)
    for name, digest in zip(names, digests, strict=True):
        (one,) = await store.get([name])
        assert hash(one.request) == digest


async def test_what_is_short_is_kept_as_it_is(store, record):
    """A body too short to share anything writes no other row."""
    await store.append(record(request=b'{"messages":[{"role":"user","content":"%s"}]}' % (b"x" * 900)))
    with sqlite3.connect(store._path) as connection:
        assert connection.execute("SELECT count(*) FROM blobs").fetchone() == (0,)


async def test_closing_a_stream_does_not_write_its_request_again(store, record):
    opened = record("open", request=json.dumps({"messages": [{"role": "user", "content": say(9000)}]}).encode())
    await store.append(opened)
    with sqlite3.connect(store._path) as connection:
        connection.execute("UPDATE records SET request = X'00'")
    await store.append(dataclasses.replace(record(id=opened.id), request=opened.request))
    with sqlite3.connect(store._path) as connection:
        assert connection.execute("SELECT request, status FROM records").fetchall() == [(b"\x00", "complete")]
