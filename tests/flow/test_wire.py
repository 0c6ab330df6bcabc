"""Whole requests against a provider that does what providers have done: the client's bytes, and what is recorded."""

import asyncio
import contextlib
import gzip
import json
import zlib

import brotli
import pytest
import zstandard

from reef.core.nouns import Usage
from reef.engines.fake import FakeEngine
from tests.flow.kit_wire import (
    DIALECTS,
    DONE,
    JSON,
    PATHS,
    RECEIPT,
    TRAILING,
    USAGE,
    WORDS,
    ask,
    calls,
    chunk,
    event,
    fragments,
    messages,
    post,
    recorded,
    replies,
    reply,
    response,
    stream,
    streams,
    told,
)
from tests.gateway.conftest import TOKEN, running

# --- usage ------------------------------------------------------------------------------------------------------------

ENDS = {
    "trailing": chunk("stop") + TRAILING,
    "second-last": TRAILING + chunk("stop"),
    "beside the end": chunk("stop", usage=USAGE),
    "so far and at the end": chunk(content="!", usage=USAGE | {"completion_tokens": 1}) + chunk("stop") + TRAILING,
    "null until then": chunk("stop").replace(b'"choices"', b'"usage": null, "choices"') + TRAILING,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_wherever_it_comes(chatty, provider, dialect, end):
    """case 1: not asked for, in a chunk without choices: the bytes stay, the record has it, nothing stumbles."""
    said = chunk(content=WORDS) + ENDS[end] + DONE
    provider.script = streams(said, size=50)
    answer = await post(chatty, dialect, ask(dialect))
    record = await recorded(chatty, answer)
    assert (record.status, record.usage) == ("complete", Usage(26, 2))
    if dialect == "chat":
        assert answer.content == said
    elif dialect == "messages":
        (last,) = [item for item in told(answer.content) if item["type"] == "message_delta"]
        assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (26, 2)
    else:
        assert told(answer.content)[-1]["response"]["usage"]["total_tokens"] == 28


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_in_a_providers_own_dialect(native, provider, dialect, whole):
    """case 1: what comes at the end of each dialect (Messages: prompt at the beginning, answer at the end)."""
    provider.script = replies(reply(dialect)) if whole else streams(stream(dialect), size=33)
    record = await recorded(native, await post(native, dialect, ask(dialect, stream=not whole)))
    assert (record.status, record.usage, record.choices[0].text) == ("complete", Usage(26, 2), WORDS)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_is_not_made_up(chatty, provider, dialect):
    """case 2: asked for, and the provider never sends it: the client gets no chunk of ours, the record has none."""
    said = chunk(content=WORDS) + chunk("stop") + DONE
    provider.script = streams(said)
    more = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
    answer = await post(chatty, dialect, ask(dialect, **more))
    assert answer.status_code == 200
    if dialect == "chat":
        assert answer.content == said
    record = await recorded(chatty, answer)
    assert (record.status, record.usage, record.choices[0].text) == ("complete", None, WORDS)


async def test_our_own_usage_is_one_chunk_without_choices(tmp_path):
    """case 2: what Reef itself makes of an engine's counts."""
    async with running(tmp_path, FakeEngine()) as gateway:
        answer = await post(gateway, "chat", ask("chat", stream_options={"include_usage": True}))
    found = [item for item in told(answer.content) if item.get("usage") is not None]
    assert [item["choices"] for item in found] == [[]]
    assert found == told(answer.content)[-1:]


# --- fragments --------------------------------------------------------------------------------------------------------

TOOLS = ("get_weather", "f", "g")
TALK = {
    "one index twice in a chunk": (
        fragments((0, "c1", "f", ""), (0, None, None, '{"a":')) + fragments((0, None, None, "1}")),
        [("f", {"a": 1})],
    ),
    "in turns, without ids": (
        fragments((0, None, "f", None), (1, None, "g", None))
        + fragments((0, None, None, '{"x"'))
        + fragments((1, None, None, '{"y"'))
        + fragments((0, None, None, ":1}"))
        + fragments((1, None, None, ":2}")),
        [("f", {"x": 1}), ("g", {"y": 2})],
    ),
    "a name in two pieces": (
        fragments((0, "c1", "get_", None)) + fragments((0, None, "weather", None)) + fragments((0, None, None, "{}")),
        [("get_weather", {})],
    ),
}


def tools(dialect):
    schema = {"type": "object", "properties": {}}
    if dialect == "chat":
        return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in TOOLS]
    if dialect == "messages":
        return [{"name": name, "input_schema": schema} for name in TOOLS]
    return [{"type": "function", "name": name, "parameters": schema} for name in TOOLS]


