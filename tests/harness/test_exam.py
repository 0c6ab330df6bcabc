"""The pytest plugin: a run is reported when it is asked for, and a run's outcome is never touched."""

import asyncio
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from reef.core.nouns import Report
from reef.records import Query
from tests.gateway.conftest import TOKEN, running

ROOT = Path(__file__).parents[2]
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TESTS = {
    "good": "def test_one(): pass\ndef test_two(): pass\n",
    "bad": "import pytest\ndef test_one(): pass\ndef test_two(): assert 1 == 2, 'not the same'\n"
    "@pytest.fixture\ndef broken(): raise OSError('no disk')\ndef test_three(broken): pass\n"
    "@pytest.mark.skip\ndef test_four(): pass\n",
    "torn": "import nothing_of_this_name\n",
    "none": "x = 1\n",
    "stopped": "def test_one(): pass\ndef test_two(): raise KeyboardInterrupt\n",
    "left": "import pytest\ndef test_one(): pass\ndef test_two(): pytest.exit('enough')\n",
}


async def pytest_run(folder, tests, *arguments, plugin=True, **environment):
    """Exit status and output of a run of pytest with the plugin, and nothing else that is installed."""
    (folder / "test_it.py").write_text(TESTS[tests])
    (folder / "pytest.ini").write_text("[pytest]\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("REEF_", "PYTEST_"))}
    clean |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), **environment}
    named = ["-p", "reef.harness.exam"] if plugin else []
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", *named, *arguments,
        cwd=folder, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await done.communicate()
    return done.returncode, said.decode()


@pytest.fixture
async def served(tmp_path):
    """A gateway with one record of the session `work`."""
    async with running(tmp_path / "state") as gateway, gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=ASK, headers={"x-reef-session": "work"})
        gateway.receipt = answer.headers["x-reef-agent-record-id"]
        gateway.environment = {"REEF_URL": gateway.url, "REEF_TOKEN": TOKEN}
        yield gateway


async def reports(gateway):
    found = [item for _, item in await gateway.store.find(Query("default", kind="report"))]
    assert all(isinstance(one, Report) for one in found)
    return found


async def test_a_run_that_passed_and_one_that_failed(served, tmp_path):
    status, said = await pytest_run(tmp_path, "good", "--reef-session", "work", **served.environment)
    assert status == 0, said
    assert "reef: reported score 1" in said
    (report,) = await reports(served)
    assert (report.references, report.score, report.feedback) == ((served.receipt,), 1.0, None)
    assert report.metrics.keys() == {"passed", "failed", "errors", "seconds"}
    assert (report.metrics["passed"], report.metrics["failed"]) == (2, 0)
    status, said = await pytest_run(tmp_path, "bad", REEF_RECORD=served.receipt, **served.environment)
    assert status == 1
    report = (await reports(served))[0]
    assert (report.references, report.score) == ((served.receipt,), 0.0)
    assert [report.metrics[name] for name in ("passed", "failed", "errors")] == [1, 1, 1]
    lines = report.feedback.splitlines()
    assert lines[0] == "2 of 3 tests failed:"
    assert lines[1].startswith("FAILED test_it.py::test_two - AssertionError: not the same")
    assert lines[2] == "ERROR test_it.py::test_three - OSError: no disk"


async def test_the_share_and_what_cannot_be_collected(served, tmp_path):
    status, _ = await pytest_run(tmp_path, "bad", "--reef-share", REEF_SESSION="work", **served.environment)
    assert status == 1
    assert await reports(served) == []  # an agent that tests its own work says nothing
    await pytest_run(tmp_path, "bad", "--reef-share", "--reef-session", REEF_SESSION="work", **served.environment)
    assert (await reports(served))[0].score == pytest.approx(1 / 3)
    status, said = await pytest_run(tmp_path, "torn", "--reef-session", "work", **served.environment)
    assert status == 2, said
    report = (await reports(served))[0]
    assert (report.score, report.metrics["errors"]) == (0.0, 1)
    assert "nothing_of_this_name" in report.feedback


@pytest.mark.parametrize("tests", ["none", "stopped", "left"])
async def test_a_run_that_came_to_nothing_says_nothing(served, tmp_path, tests):
    status, said = await pytest_run(tmp_path, tests, "--reef-session", "work", **served.environment)
    bare, _ = await pytest_run(tmp_path, tests, plugin=False)
    assert status == bare != 0
    assert "nothing to report" in said
    assert await reports(served) == []


async def test_off_unless_asked_for(served, tmp_path):
    for more in ((), ("--reef-session", "work", "--collect-only")):
        status, said = await pytest_run(tmp_path, "good", *more, **served.environment)
        assert status == 0
        assert "reef:" not in said
    assert await reports(served) == []


async def test_trouble_is_a_line_and_no_more(served, tmp_path):
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cases = [
            (served.environment | {"REEF_TOKEN": "wrong"}, "wrong token"),
            (served.environment | {"REEF_SCENARIO": "nowhere"}, "no scenario"),
            ({"REEF_URL": "http://127.0.0.1:1"}, "Error"),
            ({"REEF_URL": "nonsense:::"}, "warning"),
            ({"REEF_URL": "localhost:8900"}, "REEF_URL is 'localhost:8900', which is no address: write it as http://"),
            ({"REEF_URL": mute}, "no answer within 2 s"),
        ]
        for environment, why in cases:
            status, said = await pytest_run(tmp_path, "good", "--reef-session", "work", **environment)
            assert status == 0, said
            assert "reef: warning: the run was not reported" in said
            assert why in said
            assert "2 passed" in said
    assert await reports(served) == []


def test_it_loads_nothing_of_reef():
    code = (
        "import sys, reef.harness.exam as exam; print(*(name for name in sys.modules if name[:4] in ('reef', 'pyte')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reef reef.harness reef.harness.exam"


def test_it_is_an_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"reef": "reef.harness.exam"}


async def test_a_redirect_is_not_followed_with_the_token(tmp_path):
    asked = []

    async def answer(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        status, said = await pytest_run(tmp_path, "good", "--reef-session", "s", REEF_URL=url, REEF_TOKEN="secret")
    assert status == 0
    assert len(asked) == 1
    assert "secret" not in said


async def test_asked_for_without_a_session_it_says_so(served, tmp_path):
    for words in (["--reef-session"], ["--reef-share"], ["--reef-session="]):
        status, said = await pytest_run(tmp_path, "good", *words, **served.environment)
        assert status == 0
        assert said.count("reef: warning: the run was not reported: nothing says what it is about; give") == 1
    assert await reports(served) == []


async def test_feedback_never_carries_the_token(served, tmp_path):
    TESTS["told"] = "import os\ndef test_one(): assert os.environ['REEF_TOKEN'] == ''\n"
    status, _ = await pytest_run(tmp_path, "told", "--reef-session", "work", **served.environment)
    assert status == 1
    (report,) = await reports(served)
    assert TOKEN not in report.feedback
    assert "[token]" in report.feedback


async def test_a_server_s_words_are_one_line(tmp_path):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        data = b'{"error": {"message": "no\\u001b[31m\\nway"}}'
        writer.write(b"HTTP/1.1 400 x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        _, said = await pytest_run(tmp_path, "good", "--reef-session", "s", REEF_URL=url)
    assert "RuntimeError: no [31m way" in said
