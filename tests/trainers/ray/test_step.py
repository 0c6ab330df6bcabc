"""A step by several workers is the step that one process makes: the same numbers, in the same files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from recipes.grpo.recipe import GRPORecipe
from recipes.opd.recipe import OPDRecipe
from recipes.openclawrl.recipe import OpenClawRecipe
from recipes.sao.recipe import SAORecipe
from recipes.sdft.recipe import SDFTRecipe
from recipes.sft.recipe import SFTRecipe
from recipes.tttd.recipe import DiscoverRecipe
from reef.core.errors import DigestError, MissingError, ReefError, TeacherError, TrainError
from reef.core.wire import Datum, Step, Stepped
from reef.engines import Resolver, WeightFiles
from reef.trainers import Ground, folder
from reef.trainers.local.llama import Llama
from reef.trainers.local.step import advance
from reef.trainers.ray import Options, group
from reef.trainers.ray.files import Sight
from tests.engines.kit import make_lora, make_tiny
from tests.trainers.ray.kit import Lasting

pytestmark = pytest.mark.model
META = {"base": {"name": "tiny", "digest": "d" * 64}}
CLOSE = 1e-4
GPUS = int(os.environ.get("REEF_GPUS", "0"))  # 1: the same tests with a GPU for each worker


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("spoken") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(spoken: Path) -> Llama:
    return Llama.load(spoken, torch.float32)


@pytest.fixture(scope="module")
def resolve(model: Llama, tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    """The base, and `taught`: a LoRA."""
    place = make_lora(tmp_path_factory.mktemp("taught"), model.layout, seed=5)
    files = {file.name: file for file in place.iterdir()}

    def find(release: str) -> WeightFiles:
        if release == "taught":
            return WeightFiles("lora", files, META | {"kind": "lora", "rank": 4, "alpha": 8})
        if release != "r0":
            raise MissingError(f"no release {release}")
        return WeightFiles("base", {}, META | {"kind": "base"})

    return find


class Both:
    """The same orders to `local` and to `ray`, on training folders of their own."""

    def __init__(self, model: Llama, resolve: Resolver, place: Path) -> None:
        assert model.folder is not None
        self.model, self.resolve, self.place = model, resolve, place
        self.folder = model.folder

    def local(self, order: Step, training: str = "local") -> Stepped:
        return advance(self.model, self.place / training, order, self.resolve)

    def ray(self, order: Step, workers: int, training: str = "", **ground: Any) -> Stepped:
        place = Ground(self.folder, self.place / (training or f"ray{workers}"), self.resolve, **ground)
        work = Lasting(place, Options(workers=workers, cpus=1, gpus=GPUS, timeout=120))
        try:
            return work.advance(order, lambda stage, done, total: None)
        finally:
            work.close()


@pytest.fixture
def both(model: Llama, resolve: Resolver, tmp_path: Path) -> Both:
    return Both(model, resolve, tmp_path)


def same(one: Stepped, other: Stepped) -> None:
    """Files and metrics. Nothing moves so little that the bound would hide it: a first step is about a rate long."""
    assert set(one.metrics) == set(other.metrics)
    for name in set(one.metrics) - {"train_seconds"}:
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=CLOSE, abs=CLOSE), name
    places = Path(one.folder), Path(other.folder)
    assert len({tuple(sorted(file.name for file in place.iterdir())) for place in places}) == 1
    for file in sorted(places[0].glob("*.safetensors")):
        mine, theirs = load_file(file), load_file(places[1] / file.name)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()
        }
        for name, tensor in mine.items():
            assert float((tensor.float() - theirs[name].float()).abs().max()) < CLOSE, f"{file.name}: {name}"
    for file in places[0].glob("*.json"):
        if file.name != folder.STATE:
            assert file.read_bytes() == (places[1] / file.name).read_bytes()
    folder.verify(places[1], folder.read(places[1]))  # type: ignore[arg-type]


def samples(
    step: int, count: int = 7, *, chats: bool = False, groups: bool = False, contexts: bool = False
) -> list[Datum]:
    """Samples as on policy: every token as likely as any. Groups are spread over micro-batches, contexts are not at
    every sample."""
    draw = torch.Generator().manual_seed(step)

    def tokens(least: int, most: int) -> list[int]:
        many = int(torch.randint(least, most, (1,), generator=draw))
        return torch.randint(3, 200, (many,), generator=draw).tolist()

    found = []
    for number in range(count):
        prompt, answer = [1, *tokens(2, 12)], tokens(1, 9)
        found.append(
            Datum(
                tokens=prompt + answer,
                prompt_length=len(prompt),
                mask=[1] * (len(answer) - 1) + [1 if number else 0] if len(answer) > 1 else [1],
                logprobs=[-math.log(263)] * len(answer),
                reward=float(number % 3 == 0),
                record_id=f"{number:032x}",
                choice=0,
                temperature=100.0,
                lag=number % 2,
                group=f"g{number % 2}" if groups else None,
            )
        )
    says = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("Say the", "Do not")]
    for number in (0, 2, 3) if contexts else ():
        found[number] = msgspec.structs.replace(found[number], contexts=says[: 1 + number % 2])
    for number in range(count) if chats else ():
        told = [{"role": "user", "content": "Hi " * (number + 1)}, {"role": "assistant", "content": "the an"}]
        empty: dict[str, Any] = {"tokens": [], "prompt_length": 0, "mask": [], "logprobs": []}
        found[number] = msgspec.structs.replace(found[number], chat=json.dumps({"messages": told}), **empty)
    return found


def order(step: int, recipe: Any = None, **changes: Any) -> Step:
    objective = (recipe or SAORecipe(rank=2, kl=0.1)).objective()
    options = dict(objective.options) | {"learning_rate": 0.01} | changes.pop("options", {})
    wanted = {
        "scenario": "demo",
        "part": "weights",
        "line": "one",
        "step": step,
        "base_release": "r0",
        "base_step": 0,
        "objective": objective.path,
        "options": options,
        "batch_id": f"batch-{step}",
        "unit_ids": [f"u{step}-{number}" for number in range(7)],
        "cursor": 10 * step,
        "data": samples(step),
    }
    return Step(**(wanted | changes))


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sao": (SAORecipe(rank=2, kl=0.1), {}),
    "sao with a whole critic": (SAORecipe(rank=2), {"options": {"critic": "full", "critic_learning_rate": 1e-3}}),
    "grpo": (GRPORecipe(rank=2, kl=0.1), {"groups": True}),
    "dr_grpo": (GRPORecipe(rank=2, preset="dr_grpo", kl=0.1), {"groups": True}),
    "gspo": (GRPORecipe(rank=2, preset="gspo"), {"groups": True}),
    "opd": (OPDRecipe(rank=2, teacher="taught"), {}),
    "opd, sampled": (OPDRecipe(rank=2, teacher="taught", top_k=0), {}),
    "sft": (SFTRecipe(rank=2, epochs=3, kl=0.1), {"chats": True}),
    "sdft": (SDFTRecipe(rank=2), {"contexts": True}),
    "sdft with a moving average": (SDFTRecipe(rank=2, average=0.25, top_k=5), {"contexts": True}),
    "openclawrl": (OpenClawRecipe(rank=2, top_k=5, kl=0.1), {"contexts": True}),
    "openclawrl, sampled": (OpenClawRecipe(rank=2, distil="sampled", top_k=5), {"contexts": True}),
    "tttd": (DiscoverRecipe(rank=2, kl=0.1), {"groups": True}),
}
FULL = ("sao", "grpo", "sft", "sdft with a moving average")


def method(name: str, step: int, **options: Any) -> Step:
    recipe, given = METHODS[name]
    data = {key: value for key, value in given.items() if key != "options"}
    return order(step, recipe, options=given.get("options", {}) | options, data=samples(step, **data))


@pytest.mark.parametrize("name", METHODS)
def test_two_workers_make_the_step_of_one_process(both: Both, name: str) -> None:
    """Every method, over two steps: what `prepare` finds out is of the whole batch, whoever made the passes."""
    for step in (1, 2):
        wanted = method(name, step)
        same(both.local(wanted), both.ray(wanted, 2))


@pytest.mark.parametrize("name", FULL)
def test_full_weights_are_sharded_and_come_back_whole(both: Both, name: str) -> None:
    for step in (1, 2):
        wanted = method(name, step, rank=0, learning_rate=1e-3)
        same(both.local(wanted), both.ray(wanted, 2))


@pytest.mark.skipif(GPUS > 0, reason="for as many workers as there may be CPUs")
@pytest.mark.parametrize("rank", [2, 0])
def test_one_worker_and_three(both: Both, rank: int) -> None:
    """Three do not divide the tiny model's shapes: the last shard is a short one, or none."""
    wanted = order(1, options={"rank": rank, "learning_rate": 1e-3})
    alone = both.local(wanted)
    for workers in (1, 3):
        same(alone, both.ray(wanted, workers))


