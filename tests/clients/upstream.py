"""A scripted provider on a real socket: it asks for one tool call, then says what the tool returned.

Knows: the three dialects well enough for the clients that are driven here, JSON and streamed, with usage.
Does not know: Reef. It keeps every request's bytes and headers, and refuses a dialect that it does not `speak`.

The script: a request whose tools hold one of TOOLS and no result yet is answered with a call of it; one with results
with a text that quotes them; one without tools with a greeting. Streams leave in pieces that respect no boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

KEY = "the-upstream-s-own-key"
WORD = "coral é 珊瑚"
"""What is written to a file, and looked up: not ASCII, so that cut characters show."""
FAULTS = ("cut", "clean", "event")
"""Models whose streams break off: by a dropped connection, by an end without an end marker, by an error event."""
_FILE = re.compile(r"/[\w./-]+/hello\.txt")
_HERE = {"subagent_type": "general-purpose", "run_in_background": False}
_PIECE = 41
_count = itertools.count(1)


def _arguments(name: str, takes: Any, said: str) -> dict[str, Any] | None:
    """The arguments for a client's tool, which takes these properties; None for one that the script does not use."""
    found = _FILE.search(said)
    path = found.group() if found else "hello.txt"
    delegated = said.replace("Delegate: ", "")
    if name == "Agent":  # only where the task says so
        return None if delegated == said else {"description": "write", "prompt": delegated[-500:], **_HERE}
    return {
        "lookup": {"key": "colour"},
        "write": {"filePath" if "filePath" in takes else "path": path, "content": WORD + "\n"},
        "Write": {"file_path": path, "content": WORD + "\n"},
        "exec_command": {"cmd": f"echo '{WORD}' > {path} && cat {path}"},
    }.get(name)


@dataclass(frozen=True)
class Seen:
    """One request as it arrived, and the id its answer had in its headers."""

    id: str
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Turn:
    """What to answer, in no dialect: a text, or calls of tools."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # tool, arguments

    @property
    def usage(self) -> tuple[int, int]:
        return 120, 7 + len(self.text) // 4


class Upstream:
    """`with Upstream({"chat"}) as up:` serves until the block ends. `seen` are the requests, in order."""

    def __init__(self, speaks: set[str], script: Callable[[Any], Turn | None] = lambda body: None) -> None:
        self.speaks = speaks
        self.script = script  # what comes before the one below, if it says something of a request's body
        self.seen: list[Seen] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Upstream:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/v1/{rest:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            f"req-up-{next(_count)}",
            request.method,
            request.path,
            request.query_string,
            {name.lower(): value for name, value in request.headers.items()},
            await request.read(),
        )
        dialect = {
            "/v1/chat/completions": "chat",
            "/v1/responses": "responses",
            "/v1/messages": "messages",
            "/v1/messages/count_tokens": "messages",
        }.get(request.path)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "up-1", "object": "model"}]})
        self.seen.append(seen)
        headers = {"x-request-id": seen.id, "request-id": seen.id}
        if seen.headers.get("authorization") != f"Bearer {KEY}" and seen.headers.get("x-api-key") != KEY:
            return web.json_response({"error": {"message": "wrong key"}}, status=401, headers=headers)
        if dialect not in self.speaks or request.method != "POST":
            return web.json_response({"error": {"message": f"no {request.path} here"}}, status=404, headers=headers)
        if request.path.endswith("count_tokens"):
            return web.json_response({"input_tokens": 42}, headers=headers)
        body, speak = seen.json, _DIALECTS[dialect]
        turn = self.script(body) or _script(*speak.ask(body))
        if not body.get("stream"):
            return web.json_response(speak.whole(turn, body), headers=headers)
        data = speak.events(turn, body)
        if (fault := body.get("model")) in FAULTS:
            data = b"\n\n".join(data.split(b"\n\n")[:4]) + b"\n\n" + (speak.error if fault == "event" else b"")
        return await self._stream(request, data, headers, cut=fault == "cut")

    async def _stream(
        self, request: web.Request, data: bytes, headers: dict[str, str], *, cut: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **headers})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # some clients leave as soon as they saw the end marker
            for at in range(0, len(data), _PIECE):
                await response.write(data[at : at + _PIECE])
                await asyncio.sleep(0.0005)
            if cut and request.transport is not None:
                request.transport.abort()
            await response.write_eof()
        return response


def _script(tools: dict[str, Any], results: list[str], said: str) -> Turn:
    """The next turn of the conversation."""
    if results and "final_answer" in tools:  # a client whose loop ends with a tool of its own
        return Turn(calls=(("final_answer", json.dumps({"answer": _quote(results)}, ensure_ascii=False)),))
    if results:
        return Turn(_quote(results))
    for name, schema in tools.items():
        if (arguments := _arguments(name, schema.get("properties", {}), said)) is not None:
            wanted = [arguments, {"key": "shape"}] if "both at once" in said else [arguments]
            return Turn(calls=tuple((name, json.dumps(item, ensure_ascii=False)) for item in wanted))
    return Turn(f"Hello from the upstream, {WORD}.")


def _quote(results: list[str]) -> str:
    return "The tool returned: " + " and ".join(" ".join(result.split())[-200:] for result in results)


def _text(content: Any) -> str:
    """The text in a message's content, whichever shape it has."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return _text(content.get("text", content.get("content", content.get("output", ""))))
    return "\n".join(_text(part) for part in content) if isinstance(content, list) else ""


