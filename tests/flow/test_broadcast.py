"""Weights by broadcast through the whole product: a step is trained, the candidate is loaded from what arrived, and it
answers as one that was read from files; an engine killed while it receives reads them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bench.kit.served import served
from tests.flow.test_full_weights import Crowd, Seat, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

CONFIG = """
reef: {{recipe: sao, train: full, learning_rate: 1.0e-4, batch_size: 2, port: {port}, state_dir: {state}}}
gate: {{policy: always}}
training: {{broadcast: "127.0.0.1:0", nice: 0}}
"""
TOKENS = list(range(100, 140))


def arrivals(seat: Seat) -> dict[str, Any]:
    found = seat.call(_ping()).detail["arrivals"]
    assert isinstance(found, dict)
    return found


def _ping() -> Any:
    from reef.core.wire import Ping

    return Ping()


def test_a_candidate_is_loaded_from_what_the_trainer_sent(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with served(state, CONFIG) as (url, token):
        seat = Seat(state, url, token)
        assert arrivals(seat)["received"] == 0
        with Crowd(seat, clients=1, pause=0.5) as crowd:
            seat.teach()
            until(lambda: seat.head().seq == 1)
            head = seat.head()
            until(lambda: seat.served() == head.id)
            until(lambda: head.id in crowd.releases)
        assert crowd.failed == []
        seen = arrivals(seat)
        digest, size = head.parts["weights"].files["model.safetensors"]
        assert (seen["connected"], seen["received"], seen["loaded"], seen["read"]) == (True, 1, 1, 0)
        assert seen["last"]["files"] == {"model.safetensors": digest[:12]}
        assert seen["last"]["bytes"] - size < 64
        taken, said = seat.rate(head.id, TOKENS), seat.greedy()

        was = seat.engine()
        os.kill(was, signal.SIGKILL)
        until(lambda: _other(seat, was))
        assert seat.rate(head.id, TOKENS) == taken
        again = seat.greedy()
        assert (again[0], again[1]) == (said[0], said[1])
        assert again[2] == pytest.approx(said[2], abs=1e-5)  # computed beside others, or alone
        seen = arrivals(seat)
        assert (seen["received"], seen["loaded"], seen["read"]) == (0, 0, 1)


def _other(seat: Seat, pid: int) -> bool:
    from reef.core.errors import ReefError

    try:
        return seat.engine() != pid
    except ReefError:
        time.sleep(0.2)
        return False


def test_an_engine_killed_while_it_receives_reads_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEF_FAILPOINT", "broadcast.received:5")
    state = tmp_path / "state"
    with served(state, CONFIG) as (url, token):
        seat = Seat(state, url, token)
        was = seat.engine()
        seat.teach()
        until(lambda: seat.head().seq == 1)
        head = seat.head()
        until(lambda: seat.served() == head.id)
        assert seat.engine() != was
        seen = arrivals(seat)
        assert (seen["received"], seen["loaded"], seen["read"]) == (0, 0, 1)
        assert seat.greedy()[0] == head.id
