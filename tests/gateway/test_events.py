"""GET /reef/events on a real socket: who hears what, in which order, and how a stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from reef.gateway import events
from reef.gateway.auth import Token, Tokens
from reef.gateway.context import Limits
from reef.records.journal import Journal
from reef.records.tokens import Grant, Quota, digest
from tests.gateway.conftest import Gateway, running


class Listener:
    """Reads one stream, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments: list[str] = []
        self._lines = response.aiter_lines()

    async def next(self, seconds: float = 5.0) -> dict[str, Any]:
        async with asyncio.timeout(seconds):
            number = None
            async for line in self._lines:
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    act: dict[str, Any] = json.loads(line[6:])
                    assert act["seq"] == number
                    return act
                elif line.startswith(":"):
                    self.comments.append(line)
        raise AssertionError("the stream ended")

    async def end(self, seconds: float = 5.0) -> None:
        """The stream ends properly; nothing more is told."""
        async with asyncio.timeout(seconds):
            async for line in self._lines:
                assert not line.startswith("data: "), line


@contextlib.asynccontextmanager
async def listening(
    gateway: Gateway, path: str = "/reef/events", token: str = "t-all-rights", **headers: str
) -> AsyncIterator[Listener]:
    async with gateway.client(token) as client, client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream"
        listener = Listener(response)
        line = await anext(listener._lines)  # it listens from here on
        assert line == ": reef"
        yield listener


def tell(gateway: Gateway, ref: str, scenario: str = "default", kind: Any = "release", **detail: Any) -> int:
    seq = Journal(gateway.board).tell(scenario, kind, ref, actor="learner", reason=f"about {ref}", detail=detail)
    assert seq is not None
    return seq


async def test_an_act_is_heard_as_it_happens(gateway: Gateway) -> None:
    tell(gateway, "before")
    async with listening(gateway) as listener:
        await asyncio.sleep(0.1)
        seq = tell(gateway, "a", step=3, seq="not this one")
        act = await listener.next()
        assert act.pop("at") > 0
        assert act == {
            "seq": seq, "scenario": "default", "kind": "release", "ref": "a", "actor": "learner", "reason": "about a",
            "step": 3,
        }  # fmt: skip


async def test_a_listener_goes_on_where_it_was(gateway: Gateway) -> None:
    seqs = [tell(gateway, f"ref {number}") for number in range(250)]  # more than a page
    async with listening(gateway, "/reef/events?after=0") as listener:
        heard = [await listener.next() for _ in range(251)]  # and the scenario's creation
        assert [act["seq"] for act in heard[1:]] == seqs
        assert heard[0]["kind"] == "create"
    async with listening(gateway, f"/reef/events?after={seqs[100]}") as listener:
        assert (await listener.next())["seq"] == seqs[101]
    again = {"last-event-id": str(seqs[200])}
    async with listening(gateway, f"/reef/events?after={seqs[100]}", **again) as listener:
        assert (await listener.next())["seq"] == seqs[201]


async def test_a_listener_of_a_journal_that_was_lost_hears_of_the_new_one(gateway: Gateway) -> None:
    """Its number is higher than any there is: it would wait for acts that come in a year."""
    tell(gateway, "before")
    async with listening(gateway, **{"last-event-id": "999999"}) as listener:
        seq = tell(gateway, "a")
        assert (await listener.next())["seq"] == seq


async def test_what_is_told_while_a_page_is_read_is_not_missed(gateway: Gateway) -> None:
    async with listening(gateway, "/reef/events?after=0") as listener:
        heard: list[int] = []

        async def hear() -> None:
            while len(heard) < 301:
                heard.append((await listener.next())["seq"])

        task = asyncio.create_task(hear())
        for number in range(300):
            await asyncio.to_thread(tell, gateway, f"ref {number}")
        await task
        assert heard == sorted(heard)
        assert len(set(heard)) == 301


async def test_a_token_hears_of_its_scenarios_only(gateway: Gateway) -> None:
    async with listening(gateway, "/reef/events?after=0", "t-one") as listener:
        tell(gateway, "other")
        mine = tell(gateway, "mine", "one")
        assert (await listener.next())["seq"] == mine
    async with listening(gateway, "/reef/events?after=0&scenario=one") as listener:
        assert (await listener.next())["seq"] == mine


@pytest.mark.parametrize(
    ("token", "path", "status", "words"),
    [
        ("t-infer", "/reef/events", 403, "lacks the right 'read'"),
        ("wrong", "/reef/events", 401, "wrong token"),
        ("t-one", "/reef/events?scenario=default", 403, "not for 'default'"),
        ("t-all-rights", "/reef/events?scenario=No!", 400, "scenario"),
        ("t-all-rights", "/reef/events?after=-1", 400, "after"),
        ("t-all-rights", "/reef/events?after=" + "9" * 30, 400, "after"),
    ],
)
async def test_who_may_not_listen_is_told(gateway: Gateway, token: str, path: str, status: int, words: str) -> None:
    async with gateway.client(token) as client:
        answer = await client.get(path)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_silence_is_broken_by_comments(tmp_path: Any) -> None:
    async with running(tmp_path, limits=Limits(quiet_seconds=0.05)) as gateway, listening(gateway) as listener:
        await asyncio.sleep(0.3)
        tell(gateway, "a")
        await listener.next()
        assert listener.comments.count(": quiet") >= 2


async def test_a_stop_ends_every_stream_properly_and_at_once(tmp_path: Any) -> None:
    limits = Limits(drain_seconds=30)
    async with running(tmp_path, limits=limits) as gateway, listening(gateway) as one, listening(gateway) as two:
        gateway.server.stop()
        await asyncio.gather(one.end(), two.end())
        async with asyncio.timeout(5):
            await gateway.task  # type: ignore[misc]


async def test_listeners_are_no_requests_in_work_and_are_bounded(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST", 1)
    app = gateway.server.config.app
    async with listening(gateway):
        assert app.work.running == 0  # type: ignore[union-attr]
        async with gateway.client() as client:
            assert (await client.get("/reef/events")).status_code == 503
    for _ in range(100):
        if app.feed.count == 0:  # type: ignore[union-attr]
            break
        await asyncio.sleep(0.02)
    assert app.feed.count == 0  # type: ignore[union-attr]
    async with listening(gateway):
        pass


async def test_who_does_not_read_is_dropped(tmp_path: Any) -> None:
    async with running(tmp_path, limits=Limits(store_seconds=0.3)) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /reef/events?after=0 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t-all-rights\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        feed = gateway.server.config.app.feed  # type: ignore[union-attr]
        assert feed.count == 1
        for number in range(200):
            await asyncio.to_thread(tell, gateway, f"ref {number}", text="x" * 100_000)
            if feed.count == 0:
                break
        for _ in range(100):
            if feed.count == 0:
                break
            await asyncio.sleep(0.05)
        assert feed.count == 0
        writer.close()


async def test_a_token_that_is_revoked_hears_no_more(tmp_path: Any) -> None:
    tokens = Tokens([("t-all-rights", Token("owner"))])
    mine = Grant("ada", digest("secret"), frozenset({"read"}), None, Quota(), None, 0.0, None, None)
    tokens.refresh([mine])
    async with running(tmp_path, tokens=tokens) as gateway, listening(gateway, token="secret") as listener:
        tell(gateway, "a")
        await listener.next()
        tokens.refresh([])
        tell(gateway, "b")
        await listener.end()
