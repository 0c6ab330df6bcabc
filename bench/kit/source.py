"""A streaming upstream: one chunk each 5 ms by a fixed schedule, each with the moment it was sent in its text.

    python -m kit.source PORT

Knows: just enough HTTP to answer any POST with `max_tokens` such chunks, and any GET with 200.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import uvloop

from kit.alarm import Alarm

PERIOD = 5_000_000  # nanoseconds
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FRAME = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}


def event(text: str | None, finish: str | None = None) -> bytes:
    """One HTTP chunk with one event."""
    delta = {} if text is None else {"content": text}
    body = json.dumps({**_FRAME, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    return chunk(f"data: {body}\n\n".encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    alarm, chunks = Alarm(), 0
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if found := re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE):
                chunks = int(json.loads(await reader.readexactly(int(found[1])))["max_tokens"])
            if not head.startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            writer.write(_HEAD)
            begun = time.monotonic_ns()
            for number in range(chunks):
                await alarm.until(begun + number * PERIOD)
                writer.write(event(f"{time.monotonic_ns()} "))
            writer.write(event(None, "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        alarm.close()
        writer.close()


async def main(port: int) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