@pytest.mark.parametrize("options", [{}, {"rank": 0, "learning_rate": 1e-3}, {"critic": "full"}])
def test_a_batch_of_fewer_samples_than_workers(both: Both, options: dict[str, Any]) -> None:
    """All workers train on it alike, and it counts once."""
    wanted = order(1, options=options, data=samples(1, 2)[1:])
    same(both.local(wanted), both.ray(wanted, 2))


@pytest.mark.parametrize("rank", [2, 0])
def test_a_line_goes_on_with_either_backend(both: Both, rank: int) -> None:
    """local, ray, local is local, local, local."""
    for step in (1, 2, 3):
        wanted = order(step, options={"rank": rank, "learning_rate": 1e-3})
        alone = both.local(wanted)
        same(alone, both.ray(wanted, 2, "mixed") if step == 2 else both.local(wanted, "mixed"))


def test_a_new_line_takes_the_kept_optimizer_of_its_release(both: Both) -> None:
    """The release's files are named by their content in the chain, not as in the step."""
    options = {"rank": 0, "learning_rate": 1e-3}
    first = both.ray(order(1, options=options), 2)
    kind, files, meta = folder.part_files(Path(first.folder))
    chain = both.place / "chain"
    chain.mkdir()
    copies = {name: chain / f"{number:064x}" for number, name in enumerate(files)}
    for name, copy in copies.items():
        copy.write_bytes(files[name].read_bytes())
    both.resolve = lambda release: WeightFiles(kind, copies, meta)
    old = both.ray(order(2, options=options), 2)
    new = both.ray(order(2, options=options, line="two", base_release="r1", base_step=1), 2)
    same(old, new)
    warm = both.ray(order(2, options=options, line="three", base_release="r1", base_step=1), 2, "elsewhere")
    assert int(load_file(Path(warm.folder) / "optimizer.safetensors")["policy.warmup"]) == 3


