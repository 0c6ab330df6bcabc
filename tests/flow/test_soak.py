"""Long kills on a real server: kill -9 of any process, again and again under load; nothing is lost or trained twice.

`REEF_SOAK_MINUTES` (default 5) is how long each test kills. Clients chat and report all the while; a harness recipe
learns beside the weights. What is checked afterwards is what a client, an operator and the state folder can see.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

from reef.cli.preferences import PREFERENCES
from reef.core.ids import new_report
from reef.core.nouns import Record, Report
from reef.records.board import Board
from reef.records.sqlite import SqliteStore
from reef.releases.chain import GitChain
from reef.trainers import folder
from tests.flow.test_serve import Served, running, until

MINUTES = float(os.environ.get("REEF_SOAK_MINUTES", "5"))
pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(MINUTES * 60 + 1500)]

ROLES = ("gateway", "engine", "learner", "trainer")
BATCH = 4
CONFIG = """
reef:
  port: {port}
  recipes:
    - {{use: sao, batch_size: {batch}, max_staleness: {stale}}}
    - {{use: feedback_rules, max_rules: 2}}
gate: {{policy: {policy}}}
"""


class Client:
    """A user who asks, streams every second answer, and reports; what was promised to it is written down."""

    def __init__(self, url: str, token: str, number: int, notes: Notes) -> None:
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
        )  # fmt: skip
        self.draw = random.Random(number)
        self.notes = notes

    def live(self, stop: threading.Event) -> None:
        try:
            for turn in itertools.count():
                if stop.is_set():
                    return
                try:
                    self.exchange(turn)
                except httpx.HTTPError:
                    time.sleep(0.1)  # the process that had it was killed
        except Exception as error:
            self.notes.wrong.append(f"a client ended with {error!r}")

    def exchange(self, turn: int) -> None:
        addition = PREFERENCES["addition"]
        prompt = self.draw.choice(addition.train)
        body = {"messages": [{"role": "user", "content": prompt.text}], "max_tokens": 8, "stream": turn % 2 == 0}
        receipt, text = None, ""
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.notes.refused[answer.status_code] += 1
                    time.sleep(0.2)
                    return
                receipt = answer.headers["x-reef-agent-record-id"]
                self.notes.seen.append(receipt)
                text = answer.read().decode()
        except httpx.HTTPError:
            if receipt is None or self.draw.random() < 0.5:
                raise  # else it reports all the same: a receipt is good from the moment it was seen
        else:
            if body["stream"] and "data: [DONE]" not in text and '"error"' not in text:
                self.notes.wrong.append(f"the stream of {receipt} ended cleanly without its end: {text[-200:]!r}")
            elif not body["stream"] or "data: [DONE]" in text:
                self.notes.finished.append(receipt)
        said = {"score": float(self.draw.random() < 0.5)}
        if self.draw.random() < 0.1:
            said["feedback"] = f"Please mention the number {self.draw.randrange(100)} once."
        self.report({**said, "references": [receipt], "agent_record_id": new_report()})

    def report(self, body: dict) -> None:
        """Send a report until it is acknowledged; its own id makes sending it again harmless."""
        for _ in range(100):
            with contextlib.suppress(httpx.HTTPError):
                answer = self.http.post("/reef/report", json=body)
                if answer.status_code == 200:
                    self.notes.reports[body["agent_record_id"]] = body
                    return
                self.notes.refused[answer.status_code] += 1
                if answer.status_code < 500:
                    self.notes.wrong.append(f"report {body}: {answer.status_code} {answer.text}")
                    return
            time.sleep(0.2)
        self.notes.wrong.append(f"report {body} was refused a hundred times")


class Notes:
    """What clients were promised, and what was seen in the training folder meanwhile."""

    def __init__(self) -> None:
        self.seen: list[str] = []  # receipts
        self.finished: list[str] = []  # of answers that ended
        self.reports: dict[str, dict] = {}  # acknowledged, by id
        self.refused: collections.Counter[int] = collections.Counter()
        self.wrong: list[str] = []
        self.killed: collections.Counter[str] = collections.Counter()
        self.steps: dict[tuple[str, str, int], tuple[str, ...]] = {}  # (part, line, step) -> units

    def look(self, training: Path) -> None:
        """Steps are pruned in time, so they are noted as they come."""
        for place in training.glob("default/*/*/[0-9]*"):
            if (key := (place.parts[-3], place.parts[-2], int(place.name))) not in self.steps:
                with contextlib.suppress(FileNotFoundError):
                    if (state := folder.read(place)) is not None:
                        self.steps[key] = state.unit_ids

    def follow(self, training: Path, stop: threading.Event) -> None:
        while not stop.wait(0.1):
            self.look(training)


@contextlib.contextmanager
def together(*works):
    """Run these in threads, each with an event that tells it to stop."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def load(served: Served, notes: Notes, clients: int = 3):
    """Clients that chat and report."""
    return together(*(Client(served.url, served.token, number, notes).live for number in range(clients)))