def calls_of(record):
    listed = record.choices[0].message["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in listed]


@pytest.mark.parametrize("size", [1 << 20, 1])
@pytest.mark.parametrize("talk", TALK)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_fragments_of_calls(chatty, provider, dialect, talk, size):
    """case 3, case 5: put together by index, in order: for the record, and for clients of another dialect."""
    said, wanted = TALK[talk]
    said += chunk("tool_calls") + TRAILING + DONE
    provider.script = streams(said, size=size)
    answer = await post(chatty, dialect, ask(dialect, tools=tools(dialect)))
    record = await recorded(chatty, answer)
    assert calls_of(record) == wanted
    assert record.choices[0].finish_reason == "tool_calls"
    assert answer.content == said if dialect == "chat" else calls(dialect, answer.content) == wanted


def interleaved(dialect):
    """Two calls whose arguments come in turns, in a provider's own Messages or Responses."""
    pieces = [('{"x"', ":1}"), ('{"y"', ":2}")]
    if dialect == "messages":
        blocks = [
            (
                {"type": "tool_use", "id": f"t{number}", "name": name, "input": {}},
                [(turn, {"type": "input_json_delta", "partial_json": part}) for turn, part in enumerate(parts)],
            )
            for number, (name, parts) in enumerate(zip("fg", pieces, strict=True))
        ]
        return messages(blocks, "tool_use")
    items = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": f"c{n}", "name": name, "arguments": "".join(parts)}
        for n, (name, parts) in enumerate(zip("fg", pieces, strict=True))
    ]
    found = [event({"type": "response.created", "response": response([]) | {"status": "in_progress"}})]
    for n, item in enumerate(items):
        found.append(event({"type": "response.output_item.added", "output_index": n, "item": item | {"arguments": ""}}))
    for turn in range(2):
        for n in range(2):
            told = {"type": "response.function_call_arguments.delta", "output_index": n, "item_id": f"fc_{n}"}
            found.append(event(told | {"delta": pieces[n][turn]}))
    for n, item in enumerate(items):
        found.append(event({"type": "response.output_item.done", "output_index": n, "item": item}))
    return b"".join([*found, event({"type": "response.completed", "response": response(items)})])


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "left early"])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_fragments_in_a_providers_own_dialect(native, provider, dialect, cut):
    """case 5: blocks and items that grow in turns; also when the stream breaks off before it says them again."""
    said = interleaved(dialect)
    if cut:
        said = said[
            : said.index(b"event: content_block_stop" if dialect == "messages" else b"response.output_item.done")
        ]
        said = said[: said.rindex(b"\n\n") + 2]
    provider.script = streams(said, size=37, cut=cut)
    async with native.client() as client:
        body = b""
        async with client.stream("POST", PATHS[dialect], content=ask(dialect), headers=JSON) as answer:
            with contextlib.suppress(Exception):
                async for piece in answer.aiter_raw():
                    body += piece
    record = await recorded(native, answer)
    assert calls_of(record) == [("f", {"x": 1}), ("g", {"y": 2})]
    assert record.status == ("interrupted" if cut else "complete")
    assert body.startswith(said) if cut else body == said


