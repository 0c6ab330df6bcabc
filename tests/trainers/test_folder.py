"""The training folder: whole or not at all, answered once, checked, forgotten."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reef.core.disk import sha256
from reef.core.errors import StoreError, TrainError
from reef.core.wire import Step, Stepped
from reef.trainers import folder
from reef.trainers.fake import FakeTrainer

Make = Callable[..., Step]


async def train(training: Path, order: Step) -> Stepped:
    last = None
    async for item in FakeTrainer(training).step(order):
        last = item
    assert isinstance(last, Stepped)
    return last


def refuses(training: Path, order: Step) -> str:
    with pytest.raises(TrainError) as caught:
        folder.answered(training, order)
    return caught.value.message


async def test_a_step_is_acknowledged_and_answered_from_disk(tmp_path: Path, order: Make) -> None:
    first = await train(tmp_path, order())
    again = await train(tmp_path, order())
    assert not first.reused
    assert again.reused
    assert (again.folder, again.metrics) == (first.folder, first.metrics)
    assert first.folder == str(tmp_path / "demo" / "weights" / "one" / "1")
    state = folder.read(Path(first.folder))
    assert state is not None
    assert (state.batch_id, state.cursor, state.step) == ("batch-1", 10, 1)
    assert state.unit_ids == tuple(f"u1-{number}" for number in range(6))
    assert set(state.files) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "weights.json",
        "optimizer.safetensors",
        "modules.safetensors",
    }
    kind, files, meta = folder.part_files(Path(first.folder))
    assert kind == "lora"
    assert set(files) == {"adapter_model.safetensors", "adapter_config.json", "weights.json"}
    assert meta["base"]["name"] == "fake"


async def test_another_batch_at_the_same_step_is_refused(tmp_path: Path, order: Make) -> None:
    await train(tmp_path, order())
    assert "batch-1" in refuses(tmp_path, order(batch_id="other"))


async def test_a_unit_trains_once_on_a_line(tmp_path: Path, order: Make) -> None:
    await train(tmp_path, order())
    assert "u1-3" in refuses(tmp_path, order(2, unit_ids=["u2-0", "u1-3"]))
    assert folder.answered(tmp_path, order(1, line="two")) is None  # another line may: the first was given up


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "modules.safetensors"])
@pytest.mark.parametrize("how", ["missing", "changed", "longer"])
async def test_a_damaged_file_is_an_error(tmp_path: Path, order: Make, name: str, how: str) -> None:
    done = await train(tmp_path, order())
    file = Path(done.folder) / name
    if how == "missing":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(bytes(raw) + (b"x" if how == "longer" else b""))
    assert name in refuses(tmp_path, order())
    with pytest.raises(TrainError, match=name):
        async for _ in FakeTrainer(tmp_path).step(order(2)):
            pass


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1}'])
async def test_a_damaged_state_is_an_error(tmp_path: Path, order: Make, text: str) -> None:
    done = await train(tmp_path, order())
    (Path(done.folder) / "state.json").write_text(text)
    assert "remove" in refuses(tmp_path, order())


@pytest.mark.parametrize("name", ["..", "a/b", "", ".x"])
def test_names_cannot_escape(tmp_path: Path, order: Make, name: str) -> None:
    assert "cannot name" in refuses(tmp_path, order(line=name))


async def test_lines_and_steps(tmp_path: Path, order: Make) -> None:
    assert folder.latest(tmp_path, "demo", "weights", "one") is None
    for step in (1, 2, 10):
        await train(tmp_path, order(step, base_step=step - 1))
    assert folder.steps(tmp_path, "demo", "weights", "one") == [1, 2, 10]
    newest = folder.latest(tmp_path, "demo", "weights", "one")
    assert newest is not None
    assert newest.step == 10


async def test_a_release_finds_its_training_folder(tmp_path: Path, order: Make) -> None:
    done = await train(tmp_path, order())
    await train(tmp_path, order(1, line="two", batch_id="other"))
    name = "adapter_model.safetensors"
    digest = sha256(Path(done.folder) / name)
    assert folder.find(tmp_path, "demo", "weights", 1, name, digest) == Path(done.folder)
    (tmp_path / "demo" / "weights" / "a" / "1").mkdir(parents=True)
    (tmp_path / "demo" / "weights" / "a" / "1" / "state.json").write_text("damaged")
    assert folder.find(tmp_path, "demo", "weights", 1, name, digest) == Path(done.folder)
    assert folder.find(tmp_path, "demo", "weights", 2, name, digest) is None
    assert folder.find(tmp_path, "demo", "weights", 1, name, "0" * 64) is None


async def test_prune_keeps_releases_live_line_and_newest(tmp_path: Path, order: Make) -> None:
    for line, count in (("old", 3), ("live", 4), ("last", 2)):
        for step in range(1, count + 1):
            await train(tmp_path, order(step, line=line, unit_ids=[f"{line}{step}"]))
    os.utime(tmp_path / "demo" / "weights" / "last" / "2", ns=(2**62, 2**62))
    removed = folder.prune(tmp_path, "demo", "weights", {("old", 2)}, "live")
    assert sorted(f"{entry.parent.name}/{entry.name}" for entry in removed) == ["last/1", "old/1", "old/3"]
    assert folder.steps(tmp_path, "demo", "weights", "old") == [2]
    assert folder.steps(tmp_path, "demo", "weights", "live") == [1, 2, 3, 4]
    assert folder.steps(tmp_path, "demo", "weights", "last") == [2]
    assert folder.prune(tmp_path, "demo", "weights", {("old", 2)}, "live") == []


def test_an_unwritable_folder_is_an_error_and_leaves_nothing(tmp_path: Path, order: Make) -> None:
    (tmp_path / "demo").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        folder.write(tmp_path, order(), "lora", {"a": b"x"}, {})


def test_a_failing_file_leaves_nothing(tmp_path: Path, order: Make) -> None:
    def broken(file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        folder.write(tmp_path, order(), "lora", {"a": b"x", "b": broken}, {})
    assert list((tmp_path / "demo" / "weights" / "one").iterdir()) == []


def test_metrics_that_are_not_numbers_are_never_written(tmp_path: Path, order: Make) -> None:
    with pytest.raises(ValueError, match="JSON"):
        folder.write(tmp_path, order(), "lora", {"a": b"x"}, {"loss": float("nan")})
    assert folder.steps(tmp_path, "demo", "weights", "one") == []


def test_the_first_of_two_writers_wins(tmp_path: Path, order: Make) -> None:
    first = folder.write(tmp_path, order(), "lora", {"a": b"first"}, {"loss": 1.0})
    second = folder.write(tmp_path, order(), "lora", {"a": b"second"}, {"loss": 2.0})
    assert second.reused
    assert second.metrics == {"loss": 1.0}
    assert (Path(first.folder) / "a").read_bytes() == b"first"
    assert [entry.name for entry in Path(first.folder).parent.iterdir()] == ["1"]


KILL = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import make_order
from reef.trainers.fake import FakeTrainer
from reef.trainers import folder

async def main():
    training = Path(sys.argv[1])
    folder.sweep(training)
    for step in (1, 2, 3):
        async for item in FakeTrainer(training).step(make_order(step)):
            pass

asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["before_write", "after_write", "after_rename"])
@pytest.mark.parametrize("passing", [1, 2, 3])
def test_kill_at_every_durable_step(tmp_path: Path, point: str, passing: int) -> None:
    """Killed at the write of step `passing`: everything before is there, the step whole or absent; a rerun ends it."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILL, str(tmp_path), here]
    killed = subprocess.run(
        command, env=os.environ | {"REEF_FAILPOINT": f"trainers.{point}:{passing}"}, cwd=os.getcwd()
    )
    assert killed.returncode == -9
    expected = list(range(1, passing + (point == "after_rename")))
    assert folder.steps(tmp_path, "demo", "weights", "one") == expected
    assert subprocess.run(command, cwd=os.getcwd()).returncode == 0
    line = tmp_path / "demo" / "weights" / "one"
    assert sorted(entry.name for entry in line.iterdir()) == ["1", "2", "3"]
    for step in (1, 2, 3):
        state = folder.read(line / str(step))
        assert state is not None
        assert state.batch_id == f"batch-{step}"
        folder.verify(line / str(step), state)
        json.loads((line / str(step) / "weights.json").read_bytes())