@pytest.fixture
def notes(tmp_path):
    made = Notes()
    with together(lambda stop: made.follow(tmp_path / ".reef/training", stop)):
        yield made


@pytest.fixture(params=["always", "guarded"])
def policy(request):
    """With `always` much is trained and released; with `guarded` kills also meet a gate in the middle of its asking."""
    return request.param


@pytest.fixture
def served(tmp_path, policy):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stale = 40 if policy == "always" else 3  # every sample that a guarded line may use costs a whole look
    made = Served(tmp_path, CONFIG.format(port=port, batch=BATCH, policy=policy, stale=stale))
    try:
        yield made.start(300)
    finally:
        made.stop()
        print((tmp_path / "said").read_text()[-2000:])


def kill(served: Served, draw: random.Random) -> str | None:
    """kill -9 a process of a random role, if that runs now; a handle on it makes sure it is the server's own."""
    role = draw.choice(ROLES)
    found = [pid for name, pid in served.children().items() if name.startswith(role)]
    if not found:
        return None
    pid = draw.choice(found)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        if pid in served.children().values():  # still the same: an id is not reused while we hold a handle on it
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return role
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
    return None


def status(served: Served) -> dict:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        answer = served.client.get("/reef/status")
        if answer.status_code == 200:
            return answer.json()
    return {}


def parts(shown: dict) -> dict:
    scenario = shown.get("scenarios", {}).get("default") or {}
    return (scenario.get("learner") or {}).get("parts") or {}


def healthy(served: Served) -> bool:
    """Every process is there, ready and answers; the trainer comes when it is needed."""
    names = served.children().keys()
    if not {"gateway0", "gateway1", "engine0", "learner0"} <= names:
        return False
    with contextlib.suppress(httpx.HTTPError):
        shown = status(served)
        ready = served.client.get("/readyz").status_code == 200
        return bool(ready and shown and shown["learner"]["alive"] and shown["engine"]["ready"] and parts(shown))
    return False


def rested(served: Served) -> bool:
    """The learner has used or dropped whatever it can."""
    shown = parts(status(served))
    return bool(shown) and all(
        part["state"] == "waiting" and part["error"] is None and part["pending"] < (part["batch_size"] or 1)
        for part in shown.values()
    )


def still_learns(served: Served, notes: Notes) -> None:
    """After all that, new reports are still trained and judged."""
    before = parts(status(served))["weights"]
    with load(served, notes):
        until(
            lambda: (
                (now := parts(status(served)).get("weights"))
                and now["trained"] > before["trained"]
                and now["last"] != before["last"]
            ),
            300,
        )


def check_served(served: Served, notes: Notes) -> None:
    """What a client sees: every receipt resolves, what ended is complete, acknowledged reports are known."""
    assert notes.wrong == []
    assert set(notes.refused) <= {502, 503, 504}, notes.refused
    until(lambda: all(served.resolves(receipt)["status"] != "open" for receipt in notes.seen[-200:]), 60)
    statuses = {receipt: served.resolves(receipt)["status"] for receipt in notes.seen}
    assert "open" not in statuses.values()
    assert {statuses[receipt] for receipt in notes.finished} <= {"complete"}
    for body in list(notes.reports.values())[-50:]:
        assert served.client.post("/reef/report", json=body).json()["duplicate"] is True
    shown = served.client.get("/reef/scenarios/default/releases", params={"limit": 1}).json()["releases"]
    assert shown[0]["current"] is True


async def check_stored(state: Path, notes: Notes) -> None:
    """What the state folder says after the stop."""
    store = SqliteStore(state / "records.db", owner="test")
    await store.start()
    records = await store.get(notes.seen)
    assert all(isinstance(one, Record) and one.status != "open" for one in records)
    reports = await store.get(list(notes.reports))
    assert all(isinstance(one, Report) for one in reports)
    await store.close()
    chain = GitChain(state / "releases.git")
    assert chain.verify("default") == []
    history = chain.history("default", limit=100_000)
    assert [release.seq for release in history] == list(range(len(history)))[::-1]
    board = Board(state / "records.db")
    assert board.get("default").release_id == history[0].id
    board.close()
    check_trained(state, notes, history)
    check_looks(state)


