"""The webhook against a real receiver that fails, hangs, lies about where it lives, and comes back."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ConfigError, WireError
from reef.loop.hook import Webhook
from tests.loop.kit import NAME, World
from tests.loop.test_learner import House, until

ROOT = Path(__file__).parents[2]


class Receiver:
    """An HTTP server that answers with the given statuses in turn, then with 204. 0: it hangs up; -1: no answer."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.taken: list[dict[str, Any]] = []
        self.tries: list[tuple[str, dict[str, str], bytes]] = []
        self.lines: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Receiver:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/hooks/pAsSwOrD?key=SeCrEt"
        return self

    async def __aexit__(self, *rest: object) -> None:
        self.server.close()
        for line in self.lines:
            line.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.lines.add(task)
        try:
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.tries.append((first, headers, body))
            status = self.statuses.pop(0) if self.statuses else 204
            if status == -1:
                await asyncio.sleep(60)
            if status:
                more = f"location: {self.url}\r\n" if status == 307 else ""
                writer.write(f"HTTP/1.1 {status} Word\r\n{more}content-length: 0\r\n\r\n".encode())
            if 200 <= status < 300:
                self.taken.append(json.loads(body))
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.lines.discard(task)
            writer.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()


def tell(world: World, ref: str, kind: Any = "release", **detail: Any) -> None:
    world.journal.tell(NAME, kind, ref, actor="ada", reason="because", detail=detail)


async def test_acts_arrive_in_order_and_signed(world: World) -> None:
    async with Receiver() as receiver:
        tell(world, "from before")
        hook = Webhook(world.tools, receiver.url, ["release", "alarm"], secret="s3")
        await hook.look()
        tell(world, "a", step=2)
        tell(world, "b", "measure")
        tell(world, "c", "alarm")
        tell(world, "d", "measure")
        await hook.look()
        await hook.look()
        assert [act["ref"] for act in receiver.taken] == ["a", "c"]
        act = receiver.taken[0]
        assert (act["kind"], act["scenario"], act["step"], act["actor"]) == ("release", NAME, 2, "ada")
        first, headers, body = receiver.tries[0]
        assert first == "POST /hooks/pAsSwOrD?key=SeCrEt HTTP/1.1"
        assert headers["x-reef-signature"] == "sha256=" + hmac.new(b"s3", body, hashlib.sha256).hexdigest()
        assert (headers["x-reef-kind"], headers["x-reef-seq"]) == ("release", str(act["seq"]))
        assert headers["content-type"] == "application/json"
        assert hook.shown() == {"host": "127.0.0.1", "sent": 2}


@pytest.mark.parametrize(
    ("status", "words"),
    [(500, "answered 500"), (404, "answered 404"), (307, "answered 307"), (0, "not delivered"), (-1, "within")],
)
async def test_what_was_not_taken_is_sent_again_before_anything_else(world: World, status: int, words: str) -> None:
    async with Receiver() as receiver:
        hook = Webhook(world.tools, receiver.url, ["release"], seconds=0.3)
        await hook.look()
        tell(world, "a")
        tell(world, "b")
        receiver.statuses = [status, status]
        for _ in range(2):
            with pytest.raises(WireError, match=words) as raised:
                await hook.look()
            for secret in ("pAsSwOrD", "SeCrEt"):
                assert secret not in str(raised.value)
        assert len(receiver.tries) == 2  # one at a time: it follows no redirect, and nothing overtakes
        await hook.look()
        assert [act["ref"] for act in receiver.taken] == ["a", "b"]


async def test_a_receiver_that_is_not_there_is_waited_for(world: World) -> None:
    hook = Webhook(world.tools, "http://127.0.0.1:9/", ["release"])
    await hook.look()
    tell(world, "a")
    with pytest.raises(WireError, match=r"webhook at 127\.0\.0\.1 was not delivered"):
        await hook.look()
    async with Receiver() as receiver:
        other = Webhook(world.tools, receiver.url, ["release"])  # another process, another address: the same cursor
        await other.look()
        assert [act["ref"] for act in receiver.taken] == ["a"]


async def test_a_long_journal_goes_out_page_by_page(world: World) -> None:
    async with Receiver() as receiver:
        hook = Webhook(world.tools, receiver.url, ["alarm"])
        await hook.look()
        for number in range(230):
            tell(world, f"{number}", "release" if number % 50 else "alarm")
        while await hook.look():
            pass
        assert [act["ref"] for act in receiver.taken] == ["0", "50", "100", "150", "200"]


@pytest.mark.parametrize(
    ("url", "wanted", "words"),
    [
        ("ftp://there/", None, "must be http"),
        ("http://user:word@there/", None, "must not hold a password"),
        ("http://there/", "REEF_HOOK", "REEF_HOOK is empty"),
    ],
)
async def test_what_cannot_be_sent_is_said(world: World, url: str, wanted: str | None, words: str) -> None:
    hook = Webhook(world.tools, url, ["release"], wanted=wanted)
    with pytest.raises(ConfigError, match=words) as raised:
        await hook.look()
    assert "word@" not in str(raised.value)


async def test_a_dead_receiver_costs_learning_nothing(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs, and learning goes on; when it comes back it gets everything; no secret is logged (case 33)."""
    caplog.set_level(logging.DEBUG)
    world.board.create_scenario(NAME, {})
    async with Receiver() as receiver:
        receiver.statuses = [-1] * 1000
        hook = Webhook(world.tools, receiver.url, ["release"], secret="tOpSeCrEt", seconds=0.2)
        async with House(world, tmp_path, hook=hook) as house:
            await until(lambda: world.ledger.cursor("", "webhook"))
            for seq in (1, 2, 3):
                await world.say(2)
                await until(lambda seq=seq: world.head.seq == seq)  # type: ignore[misc]
            await until(lambda: len(receiver.tries) > 1)
            assert receiver.taken == []
            shown = house.learner._hooked()
            assert shown is not None
            assert "within 0.2 seconds" in shown["error"]
            receiver.statuses = []
            await until(lambda: len(receiver.taken) >= 3)
        assert [act["seq"] for act in receiver.taken] == sorted(act["seq"] for act in receiver.taken)
        assert [act["step"] for act in receiver.taken] == [1, 2, 3]
    assert "was not delivered" in caplog.text
    for secret in ("pAsSwOrD", "SeCrEt", "tOpSeCrEt"):
        assert secret not in caplog.text


DIES = """
import asyncio, sys
from pathlib import Path
from reef.loop.hook import Webhook
from tests.loop.kit import World

async def main():
    world = await World(Path(sys.argv[1])).open()
    await Webhook(world.tools, sys.argv[2], ["release"]).look()

asyncio.run(main())
"""


@pytest.mark.parametrize(("point", "taken"), [("loop.after_send", ["a", "a", "b"]), ("loop.after_sent", ["a", "b"])])
async def test_a_crash_repeats_at_most_the_act_it_was_at(tmp_path: Path, point: str, taken: list[str]) -> None:
    world = await World(tmp_path).open()
    async with Receiver() as receiver:
        hook = Webhook(world.tools, receiver.url, ["release"])
        await hook.look()
        tell(world, "a")
        tell(world, "b")
        environment = os.environ | {"REEF_FAILPOINT": point}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DIES, str(tmp_path), receiver.url, cwd=ROOT, env=environment
        )
        assert await child.wait() == -signal.SIGKILL
        await hook.look()
        assert [act["ref"] for act in receiver.taken] == taken
    await world.close()