def size(line: Path) -> int:
    return sum(file.stat().st_size for file in line.glob("*/*") if file.name != folder.STATE)


async def test_a_line_holds_what_its_next_step_needs(tmp_path: Path, order: Make) -> None:
    """Six steps take the room of one; each is still acknowledged, and no unit of theirs trains again."""
    line = tmp_path / "demo" / "weights" / "one"
    one, taken = 0, []
    for step in range(1, 7):
        done = await train(tmp_path, order(step))
        one = one or size(line)
        times = [(line / str(earlier)).stat().st_mtime_ns for earlier in range(1, step + 1)]
        freed = folder.slim(tmp_path, "demo", "weights", "one", step)
        taken.append((freed, size(line)))
        assert [(line / str(earlier)).stat().st_mtime_ns for earlier in range(1, step + 1)] == times
        assert folder.answered(tmp_path, order(step)) is not None
        assert folder.part_files(Path(done.folder))[0] == "lora"
    assert taken == [(0, one), *[(one, one)] * 5]
    assert folder.steps(tmp_path, "demo", "weights", "one") == [1, 2, 3, 4, 5, 6]
    gone = folder.read(line / "2")
    assert gone is not None
    assert (gone.batch_id, gone.files) == ("batch-2", {})
    assert "was trained at step 2" in refuses(tmp_path, order(7, unit_ids=["new", gone.unit_ids[0]]))
    with pytest.raises(TrainError, match="only its acknowledgement"):
        folder.part_files(line / "2")
    assert folder.slim(tmp_path, "demo", "weights", "one", 6) == 0