def _sse(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _cut(text: str) -> list[str]:
    return [text[at : at + 9] for at in range(0, len(text), 9)]


class _Chat:
    error = b'data: {"error": {"message": "the provider broke", "type": "server_error"}}\n\n'

    @staticmethod
    def ask(body: Any) -> tuple[dict[str, Any], list[str], str]:
        messages = body["messages"]
        results = [_text(m["content"]) for m in messages if m["role"] == "tool"]
        said = "\n".join(_text(m.get("content")) for m in messages if m["role"] == "user")
        if not results and "Observation:" in said:  # smolagents keeps its tool history as text
            results = [said.rpartition("Observation:")[2]]
        functions = [tool["function"] for tool in body.get("tools") or []]
        return {function["name"]: function["parameters"] for function in functions}, results, said

    @staticmethod
    def whole(turn: Turn, body: Any) -> Any:
        asked, answered = turn.usage
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
        if turn.calls:
            message["tool_calls"] = [
                {"id": f"call_{next(_count)}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in turn.calls
            ]
        reason = "tool_calls" if turn.calls else "stop"
        return {
            "id": f"chatcmpl-up{next(_count)}",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "up-1",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered},
        }

    @classmethod
    def events(cls, turn: Turn, body: Any) -> bytes:
        whole = cls.whole(turn, body)
        choice = whole["choices"][0]
        deltas: list[Any] = [{"role": "assistant", "content": None if turn.calls else ""}]
        for index, call in enumerate(choice["message"].get("tool_calls", [])):
            function = call["function"] | {"arguments": ""}
            deltas.append({"tool_calls": [call | {"index": index, "function": function}]})
        pieces = [[(index, piece) for piece in _cut(arguments)] for index, (_, arguments) in enumerate(turn.calls)]
        for index, piece in filter(None, itertools.chain(*itertools.zip_longest(*pieces))):  # calls take turns
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        deltas += [{"content": piece} for piece in _cut(turn.text)]
        head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        usage = (body.get("stream_options") or {}).get("include_usage")
        more = {"usage": None} if usage else {}
        chunks = [head | {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} | more for d in deltas]
        chunks.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]} | more)
        if usage:
            chunks.append(head | {"choices": [], "usage": whole["usage"]})
        return b"".join(map(_sse, chunks)) + b"data: [DONE]\n\n"


