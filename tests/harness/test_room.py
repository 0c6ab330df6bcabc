"""A room in a real bubblewrap: what an agent in it cannot do. Without bubblewrap these tests fail, knowingly.

Each attack is written so that its agent says True when it succeeds; what is allowed says True the same way.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from reef.core.errors import ConfigError
from reef.harness import room
from tests.harness.fakes import SMALL, Gateway, job, rooms

SAY = """
import os, time
try: found = did()
except BaseException as error: found = f"{type(error).__name__}: {error}"
open(os.environ["ROOT"] + "/said", "w").write(repr(found))
"""
LIBC = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"

ATTACKS = {
    "the host's loopback": "import socket\ndef did(): return bool(socket.create_connection(('127.0.0.1', PORT), 2))",
    "Reef's own port": "import socket\ndef did(): return bool(socket.create_connection(('127.0.0.1', REEF), 2))",
    "the internet": """
        import socket
        def did():
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.connect(('192.0.2.1', 53)); return s.send(b'x') == 1""",
    "a name": "import socket\ndef did(): return bool(socket.getaddrinfo('example.com', 80))",
    "a unix socket": "import socket\ndef did(): socket.socket(socket.AF_UNIX).connect('FOLDER/socket'); return True",
    "an abstract socket": """
        import socket
        def did(): socket.socket(socket.AF_UNIX).connect('\\0reef-test'); return True""",
    "the state folder": "def did(): return bool(open('FOLDER/records.db').read())",
    "the state folder's list": "import os\ndef did(): return bool(os.listdir('FOLDER'))",
    "the source of Reef": "import os\ndef did(): return os.path.exists('SOURCE')",
    "homes": """
        import os
        def did(): return any(next(os.walk(at), [[]])[-1] for at in ('/home', 'HOMEDIR'))""",
    "the shadow file": "def did(): return bool(open('/etc/shadow').read())",
    "other accounts": "def did(): return len(open('/etc/passwd').readlines()) > 1",
    "a link to the state folder": """
        import os
        def did(): os.symlink('FOLDER/records.db', '/room/link'); return bool(open('/room/link').read())""",
    "the environment": "import os\ndef did(): return 'hunter2' in str(os.environ)",
    "environments of others": """
        import os
        def did():
            seen = 0
            for n in filter(str.isdigit, os.listdir('/proc')):
                try: seen += b'hunter2' in open(f'/proc/{n}/environ', 'rb').read()
                except OSError: pass
            return seen > 0""",
    "the warden's environment": "def did(): return open('/proc/1/environ', 'rb').read() is not None",
    "the warden's memory": "def did(): return bool(open('/proc/1/mem', 'rb', 0))",
    "the warden's files": "import os\ndef did(): return bool(os.listdir('/proc/1/fd'))",
    "tracing the warden": "def did(): return c.ptrace(16, 1, 0, 0) == 0",
    "processes outside": """
        import os
        def did(): return any(int(n) not in (1, os.getpid()) for n in os.listdir('/proc') if n.isdigit())""",
    "writing to the root": "def did(): return open('/x', 'w').write('x') == 1",
    "writing to the system": "def did(): return open('/usr/lib/x', 'w').write('x') == 1",
    "writing to settings": "def did(): return open('/etc/passwd', 'a').write('x') == 1",
    "writing to the client": "def did(): return open('/opt/client/node_modules/.bin/fake', 'w').write('x') == 1",
    "writing to devices": "def did(): return open('/dev/shm/x', 'w').write('x') == 1",
    "disks": """
        import os
        def did(): return any(n.startswith(('sd', 'vd', 'nvme', 'mem', 'kmsg')) for n in os.listdir('/dev'))""",
    "becoming root": "import os\ndef did(): os.setuid(0); return True",
    "being root": "import os\ndef did(): return os.getuid() == 0",
    "namespaces of one's own": """
        def did(): return any(c.unshare(flag) == 0 for flag in (0x10000000, 0x10020000, 0x20000, 0x50000000))""",
    "mounts": "def did(): return c.mount(b'x', b'/room/tmp', b'tmpfs', 0, None) == 0",
    "higher limits": """
        import resource
        def did():
            resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); return True""",
    "another's clock": "import time\ndef did(): time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "a name for the host": "def did(): return c.sethostname(b'x', 1) == 0",
    "kernel settings": "def did(): return open('/proc/sys/kernel/hostname', 'w').write('x') == 1",
    "a large file": "def did(): return open('/room/work/x', 'wb').write(bytes(2**25)) > 0",
    "much on the disk": """
        def did():
            for n, place in enumerate(['work', 'home', 'tmp', 'exam'] * 8):
                open(f'/room/{place}/{n}', 'wb').write(bytes(2**20))
            return True""",
    "a fork bomb": """
        import os, time
        def did():
            for _ in range(64):
                if os.fork() == 0: time.sleep(30); os._exit(0)
            return True""",
    "threads": """
        import threading, time
        def did():
            for _ in range(64): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            return True""",
    "keys that outlive it": """
        import ctypes, platform
        def did():
            call = ctypes.CDLL(None, use_errno=True).syscall
            add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
            return call(add, b'user', b'reef-test', b'x', 1, -3) > 0 or call(keyctl, 0, -3, 0) > 0""",
    "sockets without a namespace": """
        import ctypes, socket
        def did():
            if ctypes.CDLL(None, use_errno=True).syscall(425, 1, ctypes.create_string_buffer(200)) >= 0: return True
            for family in set(range(46)) - {1, 2, 10, 16}:
                for kind in (1, 2, 3, 5):
                    try: return bool(socket.socket(family, kind))
                    except OSError as error:
                        if error.errno != 97: return True""",
    "memory in a file without a folder": """
        import os
        def did(): return os.memfd_create('x') >= 0""",
    "the exam before it": """
        import os
        def did():
            for folder, _, names in os.walk('/room'):
                for name in names:
                    if 'EXAM' + 'WORD' in open(os.path.join(folder, name), errors='replace').read(): return True""",
}  # fmt: skip


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A state folder, listening sockets, and a secret in the environment, as a server has them."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "records.db").write_text("every answer of everybody")
    heard, listening, abstract = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    heard.bind(("127.0.0.1", 0))
    listening.bind(str(folder / "socket"))
    abstract.bind("\0reef-test")
    for each in (heard, listening, abstract):
        each.listen()
    os.environ["UPSTREAM_KEY"] = "hunter2"
    here = {"SOURCE": str(Path(room.__file__)), "HOMEDIR": str(Path.home())}
    yield {"FOLDER": str(folder), "PORT": str(heard.getsockname()[1]), **here}
    del os.environ["UPSTREAM_KEY"]
    for each in (heard, listening, abstract):
        each.close()


async def said(made, program, **rest):
    """What the agent said, and the outcome."""
    outcome = await made.of("s").run(job(textwrap.dedent(program) + SAY, **rest), (), "release")
    assert outcome.trouble is None, outcome
    return outcome.trajectory.final if outcome.trajectory else None, outcome


@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_fail(name, ground, tmp_path):
    async with Gateway() as gateway:
        text = LIBC + textwrap.dedent(ATTACKS[name])
        for word, value in {**ground, "REEF": str(gateway.port)}.items():
            text = text.replace(word, value)
        found, outcome = await said(rooms(tmp_path, gateway.address), text, check="true", hidden={"h": "EXAMWORD"})
    assert found is not None, outcome
    assert found != "True", outcome
    for wrong in ("NameError", "SyntaxError", "AttributeError", "TypeError"):
        assert wrong not in found


async def test_what_is_allowed_can_be_done(tmp_path):
    """The test above can fail."""
    async with Gateway() as gateway:
        made = rooms(tmp_path, gateway.address)
        for text in (
            "import os\ndef did(): return os.path.isdir('/usr/lib') and open('/room/work/x', 'w').write('x') == 1",
            "import os\ndef did(): return os.fork() == 0 or bool(os.wait())",
            "import socket\ndef did(): return bool(socket.create_connection(('127.0.0.1', 8900), 2))",
            "import pwd, os\ndef did(): return pwd.getpwuid(os.getuid()).pw_dir == os.environ['HOME']",
            "def did(): return open('/tmp/x', 'w').write('x') == 1",
        ):
            assert (await said(made, text))[0] == "True"


async def test_it_works_without_root_by_a_user_namespace(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--unshare-user" in room.command(False, 3, (), {}, SMALL)
    async with Gateway() as gateway:
        made = rooms(tmp_path, gateway.address)
        for name in ("becoming root", "mounts", "the warden's memory", "writing to the client"):
            text = LIBC + textwrap.dedent(ATTACKS[name])
            assert (await said(made, text))[0] not in ("True", None), name
        _, outcome = await said(made, f"def did():\n{textwrap.indent(FORKS, '    ')}")
        assert outcome.fault == "fake started more than 32 processes"
        assert (await said(made, "def did(): return open('/room/work/x', 'w').write('x') == 1"))[0] == "True"


FORKS = """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: pass
"""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("held = []\nwhile True: held.append(bytearray(2**24))", "256 MiB of memory"),
        (
            "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n        held = bytearray(2**26)\n"
            "        for at in range(0, 2**26, 4096): held[at] = 1\n        time.sleep(60)\ntime.sleep(60)",
            "256 MiB of memory",
        ),
        (
            "import mmap, time\nheld = mmap.mmap(-1, 2**29)\nfor at in range(0, 2**29, 4096): held[at] = 1\n"
            "time.sleep(60)",
            "256 MiB of memory",
        ),
        ("while True: print('x' * 1000)", "bytes of output"),
        ("import os\nfor n in range(10**6): open(f'/room/work/{n}', 'w').close()", "2000 files and folders"),
        ("import time\ntime.sleep(60)", "not done within 2 s"),
        ("import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)", "within 2 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        ("raise SystemExit('no way')", "ended with 1: no way"),
        ("open('/room/work/x', 'wb').write(bytes(2**26))", "ended with 1: OSError"),
        (FORKS, "not done within 2 s"),  # no more than the kernel allows
    ],
)
async def test_too_much_of_anything_is_the_agents_fault(program, says, tmp_path):
    outcome = await rooms(tmp_path).of("s").run(job(program, 2.0, check="true"), (), "release")
    assert (outcome.score, outcome.trouble) == (0.0, None)
    assert says in outcome.fault


async def test_the_warden_cannot_be_ended(tmp_path):
    text = "import os\ndef did():\n    for n in (9, 15, 19): os.kill(1, n)\n    time.sleep(0.3)\n    return 'tried'"
    found, outcome = await said(rooms(tmp_path), text, check="true")
    assert (found, outcome.score) == ("'tried'", 1.0)


async def test_a_transcript_that_is_a_link_is_not_read(tmp_path):
    program = "import os\nos.symlink('/etc/passwd', os.environ['ROOT'] + '/said')"
    outcome = await rooms(tmp_path).of("s").run(job(program), (), "release")
    assert (outcome.trajectory, outcome.fault, outcome.trouble) == (None, None, None)
    program = "import os\nr = os.environ['ROOT']\nos.rename(r, r + '2')\nos.symlink('/etc', r)"
    assert (await rooms(tmp_path / "b").of("s").run(job(program), (), "release")).trajectory is None


async def test_strange_files_are_left_behind(tmp_path):
    program = """
        import os
        root = os.environ['ROOT'].encode()
        os.mkfifo(root + b'/pipe')
        open(root + b'/\\xff', 'w').close()
        open(root + b'/large', 'wb').write(bytes(2 * 2**20))
        deep = root
        for n in range(200):
            deep += b'/d'
            os.mkdir(deep)
        def did(): return 'here'"""
    found, _ = await said(rooms(tmp_path), program)
    assert found == "'here'"
    assert list((tmp_path / "rooms").iterdir()) == []


async def test_a_daemon_does_not_outlive_its_agent(tmp_path):
    text = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv('PYTHON', ['left-by-an-agent', '-S', '-c', 'import time; time.sleep(60)'])\n"
        "    os._exit(0)\n"
        "def did(): return True\n"
    )
    exam = "import os\nprint(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()) == [1, os.getpid()])"
    _, outcome = await said(rooms(tmp_path), text, check="exec PYTHON exam.py", hidden={"exam.py": exam})
    assert outcome.said == "True\n"
    await gone("left-by-an-agent")


RUNNER = """
import asyncio, sys
from pathlib import Path
from tests.harness.fakes import job, rooms
program = "import os\\nos.execv('PYTHON', ['MARK', '-S', '-c', 'import time; time.sleep(60)'])"
asyncio.run(rooms(Path(sys.argv[1])).of("s").run(job(program, 60.0), (), "release"))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_ends_with_whoever_opened_it(how, tmp_path):
    mark = f"an-episode-{tmp_path.name}"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER.replace("MARK", mark), str(tmp_path)], cwd=Path(__file__).parents[2]
    )
    try:
        await running(mark)
    finally:
        runner.send_signal(how)
        runner.wait()
    await gone(mark)


