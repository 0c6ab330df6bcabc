"""What can go wrong between Reef and a server of an engine, as faults that a stub server puts before its answers.

Each maker gives a fault for `Stub.faults`, by `On(path, fault, times=…)`. Those that need the honest answer ask for it;
the others never let the stub know. `edit` and its kin change what an answer says, streamed or whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from tests.engines.remote.stub import DONE, Call, Fault, Reply, Stub, packed

EVER = 3600.0  # seconds
ALWAYS = 1_000_000  # times
HTML = "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"


# --- a server that is gone, or slow -----------------------------------------------------------------------------------


def reset() -> Fault:
    """The connection is reset when the request is there, without a byte."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(EVER)
        raise AssertionError

    return fault


def hang(before: bool = True) -> Fault:
    """No byte ever. `before` False: the work is done all the same."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        if not before:
            await call()
        await asyncio.sleep(EVER)
        return await call()

    return fault


def late(seconds: float) -> Fault:
    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        await asyncio.sleep(seconds)
        return await call()

    return fault


def done_but_reset() -> Fault:
    """The work is done, and the connection is reset before its answer."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        await call()
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(EVER)
        raise AssertionError

    return fault


def dies() -> Fault:
    """The whole server is killed when the request is there."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        asyncio.get_running_loop().call_soon(stub.kill)
        await asyncio.sleep(EVER)
        raise AssertionError

    return fault


def cut(at: int, after: Callable[[Stub], None] = lambda stub: None) -> Fault:
    """A stream's first events, then a reset. A whole answer is cut in its middle."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        reply = await call()
        response = await _begun(stub, request, reply)
        async for number, data in _parts(reply):
            if number == at:
                break
            await response.write(data if reply.events is not None else data[: len(data) // 2])
        await asyncio.sleep(0.01)
        after(stub)
        assert request.transport is not None
        request.transport.abort()
        return response

    return fault


def stall(at: int, seconds: float = EVER) -> Fault:
    """A stream's first events, then nothing for a while."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        reply = await call()
        response = await _begun(stub, request, reply)
        async for number, data in _parts(reply):
            if number == at:
                await asyncio.sleep(seconds)
            await response.write(data)
        await response.write_eof()
        return response

    return fault


def drip(seconds: float) -> Fault:
    """A byte at a time."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        reply = await call()
        response = await _begun(stub, request, reply)
        async for _, data in _parts(reply):
            for place in range(len(data)):
                await response.write(data[place : place + 1])
                await asyncio.sleep(seconds)
        await response.write_eof()
        return response

    return fault


# --- no answer at all -------------------------------------------------------------------------------------------------


def says(status: int, body: Any = None, *, kind: str = "application/json", **headers: str) -> Fault:
    """Some other answer; `retry_after` is a header."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        told = {"error": {"message": f"status {status}", "type": "Error", "code": status}} if body is None else body
        return Reply(told, status, kind, named)

    return fault


def page(status: int = 502) -> Fault:
    """An error page of a proxy in between."""
    return says(status, HTML, kind="text/html")


def redirects(to: str) -> Fault:
    return says(307, "", kind="text/plain", location=to)


def garbage(data: bytes = b'{"choices": [{"index": 0, "mess') -> Fault:
    """200, and no JSON."""
    return says(200, data)


def endless(piece: bytes = b" " * 65536) -> Fault:
    """A body without an end."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(piece)
            await asyncio.sleep(0)

    return fault


_BOMB: list[bytes] = []


def bomb(stream: bool = False) -> Fault:
    """A few hundred kilobytes that unpack to hundreds of megabytes."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        if not _BOMB:
            _BOMB.append(gzip.compress(b" " * (300 << 20), 1))
        kind = "text/event-stream" if stream else "application/json"
        return web.Response(body=_BOMB[0], content_type=kind, headers={"content-encoding": "gzip"})

    return fault


# --- streams that are not right ---------------------------------------------------------------------------------------


def events(change: Callable[[list[bytes]], list[bytes]]) -> Fault:
    """The whole list of a stream's events, changed."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> web.StreamResponse:
        reply = await call()
        assert reply.events is not None, reply.body
        whole = [packed(each) async for each in reply.events]
        response = await _begun(stub, request, reply)
        for data in change(whole):
            await response.write(data)
        await response.write_eof()
        return response

    return fault


def endings(*, done: bool = True, last: int = 1) -> Fault:
    """A stream whose [DONE] is missing, or whose last chunk comes `last` times."""

    def change(whole: list[bytes]) -> list[bytes]:
        assert whole[-1] == packed(DONE)
        return [*whole[:-2], *[whole[-2]] * last, *([whole[-1]] if done else [])]

    return events(change)


def typed(kind: str) -> Fault:
    """Another content-type."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        reply = await call()
        reply.kind = kind
        return reply

    return fault


# --- lies -------------------------------------------------------------------------------------------------------------


def edit(change: Callable[[Any], Any]) -> Fault:
    """Each JSON value of an answer, changed: a whole one, or each chunk."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        reply = await call()
        if reply.events is None:
            reply.body = change(copy.deepcopy(reply.body))
            return reply
        honest = reply.events

        async def changed() -> AsyncIterator[Any]:
            async with contextlib.aclosing(honest) as source:  # type: ignore[type-var]
                async for each in source:
                    yield each if isinstance(each, str) else change(copy.deepcopy(each))

        reply.events = changed()
        return reply

    return fault


def nothing() -> Fault:
    """200 and what the honest answer would be, but nothing was done. The stub must not change by asking it."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        return Reply("", kind="text/plain")

    return fault


def takes_other(weights: str) -> Fault:
    """A LoRA is loaded, but answers come from other weights; none: from the base's."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        reply = await call()
        name = (await request.json())["lora_name"]
        if reply.status == 200:
            stub.loras[name].weights = weights  # type: ignore[attr-defined]
        return reply

    return fault


def numbers(text: str) -> Fault:
    """A whole answer as JSON in which `"logprob": <number>` of the answer's tokens is `text`: NaN is no JSON."""

    async def fault(stub: Stub, request: web.Request, call: Call) -> Reply:
        reply = await call()
        reply.body = json.dumps(_swapped(reply.body)).replace('"@"', text).encode()
        return reply

    return fault


def _swapped(value: Any) -> Any:
    if isinstance(value, dict):
        found = {name: "@" if name == "logprob" else _swapped(each) for name, each in value.items()}
        if isinstance(found.get("output_token_logprobs"), list):
            found["output_token_logprobs"] = [["@", *each[1:]] for each in found["output_token_logprobs"]]
        return found
    return [_swapped(each) for each in value] if isinstance(value, list) else value


# --- writing ----------------------------------------------------------------------------------------------------------


async def _begun(stub: Stub, request: web.Request, reply: Reply) -> web.StreamResponse:
    kind = "text/event-stream; charset=utf-8" if reply.events is not None else reply.kind
    response = web.StreamResponse(status=reply.status, headers={"content-type": kind, **reply.headers})
    await response.prepare(request)
    return response


async def _parts(reply: Reply) -> AsyncIterator[tuple[int, bytes]]:
    if reply.events is None:
        yield 0, json.dumps(reply.body).encode()
        return
    number = 0
    async with contextlib.aclosing(reply.events) as source:  # type: ignore[type-var]
        async for each in source:
            yield number, packed(each)
            number += 1