async def test_a_step_that_is_kept_stays_whole(tmp_path: Path, order: Make) -> None:
    for step in (1, 2, 3):
        await train(tmp_path, order(step))
    assert folder.slim(tmp_path, "demo", "weights", "one", 3, {1}) > 0
    line = tmp_path / "demo" / "weights" / "one"
    assert [step for step in (1, 2, 3) if (state := folder.read(line / str(step))) and state.files] == [1, 3]


async def test_a_line_whose_newest_step_was_removed_says_so(tmp_path: Path, order: Make) -> None:
    for step in (1, 2):
        await train(tmp_path, order(step))
    folder.slim(tmp_path, "demo", "weights", "one", 2)
    shutil.rmtree(tmp_path / "demo/weights/one/2")
    with pytest.raises(TrainError, match="gone beyond already; start a new line"):
        await train(tmp_path, order(2))


SLIM = KILL.replace("pass\n", "pass\n        folder.slim(training, 'demo', 'weights', 'one', step)\n")


@pytest.mark.parametrize("passing", [1, 2])
def test_kill_while_a_step_shrinks(tmp_path: Path, passing: int) -> None:
    """Killed between the smaller acknowledgement and the files that it no longer names: the rerun takes them away."""
    command = [sys.executable, "-c", SLIM, str(tmp_path), str(Path(__file__).parent)]
    point = {"REEF_FAILPOINT": f"trainers.slimmed:{passing}"}
    killed = subprocess.run(command, env=os.environ | point, cwd=os.getcwd())
    assert killed.returncode == -9
    line = tmp_path / "demo" / "weights" / "one"
    assert (line / str(passing) / "optimizer.safetensors").exists()
    for step in range(1, passing + 2):
        state = folder.read(line / str(step))
        assert state is not None
        folder.verify(line / str(step), state)
        assert bool(state.files) == (step > passing)
    assert subprocess.run(command, cwd=os.getcwd()).returncode == 0
    for step in (1, 2):
        assert [entry.name for entry in (line / str(step)).iterdir()] == [folder.STATE]
    newest = folder.read(line / "3")
    assert newest is not None
    folder.verify(line / "3", newest)
