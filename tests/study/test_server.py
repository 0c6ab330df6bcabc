"""A server of one's own: what it is not told, and the folder it needs for itself."""

import fcntl
import subprocess

import pytest

from reef.core.errors import WireError
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