async def test_a_cancelled_episode_is_ended(tmp_path):
    mark = f"cancelled-{tmp_path.name}"
    program = f"import os\nos.execv('PYTHON', ['{mark}', '-S', '-c', 'import time; time.sleep(60)'])"
    task = asyncio.create_task(rooms(tmp_path).of("s").run(job(program, 60.0), (), "release"))
    await running(mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(mark)


async def test_a_sandbox_that_does_not_come_up_is_trouble(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "bwrap"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --help ] && echo --size && exit\necho 'bwrap: No permissions' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    outcome = await rooms(tmp_path).of("s").run(job("pass"), (), "release")
    assert "No permissions" in outcome.trouble
    fake.write_text('#!/bin/sh\n[ "$1" = --help ] && echo --size && exit\nexec /bin/sleep 60\n')
    monkeypatch.setattr(room, "START", 0.2)
    outcome = await rooms(tmp_path / "b").of("s").run(job("pass"), (), "release")
    assert "not up within" in outcome.trouble


def test_without_bubblewrap_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install bubblewrap"):
        room.bubblewrap("an agent's episode")


def _running(mark):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(mark.encode() + b"\0"):
                return True
        except OSError:
            pass
    return False


async def running(mark):
    deadline = time.monotonic() + 30
    while not _running(mark):
        assert time.monotonic() < deadline, "it never ran"
        await asyncio.sleep(0.05)


async def gone(mark):
    deadline = time.monotonic() + 30
    while _running(mark):
        assert time.monotonic() < deadline, "it still runs"
        await asyncio.sleep(0.05)
