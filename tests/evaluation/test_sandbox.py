"""The scorer `tests` in a real bubblewrap: what good code is worth, and what bad code cannot do.

Without bubblewrap these tests fail, knowingly: `.ci/run` installs it. Each attack is written so that it scores 1 when
it succeeds: a 0 says that the sandbox held, and the note why.
"""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from reef.core.errors import ConfigError
from reef.evaluation import Task, sandbox
from reef.evaluation.ask import Question
from reef.evaluation.sandbox import code, names
from reef.evaluation.scorers import make

DOUBLE = "def test_one():\n    assert double(1) == 2\ndef test_none():\n    assert double(0) == 0\n"
DID = "from answer import did\nassert did() is True\n"


async def score(text, tests=DOUBLE, **fields):
    scorer = make({"use": "tests", "answer": tests, **fields}, trust="file")
    return await scorer.score(Task("t", Question.of("Write it."), scorer), text)


@pytest.mark.parametrize(
    ("text", "fields", "value"),
    [
        ("def double(x): return 2 * x", {}, 1),
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nUse it:\n```py\ndouble(1)\n```", {}, 1),
        ("```\ndef double(x): return 2 * x", {}, 1),
        ("```sh\npip install double, which is a longer block\n```\n```python\ndef double(x): return 2*x\n```", {}, 1),
        ("def double(x): return x * x", {}, 0.5),
        ("def double(x): return x * x", {"share": False}, 0),
        ("def double(x): return 1", {}, 0),
        ("if __name__ == '__main__':\n    raise SystemExit\ndef double(x): return 2 * x", {}, 1),
        ("import threading, subprocess, json, socket, ctypes\ndef double(x): return 2 * x", {}, 1),
        ("print('x' * 10_000_000)\ndef double(x): return 2 * x", {}, 1),
        ("open('/tmp/mine', 'w').write('2')\ndef double(x): return int(open('/tmp/mine').read()) * x", {}, 1),
        ("I cannot write code.", {}, 0),
        ("", {}, 0),
        ("#" * 1_000_000 + "\ndef double(x): return 2 * x", {}, 1),
        ("def double(x): return 2 * x", {"tests": "assert double(2) == 4"}, 1),
        ("def double(x): return 2 * x", {"tests": "import answer\nassert answer.double(2) == 5"}, 0),
    ],
)
async def test_what_code_is_worth(text, fields, value):
    assert (await score(text, **fields)).value == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nos._exit(0)", "ended its process"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended its process"),
        ("def double(x): return double(x)", "RecursionError"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x)", ""),
        ("def double(x:", "SyntaxError"),
        ("def double(x):\n    while True: pass", "not done within 0.5 s"),
        ("import time\ndef double(x): time.sleep(60)", "not done within 0.5 s"),
        ("import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", "0.5 s"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", "NameError"),
        ("import atexit, os\nclass E(Exception): pass\nraise E('x' * 10_000_000)", "E: xxx"),
    ],
)
async def test_its_own_crash_or_timeout_is_its_score(text, says):
    found = await score(text, seconds=0.5)
    assert found.value == 0
    assert says in found.note


FORGED = """
import json, os, sys
frame, seen = sys._getframe(), []
for number in range(3, 64):
    for line in ('["start"]', '["", "passed", "test_one"]', '["passed", "test_none"]', '["end"]', 'passed'):
        try: os.write(number, (line + "\\n").encode())
        except OSError: pass
os._exit(0)
"""


async def test_a_report_cannot_be_written_without_its_token():
    found = await score(FORGED)
    assert found.value == 0
    assert "ended its process" in found.note


@pytest.mark.parametrize(
    "line",
    [
        "'[' * 60000",
        "json.dumps([token, 'passed', {}])",
        "json.dumps([token, 'passed', ['test_one']])",
        "json.dumps([token, ['passed'], 'test_one'])",
        "json.dumps([token])",
        "json.dumps({'token': token})",
        "'null'",
    ],
)
async def test_whatever_code_writes_into_its_report_it_is_judged(line):
    text = f"""
import json, os, sys
frame = sys._getframe()
while "token" not in frame.f_locals:
    frame = frame.f_back
token, out = frame.f_locals["token"], frame.f_locals["out"]
os.write(out, ({line} + "\\n").encode())
def double(x): return 3 * x
"""
    found = await score(text)
    assert (found.value, found.note[:8]) == (0.5, "test_one")