class _Responses:
    error = b'event: error\ndata: {"type": "error", "code": "server_error", "message": "the provider broke"}\n\n'

    @staticmethod
    def ask(body: Any) -> tuple[dict[str, Any], list[str], str]:
        given = body["input"]
        items = given if isinstance(given, list) else [{"role": "user", "content": given}]
        results = [_text(i["output"]) for i in items if i.get("type") == "function_call_output"]
        said = "\n".join(_text(i.get("content")) for i in items if i.get("role") == "user")
        functions = [tool for tool in body.get("tools") or [] if tool["type"] == "function"]
        return {function["name"]: function["parameters"] for function in functions}, results, said

    @staticmethod
    def whole(turn: Turn, body: Any) -> Any:
        asked, answered = turn.usage
        number = next(_count)
        part = {"type": "output_text", "text": turn.text, "annotations": []}
        message = {"id": f"msg_up{number}", "type": "message", "role": "assistant", "content": [part]}
        items = [
            {"id": f"fc_up{next(_count)}", "type": "function_call", "call_id": f"call_{next(_count)}", "name": name}
            | {"arguments": arguments}
            for name, arguments in turn.calls
        ]
        return {
            "id": f"resp_up{number}",
            "object": "response",
            "created_at": 1700000000,
            "status": "completed",
            "model": "up-1",
            "output": [item | {"status": "completed"} for item in items or [message]],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "usage": {
                "input_tokens": asked,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answered,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": asked + answered,
            },
        }

    @classmethod
    def events(cls, turn: Turn, body: Any) -> bytes:
        whole = cls.whole(turn, body)
        open_ = whole | {"status": "in_progress", "output": [], "usage": None}
        found: list[tuple[str, Any]] = [("created", {"response": open_}), ("in_progress", {"response": open_})]
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            begun = item | {"status": "in_progress"} | ({"arguments": ""} if turn.calls else {"content": []})
            found.append(("output_item.added", {"output_index": index, "item": begun}))
            if turn.calls:
                arguments = item["arguments"]
                found += [("function_call_arguments.delta", at | {"delta": piece}) for piece in _cut(arguments)]
                found.append(("function_call_arguments.done", at | {"arguments": arguments}))
            else:
                at |= {"content_index": 0}
                (part,) = item["content"]
                found.append(("content_part.added", at | {"part": part | {"text": ""}}))
                found += [("output_text.delta", at | {"delta": piece, "logprobs": []}) for piece in _cut(turn.text)]
                found.append(("output_text.done", at | {"text": turn.text, "logprobs": []}))
                found.append(("content_part.done", at | {"part": part}))
            found.append(("output_item.done", {"output_index": index, "item": item}))
        found.append(("completed", {"response": whole}))
        return b"".join(
            _sse({"type": f"response.{name}", "sequence_number": number} | data, f"response.{name}")
            for number, (name, data) in enumerate(found)
        )


class _Messages:
    error = (
        b'event: error\ndata: {"type": "error", "error": {"type": "api_error", "message": "the provider broke"}}\n\n'
    )

    @staticmethod
    def ask(body: Any) -> tuple[dict[str, Any], list[str], str]:
        blocks = [
            block
            for message in body["messages"]
            if message["role"] == "user" and isinstance(message["content"], list)
            for block in message["content"]
        ]
        results = [_text(b.get("content")) for b in blocks if b["type"] == "tool_result"]
        said = "\n".join(_text(m["content"]) for m in body["messages"] if m["role"] == "user")
        return {t["name"]: t.get("input_schema", {}) for t in body.get("tools") or []}, results, said

    @staticmethod
    def whole(turn: Turn, body: Any) -> Any:
        asked, answered = turn.usage
        number = next(_count)
        calls = [
            {"type": "tool_use", "id": f"toolu_{next(_count)}", "name": name, "input": json.loads(arguments)}
            for name, arguments in turn.calls
        ]
        return {
            "id": f"msg_up{number}",
            "type": "message",
            "role": "assistant",
            "model": "up-1",
            "content": calls or [{"type": "text", "text": turn.text}],
            "stop_reason": "tool_use" if turn.calls else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": asked, "output_tokens": answered},
        }

    @classmethod
    def events(cls, turn: Turn, body: Any) -> bytes:
        whole = cls.whole(turn, body)
        begun = whole | {"content": [], "stop_reason": None}
        begun["usage"] = whole["usage"] | {"output_tokens": 1}
        kind, key = ("input_json_delta", "partial_json") if turn.calls else ("text_delta", "text")
        found: list[tuple[str, Any]] = [("message_start", {"message": begun}), ("ping", {})]
        for index, block in enumerate(whole["content"]):
            empty = block | ({"input": {}} if turn.calls else {"text": ""})
            found.append(("content_block_start", {"index": index, "content_block": empty}))
            for piece in _cut(turn.calls[index][1] if turn.calls else turn.text):
                found.append(("content_block_delta", {"index": index, "delta": {"type": kind, key: piece}}))
            found.append(("content_block_stop", {"index": index}))
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        found.append(("message_delta", {"delta": ending, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}))
        found.append(("message_stop", {}))
        return b"".join(_sse({"type": name} | data, name) for name, data in found)


_DIALECTS: dict[str, Any] = {"chat": _Chat, "responses": _Responses, "messages": _Messages}
