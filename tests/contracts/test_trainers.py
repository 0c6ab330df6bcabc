"""What every trainer keeps to: a step is durable, made once, answered again from disk. A new trainer is one line."""

import asyncio
import contextlib
import gc
import json
import math
import random
import shutil
import socket
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest

from reef import trainers
from reef.core import rpc
from reef.core.errors import TrainError
from reef.core.wire import Datum, Progress, Step, Stepped
from reef.engines import WeightFiles
from reef.trainers import folder
from reef.trainers.client import SocketTrainer
from reef.trainers.fake import FakeTrainer

VOCABULARY = 263  # of the tiny model
BASE = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})


@contextlib.asynccontextmanager
async def fake(training, model):
    trainer = FakeTrainer(training)
    yield trainer
    await trainer.close()


@contextlib.asynccontextmanager
async def behind(training, model, backend="local", options=None):
    """A backend with a tiny random model, behind its real server on a unix socket."""
    from reef.trainers import Ground
    from reef.trainers.server import Server

    with tempfile.TemporaryDirectory(prefix="reef-") as place:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{place}/trainer.sock")
        listener.listen()
        ground = Ground(model(), training, lambda release: BASE)
        process = Server(ground, backend, options)
        server = await rpc.serve(listener, process.answer)
        trainer = SocketTrainer(Path(place) / "trainer.sock")
        yield trainer
        await trainer.close()
        server.close()
        process.close()


def local(training, model):
    return behind(training, model)


@contextlib.asynccontextmanager
async def ray(training, model):
    """Two workers, which outlive their trainer: each start takes seconds."""
    from reef.trainers.ray import Options

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trainers.WORKS, "ray", "tests.trainers.ray.kit:Lasting")
        async with behind(training, model, "ray", Options(workers=2, cpus=1)) as trainer:
            yield trainer


def tinker(training, model):
    """A stub of the service, which has the model too and outlives its clients."""
    from tests.trainers.tinker.kit import options

    return behind(training, model, "tinker", options(training.parent / "service", model()))


@contextlib.asynccontextmanager
async def slime(training, model):
    """A stub of slime in processes of its own, started as slime is, which go on where they were."""
    from tests.trainers.slime.kit import cluster, options

    place = training.parent / "slime"
    async with behind(training, model, "slime", options(place)) as trainer:
        with cluster(place, model(), temperature=100.0):
            yield trainer