@pytest.mark.parametrize("size", [1 << 20, 1])
async def test_choices_in_turns(native, provider, size):
    """case 5, for answers: two choices whose words, calls and ends come in turns are two answers."""
    said = (
        chunk(content="A", index=0)
        + chunk(content="b", index=1)
        + chunk(content="B", index=0)
        + chunk("length", content="c", index=1)
        + chunk("stop", index=0)
        + TRAILING
        + DONE
    )
    provider.script = streams(said, size=size)
    answer = await post(native, "chat", ask("chat", n=2))
    assert answer.content == said
    record = await recorded(native, answer)
    assert [(c.index, c.text, c.finish_reason) for c in record.choices] == [(0, "AB", "stop"), (1, "bc", "length")]
    async with native.client() as client:
        report = {"score": 1, "choice": 1, "references": [record.id]}
        assert (await client.post("/reef/report", json=report)).status_code == 200
        assert (await client.post("/reef/report", json=report | {"choice": 2})).status_code == 400


async def test_a_choice_that_never_ends(native, provider):
    """One of two choices without a finish reason: the answer is not whole, whatever its end marker says."""
    provider.script = streams(chunk("stop", content="a", index=0) + chunk(content="b", index=1) + DONE)
    async with (
        native.client() as client,
        client.stream("POST", PATHS["chat"], content=ask("chat", n=2), headers=JSON) as answer,
    ):
        with pytest.raises(Exception, match=r"peer closed|incomplete"):
            await answer.aread()
    assert (await recorded(native, answer)).status == "interrupted"


# --- bytes ------------------------------------------------------------------------------------------------------------


def odd(data):
    """The same events, written as the format also allows."""
    found = []
    for number, block in enumerate(data.decode().strip().split("\n\n")):
        if number % 3 == 0:
            block = block.replace("data: ", "data:")
        elif number % 3 == 1:
            block = ": a comment\n" + block.replace(", ", ",\ndata: ", 1)
        else:
            block = "id: 7\nretry: 10\n" + block
        found.append(block + "\n\n")
    return "".join(found)


@pytest.mark.parametrize("line", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_byte_at_a_time(either, provider, dialect, line):
    """case 6: letters and line ends cut anywhere, comments, `data:` without a space, data over several lines."""
    said = odd(stream(dialect if either.native else "chat")).replace("\n", line).encode()
    assert WORDS.encode() in said
    provider.script = streams(said, size=1)
    answer = await post(either, dialect, ask(dialect))
    record = await recorded(either, answer)
    assert (record.status, record.choices[0].text) == ("complete", WORDS)
    if either.native or dialect == "chat":
        assert answer.content == said
    else:
        assert WORDS in answer.text
        assert "\ufffd" not in answer.text


def deflated(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflated),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstandard.compress),
    "gzip unsaid": (None, gzip.compress),
    "said but plain": ("gzip", bytes),
}


