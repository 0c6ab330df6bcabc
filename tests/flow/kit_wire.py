"""A provider that says exactly what a test scripts, and the same small things said in each dialect.

Knows: the three dialects' JSON and events. Does not know: what is recorded of them.
"""

import asyncio
import json

from aiohttp import web

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
DIALECTS = tuple(PATHS)
WORDS = "北京🌍 and a cup of café"
DONE = b"data: [DONE]\n\n"
JSON = {"content-type": "application/json"}
RECEIPT = "x-reef-agent-record-id"


class Provider:
    """Answers each request by `script(request)`; `seen` are the bodies, in order."""

    def __init__(self):
        self.seen = []
        self.script = None
        self.left = asyncio.Event()

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post("/{any:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _answer(self, request):
        self.seen.append(await request.read())
        try:
            return await self.script(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise


def streams(data, *, size=1 << 20, cut=False, **headers):
    """A stream in pieces of `size` bytes."""

    async def script(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
        await response.prepare(request)
        for place in range(0, len(data), size):
            await response.write(data[place : place + size])
        if cut:
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return script


def replies(data, status=200, **headers):
    body = data if isinstance(data, bytes) else json.dumps(data).encode()

    async def script(request):
        return web.Response(body=body, status=status, headers=headers, content_type="application/json")

    return script


def event(value):
    """An event of any dialect: with a name where its data has a type."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def chunk(finish=None, *, index=0, logprobs=None, usage=None, **delta):
    """A chat chunk; `usage` where a provider sends it beside a choice."""
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    value = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    value["choices"] = [choice | ({"logprobs": logprobs} if logprobs is not None else {})]
    return event(value | ({"usage": usage} if usage is not None else {}))


def fragments(*parts):
    """A chat chunk with fragments of tool calls: (index, id, name, arguments), None where it is silent."""
    found = []
    for index, name, function, arguments in parts:
        said = {key: value for key, value in (("name", function), ("arguments", arguments)) if value is not None}
        found.append({"index": index, "function": said} | ({"id": name, "type": "function"} if name else {}))
    return chunk(tool_calls=found)


USAGE = {"prompt_tokens": 26, "completion_tokens": 2, "total_tokens": 28}
TRAILING = event({"id": "up-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})


def ask(dialect, *, stream=True, **more):
    """A request's bytes, such as no JSON library would write them again."""
    body = {"model": "m"} | ({"max_tokens": 99} if dialect == "messages" else {})
    body["input" if dialect == "responses" else "messages"] = [{"role": "user", "content": "Hello"}]
    return json.dumps(body | {"stream": stream} | more, indent=3).replace("Hello", "\\u0048ello").encode()


def reply(dialect):
    """A whole answer of WORDS."""
    if dialect == "chat":
        choice = {"index": 0, "message": {"role": "assistant", "content": WORDS}, "finish_reason": "stop"}
        return {"id": "up-1", "object": "chat.completion", "model": "served", "choices": [choice], "usage": USAGE}
    if dialect == "messages":
        return _message([{"type": "text", "text": WORDS}], "end_turn")
    return _response([_said()])


def stream(dialect):
    """The same, streamed."""
    if dialect == "chat":
        return chunk(role="assistant", content="") + chunk(content=WORDS) + chunk("stop") + TRAILING + DONE
    if dialect == "messages":
        return messages([({"type": "text", "text": ""}, [(0, {"type": "text_delta", "text": WORDS})])], "end_turn")
    item = _said()
    return (
        event({"type": "response.created", "response": _response([]) | {"status": "in_progress", "usage": None}})
        + event({"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}})
        + event({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": WORDS})
        + event({"type": "response.output_item.done", "output_index": 0, "item": item})
        + event({"type": "response.completed", "response": _response([item])})
    )


def begun(dialect):
    """The beginning of a stream that says `Half`."""
    if dialect == "chat":
        return chunk(content="Half")
    if dialect == "messages":
        begin = event({"type": "message_start", "message": _message([], None)})
        block = event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        delta = {"type": "text_delta", "text": "Half"}
        return begin + block + event({"type": "content_block_delta", "index": 0, "delta": delta})
    begin = event({"type": "response.created", "response": _response([]) | {"status": "in_progress"}})
    item = event({"type": "response.output_item.added", "output_index": 0, "item": _said() | {"content": []}})
    delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "Half"}
    return begin + item + event(delta)


def failure(dialect, message):
    """An error inside a stream."""
    if dialect == "chat":
        return event({"error": {"message": message, "code": "overloaded"}})
    if dialect == "messages":
        return event({"type": "error", "error": {"type": "overloaded_error", "message": message}})
    return event({"type": "error", "code": "server_error", "message": message, "sequence_number": 9})


def messages(blocks, reason):
    """A Messages stream: all blocks begin, then their deltas in the order of their first number, then all end."""
    found = [event({"type": "message_start", "message": _message([], None)})]
    for index, (block, _) in enumerate(blocks):
        found.append(event({"type": "content_block_start", "index": index, "content_block": block}))
    turns = sorted((turn, index, delta) for index, (_, deltas) in enumerate(blocks) for turn, delta in _keyed(deltas))
    for _, index, delta in turns:
        found.append(event({"type": "content_block_delta", "index": index, "delta": json.loads(delta)}))
    found += [event({"type": "content_block_stop", "index": index}) for index in range(len(blocks))]
    found.append(event({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 2}}))
    return b"".join([*found, event({"type": "message_stop"})])


def _keyed(deltas):
    return [(turn, json.dumps(delta)) for turn, delta in deltas]


def _message(content, reason):
    usage = {"input_tokens": 26, "output_tokens": 2 if content else 0}
    made = {"id": "msg_up", "type": "message", "role": "assistant", "model": "served", "content": content}
    return made | {"stop_reason": reason, "stop_sequence": None, "usage": usage}


def _said():
    content = [{"type": "output_text", "text": WORDS, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def _response(output):
    usage = {"input_tokens": 26, "output_tokens": 2, "total_tokens": 28}
    made = {"id": "resp_up", "object": "response", "created_at": 1, "model": "served", "status": "completed"}
    return made | {"output": output, "usage": usage}


def response(output):
    """A whole Responses answer with these items."""
    return _response(output)


def told(body):
    """The data of each event of a stream, `[DONE]` left out."""
    found = []
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(":")[2].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if lines and lines != ["[DONE]"]:
            found.append(json.loads("\n".join(lines)))
    return found


def calls(dialect, body):
    """The tool calls that a client reads in a stream: (name, arguments as JSON)."""
    found = {}
    for item in told(body):
        if dialect == "responses":
            if item["type"] == "response.completed":
                output = [each for each in item["response"]["output"] if each["type"] == "function_call"]
                return [(each["name"], json.loads(each["arguments"])) for each in output]
        elif dialect == "messages":
            if item["type"] == "content_block_start":
                found[item["index"]] = [item["content_block"].get("name"), ""]
            elif item["type"] == "content_block_delta":
                found[item["index"]][1] += item["delta"].get("partial_json", "")
        else:
            for choice in item["choices"]:
                for part in choice["delta"].get("tool_calls", ()):
                    call = found.setdefault(part["index"], ["", ""])
                    call[0] += part["function"].get("name", "")
                    call[1] += part["function"].get("arguments", "")
    return [(name, json.loads(arguments)) for _, (name, arguments) in sorted(found.items())]


async def post(gateway, dialect, body, **headers):
    async with gateway.client() as client:
        return await client.post(PATHS[dialect], content=body, headers=JSON | headers)


async def recorded(gateway, answer):
    return await gateway.closed(answer.headers[RECEIPT])
