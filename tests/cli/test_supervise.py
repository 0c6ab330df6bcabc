"""The supervisor over real processes: restarts, back-off, waking, order of stopping, and dying together."""

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from reef.cli.logs import Lines, Log

SCRIPT = """
import os, pathlib, signal, socket, sys
from reef.cli.supervise import Role, Supervisor
for number in (signal.SIGINT, signal.SIGHUP):  # ignored where the tests run in the background
    signal.signal(number, signal.SIG_DFL)
folder = pathlib.Path(sys.argv[1])
def sh(text):
    return ["sh", "-c", text]
def supervise(*roles, **more):
    supervisor = Supervisor(roles, folder, run_id="run", **more)
    (folder / "up").touch()
    supervisor.run()
os.chdir(folder)
"""


def until(check, seconds=8.0):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def lines(path):
    return path.read_text().split() if path.exists() else []


def alive(pid):
    """Whether a process runs (a zombie, which only waits to be collected, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(tmp_path):
    started = []

    def start(body, **environment):
        script = tmp_path / "main.py"
        script.write_text(SCRIPT + textwrap.dedent(body))
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        until((tmp_path / "up").exists)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


def test_a_killed_child_comes_back_and_takes_its_children_along(start, tmp_path):
    start("supervise(Role('a', sh('sleep 60 & echo $$ $! >> pids; wait')))")
    first, grandchild = map(int, until(lambda: lines(tmp_path / "pids")))
    os.kill(first, signal.SIGKILL)
    again = until(lambda: lines(tmp_path / "pids")[2:])
    assert int(again[0]) != first
    assert not alive(first)
    until(lambda: not alive(grandchild))


def test_a_failing_child_is_tried_for_ever_ever_slower(start, tmp_path):
    start("supervise(Role('a', sh('echo x >> tries; exit 3')), Role('missing', ['/no/such/program']))")
    time.sleep(2.0)
    assert 3 <= len(lines(tmp_path / "tries")) <= 6  # at 0, .1, .3, .7, 1.5 seconds
    assert alive_supervisor(tmp_path)


def alive_supervisor(tmp_path):
    before = len(lines(tmp_path / "tries"))
    until(lambda: len(lines(tmp_path / "tries")) > before)
    return True


def test_a_sleeping_role_wakes_on_a_connection_each_time(start, tmp_path):
    start(
        """
        listener = socket.socket(socket.AF_UNIX); listener.bind("s"); listener.listen()
        serve = "import os, socket; s = socket.socket(fileno=int(os.environ['REEF_FD_S'])); s.accept()[0].send(b'hi')"
        supervise(Role('a', [sys.executable, '-S', '-c', serve], {'S': listener.fileno()}, wakes=listener))
        """
    )
    time.sleep(0.3)
    assert not (tmp_path / "a.log").exists()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(8)
            client.connect(str(tmp_path / "s"))
            assert client.recv(2) == b"hi"


def test_stopping_goes_by_phase_and_kills_the_stubborn(start, tmp_path):
    process = start(
        """
        def role(name, phase):
            trap = f"trap 'sleep 0.2; echo {name} >> order; exit' TERM; echo {name} >> ready; "
            return Role(name, sh(trap + forever), phase=phase)
        forever = "while :; do sleep 0.05; done"
        deaf = sh("trap '' TERM; echo $$ > stubborn; echo d >> ready; " + forever)
        stubborn = Role('d', deaf, phase=2, grace=0.5)
        supervise(role('c', 2), role('b', 1), role('a', 0), stubborn)
        """
    )
    until(lambda: len(lines(tmp_path / "ready")) == 4)
    began = time.monotonic()
    process.terminate()
    assert process.wait(10) == 0
    assert lines(tmp_path / "order") == ["a", "b", "c"]
    assert not alive(int(lines(tmp_path / "stubborn")[0]))
    assert time.monotonic() - began < 5


def test_a_closed_terminal_stops_it_too(start, tmp_path):
    process = start("supervise(Role('a', sh('echo $$ > pid; exec sleep 60')))")
    pid = int(until(lambda: lines(tmp_path / "pid"))[0])
    process.send_signal(signal.SIGHUP)
    assert process.wait(8) == 0
    assert not alive(pid)


def say(level, message):
    """A line as a child writes it."""
    return Lines().format(logging.makeLogRecord({"levelname": level, "msg": message, "name": "a"}))


def test_a_log_goes_on_when_the_disk_is_full(tmp_path, capfd):
    (tmp_path / "role.log").symlink_to("/dev/full")
    log = Log(tmp_path, "role")
    for _ in range(3):
        log.line(say("WARNING", "still heard"))
    assert capfd.readouterr().err.count("still heard") == 3


def test_a_second_signal_kills_at_once(start, tmp_path):
    process = start("supervise(Role('a', sh(\"trap '' TERM; echo $$ > pid; while :; do sleep 0.05; done\"), grace=60))")
    pid = int(until(lambda: lines(tmp_path / "pid"))[0])
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 0
    assert not alive(pid)


def test_who_listens_is_told_of_a_stop_while_roles_still_end(start, tmp_path):
    process = start(
        """
        ending = "trap 'while [ ! -e go ]; do sleep 0.02; done; exit 0' TERM"
        role = Role('a', sh(ending + "; touch ready; while :; do sleep 0.02; done"))
        supervise(role, stopping=lambda: (folder / "told").open("a").write("x"))
        """
    )
    until((tmp_path / "ready").exists)
    process.terminate()
    until((tmp_path / "told").exists)
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(5) == 0
    assert (tmp_path / "told").read_text() == "x"


def test_a_once_role_runs_at_the_start_and_when_kicked(start, tmp_path):
    start(
        """
        supervisor = None
        def died(name, incarnation):
            environment["DEAD"] = incarnation
            supervisor.kick('once')
        environment = {"DEAD": "nobody"}
        a = Role('a', sh('echo $$ $REEF_INCARNATION >> pids; exec sleep 60'))
        once = Role('once', sh('echo $DEAD >> ran'), environment=environment, once=True)
        supervisor = Supervisor([a, once], folder, run_id="run", died=died)
        (folder / "up").touch()
        supervisor.run()
        """
    )
    until(lambda: lines(tmp_path / "ran"))
    pid, incarnation = until(lambda: lines(tmp_path / "pids"))
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: len(lines(tmp_path / "ran")) > 1)
    time.sleep(0.2)
    assert lines(tmp_path / "ran") == ["nobody", incarnation]
    assert incarnation.startswith("run")


def test_a_failpoint_kills_only_the_first_incarnation(start, tmp_path):
    start("supervise(Role('a', sh('echo [$REEF_FAILPOINT] >> seen; exit 1')))", REEF_FAILPOINT="x")
    assert until(lambda: lines(tmp_path / "seen")[1:])[0] == "[]"
    assert lines(tmp_path / "seen")[0] == "[x]"


@pytest.mark.parametrize("platform", ["linux", "elsewhere"])
def test_children_die_with_a_killed_supervisor(start, tmp_path, platform):
    process = start(
        f"""
        code = '''
        import sys, os, time
        sys.platform = "{platform}"
        from reef.cli.process import die_with_parent
        die_with_parent()
        open("pids", "a").write(f"{{os.getpid()}}\\\\n")
        time.sleep(60)
        '''
        import textwrap
        supervise(*(Role(name, [sys.executable, '-c', textwrap.dedent(code)]) for name in 'ab'))
        """
    )
    until(lambda: len(lines(tmp_path / "pids")) == 2)
    pids = [int(pid) for pid in lines(tmp_path / "pids")]
    assert all(alive(pid) for pid in pids)
    process.kill()
    until(lambda: not any(alive(pid) for pid in pids), 2.0)
