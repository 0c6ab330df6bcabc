"""The search: what a step does and reports, and that a kill at any place loses and doubles nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.tttd import drive
from recipes.tttd.archive import File
from recipes.tttd.search import Search, Settings
from reef.core.errors import InputError, ReefError, StoreError
from tests.recipes.kit_search import GROUPS, ROLLOUTS, Paper, Sums, search

ROOT = Path(__file__).parents[2]
CELLS = GROUPS * ROLLOUTS
STEPS = 5


def paper(made: Search) -> Paper:
    assert isinstance(made.server, Paper)
    return made.server


async def test_a_step_reports_a_whole_grid_and_grows_the_archive(tmp_path: Path) -> None:
    made = await search(tmp_path, 2)
    reports = paper(made).reports
    assert len(reports) == 2 * CELLS
    cells = [(one["metadata"]["step"], one["metadata"]["group"], one["metadata"]["rollout"]) for one in reports]
    assert sorted(cells) == [(s, g, r) for s in (1, 2) for g in range(GROUPS) for r in range(ROLLOUTS)]
    assert {(one["metadata"]["groups_per_step"], one["metadata"]["rollouts_per_group"]) for one in reports} == {(3, 4)}
    state = made.state
    assert state.archive.expansions == 2 * GROUPS
    assert all("9" not in entry.state for entry in state.archive.entries.values())  # invalid ones never enter
    scores = {one["receipt"]: one["score"] for one in reports}
    assert 0.0 in scores.values()
    first = state.history[0]
    assert first["mean"] == pytest.approx(sum(one["score"] for one in reports[:CELLS]) / CELLS)
    assert (first["release"], state.history[1]["release"]) == ("r0", "r1")
    assert first["grad_norm"] == 1.0
    problem = made.problem
    assert isinstance(problem, Sums)
    assert len(problem.calls) == len(set(problem.calls)) == len(state.known) == len(state.curve)
    assert state.curve == sorted(state.curve)


async def test_the_grammar_is_sent_unless_answers_are_free(tmp_path: Path) -> None:
    made = await search(tmp_path / "a", 1)
    assert all(one["structured_outputs"] == made.problem.grammar() for one in paper(made).asked)
    assert len({one["seed"] for one in paper(made).asked}) == CELLS
    free = await search(tmp_path / "b", 1, constrained=False)
    assert not any("structured_outputs" in one for one in paper(free).asked)


async def test_a_frozen_search_reports_nothing_and_begins_alike(tmp_path: Path) -> None:
    made, frozen = await search(tmp_path / "a", 3), await search(tmp_path / "b", 3, frozen=True)
    assert paper(frozen).reports == []
    assert made.state.history[0]["mean"] == frozen.state.history[0]["mean"]
    assert {one["release"] for one in frozen.state.history} == {"r0"}
    assert frozen.state.archive.expansions == 3 * GROUPS


async def test_a_search_goes_on_only_as_it_was(tmp_path: Path) -> None:
    await search(tmp_path, 1)
    with pytest.raises(StoreError, match="another one"):
        await search(tmp_path, 2, seed=7)
    with pytest.raises(InputError):
        Settings(groups=0)
    with pytest.raises(InputError):
        Settings(rollouts=1)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no step": lambda kept: kept.pop("step"),
    "no archive": lambda kept: kept.pop("archive"),
    "an entry without a value": lambda kept: kept["archive"]["entries"][0].pop("value"),
    "an entry that is a word": lambda kept: kept["archive"]["entries"].append("x"),
    "an endless value": lambda kept: kept["archive"]["entries"][0].update(value=float("inf")),
    "a value in words": lambda kept: kept["curve"].append("much"),
    "known, half": lambda kept: kept["known"].update({"12": [1.0]}),
    "pending without cells": lambda kept: kept.update(phase="pending"),
    "cells of nothing": lambda kept: kept.update(phase="pending", cells=[{}] * CELLS),
    "another phase": lambda kept: kept.update(phase="paused"),
    "another step": lambda kept: kept.update(step=7),
    "no history": lambda kept: kept.update(history=None),
    "a state of nothing": lambda kept: kept["known"].clear(),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_kept_search_that_is_damaged_says_what_to_do(tmp_path: Path, what: str) -> None:
    await search(tmp_path, 1)
    file = File(tmp_path / "search.json")
    kept = file.read()
    assert kept is not None
    DAMAGE[what](kept)
    with pytest.raises(StoreError, match="move its file away to search from the start"):
        Search(Paper(tmp_path), Sums(), Settings(groups=GROUPS, rollouts=ROLLOUTS), file.write, kept)


class Moving(Paper):
    """Serves another release with every answer, `times` steps long."""

    times = 1

    async def ask(self, messages: str, *, seed: int, max_tokens: int, **body: Any) -> Any:
        number = len(self.asked)
        answer = await super().ask(messages, seed=seed, max_tokens=max_tokens, **body)
        return type(answer)(answer.text, answer.receipt, f"x{number}" if number < self.times * CELLS else "r0")


async def test_rollouts_of_two_releases_are_asked_again(tmp_path: Path) -> None:
    server = Moving(tmp_path)
    made = Search(server, Sums(), Settings(groups=GROUPS, rollouts=ROLLOUTS), File(tmp_path / "s.json").write)
    await made.step()
    assert len(server.asked) == 2 * CELLS
    assert len({one["seed"] for one in server.asked}) == 2 * CELLS
    server.times = 99
    with pytest.raises(ReefError, match="changed"):
        await made.step()


class Broken(Paper):
    async def ask(self, messages: str, *, seed: int, max_tokens: int, **body: Any) -> Any:
        if len(self.asked) == 3:
            raise InputError("the engine knows no grammar")
        return await super().ask(messages, seed=seed, max_tokens=max_tokens, **body)


async def test_an_error_of_the_server_is_its_own(tmp_path: Path) -> None:
    made = Search(Broken(tmp_path), Sums(), Settings(), File(tmp_path / "s.json").write)
    with pytest.raises(InputError, match="no grammar"):
        await made.step()


# --- kills ------------------------------------------------------------------------------------------------------------


def life(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.recipes.kit_search", str(folder), str(STEPS)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})


def same(folder: Path, whole: Path) -> None:
    """Both ended alike: the same archive, figures and verifier calls, and every cell reported once."""
    one, other = (json.loads((place / "search.json").read_text()) for place in (folder, whole))
    assert one == other
    mine, theirs = Paper(folder).reports, Paper(whole).reports
    assert len(mine) == STEPS * CELLS
    assert sorted(map(json.dumps, mine)) == sorted(map(json.dumps, theirs))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    asyncio.run(search(folder, STEPS))
    return folder


@pytest.mark.parametrize(
    "point",
    [
        *(f"tttd.{name}:{count}" for name in ("pending", "reported", "learnt") for count in (1, 3)),
        *(f"tttd.{name}:{count}" for name in ("before_rename", "after_rename") for count in (1, 4, 7)),
    ],
)
def test_a_kill_at_a_place_changes_nothing(tmp_path: Path, whole: Path, point: str) -> None:
    assert life(tmp_path, REEF_FAILPOINT=point).wait() == -signal.SIGKILL
    assert life(tmp_path).wait() == 0
    same(tmp_path, whole)


def test_kills_at_any_time_change_nothing(tmp_path: Path, whole: Path) -> None:
    """Each life is killed when it has made a random number of reports more; the last one ends."""
    numbers, killed = random.Random(5), 0
    while True:
        before = len(Paper(tmp_path).reports)
        child = life(tmp_path)
        goal = before + numbers.randrange(1, CELLS + 5)
        while child.poll() is None and len(Paper(tmp_path).reports) < goal:
            time.sleep(0.002)
        if child.poll() is not None:
            assert child.returncode == 0
            break
        child.kill()
        child.wait()
        killed += 1
    assert killed >= 3
    same(tmp_path, whole)


# --- the driver -------------------------------------------------------------------------------------------------------


def test_the_driver_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEF_URL", raising=False)
    assert drive.main([]) == 2
    assert "reef run recipes/tttd" in capsys.readouterr().err
    monkeypatch.setenv("REEF_URL", "http://127.0.0.1:1")
    assert drive.main(["--problem", "nothing"]) == 2
    assert "circle_packing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        drive.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(
        option in said for option in ("--steps", "--groups", "--rollouts", "--problem", "--n", "--frozen", "--seed")
    )


def test_a_second_driver_on_one_search_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REEF_URL", "http://127.0.0.1:1")
    with File(tmp_path / "s.json").alone():
        assert drive.main(["--keep", str(tmp_path / "s.json")]) == 2
    assert "another driver works on" in capsys.readouterr().err