async def test_output_without_end_is_ended():
    text = (
        "import os\nwhile True:\n  for n in range(3, 64):\n    try: os.write(n, b'x' * 10**5)\n    except OSError: pass"
    )
    found = await score(text, seconds=20)
    assert found.value == 0
    assert "bytes of report" in found.note


ATTACKS = {
    "fork bomb": """
        import os, time
        def did():
            for _ in range(64):
                if os.fork() == 0:
                    time.sleep(30); os._exit(0)
            return True""",
    "threads": """
        import threading, time
        def did():
            for _ in range(64): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            return True""",
    "memory": "def did(): return len(bytearray(2**30)) > 0",
    "memory of many": """
        import os
        def did():
            held = []
            while True:
                held.append(bytearray(2**24))
                if len(held) > 64: return True""",
    "a large file": "def did(): return open('/tmp/x', 'wb').write(bytes(2**25)) > 0",
    "many files": """
        def did():
            for n in range(64): open(f'/tmp/{n}', 'wb').write(bytes(2**20))
            return True""",
    "higher limits": """
        import resource
        def did():
            resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); return True""",
    "the host's loopback": """
        import socket
        def did(): return bool(socket.create_connection(('127.0.0.1', PORT), 2))""",
    "the internet": """
        import socket
        def did():
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.connect(('192.0.2.1', 53)); return s.send(b'x') == 1""",
    "a unix socket": """
        import socket
        def did(): socket.socket(socket.AF_UNIX).connect('FOLDER/socket'); return True""",
    "the shadow file": "def did(): return bool(open('/etc/shadow').read())",
    "the password file": "def did(): return bool(open('/etc/passwd').read())",
    "the state folder": "def did(): return bool(open('FOLDER/records.db').read())",
    "the state folder's list": "import os\ndef did(): return bool(os.listdir('FOLDER'))",
    "reef itself": "import os\ndef did(): return os.path.exists('REEF')",
    "a link to the state folder": """
        import os
        def did():
            os.symlink('FOLDER/records.db', '/tmp/link'); return bool(open('/tmp/link').read())""",
    "a link up": """
        import os
        def did():
            os.chdir('/tmp'); os.symlink('../' * 20 + 'FOLDER', 'up'); return bool(os.listdir('up'))""",
    "a hard link": "import os\ndef did(): os.link('/usr/lib', '/tmp/lib'); return True",
    "the environment": "import os\ndef did(): return 'SECRET' in str(os.environ)",
    "the parent's environment": """
        import os
        def did(): return any(b'hunter2' in open(f'/proc/{n}/environ', 'rb').read() for n in os.listdir('/proc'))""",
    "other processes": """
        import os
        def did():
            for n in range(2, 100_000):
                try: os.kill(n, 0); return n != os.getpid()
                except ProcessLookupError: pass""",
    "writing to the root": "def did(): return open('/x', 'w').write('x') == 1",
    "writing to the libraries": "def did(): return open('/usr/lib/x', 'w').write('x') == 1",
    "writing to Python": """
        import os
        def did(): return open(os.path.dirname(os.__file__) + '/x.py', 'w').write('x') == 1""",
    "writing to shared memory": "def did(): return open('/dev/shm/x', 'w').write('x') == 1",
    "devices": """
        import os
        def did(): return any(n.startswith(('sd', 'vd', 'nvme', 'mem', 'kmsg')) for n in os.listdir('/dev'))""",
    "becoming root": "import os\ndef did(): os.setuid(0); return True",
    "being root": "import os\ndef did(): return os.getuid() == 0 and open('/etc/x', 'w').write('x') == 1",
    "namespaces of one's own": """
        import ctypes
        def did():
            c = ctypes.CDLL(None)
            return any(c.unshare(flag) == 0 for flag in (0x10000000, 0x10020000, 0x20000, 0x50000000))""",
    "a namespace by clone": """
        import ctypes
        def did():
            c = ctypes.CDLL(None); c.syscall.restype = ctypes.c_long
            number = 56 if __import__('platform').machine() == 'x86_64' else 220
            return c.syscall(number, 0x10000000 | 17, 0, 0, 0, 0) >= 0""",
    "mounts": "import ctypes\ndef did(): return ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
    "what the runner was told": "import sys\ndef did(): return bool(sys.stdin.read()) if sys.stdin else False",
}  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A state folder, a listening socket, and a secret in the environment, as a server has them."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "records.db").write_text("every answer of everybody")
    heard, listening = socket.socket(), socket.socket(socket.AF_UNIX)
    heard.bind(("127.0.0.1", 0))
    listening.bind(str(folder / "socket"))
    for each in (heard, listening):
        each.listen()
    os.environ["REEF_TEST_SECRET"] = "hunter2"
    yield {"FOLDER": str(folder), "PORT": str(heard.getsockname()[1]), "REEF": str(Path(sandbox.__file__))}
    del os.environ["REEF_TEST_SECRET"]
    for each in (heard, listening):
        each.close()


