"""A run without its server: places, settings, and when the learner is at rest."""

import pytest

from reef.core.errors import ReefError, TrainError, WireError
from reef.study import Arm, run
from reef.study.run import Run


def made(tmp_path, config=None, seed=3):
    return Run(tmp_path / "arm-3", Arm("arm", config or {}), seed)


def looking(one, *looks):
    """The learner's words at each look; the last ones stay."""
    left = list(looks)

    async def look():
        return left.pop(0) if len(left) > 1 else left[0]

    one._look = look
    return left


def part(rests, state="waiting", **more):
    return {"weights": {"rests": rests, "state": state, **more}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(run, "QUICK", 0.001)
    monkeypatch.setattr(run, "SLOW", 0.001)


def test_random_numbers_depend_on_seed_and_place_alone(tmp_path):
    one, again, other = made(tmp_path), made(tmp_path), made(tmp_path, seed=4)
    one.at("else").random()
    assert one.at("batch", 1).random() == again.at("batch", 1).random()
    assert one.at("batch", 1).random() != one.at("batch", 2).random()
    assert one.at("batch", 1).random() != other.at("batch", 1).random()


def test_the_seed_is_put_into_the_servers_settings(tmp_path):
    config = {"reef": {"recipe": "sao", "seed": "{seed}", "default_scenario": "sums"}, "gate": {"policy": "always"}}
    one = made(tmp_path, config)
    assert one.config["reef"]["seed"] == 3
    assert one.config["reef"]["workers"] == 1
    assert one.config["gate"] == {"policy": "always"}
    assert one.scenario == "sums"
    assert config["reef"]["seed"] == "{seed}"  # the arm is not touched


def test_what_is_the_studys_to_set_is_refused(tmp_path):
    with pytest.raises(ReefError, match=r"the arm arm sets reef\.port"):
        made(tmp_path, {"reef": {"port": 8900}})


async def test_the_learner_rests_when_it_found_nothing_to_do_twice_since(tmp_path):
    one = made(tmp_path)
    left = looking(one, {}, part(7), part(7, "training"), part(8), part(8), part(9), part(99))
    assert (await one._rested())["weights"]["rests"] == 9
    assert len(left) == 1


async def test_every_part_has_to_rest(tmp_path):
    one = made(tmp_path)
    harness = {"harness": {"rests": 0, "state": "waiting"}}
    done = {"harness": {"rests": 2, "state": "waiting"}}
    left = looking(one, part(0) | harness, part(5) | harness, part(9) | done, part(99) | done)
    assert (await one._rested())["weights"]["rests"] == 9
    assert len(left) == 1


async def test_a_learner_that_started_again_counts_from_its_start(tmp_path):
    one = made(tmp_path)
    left = looking(one, part(40), part(41), {}, part(1), part(2), part(3), part(99))
    assert (await one._rested())["weights"]["rests"] == 3
    assert len(left) == 1


async def test_a_learner_that_is_blocked_or_fails_for_long_is_an_error(tmp_path, monkeypatch):
    one = made(tmp_path)
    looking(one, part(5, "blocked", error="set train back"))
    with pytest.raises(TrainError, match="set train back"):
        await one._rested()
    monkeypatch.setattr(run, "FAILING", 0.01)
    looking(one, part(5, "failed", error="no engine"))
    with pytest.raises(TrainError, match="again and again: no engine"):
        await one._rested()


async def test_a_failure_that_passes_is_waited_out(tmp_path):
    one = made(tmp_path)
    looking(one, part(5), part(5, "failed", error="no engine"), part(6), part(7))
    assert (await one._rested())["weights"]["state"] == "waiting"


async def test_a_learner_that_does_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "STALLED", 0.02)
    one = made(tmp_path)
    looking(one, part(5, "waiting", oldest_seconds=1.0))
    with pytest.raises(WireError, match="did nothing"):
        await one._rested()


def test_points_of_a_repeated_stretch_are_logged_once(tmp_path):
    said = []
    for _ in range(2):
        one = Run(tmp_path / "arm-3", Arm("arm", {}), 3, show=said.append)
        one.point(batch=1, score=0.25)
    assert said == ["batch 1  score 0.250"]
    assert len((tmp_path / "arm-3" / "points.jsonl").read_text().splitlines()) == 1


def test_seconds_go_on_from_the_kept_place(tmp_path):
    one = made(tmp_path)
    with one.spending("asking"), one.spending("asking"):
        pass
    one._spent["asking"] = 5.0
    one._before = 100.0
    one.keep(batch=1)
    again = made(tmp_path)
    assert again.seconds >= 100.0
    assert again.spent["asking"] == 5.0
