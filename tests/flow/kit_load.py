"""Gateway processes in front of a scripted provider, and clients that write down what they saw.

Knows: the three dialects as far as their text goes, what a client may conclude from what it received.
Does not know: the record store. The provider speaks chat only, so the other dialects are translated.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.gateway.conftest import template

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/gateway/worker.py"
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
ENDS = {"chat": b"data: [DONE]", "messages": b"event: message_stop", "responses": b"event: response.completed"}
JSON = {"content-type": "application/json"}
RECEIPT = "x-reef-agent-record-id"


def said(name: str) -> str:
    """What the provider answers to a question of this name."""
    return f"I heard {name}, 北京🌍, and more."


class Provider:
    """An OpenAI-compatible server: `pause` seconds before each piece of an answer.

    What is named slow… is answered, or after its first piece continued, 20 s later; the stream that answers long… has
    100 pieces more and takes two seconds. `left` is set when a client went away in the middle of such an answer.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.asked = 0
        self.left = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        content = body["messages"][-1]["content"]
        name = (content if isinstance(content, str) else content[0]["text"]).split()[0]
        text, pause, more = said(name), self.pause, 0
        if name.startswith("slow"):
            pause = 20.0
        elif name.startswith("long"):
            pause, more = 0.02, 100
        base = {"id": "up-1", "created": 1, "model": "served"}
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            whole = json.dumps(base | {"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
            await self._wait(reader, pause)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(whole) + whole)
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        base["object"] = "chat.completion.chunk"
        deltas = [*(text[at : at + 7] for at in range(0, len(text), 7)), *(f" {n}" for n in range(more))]
        for delta in deltas:
            self._event(writer, base | {"choices": [{"index": 0, "delta": {"content": delta}, "finish_reason": None}]})
            await writer.drain()
            await self._wait(reader, pause)
        self._event(writer, base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event(writer, base | {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, value: dict) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _wait(self, reader: asyncio.StreamReader, seconds: float) -> None:
        """A pause; ConnectionError as soon as the client is gone."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await reader.read(1)
                self.left.set()
                raise ConnectionError


@dataclass
class Note:
    """One request and what its client saw of the answer. `body` grows as it comes; `ended`: nothing more will."""

    name: str
    dialect: str
    stream: bool
    sent: bytes
    headers: dict = field(default_factory=dict)
    status: int | None = None
    receipt: str | None = None
    recorded: str | None = None
    retry: str | None = None
    body: bytes = b""
    ended: bool = False
    clean: bool = False  # the answer ended as HTTP answers end
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """The client holds a whole answer."""
        return self.clean and self.status == 200 and (not self.stream or ENDS[self.dialect] in self.body)

    @property
    def text(self) -> str:
        """The answer's text, read by the dialect's own rules."""
        if not self.stream:
            body = json.loads(self.body)
            if self.dialect == "chat":
                return body["choices"][0]["message"]["content"]
            return body["content"][0]["text"] if self.dialect == "messages" else body["output"][0]["content"][0]["text"]
        found = []
        for line in self.body.decode().splitlines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if self.dialect == "chat":
                found += [choice["delta"].get("content") or "" for choice in event["choices"]]
            elif event["type"] == "content_block_delta":
                found.append(event["delta"]["text"])
            elif event["type"] == "response.output_text.delta":
                found.append(event["delta"])
        return "".join(found)


def question(name: str, number: int, filler: str = "", **headers: str) -> Note:
    """A request of one of six kinds. Its bytes are such as no JSON library would write them again."""
    dialect, stream = tuple(PATHS)[number % 3], number // 3 % 2 == 0
    text = json.dumps(f"{name} caf\u00e9 {filler}").replace("caf", "\\u0063af")
    flag = "true" if stream else "false"
    if dialect == "responses":
        sent = f'{{"model": "m",  "input": [{{"role":"user", "content":{text}}}],\n "stream": {flag}}}'
    else:
        sent = (
            f'{{"model": "m",  "messages": [{{"role":"user", "content":{text}}}],\n "max_tokens": 99, "stream":{flag}}}'
        )
    return Note(name, dialect, stream, sent.encode(), headers)


async def ask(session: aiohttp.ClientSession, url: str, note: Note) -> Note:
    """Send it and write down what comes. A connection that breaks is no error here."""
    begun = asyncio.get_running_loop().time()
    try:
        headers = JSON | note.headers
        async with session.post(url + PATHS[note.dialect], data=note.sent, headers=headers) as answer:
            note.receipt = answer.headers.get(RECEIPT)
            note.recorded = answer.headers.get("x-reef-recorded")
            note.retry = answer.headers.get("retry-after")
            note.status = answer.status
            async for piece in answer.content.iter_any():
                note.body += piece
        note.clean = True
    except aiohttp.ClientError:
        pass
    finally:
        note.ended = True
        note.seconds = asyncio.get_running_loop().time() - begun
    return note


class Process:
    """Gateway processes, one after the other, on one listening socket over one state folder.

    Who dials while none runs waits for the next. `more` is what `worker.py` takes.
    """

    def __init__(self, state: Path, provider: Provider, *, drain: float = 20.0, **more) -> None:
        shutil.copytree(template(), state, dirs_exist_ok=True)
        self.state, self.drain, self.more = state, drain, {"upstream": provider.url, **more}
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.running: subprocess.Popen | None = None

    def start(self, failpoint: str = "", *, under: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [*under, sys.executable, str(WORKER), str(self.state), str(self.sock.fileno()), "0"]
        self.running = subprocess.Popen(
            [*command, str(self.drain), json.dumps(self.more)],
            pass_fds=[self.sock.fileno()],
            stdout=subprocess.PIPE,
            stderr=(log := (self.state / "said").open("ab")),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "REEF_FAILPOINT": failpoint},
        )
        log.close()
        return self.running

    async def ended(self, within: float = 30.0) -> int:
        code = await asyncio.wait_for(asyncio.to_thread(self.running.wait), within)
        self.running.stdout.close()
        return code

    async def kill(self) -> None:
        self.running.kill()
        assert await self.ended() == -signal.SIGKILL

    def close(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            self.running.stdout.close()
        self.sock.close()


class Load:
    """`clients` that ask one thing after the other until `end`, or until `most` were asked in all.

    `filler` gives text that each request carries beside its name.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        label: str,
        *,
        clients: int = 8,
        most: int = 1 << 30,
        filler: Callable[[], str] = str,
        **headers: str,
    ) -> None:
        self.notes: list[Note] = []
        self.session, self.url, self.label, self.headers = session, url, label, headers
        self.clients, self.most, self.filler = clients, most, filler
        self.stopping = False
        self.tasks: list[asyncio.Task] = []

    async def __aenter__(self) -> "Load":
        self.tasks = [asyncio.create_task(self._live()) for _ in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _live(self) -> None:
        while not self.stopping and len(self.notes) < self.most:
            number = len(self.notes)
            note = question(f"{self.label}-{number}", number, self.filler(), **self.headers)
            self.notes.append(note)
            await ask(self.session, self.url, note)

    async def answered(self, more: int, within: float = 30.0) -> None:
        """Wait until so many further answers came."""
        before = sum(note.ended for note in self.notes)
        async with asyncio.timeout(within):
            while sum(note.ended for note in self.notes) < before + more:
                self.alive()
                await asyncio.sleep(0.001)

    def alive(self) -> None:
        for task in self.tasks:
            if task.done() and task.exception() is not None:
                raise task.exception()

    async def end(self) -> list[Note]:
        """Ask nothing new, and wait for what is under way."""
        self.stopping = True
        await self.done()
        return self.notes

    async def done(self, within: float = 120.0) -> list[Note]:
        async with asyncio.timeout(within):
            await asyncio.gather(*self.tasks)
        return self.notes
