"""The state folder: lock, token, sockets, port."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from reef.cli import state
from reef.core.errors import StoreError

HOLD = """
import sys, time, pathlib
from reef.cli import state
lock = state.claim(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_held_folder_names_its_holder(tmp_path):
    with holder(tmp_path / "s") as process:
        assert state.held(tmp_path / "s")
        with pytest.raises(StoreError, match=f"in use by the server with process id {process.pid}; stop that one"):
            state.claim(tmp_path / "s", patience=0.2)
    lock = state.claim(tmp_path / "s")
    assert (tmp_path / "s" / "lock").read_text() == f"{os.getpid()}\n"
    lock.release()
    assert not state.held(tmp_path / "s")


def test_a_child_keeps_the_lock_and_a_claim_waits_for_it(tmp_path):
    lock = state.claim(tmp_path)
    child = subprocess.Popen(["sleep", "0.5"], pass_fds=[lock.fd])
    os.pwrite(lock.fd, b"999999999\n", 0)  # its server is dead
    lock.release()
    assert state.held(tmp_path)
    began = time.monotonic()
    state.claim(tmp_path, patience=5).release()
    assert 0.1 < time.monotonic() - began < 4
    child.wait()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written .*; choose another with --reef.state_dir"):
        state.claim(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written"):
        state.claim(tmp_path / "file" / "below")


def test_the_token_is_made_once_and_private(tmp_path):
    token, fresh = state.token(tmp_path)
    assert fresh
    assert token.startswith("rf_")
    assert len(token) > 40
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert state.token(tmp_path) == (token, False)
    assert state.read_token(tmp_path) == token


def test_a_token_that_others_may_use_is_made_private(tmp_path, caplog):
    token, _ = state.token(tmp_path)
    for mode in (0o644, 0o602, 0o640):
        caplog.clear()
        (tmp_path / "token").chmod(mode)
        assert state.token(tmp_path) == (token, False)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        assert f"had mode {mode:o}" in caplog.text
        assert token not in caplog.text
    caplog.clear()
    assert state.read_token(tmp_path) == token
    assert caplog.text == ""


def test_sockets_of_a_deep_folder_are_short_and_linked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path)[:1] + "tmp")
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    run = state.run_folder(deep)
    listener = state.listen(run / "engine.sock")
    assert len(str(run)) < 100
    assert (deep / "run").resolve() == run.resolve()
    assert (run / "engine.sock").stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(run / "engine.sock"))
    listener.close()
    assert state.run_folder(deep) == run
    (run / "engine.sock").unlink()
    run.chmod(0o755)
    with pytest.raises(StoreError, match="not a private folder"):
        state.run_folder(deep)
    run.rmdir()


def test_a_left_over_socket_is_replaced(tmp_path):
    run = state.run_folder(tmp_path)
    assert run == tmp_path / "run"
    state.listen(run / "a.sock").close()
    state.listen(run / "a.sock").close()


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=f"port {port} on 127.0.0.1 is in use; .* --reef.port {port + 1}"):
            state.bind("127.0.0.1", port)


def test_a_host_that_is_not_ours():
    with pytest.raises(StoreError, match=r"cannot be bound|no address"):
        state.bind("203.0.113.1", 0)
    with pytest.raises(StoreError, match="no address for host"):
        state.bind("no.such.host.invalid", 0)


def test_the_address_is_one_a_client_can_use():
    with state.bind("0.0.0.0", 0) as listener:
        assert state.address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
