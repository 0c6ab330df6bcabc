"""The Engine seam over servers of one kind: an ask goes to a server that has the release's weights.

Knows: asks, failures before the first byte, what is recorded of an answer, what a load and a rating are.
Does not know: how a kind of server is told (`Server`), where weights are (`pool`), or how they get there.

- Nothing is handed out before the server began to answer, as the model that it was asked for. Until then a server that
  fails is left out, and another is asked the same; afterwards an answer that breaks off is an exception.
- An answer is from exactly the release asked for, from its first token to its last.
- A server that does not have an adapter any more (it was started anew) is given it again, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from reef.core.errors import ContextError, EngineError, InputError, UpstreamError
from reef.core.nouns import Usage
from reef.engines import Answer, Ask, Head, Piece, WeightFiles
from reef.engines.dialect.value import load
from reef.engines.flow import Flow
from reef.engines.http import Broken, Response
from reef.engines.remote import Away, Down, Lost, Server, Want
from reef.engines.remote.door import Door
from reef.engines.remote.pool import Host, Pool
from reef.engines.remote.said import Said
from reef.engines.remote.staging import Shelf
from reef.engines.remote.words import Words

KNOWN = 256  # releases whose files are remembered
NO_ANSWER = "nothing was drawn: the prompt was only counted"
LONG = 8_000  # bytes of a request that is read in a thread
MAX_ERROR = 1024 * 1024  # bytes of a refusal
BATCH = 16  # sequences that are rated by one call
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_LONG = ("context length", "maximum context", "longer than the model", "max_model_len", "input length")
_RELAYED = (429, 503)


class RemoteEngine:
    """Engine over the servers of `away`, each made by `make`. Options of all kinds: `loras` adapters at once on each
    server; `everywhere`: whether a load goes to all servers (None: adapters do, full weights go to one); `seen_as`: the
    engine's folder as the servers see it; seconds: `turn` and `wait` for full weights, see `turns`; `patience` for a
    load or a rating."""

    dialects = frozenset({"chat", "count"})

    def __init__(
        self,
        away: Away,
        make: Callable[[Door], Server],
        *,
        loras: int = 16,
        everywhere: bool | None = None,
        seen_as: str | None = None,
        turn: float = 2.0,
        wait: float = 60.0,
        patience: float = 300.0,
    ) -> None:
        self._away, self._everywhere, self._patience = away, everywhere, patience
        self._shelf, self._words = Shelf(away), Words(away.folder)
        doors = [Door(url, key=away.key, connect=away.connect, idle=away.idle) for url in away.urls]
        limits: dict[str, Any] = {"loras": loras, "turn": turn, "wait": wait, "seen": seen_as}
        self._pool = Pool([Host(make(door), away, self._shelf, **limits) for door in doors], away.name)
        self._known: dict[str, tuple[Want, WeightFiles]] = {}
        self.why: str | None = None  # what was wrong when it was last not ready

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        """Head, Pieces, Answer; see `engines.Engine`. A count is one terminal piece, `{"input_tokens": n}`."""
        if ask.dialect not in self.dialects:
            raise InputError(f"the engine {self._away.name} answers the chat dialect, not {ask.dialect}")
        want, found = await self._find(ask.release_id)
        if ask.dialect == "count":
            for item in await self._count(ask, want, found):
                yield item
            return
        without, lost = set[Host](), False
        while True:
            begun = False
            live = ask.priority == 0
            async with self._pool.seat(want, found, session=ask.session, live=live, without=without) as host:
                try:
                    async with aclosing(self._from(host, host.name(want), ask)) as items:
                        async for item in items:
                            begun = True
                            yield item
                    return
                except Down as error:
                    host.fell(error)
                    without.add(host)
                    if begun:
                        raise
                except Lost:
                    host.forget(want)
                    if lost or begun:
                        raise
                    lost = True

    async def load(self, release_id: str) -> None:
        want, found = await self._find(release_id)
        everywhere = want.full == "" if self._everywhere is None else self._everywhere
        self._pool.pardon(want)
        try:
            async with asyncio.timeout(self._patience):
                await self._pool.spread(want, found, everywhere=everywhere)
        except TimeoutError:
            raise EngineError(
                f"the servers of {self._away.name} did not load {release_id[:12]}… within {self._patience:g} s; "
                "look at their logs, or raise the option patience"
            ) from None

    async def rate(
        self, release_id: str, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        if len(sequences) != len(starts):
            raise InputError("rate needs one start for each sequence", param="starts")
        for sequence, start in zip(sequences, starts, strict=True):
            if not 1 <= start < len(sequence):
                raise InputError(f"start {start} must be at least 1 and inside its sequence", param="starts")
        want, found = await self._find(release_id)
        try:
            async with asyncio.timeout(self._patience):
                return await self._rated(want, found, sequences, starts)
        except TimeoutError:
            raise EngineError(
                f"the servers of {self._away.name} did not rate {len(sequences)} sequences within {self._patience:g} s"
            ) from None

    async def ready(self) -> bool:
        """Whether a server can be asked."""
        whys = []
        for host in self._pool.hosts:
            if (why := await host.check(2.0)) is None:
                self.why = None
                return True
            whys.append(why)
        self.why = "; ".join(whys)
        return False

    async def close(self) -> None:
        await self._pool.close()

    # --- one answer ---------------------------------------------------------------------------------------------------

    async def _from(self, host: Host, name: str, ask: Ask) -> AsyncGenerator[Head | Piece | Answer]:
        """One host's answer. Down and Lost before anything is handed out mean that nothing was."""
        server = host.server
        # Where prompts are made into tokens here, a long one must not hold up everybody else.
        long = len(ask.body) >= LONG
        request = await asyncio.to_thread(server.request, ask, name) if long else server.request(ask, name)
        await self._words.open()
        said = Said(server, request, name, self._away.base, partial(self._words.flaw, ask.body))
        response = await server.door.ask(request.path, request.body, stream=ask.stream)
        try:
            if response.status != 200:
                for item in await self._refusal(host, response, name):
                    yield item
                return
            if ask.stream and response.content_type == "text/event-stream":
                flow = Flow(server.url, replace(ask, body=b""), response, said, said.show)
                piece = await flow.next()
                yield Head(200, _EVENTS)
                while piece is not None:
                    yield piece
                    piece = await flow.next()
            else:
                data = await server.door.read(response)
                shown = said.body(data)
                if not said.finished:
                    raise EngineError(f"{server.url} answered 200 with something that is no answer; look at its log")
                yield Head(200, _JSON)
                yield Piece(shown, terminal=True)
            yield said.answer(ask.release_id)
        except Broken as error:
            raise Down(f"{server.url} broke off ({error.kind})") from None
        except TimeoutError:
            raise EngineError(
                f"{server.url} sent nothing for {self._away.idle:g} s; try again, or raise the engine's idle limit"
            ) from None
        finally:
            response.close()

    async def _refusal(self, host: Host, response: Response, name: str) -> list[Head | Piece | Answer]:
        door = host.server.door
        body = await door.read(response, MAX_ERROR)
        told, status = door.told(body), response.status
        if status < 400:
            raise UpstreamError(f"{door.url} answered {status}, which is no answer; check engines.url", body=body)
        if status in (400, 404) and name != host.base and name in told:
            raise Lost(f"{door.url} does not have {name[:12]}… any more ({told})")
        if status in (401, 403):
            error = UpstreamError(
                f"{door.url} refused Reef's credentials ({status}); check the key that engines.key_env names",
                status=status,
            )
            error.code = "upstream_auth"
            raise error
        if status in (400, 413) and any(words in told.lower() for words in _LONG):
            raise ContextError(told, param="messages")
        if status >= 500 and status not in _RELAYED:
            await host.server.look()  # Down, where this is its end
            raise UpstreamError(f"{door.url} answered {status}: {told}", status=status, body=door.clean(body))
        shown = door.clean(body).replace(name.encode(), self._away.base.encode())
        headers = {key: value for key, value in response.headers.items() if key in ("content-type", "retry-after")}
        refused = Answer(untrainable=f"the server refused ({status})", model=self._away.base)
        return [Head(status, headers), Piece(shown, terminal=True), refused]

    async def _count(self, ask: Ask, want: Want, found: WeightFiles) -> list[Head | Piece | Answer]:
        body = load(ask.body)
        if not isinstance(body, dict):
            raise InputError("the body must be a JSON object with `messages`")
        # Every release has the base's tokenizer, so whatever a server holds, it can count.
        async with self._pool.any(ask.session) as host:
            counted = await host.server.count(body)
        return [
            Head(200, _JSON),
            Piece(orjson.dumps({"input_tokens": counted}), terminal=True),
            Answer(usage=Usage(counted, 0), model=self._away.base, untrainable=NO_ANSWER),
        ]

    # --- releases -----------------------------------------------------------------------------------------------------

    async def _find(self, release_id: str) -> tuple[Want, WeightFiles]:
        """What a release wants of a server."""
        if (known := self._known.get(release_id)) is None:
            found = await asyncio.to_thread(self._away.resolve, release_id)
            known = await asyncio.to_thread(self._shelf.want, release_id, found), found
            if len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]
            self._known[release_id] = known
        return known

    async def _rated(
        self, want: Want, found: WeightFiles, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        rated: list[list[float]] = []
        async with self._pool.seat(want, found, session=None, live=False) as host:
            for at in range(0, len(sequences), BATCH):
                some, from_ = sequences[at : at + BATCH], starts[at : at + BATCH]
                given = await host.server.rate(host.name(want), some, from_)
                if [len(each) for each in given] != [len(one) - first for one, first in zip(some, from_, strict=True)]:
                    raise EngineError(f"{host.server.url} rated other tokens than it was given; look at its version")
                rated += given
        return rated
