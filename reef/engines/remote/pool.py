"""An engine's servers: which of them a request goes to, and that it has there the weights that it asks for.

Knows: health, sessions, adapters that stay and go, which set of full weights is where, servers that failed a proof.
Does not know: answers, dialects, or how a kind of server is told (a `Server` is).

- A session stays on one server (rendezvous hashing: one that comes or goes moves only its own sessions), for the sake
  of the prefix cache; a request without one goes where least is in work.
- A server that holds the full weights asked for goes before one that would have to load them. One whose own weights
  nobody asks for any more loads what is asked for, beside the traffic; so all follow a new release, one by one.
- A server that cannot be reached is left out until it answers again, and is then known anew. One that fails to load a
  release, or its proof, is left out for that release.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reef.core.errors import EngineError
from reef.engines import WeightFiles
from reef.engines.local.layout import read_json
from reef.engines.remote import BASE, Away, Down, Look, Server, Want, proof
from reef.engines.remote.staging import Shelf, locked
from reef.engines.remote.turns import Turns
from reef.engines.remote.words import tokenizer

FRESH = 1.0  # seconds for which a server's word on its full weights holds: it cannot be started anew in less
WELL = 2.0  # seconds in which a server that is well says so
COLD = 10.0  # seconds after which full weights that nobody asked for make room
OUT = 60.0  # seconds for which a server is not asked again to load what it could not
RECENT = 30.0  # seconds after its last use before an adapter may go
LOCKED = 300.0  # seconds to wait for another process that gives the same server an adapter
SPOKEN = "Reef asks: naïve café, 12 tokens or 13? <b>yes</b>\n\tdef f(x): return x**2 — 你好"
log = logging.getLogger(__name__)


class Host:
    """One server as this process knows it."""

    def __init__(
        self, server: Server, away: Away, shelf: Shelf, *, loras: int, turn: float, wait: float, seen: str | None
    ) -> None:
        self.server = server
        self.busy = 0  # requests of this process in work there
        self.base = away.model or ""  # the base model's name there; known once it was met
        self.why: str | None = None  # what is wrong with it; None: it is up
        self._away, self._shelf, self._loras, self._seen = away, shelf, loras, seen
        self._place = away.place / "servers" / _file(server.url)
        self._book = proof.Book(self._place / f"prints-{away.digest[:12]}.json")
        self._met = False
        self._based = False  # its base was seen to answer as ever
        self._meeting = asyncio.Lock()
        self._look: Look | None = None
        self._looked = float("-inf")
        self._mine: dict[str, float] = {}  # adapters known to be there, and when their use was last noted
        self._used = float("-inf")
        self._failed: dict[Want, tuple[float, EngineError]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self.turns = Turns(self._place, turn=turn, wait=wait, what=server.url)

    @contextlib.asynccontextmanager
    async def take(self, want: Want, found: WeightFiles) -> AsyncGenerator[None]:
        """In it the server answers with these weights. Down, BusyError, EngineError."""
        self.busy += 1
        try:
            await self.meet()
            async with self.turns.use(want.full, self._holds, partial(self._change, want, found)):
                self._note_use(want)
                if want.full == BASE and not self._based:
                    await self._same_base()
                if want.lora is not None:
                    await self._adapter(want, found)
                yield
        finally:
            self.busy -= 1

    def name(self, want: Want) -> str:
        return want.lora or self.base

    def cold(self) -> float:
        """Seconds since anybody used the full weights that it holds."""
        try:
            return time.time() - (self._place / "used").stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def failed(self, want: Want) -> EngineError | None:
        """Why it is left out for these weights."""
        at, error = self._failed.get(want, (float("-inf"), None))
        return error if time.monotonic() - at < OUT else None

    def pardon(self, want: Want) -> None:
        """Let it try these weights again."""
        self._failed.pop(want, None)

    def refuse(self, want: Want, error: EngineError) -> None:
        log.warning("%s", error.message)
        self._failed[want] = time.monotonic(), error

    async def blame(self, want: Want, error: EngineError) -> None:
        """It could not be made ready for these weights: is it the server, or only this?"""
        if isinstance(error, Down) and self._met:
            try:
                async with asyncio.timeout(WELL):
                    await self._asked()
            except (EngineError, TimeoutError):
                self.fell(error)
                return
        elif isinstance(error, Down):
            self.fell(error)
            return
        self.refuse(want, error)

    def forget(self, want: Want) -> None:
        """The server lost an adapter, or answered with other weights than it said."""
        self._look, self._looked = None, float("-inf")
        if want.lora is not None:
            self._mine.pop(want.lora, None)
            (self._place / "loras" / want.lora).unlink(missing_ok=True)

    def fell(self, error: EngineError) -> None:
        """It cannot be used: leave it out, and look when it is back."""
        if self.why is None:
            log.warning("%s; it is left out until it answers", error.message)
        self.why = error.message
        self._met, self._look, self._based = False, None, False
        self._mine.clear()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def meet(self) -> None:
        """At first, and when it is back: that it serves the base model that releases are for."""
        if self._met:
            return
        async with self._meeting:
            if self._met:
                return
            look = await self._asked()
            if self._away.model is not None and self._away.model not in look.models:
                raise Down(
                    f"{self.server.url} serves {', '.join(look.models) or 'nothing'}, not {self._away.model}; "
                    "set engines.model to the name that it serves the base model by"
                )
            if not look.models:
                raise Down(f"{self.server.url} serves no model yet")
            self.base = self._away.model or look.models[0]
            if (expected := await asyncio.to_thread(_tokens, self._away.folder, SPOKEN)) is not None:
                spoken = await self.server.encode(SPOKEN)
                if list(spoken) != expected:
                    raise Down(
                        f"{self.server.url} makes other tokens of a text than {self._away.folder}: it serves another "
                        "model; start it with that folder, or set reef.model to what it serves"
                    )
            self._met = True

    async def check(self, seconds: float) -> str | None:
        """What keeps it from answering, as far as it can be told within `seconds`; None: nothing does. What that begins
        goes on: the first look at a server may take longer."""
        if self.why is not None:
            return self.why
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._checked())
        await asyncio.wait([self._checking], timeout=seconds)
        if not self._checking.done():
            return f"{self.server.url} does not answer"
        return self.why

    async def _checked(self) -> None:
        try:
            await self.meet()
            await self._asked()
        except EngineError as error:
            self.fell(error)
        except Exception as error:  # a look that fails in a way of its own must not count as a good one
            log.error("looking at %s failed", self.server.url, exc_info=error)
            self.fell(EngineError(f"{self.server.url} cannot be looked at ({type(error).__name__}: {error})"))

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.turns.close()
        await self.server.door.close()

    # --- full weights -------------------------------------------------------------------------------------------------

    async def _holds(self, anew: bool) -> str:
        """The set of full weights that it holds."""
        plain = self.turns.last() == BASE and self._look is not None and self._look.holds in (None, BASE)
        if not anew and (plain or time.monotonic() - self._looked < FRESH) and self._look is not None:
            return self._look.holds or BASE
        return (await self._asked()).holds or BASE

    async def _asked(self) -> Look:
        begun = time.monotonic()
        self._look = await self.server.look()
        self._looked = begun
        return self._look

    async def _change(self, want: Want, found: WeightFiles) -> None:
        """Give it a set of full weights. The caller has it for itself."""
        begun = time.monotonic()
        tokens, look = await self._text(), await self._asked()
        if want.full == BASE and look.holds is None:
            return  # it was never given any, so it has what it was started with
        if look.holds in (None, BASE):
            await self._prove_base(tokens)
        folder: Path | None = None
        if want.full != BASE:
            folder = await asyncio.to_thread(self._shelf.stage, want, found)
        try:
            await self.server.put("full", want.full, self._there(folder) if folder is not None else None)
            key = want.full if want.full != BASE else "base"
            moved = partial(self._shelf.moved, want.full) if want.full != BASE else lambda other: False
            await proof.prove(self.server, self.base, key, tokens, self._book, moved, proof.ALONE)
            await proof.fresh(self.server, self.base, tokens, key)
        finally:
            self._looked = float("-inf")
        self._told(want.full[:12] or "the base", begun)
        await asyncio.to_thread(self._shelf.sweep)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _adapter(self, want: Want, found: WeightFiles) -> None:
        """See that it has an adapter, by the name of the release."""
        name = want.lora
        assert name is not None
        if name in self._mine:
            return
        try:
            async with locked(self._place / "loras.lock", LOCKED):
                if name not in self._mine:
                    await self._add(want, found, name)
        except TimeoutError:
            raise EngineError(
                f"{self.server.url} takes longer than {LOCKED:g} s to load other adapters; look at its log"
            ) from None

    async def _add(self, want: Want, found: WeightFiles, name: str) -> None:
        note = self._place / "loras" / name
        look = await self._asked()
        if name not in look.models or not note.exists():
            begun = time.monotonic()
            folder = await asyncio.to_thread(self._shelf.stage, want, found)
            tokens = await self._text()
            await self._prove_base(tokens)
            await self.server.put("lora", name, self._there(folder))
            if name not in (look := await self._asked()).models:
                raise EngineError(
                    f"{self.server.url} says that it loaded the adapter {name[:12]}…, and does not list it"
                )
            await proof.prove(self.server, name, name, tokens, self._book, partial(self._shelf.moved, name))
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
            self._told(f"the adapter {name[:12]}", begun)
        self._mine[name] = 0.0
        await self._make_room(look, name)

    async def _make_room(self, look: Look, name: str) -> None:
        """Take away the adapters that were not used for longest, above the limit."""
        notes = {}
        for note in (self._place / "loras").iterdir():
            with contextlib.suppress(FileNotFoundError):
                notes[note.name] = note.stat().st_mtime
        there = sorted((at, each) for each, at in notes.items() if each in look.models and each != name)
        for at, each in there[: max(0, len(there) + 1 - self._loras)]:
            if time.time() - at < RECENT and len(there) < 2 * self._loras:
                break  # somebody may be about to ask for it
            self.forget(Want(lora=each))
            await self.server.drop(each)
        await asyncio.to_thread(self._shelf.sweep)

    def _told(self, what: str, begun: float) -> None:
        log.info("%s answers with %s after %.1f s", self.server.url, what, time.monotonic() - begun)

    async def _same_base(self) -> None:
        """Once each time that it was met; the caller has a share of the server, which holds the base."""
        try:
            async with locked(self._place / "loras.lock", LOCKED):
                await self._prove_base(await self._text())
        except TimeoutError:
            raise EngineError(
                f"{self.server.url} takes longer than {LOCKED:g} s to load adapters; look at its log"
            ) from None

    async def _prove_base(self, tokens: Sequence[int]) -> None:
        """That the base answers as ever. At first, note what it answers with, to compare others with."""
        if self._based:
            return
        found = await proof.print_of(self.server, self.base, tokens)
        known = self._book.read().get("base")
        if known is None:
            self._book.write("base", found)
        elif not proof.alike(found, known):
            raise Down(
                f"{self.server.url} answers otherwise than its base model did: it was started with another model, or "
                f"with other settings. Start it as before; or, if this is meant, remove {self._book.path}"
            )
        self._based = True

    async def _text(self) -> list[int]:
        look = self._look or await self._asked()
        vocabulary = await asyncio.to_thread(_vocabulary, self._away.folder)
        return proof.text(vocabulary, look.context)

    def _there(self, folder: Path) -> str:
        """A folder as the server sees it."""
        if self._seen is None:
            return str(folder.resolve())
        return f"{self._seen.rstrip('/')}/{folder.relative_to(self._away.place).as_posix()}"

    def _note_use(self, want: Want) -> None:
        """Once a second: that somebody asked for its full weights, and for which adapter."""
        now = time.monotonic()
        if now - self._used > 1.0:
            self._used = now
            self._place.mkdir(parents=True, exist_ok=True)
            (self._place / "used").touch()
        name = want.lora
        if name in self._mine and now - self._mine[name] > 1.0:
            try:
                os.utime(self._place / "loras" / name)
                self._mine[name] = now
            except FileNotFoundError:
                del self._mine[name]  # another process took it away

    async def _watch(self) -> None:
        """Until it is back."""
        wait = 0.2
        while self.why is not None:
            await asyncio.sleep(wait)
            wait = min(5.0, wait * 1.5)
            try:
                await self.meet()
            except EngineError as error:
                self.why = error.message
            except Exception:
                log.exception("looking at %s failed", self.server.url)
            else:
                log.warning("%s answers again", self.server.url)
                self.why = None
                self._failed.clear()


class Pool:
    """The hosts of one engine."""

    def __init__(self, hosts: Sequence[Host], name: str) -> None:
        self.hosts = tuple(hosts)
        self._name = name
        self._following: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def seat(
        self, want: Want, found: WeightFiles, *, session: str | None, live: bool, without: Collection[Host] = ()
    ) -> AsyncGenerator[Host]:
        """A host that answers with these weights while it is held. BusyError; EngineError when there is none."""
        left = set(without)
        last: EngineError | None = None
        while True:
            host = self._choose(want, found, session, live, left, last)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(host.take(want, found))
                except EngineError as error:
                    await host.blame(want, error)
                    last = error
                else:
                    yield host
                    return
            left.add(host)

    @contextlib.asynccontextmanager
    async def any(self, session: str | None) -> AsyncGenerator[Host]:
        """A host, whatever it holds: for what does not depend on weights."""
        hosts = [host for host in self.hosts if host.why is None]
        if not hosts:
            raise self._none(Want(), None)
        host = max(hosts, key=lambda host: _weight(session or "", host.server.url))
        try:
            await host.meet()
            yield host
        except Down as error:
            host.fell(error)
            raise

    async def spread(self, want: Want, found: WeightFiles, *, everywhere: bool) -> None:
        """Put weights on every server, or on one. EngineError when none took them; others' failures are logged."""
        up = [host for host in self.hosts if host.why is None]
        if not everywhere or len(up) < 2:
            async with self.seat(want, found, session=None, live=False):
                return
        done = await asyncio.gather(*(self._put(host, want, found) for host in up), return_exceptions=True)
        if failures := [each for each in done if isinstance(each, BaseException)]:
            if len(failures) == len(done):
                raise failures[0]
            log.warning("%d of %d servers of %s took a release", len(done) - len(failures), len(done), self._name)

    def pardon(self, want: Want) -> None:
        """An order to load is tried again at once; an answer is not, where a server just failed."""
        for host in self.hosts:
            host.pardon(want)

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        for host in self.hosts:
            await host.close()

    async def _put(self, host: Host, want: Want, found: WeightFiles) -> None:
        try:
            async with host.take(want, found):
                return
        except EngineError as error:
            await host.blame(want, error)
            raise

    def _choose(
        self,
        want: Want,
        found: WeightFiles,
        session: str | None,
        live: bool,
        left: Collection[Host],
        last: EngineError | None,
    ) -> Host:
        hosts = [host for host in self.hosts if host.why is None and host not in left and host.failed(want) is None]
        if not hosts:
            raise self._none(want, last)
        if session is not None:
            hosts.sort(key=lambda host: _weight(session, host.server.url), reverse=True)
        else:
            hosts.sort(key=lambda host: (host.busy, random.random()))
        holding = [host for host in hosts if host.turns.last() == want.full]
        if not holding:
            coming = [host for host in hosts if want.full in host.turns.wanted()]
            return (coming or [max(hosts, key=lambda host: host.cold())])[0]
        first = hosts[0]
        if live and first not in holding and first.turns.idle and first.cold() > COLD:
            self._follow(first, want, found)
        return holding[0]

    def _follow(self, host: Host, want: Want, found: WeightFiles) -> None:
        """Give a host that nobody uses the weights that are asked for, beside the traffic."""
        if self._following:
            return
        task = asyncio.create_task(self._put(host, want, found))
        self._following.add(task)
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[Any]) -> None:
        self._following.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a server did not follow: %s", error)

    def _none(self, want: Want, last: EngineError | None) -> EngineError:
        if last is not None:
            return last
        for host in self.hosts:
            if host.why is None and (error := host.failed(want)) is not None:
                return EngineError(error.message)
        whys = "; ".join(dict.fromkeys(host.why or f"{host.server.url} was tried" for host in self.hosts))
        return Down(f"no server of engine {self._name} can answer: {whys}")


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): the server with the highest weight has the session."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()


def _file(url: str) -> str:
    """An address as a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", url.partition("://")[2])[:80]


def _vocabulary(folder: Path) -> int:
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return int(size) if isinstance(size, int) and size > 1 else 1000


def _tokens(folder: Path, text: str) -> list[int] | None:
    """A text's tokens by the tokenizer here; None where there is none that could tell."""
    if (known := tokenizer(folder)) is None:
        return None
    found: list[int] = known.encode(text, add_special_tokens=False).ids
    return found
