"""What the stub servers have in common: HTTP, generation by a toy model, pausing, dying and coming back.

A route gives a `Reply`; the stub writes it. A test can put `faults` before a path (see `hostile.py`): each gets the
request and a call that gives the honest reply, and answers in its own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.engines.remote.brain import Brain, Prefixes, Read, digest

DONE = "[DONE]"


@dataclass(slots=True)
class Reply:
    """What goes back. `events` (JSON values or text) make it a stream."""

    body: Any = None
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncIterator[Any] | None = None


class Refused(Exception):
    """A request that the server turns down; `reply` is how."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply.body))
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class Said:
    """One sequence as it was really made: for tests that ask from which weights an answer came."""

    prompt: list[int]
    lora: str | None
    weights: str = ""  # the digest that the last token was drawn with
    origin: frozenset[str] = frozenset()  # all the digests that went into it
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """How one sequence is to be drawn."""

    heat: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    limit: int = 16
    least: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    endless: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token of an answer. `finish` is set on the last one; `token` is None where none was drawn."""

    token: int | None
    logprob: float
    top: list[tuple[int, float]]
    text: str  # what it adds to the answer's text
    finish: str | None = None
    matched: int | str | None = None


Call = Callable[[], Awaitable[Reply]]
Fault = Callable[["Stub", web.Request, Call], Awaitable["web.StreamResponse | Reply"]]


@dataclass(slots=True)
class On:
    """A fault for requests to a path: passes `skip` of them by, then happens `times`. An empty path is any."""

    path: str
    fault: Fault
    times: int = 1
    skip: int = 0
    happened: int = 0

    def takes(self, path: str) -> bool:
        if self.path not in ("", path) or self.happened >= self.times:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.happened += 1
        return True


class Stub:
    """A server on 127.0.0.1 over one model folder. `delay`: seconds before each token. `slow`: before weights change.

    Subclasses fill `routes` and say under which key a prefix may be shared.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "served",
        delay: float = 0.0,
        slow: float = 0.0,
        key: str | None = None,
        ending: float = -0.5,
    ) -> None:
        self.folder, self.name, self.delay, self.slow, self.key = folder, name, delay, slow, key
        self._ending = ending  # how likely an answer ends, see `Brain`
        self.routes: dict[tuple[str, str], Callable[[Seen], Awaitable[Reply]]] = {}
        self.faults: list[On] = []
        self.seen: list[Seen] = []
        self.said: list[Said] = []
        self.running = 0  # sequences that are being made
        self.most = 0  # of them at once
        self.left = 0  # answers whose client went away
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._dying: asyncio.Future[None] | None = None
        self._lives = itertools.count(1)
        self.fresh()

    def fresh(self) -> None:
        """The state of a server that has just started: base weights, no LoRAs, nothing cached."""
        self.brain = Brain(self.folder, ending=self._ending)
        self.base = digest(self.folder)  # of the weights that it answers with
        self.prefixes = Prefixes()
        self.going = asyncio.Event()
        self.going.set()
        self.abort = asyncio.Event()  # every sequence in the making is to end now
        self.life = next(self._lives)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paused(self) -> bool:
        return not self.going.is_set()

    def asked(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def die(self) -> None:
        """As after kill -9: every connection is reset, nobody listens, all state is gone."""
        self.hang_up()
        await self.stop()
        self.fresh()

    def kill(self) -> None:
        """`die`, from inside a request."""
        self._dying = asyncio.ensure_future(self.die())

    def hang_up(self) -> None:
        if self._runner is not None and self._runner.server is not None:
            for line in [*self._runner.server.connections]:
                if line.transport is not None:
                    line.transport.abort()

    @property
    def connections(self) -> int:
        return len(self._runner.server.connections) if self._runner is not None and self._runner.server else 0

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        with contextlib.suppress(ValueError):
            raw = json.loads(raw)
        path = request.path
        seen = Seen(request.method, path, dict(request.query), dict(request.headers), raw)
        self.seen.append(seen)

        async def call() -> Reply:
            try:
                if (reply := self.guard(seen)) is not None:
                    return reply
                route = self.routes.get((request.method, path))
                return Reply({"detail": "Not Found"}, 404) if route is None else await route(seen)
            except Refused as refused:
                return refused.reply

        try:
            for on in self.faults:
                if on.takes(path):
                    found = await on.fault(self, request, call)
                    return await self.send(request, found) if isinstance(found, Reply) else found
            return await self.send(request, await call())
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise

    def guard(self, seen: Seen) -> Reply | None:
        """Whether the caller may: None, or the refusal."""
        if self.key is None or seen.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return Reply({"error": "Unauthorized"}, 401)

    async def send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        if reply.events is None:
            data = reply.body if isinstance(reply.body, bytes) else str(reply.body or "").encode()
            if reply.kind == "application/json" and not isinstance(reply.body, bytes):
                data = json.dumps(reply.body).encode()
            return web.Response(body=data, status=reply.status, content_type=reply.kind, headers=reply.headers)
        kind = "text/event-stream; charset=utf-8" if reply.kind == "application/json" else reply.kind
        response = web.StreamResponse(status=reply.status, headers={"content-type": kind, **reply.headers})
        await response.prepare(request)
        async with contextlib.aclosing(reply.events) as events:  # type: ignore[type-var]
            async for event in events:
                await response.write(packed(event))
        await response.write_eof()
        return response

    # --- generation ---------------------------------------------------------------------------------------------------

    def weights_of(self, lora: str | None) -> str:
        """The digest that a sequence is made with now."""
        raise NotImplementedError

    def cache_key(self, lora: str | None, salt: str | None) -> str:
        raise NotImplementedError

    async def prefill(self, said: Said, key: str, limit: int | None = None) -> list[Read]:
        """Read a prompt: what is known after each token. At most `limit` tokens come from the cache."""
        count, read = self.prefixes.find(key, said.prompt, len(said.prompt) if limit is None else limit)
        said.cached = count
        reads = [read or self.brain.begin()] * count
        for token in said.prompt[count:]:
            read = self.brain.read(read or self.brain.begin(), token, self.weights_of(said.lora))
            reads.append(read)
        return reads

    def scores(
        self, reads: Sequence[Read], said: Said, start: int
    ) -> list[tuple[float | None, list[tuple[int, float]]]]:
        """Each prompt token's log-prob and the likeliest, from `start` on; nothing for the first of all."""
        found: list[tuple[float | None, list[tuple[int, float]]]] = []
        for place in range(start, len(said.prompt)):
            if place == 0:
                found.append((None, []))
                continue
            odds = self.brain.odds(reads[place - 1], self.weights_of(said.lora))
            top = [(token, odds.logprob(token)) for token in odds.top(5)]
            found.append((odds.logprob(said.prompt[place]), top))
        return found

    async def draw(
        self,
        said: Said,
        wish: Wish,
        key: str,
        *,
        reads: list[Read],
        scaled: bool,
        tops: int = 0,
        of: Sequence[int] = (),
    ) -> AsyncIterator[Drawn]:
        """The tokens of one sequence. `scaled`: log-probs at the sampling temperature, else at 1. Beside each: the
        `tops` likeliest, or those `of` which they are asked."""
        self.running += 1
        self.most = max(self.most, self.running)
        abort, whole, shown = self.abort, "", ""
        tokens, reads = [*said.prompt], [*reads]
        try:
            for place in range(wish.limit):
                await self._turn(abort)
                if abort.is_set():
                    said.finish = "abort"
                    yield Drawn(None, 0.0, [], "", "abort")
                    return
                weights = self.weights_of(said.lora)
                odds = self.brain.odds(reads[-1], weights)
                token = self._pick(odds, wish, reads[-1], place)
                reads.append(self.brain.read(reads[-1], token, weights))
                tokens.append(token)
                said.ids.append(token)
                said.weights, said.origin = weights, reads[-1].origin
                heat = wish.heat if scaled else 1.0
                top = [(each, odds.logprob(each, heat)) for each in (of or odds.top(tops))]
                whole = self.brain.text.decode(said.ids)
                finish, matched = None, None
                end = next((at for stop in wish.stops if (at := whole.find(stop)) >= 0), None)
                if token in self.brain.ends and not wish.endless:
                    finish, matched = "stop", token
                elif end is not None:
                    finish, matched, whole = "stop", next(s for s in wish.stops if s in whole), whole[:end]
                elif place == wish.limit - 1:
                    finish = "length"
                # Nothing is shown that may turn out to be part of a character, or of a stop string.
                held = 0 if finish is not None else max([len(stop) for stop in wish.stops], default=1) - 1
                new = "" if whole.endswith("�") and finish is None else whole[len(shown) : len(whole) - held]
                shown += new
                said.finish = finish
                yield Drawn(token, odds.logprob(token, heat), top, new, finish, matched)
                if finish is not None:
                    self.prefixes.keep(key, tokens, reads)
                    return
        finally:
            self.running -= 1

    async def _turn(self, abort: asyncio.Event) -> None:
        """Wait for a token's turn: its delay, and while the server is paused."""
        await asyncio.sleep(self.delay)
        while not self.going.is_set() and not abort.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.going, abort)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()

    def _pick(self, odds: Any, wish: Wish, read: Read, place: int) -> int:
        number = (
            random.random() if wish.seed is None else random.Random(f"{wish.seed}/{place}/{read.state.hex()}").random()
        )
        token = self.brain.draw(odds, number, heat=wish.heat, top_p=wish.top_p, top_k=wish.top_k)
        if token in self.brain.ends and (wish.endless or place < wish.least):
            token = next(each for each in odds.top(3) if each not in self.brain.ends)
        return token

    def stop_all(self) -> None:
        """End every sequence in the making, with what it has."""
        self.abort.set()
        self.abort = asyncio.Event()

    async def idle(self) -> None:
        """Until nothing is being made."""
        while self.running:
            await asyncio.sleep(0.002)


def packed(event: Any) -> bytes:
    """One event of a stream; bytes go as they are."""
    if isinstance(event, bytes):
        return event
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


@contextlib.asynccontextmanager
async def serving(*stubs: Stub) -> AsyncIterator[None]:
    """Run stubs for a while."""
    for stub in stubs:
        await stub.start()
    try:
        yield
    finally:
        for stub in stubs:
            stub.hang_up()
            await stub.stop()
