"""One optimizer step: independent of micro-batches, exact across restarts, refusing what is not finite."""

from __future__ import annotations

import math
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from reef.core.errors import DigestError, MissingError, StoreError, TrainError
from reef.core.wire import Datum, Step, Stepped
from reef.engines import Resolver, WeightFiles
from reef.trainers import folder
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Outputs
from reef.trainers.local.rows import build
from reef.trainers.local.step import advance

Make = Callable[..., Step]
Samples = Callable[..., list[Datum]]


@pytest.fixture
def model(tiny: Path) -> Llama:
    return Llama.load(tiny, torch.float32)


def part(done: Stepped, name: str = "adapter_model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(Path(done.folder) / name)


def part_name(rank: int) -> str:
    return "adapter_model.safetensors" if rank else "model.safetensors"


def resolver(done: Stepped) -> Resolver:
    """What a chain would find for a release made from this step."""
    kind, files, meta = folder.part_files(Path(done.folder))
    return lambda release: WeightFiles(kind, files, meta)


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("options", [{}, {"kl": 0.1}, {"critic": "full"}, {"rank": 0, "learning_rate": 1e-3}])
def test_the_result_does_not_depend_on_the_split(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, options: dict[str, Any]
) -> None:
    results = []
    for number, tokens in enumerate((1, 30, 10_000)):
        training = tmp_path / str(number)
        for step in (1, 2):
            wanted = order(step)
            wanted = msgspec.structs.replace(wanted, options=wanted.options | options)
            done = advance(model, training, wanted, base, micro_tokens=tokens)
        results.append(done)
    name = part_name(options.get("rank", 2))
    for other in results[1:]:
        assert largest(part(results[0], name), part(other, name)) < 1e-5
        assert largest(part(results[0], "modules.safetensors"), part(other, "modules.safetensors")) < 1e-5
        for key in ("loss", "grad_norm", "pg_clipfrac", "critic_loss"):
            assert other.metrics[key] == pytest.approx(results[0].metrics[key], rel=1e-5, abs=1e-5)


def test_a_step_moves_the_policy_and_leaves_the_base(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    before = {name: tensor.clone() for name, tensor in model.weights.items()}
    news: list[tuple[str, int, int]] = []
    done = advance(model, tmp_path, order(), base, report=lambda *one: news.append(one))
    assert [stage for stage, _, _ in news] == ["open", "prepare", "train", "modules", "write"]
    moved = part(done)
    assert any(float(tensor.abs().max()) > 0 for name, tensor in moved.items() if "lora_B" in name)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.weights.items())
    _, _, meta = folder.part_files(Path(done.folder))
    assert meta == {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "lora", "rank": 2, "alpha": 4.0}
    assert all(math.isfinite(value) for value in done.metrics.values())


def test_the_same_order_again_is_answered_from_disk(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    first = advance(model, tmp_path, order(), base)
    again = advance(model, tmp_path, order(), base)
    assert again.reused
    assert again.metrics == first.metrics
    assert again.folder == first.folder


def test_good_answers_become_likelier_and_bad_ones_less(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples
) -> None:
    """Four on-policy-looking steps on fixed samples, half rewarded 1 and half -1."""

    def logprobs(lora: Lora | None) -> list[float]:
        found = []
        for datum in data:
            (rows,) = build([datum], model.layout)
            hidden = model.hidden(rows.packed, lora)[rows.predicts]
            found.append(torch.log_softmax(model.logits(hidden), -1).gather(1, rows.targets[:, None])[:, 0].tolist())
        return found  # type: ignore[return-value]

    data = [msgspec.structs.replace(one, mask=[1] * len(one.mask)) for one in samples(6)]
    lora: Lora | None = None
    with torch.no_grad():
        before = [sum(one) for one in logprobs(None)]  # type: ignore[arg-type]
    for step in range(1, 5):
        with torch.no_grad():
            now = logprobs(lora)
        sent = [
            msgspec.structs.replace(one, logprobs=now[number], reward=1.0 if number % 2 else -1.0)  # type: ignore[arg-type]
            for number, one in enumerate(data)
        ]
        done = advance(model, tmp_path, order(step, data=sent), base)
        assert done.metrics["pg_clipfrac"] == 0
        assert done.metrics["mismatch"] < 1e-5
        lora = Lora.load(model, part(done), 2, 4.0)
    with torch.no_grad():
        after = [sum(one) for one in logprobs(lora)]  # type: ignore[arg-type]
    for number in range(6):
        assert after[number] > before[number] if number % 2 else after[number] < before[number]


def test_a_line_goes_on_from_its_own_files_only(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    def nothing(release: str) -> WeightFiles:
        raise AssertionError("a line that has begun does not ask for its release")

    advance(model, tmp_path, order(1), base)
    second = advance(model, tmp_path, order(2), nothing)
    assert int(part(second, "optimizer.safetensors")["policy.count"]) == 2
    with pytest.raises(TrainError, match="no step 3"):
        advance(model, tmp_path, order(4), nothing)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_new_line_takes_the_kept_optimizer_of_its_release(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int
) -> None:
    """From the kept state a new line does exactly what the old one would have done."""
    changes = {"options": order().options | {"rank": rank, "learning_rate": 1e-3}}
    first = advance(model, tmp_path, order(1, **changes), base)
    old = advance(model, tmp_path, order(2, **changes), base)
    start = {"line": "two", "base_release": "r1", "base_step": 1}
    new = advance(model, tmp_path, order(2, **changes, **start), resolver(first))
    name = part_name(rank)
    assert largest(part(old, name), part(new, name)) == 0
    assert largest(part(old, "optimizer.safetensors"), part(new, "optimizer.safetensors")) == 0


@pytest.mark.parametrize("rank", [2, 0])
def test_a_new_line_without_kept_state_warms_up(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int
) -> None:
    """As on a fresh clone: the weights are the release's, the optimizer is new and rises slowly."""
    name, options = part_name(rank), order().options | {"rank": rank, "learning_rate": 1e-3}
    first = advance(model, tmp_path / "a", order(1, options=options), base)
    kept = advance(model, tmp_path / "a", order(2, options=options), base)
    start = {"line": "two", "base_release": "r1", "base_step": 1, "options": options}
    fresh = advance(model, tmp_path / "b", order(2, **start), resolver(first))
    state = part(fresh, "optimizer.safetensors")
    assert (int(state["policy.count"]), int(state["policy.warmup"])) == (1, 3)
    assert 0 < largest(part(fresh, name), part(first, name)) < largest(part(kept, name), part(first, name))


@pytest.mark.parametrize("line", ["one", "two"])
def test_a_step_of_another_backend_is_gone_on_from(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, line: str
) -> None:
    """Its weights alone are here: the optimizer is where it was made."""
    first = advance(model, tmp_path, order(1), base)
    files = {name: path.read_bytes() for name, path in resolver(first)("r1").files.items()}
    weights = (Path(first.folder) / "weights.json").read_bytes()
    shutil.rmtree(first.folder)
    files |= {"weights.json": weights, "remote.json": b"{}"}
    folder.write(tmp_path, order(1), "lora", files, {})
    start = {} if line == "one" else {"line": line, "base_release": "r1", "base_step": 1}
    done = advance(model, tmp_path, order(2, **start), resolver(first))
    state = part(done, "optimizer.safetensors")
    assert (int(state["policy.count"]), int(state["policy.warmup"])) == (1, 3)
    assert largest(part(done), part(first)) > 0


def test_a_recipe_with_a_critic_goes_on_from_one_without(
    model: Llama, tmp_path: Path, order: Make, base: Resolver
) -> None:
    """The policy's optimizer is taken over, the critic begins anew."""
    options = {"rank": 2, "alpha": 4.0, "learning_rate": 1e-3, "seed": 0, "epochs": 1, "kl": 0.0}
    first = advance(model, tmp_path, order(1, objective="recipes.sft.loss:SFT", options=options), base)
    start = {"line": "two", "base_release": "r1", "base_step": 1}
    done = advance(model, tmp_path, order(2, **start), resolver(first))
    state = part(done, "optimizer.safetensors")
    assert int(state["policy.count"]) == 2
    assert int(state["critic.count"]) == 2  # as often as a first step has it: `critic_steps`


@pytest.mark.parametrize("rank", [2, 0])
def test_a_full_disk_is_no_batchs_fault(model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int) -> None:
    wanted = order(1, options=order().options | {"rank": rank})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(StoreError, match="free some disk space"):
            advance(model, tmp_path, wanted, base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not advance(model, tmp_path, wanted, base).reused


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rollback_beyond_what_is_kept_warms_up(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int
) -> None:
    """Five releases of one step each; the head and the three before it keep their state, the first does not."""
    releases: list[Stepped] = []
    sources: dict[str, Resolver] = {"r0": base}
    for step in range(1, 6):
        start = {"line": f"l{step}", "base_release": f"r{step - 1}", "base_step": step - 1}
        options = order().options | {"rank": rank, "learning_rate": 1e-3}
        found = sources[f"r{step - 1}"]
        releases.append(advance(model, tmp_path, order(step, options=options, **start), found))
        place = tmp_path / "chain" / str(step)  # the chain's copy of the part, which no pruning touches
        shutil.copytree(releases[-1].folder, place)
        sources[f"r{step}"] = resolver(Stepped(step=step, folder=str(place), metrics={}, reused=False))
    folder.prune(tmp_path, "demo", "weights", {(f"l{step}", step) for step in (2, 3, 4, 5)}, None)

    def after(step: int) -> tuple[int, int]:
        start = {"line": f"back{step}", "base_release": f"r{step}", "base_step": step}
        wanted = order(step + 1, options=options, unit_ids=[f"n{step}"], **start)
        state = part(advance(model, tmp_path, wanted, sources[f"r{step}"]), "optimizer.safetensors")
        return int(state["policy.count"]), int(state["policy.warmup"])

    assert after(1) == (1, 3)
    assert after(2) == (3, 0)
    assert after(5) == (6, 0)


def test_kept_state_that_is_damaged_is_as_good_as_gone(
    model: Llama, tmp_path: Path, order: Make, base: Resolver
) -> None:
    first = advance(model, tmp_path, order(1), base)
    kind, files, meta = folder.part_files(Path(first.folder))
    with (Path(first.folder) / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    wanted = order(2, line="two", base_release="r1", base_step=1)
    done = advance(model, tmp_path, wanted, lambda _: WeightFiles(kind, files, meta))
    assert int(part(done, "optimizer.safetensors")["policy.warmup"]) == 3


def test_small_steps_of_full_weights_add_up_across_releases(
    tiny: Path, tmp_path: Path, order: Make, base: Resolver
) -> None:
    """Served are bfloat16 weights, which a step of 1e-6 hardly moves. A line that goes on from the kept master does not
    lose it; one whose master is gone starts from what was served."""
    model = Llama.load(tiny)
    assert model.compute == torch.bfloat16
    options = order().options | {"rank": 0, "learning_rate": 1e-6}
    first = advance(model, tmp_path, order(1, options=options), base)
    served = part(first, "model.safetensors")
    assert {one.dtype for one in served.values()} == {torch.bfloat16}
    state = part(first, "optimizer.safetensors")
    master = {name: state[f"master.{name}"] for name in served}
    assert {one.dtype for one in master.values()} == {torch.float32}
    assert largest(served, master) > 0  # what rounding would lose
    assert all(torch.equal(master[name].bfloat16(), served[name]) for name in served)
    start = {"line": "two", "base_release": "r1", "base_step": 1, "options": options}
    old = advance(model, tmp_path, order(2, options=options), base)
    new = advance(model, tmp_path, order(2, **start), resolver(first))
    assert largest(part(old, "optimizer.safetensors"), part(new, "optimizer.safetensors")) == 0
    lost = advance(model, tmp_path / "clone", order(2, **start), resolver(first))
    begun = part(lost, "optimizer.safetensors")
    moved = max(float((begun[f"master.{name}"] - served[name].float()).abs().max()) for name in served)
    assert 0 < moved < 1e-6  # a first step that warms up, from the served weights


def test_the_forward_of_the_master_is_that_of_the_served_weights(
    tiny: Path, tmp_path: Path, order: Make, base: Resolver
) -> None:
    """To the last bit, in bfloat16: what was sampled from a release is on policy for the master behind it."""
    model = Llama.load(tiny)
    done = advance(model, tmp_path, order(1, options=order().options | {"rank": 0}), base)
    state, served = part(done, "optimizer.safetensors"), part(done, "model.safetensors")
    master = Llama(model.layout, {name: state[f"master.{name}"] for name in served}, model.compute)
    with torch.no_grad():
        for rows in build(order().data, model.layout):
            hidden = [one.hidden(rows.packed)[rows.predicts] for one in (master, Llama(model.layout, served))]
            before = model.hidden(rows.packed)[rows.predicts]
            assert torch.equal(*hidden)
            assert not torch.equal(hidden[0], before)
            logprobs = [
                one.logprobs(each, rows.targets, rows.temperatures)
                for one, each in zip((master, Llama(model.layout, served)), hidden, strict=True)
            ]
            assert torch.equal(*logprobs)


@pytest.mark.parametrize("rank", [2, 0])
def test_weights_of_another_base_are_refused(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int
) -> None:
    """Where a line starts and where it goes on; the batch is not at fault, so it is no TrainError."""
    options = order().options | {"rank": rank}
    with pytest.raises(
        DigestError, match=r"release r0 belongs to the base model tiny \(d{12}\), the trainer has e{12}"
    ):
        advance(model, tmp_path, order(options=options), base, digest="e" * 64)
    assert folder.steps(tmp_path, "demo", "weights", "one") == []
    advance(model, tmp_path, order(options=options), base, digest="d" * 64)
    with pytest.raises(DigestError, match="step 1 of line one belongs to the base model tiny"):
        advance(model, tmp_path, order(2, options=options), base, digest="e" * 64)
    unknown = WeightFiles("base", {}, {"base": {"name": "fake", "digest": "0" * 64}})
    advance(model, tmp_path / "other", order(options=options), lambda _: unknown, digest="e" * 64)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "modules.safetensors", "adapter_model.safetensors"])
def test_damage_is_found_before_training(model: Llama, tmp_path: Path, order: Make, base: Resolver, name: str) -> None:
    done = advance(model, tmp_path, order(1), base)
    file = Path(done.folder) / name
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))
    with pytest.raises(TrainError, match=name):
        advance(model, tmp_path, order(2), base)
    assert folder.steps(tmp_path, "demo", "weights", "one") == [1]


def test_an_unknown_release(model: Llama, tmp_path: Path, order: Make) -> None:
    def unknown(release: str) -> WeightFiles:
        raise MissingError("no such release")

    with pytest.raises(TrainError, match="not in the chain"):
        advance(model, tmp_path, order(), unknown)


@pytest.mark.parametrize(
    ("rank", "options", "words"),
    [
        (2, {"rank": 4}, "rank 2"),
        (2, {"alpha": 1.0}, "alpha 4"),
        (2, {"rank": 0}, "are a LoRA, the recipe trains full weights.*set train: lora, or roll back to the base"),
        (0, {"rank": 2}, "are full ones, the recipe trains a LoRA.*set train: full, or roll back to the base"),
    ],
)
def test_a_recipe_that_does_not_fit_the_release(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, rank: int, options: dict[str, Any], words: str
) -> None:
    first = advance(model, tmp_path, order(1, options=order().options | {"rank": rank}), base)
    wanted = order(2, line="two", base_release="r1", base_step=1, options=order().options | {"rank": rank} | options)
    with pytest.raises(TrainError, match=words):
        advance(model, tmp_path, wanted, resolver(first))


@pytest.mark.parametrize("reward", [1e30, None])
def test_what_cannot_be_learnt_from_writes_nothing(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples, reward: float | None
) -> None:
    data = [msgspec.structs.replace(one, reward=reward) for one in samples(3)]
    with pytest.raises(TrainError):
        advance(model, tmp_path, order(data=data), base)
    assert folder.steps(tmp_path, "demo", "weights", "one") == []


class Broken:
    """An objective whose loss is not a number."""

    def __init__(self, **options: Any) -> None:
        from recipes.sao.loss import SAO

        self._inner = SAO(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def loss(self, outputs: Any, rows: Any) -> Any:
        return outputs.logprobs().sum() * math.nan, {}


def test_a_loss_that_is_not_finite(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recipes.sao.loss as loss

    monkeypatch.setattr(loss, "Broken", Broken, raising=False)
    with pytest.raises(TrainError, match="loss of the policy is nan"):
        advance(model, tmp_path, order(objective="recipes.sao.loss:Broken"), base)
    assert folder.steps(tmp_path, "demo", "weights", "one") == []


def test_a_report_that_raises_stops_the_step(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    class Enough(Exception):
        pass

    def report(stage: str, done: int, total: int) -> None:
        if stage == "train":
            raise Enough

    with pytest.raises(Enough):
        advance(model, tmp_path, order(), base, report=report)
    assert folder.steps(tmp_path, "demo", "weights", "one") == []
    assert not advance(model, tmp_path, order(), base).reused


def test_rewards_all_alike_move_the_critic_and_are_no_error(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples
) -> None:
    """case 46: no signal is a gradient of zero, which the step says, and no NaN."""
    data = [msgspec.structs.replace(one, reward=0.0) for one in samples(4)]
    done = advance(model, tmp_path, order(data=data), base)
    assert done.metrics["loss"] == 0
    assert done.metrics["grad_norm"] == 0
    assert "critic_explained_variance" not in done.metrics
    fresh = Lora.fresh(model, 2, 4.0, 0).parameters()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in part(done).items())


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_batch_of_one_is_well_defined(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples, reward: float
) -> None:
    """case 46: a batch of one learns, and from nothing but failures it learns nothing; neither is an error."""
    norms = []
    for step in (1, 2, 3):
        data = [msgspec.structs.replace(samples(1, seed=step)[0], reward=reward, lag=step)]
        done = advance(model, tmp_path, order(step, data=data), base)
        assert all(math.isfinite(value) for value in done.metrics.values())
        assert "critic_explained_variance" not in done.metrics
        assert done.metrics[f"lag_{step}"] == 1
        norms.append(done.metrics["grad_norm"])
    assert any(norms) == bool(reward)  # before a first success there is nothing to learn


def test_what_was_masked_is_told_by_lag(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples
) -> None:
    """Answers that lag by 2 were sampled far from here: all their tokens are masked, those that do not lag none."""
    data = []
    for number, datum in enumerate(samples(4)):
        datum = msgspec.structs.replace(datum, mask=[1] * len(datum.mask), reward=float(number == 0))
        (rows,) = build([datum], model.layout)
        with torch.no_grad():
            real = Outputs(model, model.hidden(rows.packed)[rows.predicts], rows).logprobs().tolist()
        lag = 2 if number == 1 else 0
        data.append(msgspec.structs.replace(datum, lag=lag, logprobs=[one - 5 * lag for one in real]))
    for number, tokens in enumerate((1, 10_000)):
        done = advance(model, tmp_path / str(number), order(data=data), base, micro_tokens=tokens).metrics
        assert (done["masked_lag_0"], done["masked_lag_2"]) == (0, pytest.approx(1))
        whole = sum(len(one.mask) for one in data)
        assert done["pg_clipfrac"] == pytest.approx(len(data[1].mask) / whole)
        assert done["effective_token_rate"] == pytest.approx(len(data[0].mask) / whole)  # of the rest, one was scored
        assert done["effective_tokens"] == whole - len(data[1].mask)


def test_a_warming_critic_leaves_the_policy(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    options = order().options | {"critic_warmup": 1, "kl": 0.1}
    first = advance(model, tmp_path, order(1, options=options), base)
    second = advance(model, tmp_path, order(2, options=options), base)
    assert (first.metrics["warming"], second.metrics["warming"]) == (1.0, 0.0)
    fresh = {name: one.detach() for name, one in Lora.fresh(model, 2, 4.0, 0).parameters().items()}
    assert largest(part(first), fresh) == 0
    assert largest(part(second), fresh) > 0
    critic = part(first, "modules.safetensors")
    assert all(float(tensor.abs().max()) > 0 for tensor in critic.values())


def test_the_full_critic_learns_all_but_attention(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    options = order().options | {"critic": "full"}
    advance(model, tmp_path, order(1, options=options), base)
    done = advance(model, tmp_path, order(2, options=options), base)
    learnt = part(done, "modules.safetensors")
    names = sorted(name for name in model.weights if "self_attn" not in name)
    assert len(learnt) == len(names) + 2
    moved = [
        name
        for number, name in enumerate(names)
        if float((learnt[f"critic.copies.{number}"] - model.weights[name]).abs().max()) > 0
    ]
    assert moved == names


def test_the_pull_to_the_base_shortens_the_way(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    drift = []
    for pull in (1e-9, 10.0):
        for step in (1, 2, 3, 4):
            options = order().options | {"kl": pull, "seed": 1}
            done = advance(model, tmp_path / str(pull), order(step, options=options), base)
        drift.append(done.metrics["kl"])
    assert 0 <= drift[1] < drift[0]