def check_looks(state: Path) -> None:
    """What a kill did to the engine or the wire is never held against a candidate."""
    with contextlib.closing(sqlite3.connect(state / "learn.db")) as base:
        verdicts = base.execute("SELECT verdict, reason FROM looks").fetchall()
    for verdict, reason in verdicts:
        blamed = any(
            words in reason for words in ("are missing", "cannot load", "never the candidate", "failed on them")
        )
        assert verdict != "reject" or not blamed, reason
        assert "training failed" not in reason
    print(f"looks: {dict(collections.Counter(verdict for verdict, _ in verdicts))}")


def check_trained(state: Path, notes: Notes, history: list) -> None:
    """No unit trained twice, by training folders, ledger and chain; and every report met its fate."""
    notes.look(state / "training")
    with contextlib.closing(sqlite3.connect(state / "learn.db")) as base:
        fates = base.execute("SELECT part, unit, fate, line, step FROM fates WHERE fate != 'duplicate'").fetchall()
        orders = base.execute("SELECT count(*) FROM orders").fetchone()[0]
    assert orders == 0, "an order was never settled"
    assert len(notes.steps) > len(history) / 2, "too few steps were seen to tell"
    known = {(part, unit): (fate, line, step) for part, unit, fate, line, step in fates}
    for (part, line, step), units in notes.steps.items():
        for unit in units:
            assert known[part, unit] == ("trained", line, step), f"{part} {unit} at {line} {step}: {known[part, unit]}"
    used = collections.Counter((part, unit) for (part, _, _), units in notes.steps.items() for unit in units)
    assert [key for key, times in used.items() if times > 1] == []
    named = collections.Counter()
    for release in history:
        if release.operation == "publish":
            named.update((part, unit) for part, held in release.consumed.items() for unit in held.units)
    assert [key for key, times in named.items() if times > 1] == []
    trained = {key for key, (fate, _, _) in known.items() if fate == "trained"}
    assert named.keys() <= trained
    if history[0].evaluation is not None and history[0].evaluation.policy == "always":
        assert named.keys() == trained
    lost = [
        receipt for body in notes.reports.values() for receipt in body["references"]
        if ("weights", f"{receipt}:0") not in known
    ]  # fmt: skip
    assert len(lost) < BATCH, f"{len(lost)} reported answers were neither trained nor dropped"
    print(
        f"{dict(notes.killed)} killed; {len(notes.seen)} receipts, {len(notes.finished)} ended, {len(notes.reports)} "
        f"reports; {len(history)} releases, {len(notes.steps)} steps seen, "
        f"{json.dumps(collections.Counter(f'{part} {fate}' for part, _, fate, _, _ in fates))}; "
        f"refused {dict(notes.refused)}"
    )


async def test_any_process_is_killed_again_and_again(served, notes, policy):
    draw = random.Random(os.environ.get("REEF_SOAK_SEED", "0"))
    end = time.monotonic() + 60 * MINUTES
    with load(served, notes):
        until(lambda: len(notes.finished) > 5, 120)
        while time.monotonic() < end:
            time.sleep(draw.uniform(1.0, 3.0) if policy == "always" else draw.uniform(2.0, 15.0))
            if (role := kill(served, draw)) is not None:
                notes.killed[role] += 1
            assert served.process.poll() is None, "the supervisor ended"
    assert notes.killed.total() >= 2 * MINUTES
    until(lambda: healthy(served), 180)
    still_learns(served, notes)
    until(lambda: rested(served), 300)
    check_served(served, notes)
    assert served.stop() == 0
    await check_stored(served.folder / ".reef", notes)


async def test_the_supervisor_is_killed_again_and_again(served, notes):
    draw = random.Random(os.environ.get("REEF_SOAK_SEED", "0"))
    end = time.monotonic() + 60 * MINUTES
    with load(served, notes):
        while time.monotonic() < end:
            answered = len(notes.finished)
            until(lambda: len(notes.finished) > answered + 3, 180)  # noqa: B023 (called at once)
            time.sleep(draw.uniform(0.0, 15.0))
            children = served.children().values()
            served.process.kill()
            served.process.wait()
            notes.killed["supervisor"] += 1
            until(lambda: not any(running(pid) for pid in children), 5.0)  # noqa: B023 (called at once)
            served.start(300)
    assert notes.killed.total() >= MINUTES
    until(lambda: healthy(served), 180)
    still_learns(served, notes)
    until(lambda: rested(served), 300)
    check_served(served, notes)
    assert served.stop() == 0
    await check_stored(served.folder / ".reef", notes)