REAL = (local, ray, tinker, slime)
TRAINERS = {"fake": fake} | {one.__name__: pytest.param(one, marks=pytest.mark.model) for one in REAL}
FITS = {"tinker": {"recipe": "grpo", "temperature": 1.0}, "slime": {"recipe": "grpo"}}
"""What backends that know only recorded tokens' log-probs are asked for."""
fit = {}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes the tiny model when first asked for, so that a fake trainer needs no torch."""
    made = []

    def make():
        from tests.engines.kit import make_tiny

        if not made:
            made.append(make_tiny(tmp_path_factory.mktemp("models") / "tiny"))
        return made[0]

    return make


@pytest.fixture(params=TRAINERS.values(), ids=TRAINERS.keys())
def start(request, tmp_path, model):
    """Starts a trainer on one and the same training folder, as after a restart."""
    fit.clear()
    fit.update(FITS.get(request.param.__name__, {}))
    return lambda: request.param(tmp_path / "training", model)


@pytest.fixture
async def trainer(start):
    async with start() as made:
        yield made


def data(seed, count=4):
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt, answer = [1, *draw.choices(range(3, 200), k=draw.randrange(2, 7))], draw.randrange(1, 6)
        made.append(
            Datum(
                tokens=[*prompt, *draw.choices(range(3, 200), k=answer)],
                prompt_length=len(prompt),
                mask=[1] * answer,
                logprobs=[-math.log(VOCABULARY)] * answer,
                reward=float(number % 2),
                record_id=f"{seed:016x}{number:016x}",
                choice=0,
                # so hot that every token is as likely, and its log-prob known without the model
                temperature=fit.get("temperature", 100.0),
                lag=0,
                group="all",
            )
        )
    return made


def order(step=1, **changes):
    from recipes.grpo.recipe import GRPORecipe
    from recipes.sao.recipe import SAORecipe

    objective = (GRPORecipe(rank=2, kl=0.0) if fit.get("recipe") == "grpo" else SAORecipe(rank=2)).objective()
    wanted = {
        "scenario": "demo",
        "part": "weights",
        "line": "one",
        "step": step,
        "base_release": "r0",
        "base_step": 0,
        "objective": objective.path,
        "options": dict(objective.options),
        "batch_id": f"batch-{step}",
        "unit_ids": [f"u{step}-{number}" for number in range(4)],
        "cursor": 10 * step,
        "data": data(step),
    }
    return Step(**(wanted | changes))


async def train(trainer, wanted):
    """(progress, the end) of one step."""
    async with aclosing(trainer.step(wanted)) as items:
        *news, done = [item async for item in items]
    assert isinstance(done, Stepped)
    assert all(isinstance(item, Progress) for item in news)
    return news, done


def made(tmp_path):
    """The step folders there are."""
    return sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("state.json"))


def test_every_trainer_is_here():
    assert TRAINERS.keys() == trainers.TRAINERS.keys()


async def test_a_step_is_durable_and_says_what_it_learnt_from(trainer, tmp_path):
    assert await trainer.ready()
    news, done = await train(trainer, order())
    assert all(0 <= item.done <= item.total for item in news)
    assert (done.step, done.reused) == (1, False)
    place = Path(done.folder)
    assert place == folder.path(tmp_path / "training", "demo", "weights", "one", 1)
    state = folder.read(place)
    folder.verify(place, state)
    assert (state.batch_id, state.unit_ids, state.cursor) == ("batch-1", tuple(order().unit_ids), 10)
    assert (state.line, state.step, state.base_release, state.objective) == ("one", 1, "r0", order().objective)
    assert done.metrics == state.metrics
    assert done.metrics["reward"] == 0.5
    json.dumps(dict(done.metrics), allow_nan=False)


async def test_a_step_holds_a_part_that_can_be_released(trainer):
    _, done = await train(trainer, order())
    kind, files, meta = folder.part_files(Path(done.folder))
    assert kind == meta["kind"] == "lora"
    assert files.keys() == {"weights.json", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["weights.json"].read_bytes()) == meta
    assert {path.suffix for path in Path(done.folder).iterdir()} == {".json", ".safetensors"}


async def test_the_same_order_is_answered_from_disk_also_after_a_restart(start, tmp_path):
    async with start() as trainer:
        _, done = await train(trainer, order())
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path(done.folder).iterdir()}
        news, again = await train(trainer, order())
        assert news == []
        assert (again.reused, again.folder, again.metrics) == (True, done.folder, done.metrics)
    async with start() as trainer:
        _, again = await train(trainer, order())
        assert again.reused
        _, second = await train(trainer, order(2))
        assert not second.reused
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path(done.folder).iterdir()} == before
    assert made(tmp_path) == [f"training/demo/weights/one/{step}" for step in (1, 2)]


async def test_a_line_goes_on_from_its_last_step(trainer):
    weights = []
    for step in (1, 2, 3):
        _, done = await train(trainer, order(step))
        weights.append((Path(done.folder) / "adapter_model.safetensors").read_bytes())
    assert len(set(weights)) == 3
    with pytest.raises(TrainError):
        await train(trainer, order(5))
    with pytest.raises(TrainError):
        await train(trainer, order(2, line="other"))


async def test_nothing_trains_twice(trainer, tmp_path):
    await train(trainer, order())
    with pytest.raises(TrainError, match="batch-1"):
        await train(trainer, order(1, batch_id="other"))
    with pytest.raises(TrainError, match="u1-2"):
        await train(trainer, order(2, unit_ids=["u2-0", "u1-2"]))
    assert made(tmp_path) == ["training/demo/weights/one/1"]
    _, done = await train(trainer, order(1, line="two"))  # another line is another life
    assert not done.reused


async def test_a_refused_order_leaves_nothing_and_the_trainer_working(trainer, tmp_path):
    for wrong in (order(data=[]), order(scenario="../demo"), order(line="")):
        with pytest.raises(TrainError):
            await train(trainer, wrong)
    assert made(tmp_path) == []
    _, done = await train(trainer, order())
    assert not done.reused


async def test_a_caller_that_leaves_early_can_ask_again(trainer, tmp_path):
    async with aclosing(trainer.step(order())) as items:
        async for _ in items:
            break
    _, done = await train(trainer, order())
    state = folder.read(Path(done.folder))
    folder.verify(Path(done.folder), state)
    assert made(tmp_path) == ["training/demo/weights/one/1"]


async def test_a_caller_that_is_cut_off_leaves_no_task_behind(trainer):
    said = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: said.append(told["message"]))
    await train(trainer, order())
    for pause in (0.0, 0.005, 0.02):
        cut = asyncio.create_task(train(trainer, order(line=f"cut-{pause}")))
        await asyncio.sleep(pause)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        await train(trainer, order(line=f"after-{pause}"))
    gc.collect()
    await asyncio.sleep(0)
    assert said == []


async def test_a_damaged_step_is_never_built_on(trainer, tmp_path):
    _, done = await train(trainer, order())
    file = Path(done.folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    for wanted in (order(), order(2)):
        with pytest.raises(TrainError, match="digest"):
            await train(trainer, wanted)
    shutil.rmtree(done.folder)
    _, again = await train(trainer, order())
    assert not again.reused