@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_fail(name, ground):
    text = textwrap.dedent(ATTACKS[name])
    for word, value in ground.items():
        text = text.replace(word, value)
    found = await score(text, DID, seconds=5)
    assert found.value == 0, found.note
    assert found.note, "nothing was tried"
    assert "NameError" not in found.note
    assert "SyntaxError" not in found.note
    assert "not done" not in found.note


async def test_the_attacks_are_tried():
    """The test above can fail: what is allowed in the sandbox scores 1 the same way."""
    assert (await score("import os\ndef did(): return os.path.isdir('/usr/lib')", DID)).value == 1
    assert (await score("import os\ndef did():\n    if not os.fork(): os._exit(0)\n    return True", DID)).value == 1


async def test_nothing_is_left_running():
    """A process that leaves its group and session ends with its sandbox."""
    text = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv('PYTHON', ['left-by-an-answer', '-S', '-c', 'import time; time.sleep(60)'])\n"
        "time.sleep(0.2)\n"
        "def double(x): return 2 * x\n"
    ).replace("PYTHON", os.path.realpath(sys._base_executable))
    assert (await score(text)).value == 1
    for _ in range(200):
        if not _running("left-by-an-answer"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a process of an answer still runs")


def _running(name):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(name.encode() + b"\0"):
                return True
        except OSError:
            pass
    return False


async def test_sandboxes_at_once_do_not_share_their_limits():
    text = "import os, time\nfor _ in range(5):\n    if os.fork() == 0: time.sleep(0.3); os._exit(0)\n"
    text += "def double(x): return 2 * x\n"
    found = await asyncio.gather(*(score(text) for _ in range(4)))
    assert [each.value for each in found] == [1, 1, 1, 1], [each.note for each in found]


async def test_a_sandbox_that_does_not_come_up_is_not_judged(tmp_path, monkeypatch):
    """The kernel refuses, or Python is not where it was: nothing that the answer could be blamed for."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --help ] && echo --size && exit\necho 'bwrap: No permissions' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = await score("def double(x): return 2 * x")
    assert found.value is None
    assert "No permissions" in found.note


async def test_a_sandbox_that_never_comes_up_is_not_judged(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\n[ "$1" = --help ] && echo --size && exit\nexec /bin/sleep 60\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "START", 0.2)
    found = await score("def double(x): return 2 * x\n" * 10_000)
    assert found.value is None
    assert "not up within" in found.note


async def test_without_a_temporary_file_code_is_not_judged(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sandbox.tempfile, "tempdir", str(tmp_path / "gone"))
        found = await score("def double(x): return 2 * x")
    assert found.value is None


def test_without_bubblewrap_the_configuration_is_wrong_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install bubblewrap"):
        make({"use": "tests", "answer": DOUBLE})
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho 'usage: bwrap'\n")
    old.chmod(0o755)
    with pytest.raises(ConfigError, match=r"0\.7 or newer"):
        make({"use": "tests", "answer": DOUBLE})


def test_as_another_user_it_works_with_a_user_namespace():
    """Not started by root, a sandbox is one by a user namespace: the same line as above without root's part."""
    line = sandbox.command(False)
    assert "--unshare-user" in line
    assert "CAP_SETUID" not in line
    done = subprocess.run([*line[: line.index("-c")], "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=30)
    assert done.stdout == "42\n", done.stderr


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"answer": " "}, "empty"),
        ({"answer": "def test("}, "not Python"),
        ({"answer": "def test_a(x): pass"}, "without arguments"),
        ({"answer": "async def test_a(): pass"}, "plain function"),
        ({"answer": "pass", "memory": 1}, "memory"),
        ({"answer": "pass", "seconds": 0}, "seconds"),
        ({"answer": "pass", "processes": 0}, "processes"),
    ],
)  # fmt: skip
def test_fields_that_are_wrong(fields, says):
    with pytest.raises(ConfigError, match=says):
        make({"use": "tests", **fields})


def test_names_and_code():
    assert names("def test_b(): pass\ndef other(): pass\ndef test_a(): pass\ndef test_b(): pass") == (
        "test_b",
        "test_a",
    )
    assert code("no fence") == "no fence"
    assert code("```json\n{}\n```") == "```json\n{}\n```"