def odd(token: int) -> Step:
    data = samples(1)
    tokens = [*data[3].tokens[: data[3].prompt_length], token]
    data[3] = msgspec.structs.replace(data[3], tokens=tokens, mask=[1], logprobs=[-5.0])
    changes = {"objective": "tests.trainers.ray.kit:Odd", "options": {"rank": 2}}
    return order(1, data=data, **changes)


def test_what_cannot_be_trained_is_said_as_local_says_it(both: Both) -> None:
    """Errors keep their class and words, nothing is written, and the same workers make the next step."""
    unscored = [msgspec.structs.replace(one, reward=None) for one in samples(1)]
    cases: list[tuple[Step, type[ReefError], str]] = [
        (odd(250), TrainError, "the loss of the policy is nan; nothing was written"),
        (order(1, data=unscored), TrainError, "SAO needs a score for every sample"),
        (order(1, OPDRecipe(rank=2, teacher="gone")), TeacherError, "neither a folder nor a release"),
        (order(1, OPDRecipe(rank=2, teacher=str(both.place))), TeacherError, "the teacher "),
        (order(1, options={"rank": 2, "nonsense": 1}), TrainError, "nonsense"),
    ]
    both.ray(order(1, line="warm"), 2)
    before = workers()
    for wanted, kind, words in cases:
        with pytest.raises(kind, match=words):
            both.ray(wanted, 2)
    with pytest.raises(DigestError, match="the trainer has eeee"):
        both.ray(order(1), 2, digest="e" * 64)
    assert folder.steps(both.place / "ray2", "demo", "weights", "one") == []
    assert not both.ray(order(1), 2).reused
    assert workers() == before


def test_a_worker_that_fails_alone_does_not_hang_the_others(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "GRACE", 1.0)
    with pytest.raises(TrainError, match="KeyError: 'odd'"):
        both.ray(odd(251), 2)
    assert not both.ray(order(1), 2).reused


def test_a_report_that_raises_stops_all_workers_and_keeps_them(both: Both) -> None:
    class Enough(Exception):
        pass

    def report(stage: str, done: int, total: int) -> None:
        if stage == "prepare":
            (both.place / "go").touch()
            raise Enough

    held = order(1, objective="tests.trainers.ray.kit:Held", options={"go": str(both.place / "go")})
    both.ray(order(1, line="warm"), 2)
    before = workers()
    work = Lasting(Ground(both.folder, both.place / "ray2", both.resolve), Options(workers=2, cpus=1))
    with pytest.raises(Enough):
        work.advance(held, report)
    work.close()
    assert folder.steps(both.place / "ray2", "demo", "weights", "one") == []
    both.ray(order(1), 2)
    assert workers() == before


def workers() -> list[tuple[str, int]]:
    return [pid for key, one in Lasting.groups.items() if key[1] == 2 for pid in one.pids]


def test_files_that_a_worker_does_not_see_are_sent(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine: nothing of the training folder or the chain is there, so its bytes go through Ray."""

    def elsewhere(path: Path) -> Sight:
        status = path.stat()
        return Sight(str(path), status.st_size, status.st_ino + 1, status.st_mtime_ns)

    both.ray(order(1, line="warm"), 2)
    monkeypatch.setattr(Sight, "of", elsewhere)
    monkeypatch.setattr(group, "CHUNK", 5000)
    for step in (1, 2):
        wanted = order(step, OPDRecipe(rank=2, teacher="taught"))
        same(both.local(wanted), both.ray(wanted, 2))
