"""A server of one's own: what it is not told, and the folder it needs for itself."""

import asyncio
import fcntl
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from reef.core.errors import StoreError, WireError
from reef.study import server


def test_what_the_environment_says_of_another_server_is_not_passed_on(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append((command, how)))
    for name in ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL", "REEF_UPSTREAM_API_KEY"):
        monkeypatch.setenv(name, "x")
    server.start(["-c", "serve.yaml"], tmp_path / "new" / "serve.log", bound=True)
    server.start([], tmp_path / "serve.log")
    (command, bound), (_, free) = started
    assert command[-3:] == ["serve", "-c", "serve.yaml"]
    assert {name for name in bound["env"] if name.startswith("REEF_U") or name == "REEF_TOKEN"} == {
        "REEF_UPSTREAM_API_KEY"
    }
    assert "REEF_URL" not in free["env"]
    assert free["env"]["REEF_TOKEN"] == "x"
    assert free["preexec_fn"] is None


async def test_a_folder_that_somebody_holds_is_waited_for_and_then_told(tmp_path, monkeypatch):
    await server.released(tmp_path / "nothing")
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(server, "LEFT", 0.1)
        with pytest.raises(WireError, match="a server runs on"):
            await server.released(tmp_path)
    await server.released(tmp_path)


async def test_a_server_that_ends_at_once_says_what_it_said(tmp_path):
    log = tmp_path / "serve.log"
    log.write_text("reef: no such recipe\n")
    with subprocess.Popen(["true"]) as child:
        child.wait()
        with pytest.raises(WireError, match="no such recipe"):
            await server.started(child, f"http://127.0.0.1:{server.free_port()}", log)


async def test_a_server_that_ends_in_the_middle_ends_what_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "WATCH", 0.01)
    log = tmp_path / "serve.log"
    log.write_text("gateway-0 was killed by SIGBUS\n")
    child = subprocess.Popen(["sleep", "60"])
    with pytest.raises(WireError, match=r"(?s)ended with exit code -9; it said:.*SIGBUS"):
        async with server.watched(child, tmp_path, log):
            child.kill()
            await asyncio.Event().wait()
    child.wait()
    async with asyncio.timeout(10):  # the task itself goes on
        await asyncio.sleep(0)


async def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "WATCH", 0.01)
    server.room(tmp_path / "not" / "yet", 1)
    free = [server.FULL - 1, server.ROOM]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[-1]))
    with subprocess.Popen(["sleep", "60"]) as child:
        with pytest.raises(StoreError, match=f"the disk of {tmp_path} is full: 15 MB are free, and 16 MB are needed"):
            async with server.watched(child, tmp_path / "run", tmp_path / "serve.log"):
                free.pop()
                await asyncio.Event().wait()
        child.kill()


async def test_what_is_watched_ends_as_it_would(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as child:
        async with server.watched(child, tmp_path, tmp_path / "log"):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="its own"):
            async with server.watched(child, tmp_path, tmp_path / "log"):
                raise ValueError("its own")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), server.watched(child, tmp_path, tmp_path / "log"):
                await asyncio.Event().wait()
        child.kill()
