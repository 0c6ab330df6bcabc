"""A pytest plugin (entry point `reef`): a test run, reported as a score of the session or the answer that it tests.

Knows: how a run ended, and where to say it. Does not know: what the score is for, or any other file of Reef: it is
loaded into the test runs of other projects, so it imports nothing but the standard library.

- Off unless `--reef-session`, `--reef-record` or REEF_RECORD says what the run is about. REEF_SESSION alone does not: a
  test run that an agent itself starts is work in progress, not the verdict on it.
- Never changes a run's outcome: what goes wrong here is one line of warning, after at most 2 seconds.
- A run that a person stopped, or in which no test ran, says nothing. What was not measured is missing, not zero.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import pytest

SECONDS = 2.0
LINES, LENGTH = 20, 300  # failures that are told, and the characters of each


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reef", "report this run to Reef (REEF_URL, REEF_TOKEN, REEF_SCENARIO)")
    group.addoption(
        "--reef-session", metavar="ID", nargs="?", const=os.environ.get("REEF_SESSION") or "",
        help="score a session: its id as the client sent it (default: REEF_SESSION); write it with =, before a file",
    )  # fmt: skip
    group.addoption("--reef-record", metavar="RECEIPT", help="score an answer, by its x-reef-agent-record-id header")
    group.addoption("--reef-share", action="store_true", help="score: the share of tests that passed, not 1 or 0")


def pytest_configure(config: pytest.Config) -> None:
    about = _about(config.getoption("reef_record", None), config.getoption("reef_session", None))
    about = about or _about(os.environ.get("REEF_RECORD"), None)
    share = bool(config.getoption("reef_share", False))
    asked = bool(about) or share or config.getoption("reef_session", None) is not None
    if asked and not hasattr(config, "workerinput") and not config.getoption("collectonly", False):
        config.pluginmanager.register(Exam(about, share), "reef-exam")


def _about(record: str | None, session: str | None) -> dict[str, Any]:
    if record:
        return {"references": [record]}
    return {"session": session} if session else {}


class Exam:
    """One run. `line` is what is printed of it in the end."""

    def __init__(self, about: Mapping[str, Any], share: bool) -> None:
        self.about = about
        self.share = share
        self.began = time.monotonic()
        self.counts = {"passed": 0, "failed": 0, "errors": 0}
        self.failures: list[str] = []
        self.stopped = False
        self.line: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self._count("failed" if report.when == "call" else "errors", report)
        elif report.outcome == "passed" and report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._count("errors", report)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.stopped = excinfo.type is KeyboardInterrupt  # not pytest's own, for what cannot be collected

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        try:
            self.line = self._finish(int(exitstatus))
        except Exception as error:
            self.line = _plain(f"reef: warning: the run was not reported: {type(error).__name__}: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.line is not None:
            terminalreporter.write_line(self.line)

    def _count(self, what: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.counts[what] += 1
        if len(self.failures) < LINES:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(getattr(crash, "message", "") or report.longreprtext).strip().splitlines() or [""]
            why = next((line[1:].strip() for line in said if line.startswith("E ")), said[0])
            word = "FAILED" if what == "failed" else "ERROR"
            self.failures.append(_redacted(f"{word} {report.nodeid} - {why}")[:LENGTH])

    def _finish(self, status: int) -> str:
        if not self.about:
            return (
                "reef: warning: the run was not reported: nothing says what it is about; give --reef-session=ID "
                "(without an ID: the one in REEF_SESSION, if that is set) or --reef-record=RECEIPT"
            )
        bad = self.counts["failed"] + self.counts["errors"]
        ran = self.counts["passed"] + bad
        if self.stopped or not ran or (status not in (0, 1) and not bad):
            return "reef: nothing to report: no test run came to its end"
        score = self.counts["passed"] / ran if self.share else float(status == 0)
        metrics = {**self.counts, "seconds": round(time.monotonic() - self.began, 3)}
        body = {**self.about, "score": score, "metrics": metrics, "metadata": {"from": "pytest"}}
        if bad:
            more = [f"and {bad - len(self.failures)} more"] if bad > len(self.failures) else []
            body["feedback"] = "\n".join([f"{bad} of {ran} tests failed:", *self.failures, *more])
        made = tell(body)
        return f"reef: reported score {score:g} as {made}"


def _redacted(text: str) -> str:
    """Without the token: a failure shows what a test compared, and feedback is read by models."""
    token = os.environ.get("REEF_TOKEN", "")
    return text.replace(token, "[token]") if len(token) >= 6 else text


def _plain(text: str) -> str:
    """One line that no terminal acts on: a server's words may be anything."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:1000]


def tell(body: Mapping[str, Any]) -> str:
    """Send a report within 2 seconds, whatever the network does; its id. Raises what went wrong."""
    found: list[str | Exception] = []

    def work() -> None:
        try:
            found.append(_send(json.dumps(body).encode()))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True, name="reef-exam")
    thread.start()
    thread.join(SECONDS)
    if not found:
        raise TimeoutError(f"no answer within {SECONDS:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _send(data: bytes) -> str:
    """No redirect is followed and no proxy used: the token goes to the address that was named, and nowhere else."""
    named = os.environ.get("REEF_URL") or "http://127.0.0.1:8900"
    url = urlsplit(named)
    if url.scheme not in ("http", "https") or not url.hostname:
        shown = named.rpartition("@")[2][:80]
        raise ValueError(f"REEF_URL is {shown!r}, which is no address: write it as http://host:port")
    headers = {"content-type": "application/json", "user-agent": "reef-pytest"}
    if token := os.environ.get("REEF_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    if scenario := os.environ.get("REEF_SCENARIO"):
        headers["x-reef-scenario"] = scenario
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    line = kind(url.hostname, url.port, timeout=SECONDS)
    try:
        line.request("POST", url.path.rstrip("/").removesuffix("/v1") + "/reef/report", data, headers)
        answer = line.getresponse()
        said = json.loads(answer.read())
    finally:
        line.close()
    if answer.status != 200:
        raise RuntimeError(said["error"]["message"])
    return str(said["agent_record_id"])
