"""GET /reef/events: what is done to releases, as server-sent events, as it happens.

Knows: the journal, who may see which act of it, how a listener that was away goes on where it was.
Does not know: what an act means, or who tells it.

- A listener keeps a number, not a queue: what it has not read waits in the journal. One that does not read for
  `store_seconds` is dropped, and finds everything when it comes back with `Last-Event-ID` (or `?after=`).
- Its token is looked at again before each piece: one that is revoked or expires ends the stream.
- At a shutdown every stream ends properly, so that clients come back elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from reef.core.errors import InputError, ReefError
from reef.core.ids import is_scenario
from reef.core.text import dump
from reef.gateway.call import Call
from reef.gateway.errors import Refusal
from reef.gateway.leash import Leash
from reef.records.journal import Journal, shown

if TYPE_CHECKING:
    from reef.gateway.app import App

PAGE: Final = 100
MOST: Final = 256
"""Listeners of one gateway."""
_HELLO: Final = b": reef\nretry: 1000\n\n"
_COMMENT: Final = b": quiet\n\n"


class Feed:
    """Wakes the listeners of one gateway; knows none of what they hear."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.closed = False
        self.count = 0
        self._news = asyncio.Event()

    def poke(self) -> None:
        """The board changed: there may be news."""
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        """Let every stream end."""
        self.closed = True
        self.poke()

    def news(self) -> asyncio.Event:
        """Set at the next change. Taken before the journal is read, so that nothing falls in between."""
        return self._news


async def events(app: App, call: Call) -> None:
    """GET /reef/events?after=SEQ&scenario=NAME"""
    feed, scenario = app.feed, call.query("scenario") or call.scenario
    if scenario is not None:
        if not is_scenario(scenario):
            raise InputError("scenario must be a scenario's name", param="scenario")
        call.token.enter(scenario)
    if call.scope.get("http_version") == "1.0":
        raise InputError("a stream without end needs HTTP/1.1", param="http_version")
    if feed.closed or feed.count >= MOST:
        text = "the server is stopping" if feed.closed else f"{MOST} clients listen here already"
        raise Refusal(503, "too_many_listeners", f"{text}; try again", headers={"retry-after": "1"})
    after, last = _place(call), await asyncio.to_thread(feed.journal.last)
    if after is None or after > last:  # more than there are: the number is of a journal that was lost
        after = last
    call.leave()  # it is no work that a stop would wait for
    feed.count += 1
    try:
        await _tell(app, call, after, scenario)
    finally:
        feed.count -= 1


async def _tell(app: App, call: Call, after: int, scenario: str | None) -> None:
    feed, quiet = app.feed, app.context.limits.quiet_seconds
    with Leash(call):
        await call.start(200, {"content-type": "text/event-stream", "cache-control": "no-store"})
        if not await _send(app, call, _HELLO):
            return
        while not feed.closed:
            news = feed.news()
            acts = await asyncio.to_thread(feed.journal.after, after, PAGE, scenario)
            try:
                token = app.context.tokens.find(call.headers, route=call.route, client=call.scope.get("client"))
                token.require("read")
            except ReefError:
                break
            seen = [act for act in acts if token.sees(act.scenario)]
            told = b"".join(b"id: %d\ndata: %b\n\n" % (act.seq, dump(shown(act))) for act in seen)
            if told and not await _send(app, call, told):
                return
            if acts:
                after = acts[-1].seq
                continue
            try:
                async with asyncio.timeout(quiet):
                    await news.wait()
            except TimeoutError:
                if not await _send(app, call, _COMMENT):
                    return
        await _send(app, call, b"", more=False)


async def _send(app: App, call: Call, data: bytes, *, more: bool = True) -> bool:
    """False: the client does not read, and was dropped."""
    try:
        async with asyncio.timeout(app.context.limits.store_seconds):
            await call.piece(data, more=more)
    except TimeoutError:
        call.drop("the listener does not read")
        return False
    return True


def _place(call: Call) -> int | None:
    """The number of the last act that the client has; None: it wants what comes from now on."""
    again = call.headers.get("last-event-id")  # a browser that connects again sends it, and the old address with it
    text = again if again is not None else call.query("after")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InputError("after (or Last-Event-ID) must be the number of an act, or 0 for all of them", param="after")
    return int(text)