async def wire(gateway, dialect, body):
    """An answer as it is on the wire: its head's lines, and its body with the framing taken off."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n"
    head += f"accept-encoding: gzip, br\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    top, _, rest = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    lines = dict(line.split(": ", 1) for line in top.decode().lower().split("\r\n")[1:])
    if "transfer-encoding" in lines:
        plain = b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                return int(top.split()[1]), lines, plain
            plain, rest = plain + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert int(lines["content-length"]) == len(rest)
    return int(top.split()[1]), lines, rest


@pytest.mark.parametrize("kind", ["whole", "stream", "error"])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_packed_answers(either, provider, dialect, packed, kind):
    """case 7: unpacked, with headers that say so, and read for the record."""
    name, pack = PACKED[packed]
    theirs = dialect if either.native else "chat"
    said = {
        "whole": json.dumps(reply(theirs), ensure_ascii=False).encode(),
        "stream": stream(theirs),
        "error": b'{"type":"error","error":{"type":"invalid_request_error","message":"too hot"}}',
    }[kind]
    headers = {"content-encoding": name} if name else {}
    if kind == "stream":
        provider.script = streams(pack(said), size=9, **headers)
    else:
        provider.script = replies(pack(said), 422 if kind == "error" else 200, **headers)
    status, lines, body = await wire(either, dialect, ask(dialect, stream=kind == "stream"))
    assert status == (422 if kind == "error" else 200)
    assert "content-encoding" not in lines
    assert ("content-length" in lines) != ("transfer-encoding" in lines)
    record = await either.closed(lines[RECEIPT])
    if kind == "error":
        assert json.loads(body)["error"]["message"] == "too hot"
        assert record.status == "rejected"
        assert "too hot" in record.error
    else:
        assert (record.status, record.choices[0].text, record.usage) == ("complete", WORDS, Usage(26, 2))
        assert WORDS in body.decode() or json.dumps(WORDS)[1:-1] in body.decode()
    if either.native or dialect == "chat":
        assert body == said


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMS = {
    "null": '"content":  null, ',
    "absent": "",
    "empty": '"content" : "", ',
    "no parts": '"content":[], ',
}


@pytest.mark.parametrize("called", [True, False], ids=["called", "neither"])
@pytest.mark.parametrize("form", FORMS)
async def test_an_assistant_without_content(native, provider, form, called):
    """case 11: null, absent, empty, with and without calls: every byte as it came."""
    turn = f'{{"role":"assistant", {FORMS[form]}' + (f'"tool_calls":[{json.dumps(CALL)}],' if called else "") + '"x":1}'
    result = ',{"role":"tool","tool_call_id":"c1","content":"4"}' if called else ',{"role":"user","content":"?"}'
    sent = f'{{"model":"m","messages":[{{"role":"user","content":"Hi"}},{turn}{result}]}}'.encode()
    provider.script = replies(reply("chat"))
    answer = await post(native, "chat", sent)
    assert answer.status_code == 200
    assert provider.seen == [sent]
    assert (await recorded(native, answer)).request == sent


@pytest.mark.parametrize("called", [True, False], ids=["called", "neither"])
@pytest.mark.parametrize("form", FORMS)
async def test_an_assistant_without_content_and_the_embedded_model(form, called):
    """case 11: the model in the process takes them too."""
    from reef.engines.local.chat import parse

    turn = json.loads(f'{{{FORMS[form]}"role":"assistant"}}') | ({"tool_calls": [CALL]} if called else {})
    found = parse(json.dumps({"messages": [{"role": "user", "content": "Hi"}, turn]}).encode())
    assert found.messages[1]["content"] == ""
    assert ("tool_calls" in found.messages[1]) == called


TURNS = {
    "messages": [
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]}],
        [{"role": "assistant", "content": []}],
        [{"role": "assistant", "content": ""}],
    ],
    "responses": [
        [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}],
        [{"role": "assistant", "content": []}],
        [{"role": "assistant", "content": ""}],
    ],
}
RESULTS = {
    "messages": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]},
    "responses": {"type": "function_call_output", "call_id": "c1", "output": "4"},
}


@pytest.mark.parametrize("number", range(3), ids=["called", "no parts", "empty"])
@pytest.mark.parametrize("dialect", TURNS)
async def test_an_assistant_without_content_in_another_dialect(either, provider, dialect, number):
    """case 11: untouched where it is spoken; translated, the turn is there and says no more than it did."""
    field = "input" if dialect == "responses" else "messages"
    end = RESULTS[dialect] if number == 0 else {"role": "user", "content": "?"}
    sent = ask(dialect, stream=False, **{field: [{"role": "user", "content": "Hi"}, *TURNS[dialect][number], end]})
    provider.script = replies(reply(dialect if either.native else "chat"))
    answer = await post(either, dialect, sent)
    assert answer.status_code == 200, answer.text
    if either.native:
        assert provider.seen == [sent]
        return
    turns = json.loads(provider.seen[0])["messages"]
    said = [turn for turn in turns if turn["role"] == "assistant"]
    assert not any(turn.get("content") for turn in said)
    assert [call["id"] for turn in said for call in turn.get("tool_calls", ())] == (["c1"] if number == 0 else [])
    assert [turn["role"] for turn in turns if turn["role"] != "assistant"] == [
        "user",
        "tool" if number == 0 else "user",
    ]
