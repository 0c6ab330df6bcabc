"""The slime backend against a stub of slime in real processes: late, killed, spoilt, another batch, a full disk."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from reef.core.errors import ConfigError, StoreError, TrainError, UpstreamError
from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.trainers import Ground, folder
from reef.trainers.slime import exchange as files
from reef.trainers.slime.exchange import Exchange
from tests.trainers.slime.kit import cluster, faults, options

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch")

BASE = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})


def objective(recipe: Any) -> dict[str, Any]:
    made = recipe.objective()
    return {"objective": made.path, "options": dict(made.options)}


def grpo(**changes: Any) -> dict[str, Any]:
    from recipes.grpo.recipe import GRPORecipe

    return objective(GRPORecipe(**({"rank": 2, "kl": 0.0} | changes)))


def grouped(data: list[Datum]) -> list[Datum]:
    return [
        msgspec.structs.replace(one, group=f"g{number // 4}", reward=float(number % 2))
        for number, one in enumerate(data)
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "slime"


@pytest.fixture
def ask(order: Callable[..., Step]) -> Callable[..., Step]:
    def make(step: int = 1, **changes: Any) -> Step:
        wanted = order(step, **(grpo() | changes))
        return msgspec.structs.replace(wanted, data=grouped(wanted.data))

    return make


@pytest.fixture
def work(tiny: Path, tmp_path: Path, place: Path) -> Callable[..., Any]:
    from reef.trainers.slime.work import SlimeWork

    def make(resolve: Any = lambda release: BASE, **changes: Any) -> Any:
        ground = Ground(tiny, tmp_path / "training", resolve, "tiny", "d" * 64)
        return SlimeWork(ground, options(place, **changes))

    return make


@pytest.fixture
def near(tiny: Path, tmp_path: Path) -> Callable[[Step], Any]:
    """The embedded trainer's step of the same order."""
    from reef.trainers.local.llama import Llama
    from reef.trainers.local.step import advance

    model = Llama.load(tiny, torch.float32)
    return lambda wanted: advance(model, tmp_path / "near", wanted, lambda release: BASE)


def quiet(stage: str, done: int, total: int) -> None:
    pass


def tensors(done: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    name = folder.read(Path(done.folder)).kind
    return load_file(Path(done.folder) / {"lora": "adapter_model.safetensors", "full": "model.safetensors"}[name])


def same(one: Any, other: Any, **near: float) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor.float(), second[name].float(), **(near or {"rtol": 1e-3, "atol": 1e-5}))


def test_steps_are_the_embedded_trainers_through_a_kill_on_either_side(
    ask: Callable[..., Step], work: Callable[..., Any], near: Callable[[Step], Any], place: Path, tiny: Path
) -> None:
    faults(place, before_train=["", "die"], after_save=["", "die"])
    with cluster(place, tiny) as slime:
        same(work().advance(ask(1), quiet), near(ask(1)))
        with pytest.raises(UpstreamError, match="has trained the batch"):
            work(seconds=4.0).advance(ask(2), quiet)  # it died over it
        assert slime.wait(60) != 0
    with cluster(place, tiny) as slime:  # trains it again, is killed between weights and marker
        with pytest.raises(UpstreamError):
            work(seconds=4.0).advance(ask(2), quiet)
        assert slime.wait(60) != 0
    with cluster(place, tiny):
        done = work().advance(ask(2), quiet)
        same(done, near(ask(2)))
        same(work().advance(ask(1, line="two"), quiet), near(ask(1, line="two")))  # back at the base
        same(work().advance(ask(3), quiet), near(ask(3)))  # and back at the line that was left
    assert work().advance(ask(3), quiet).reused
    assert len(list((place / "save" / "hf").iterdir())) < 6  # what Reef has taken over is not kept twice


def test_whole_weights_come_back_as_one_file(
    ask: Callable[..., Step], work: Callable[..., Any], near: Callable[[Step], Any], place: Path, tiny: Path
) -> None:
    chosen = grpo(train="full", learning_rate=1e-3)
    with cluster(place, tiny, train="full", lr=1e-3):
        for step in (1, 2):
            done = work().advance(ask(step, **chosen), quiet)
            same(done, near(ask(step, **chosen)), rtol=2e-2, atol=2e-2)
    meta = json.loads((Path(done.folder) / "weights.json").read_bytes())
    assert meta == {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "full", "rank": None, "alpha": None}
    _, public, _ = folder.part_files(Path(done.folder))
    assert public.keys() == {"model.safetensors", "weights.json"}


def test_late_is_not_lost_and_refused_is_asked_again(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path, tiny: Path
) -> None:
    with pytest.raises(UpstreamError, match="has not taken the batch"):
        work(seconds=0.2).advance(ask(1), quiet)
    with (
        cluster(place, tiny, eps_clip=0.3),
        pytest.raises(UpstreamError, match=r"eps_clip 0\.3, the recipe wants 0\.2"),
    ):
        work().advance(ask(1), quiet)
    faults(place, before_train=["slow"])
    with cluster(place, tiny):
        claim = Exchange(place / "exchange").claim(0)
        work(seconds=60.0).advance(ask(1), quiet)
        assert claim.is_file()


def test_a_demonstration_is_asked_for_as_such(
    ask: Callable[..., Step], work: Callable[..., Any], near: Callable[[Step], Any], place: Path, tiny: Path
) -> None:
    from recipes.sft.recipe import SFTRecipe

    chosen = objective(SFTRecipe(kl=0.0, epochs=1, rank=2))
    with cluster(place, tiny, loss_type="sft_loss", lr=chosen["options"]["learning_rate"]):
        same(work().advance(ask(1, **chosen), quiet), near(ask(1, **chosen)))


# --- without slime: what stands in the exchange folder ----------------------------------------------------------------


@pytest.fixture
def offered(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path, tiny: Path
) -> Callable[..., dict[str, Any]]:
    """Offers order 1's batch and answers it with a LoRA that was made by hand; `changes` go into the marker."""

    def make(changes: dict[str, Any] | None = None, spoil: Callable[[Path], None] | None = None) -> dict[str, Any]:
        from safetensors.torch import save_file

        from reef.trainers.local.llama import Llama, Lora

        with pytest.raises(UpstreamError, match="has not taken"):
            work(seconds=0.05).advance(ask(1), quiet)
        exchange = Exchange(place / "exchange")
        (said,) = exchange.batches()
        hf = place / "hf"
        hf.mkdir(exist_ok=True)
        lora = Lora.fresh(Llama.load(tiny, torch.float32), 2, 16.0, 0)
        save_file({name: one.detach() for name, one in lora.parameters().items()}, hf / "adapter_model.safetensors")
        (hf / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 16.0}))
        marker = {"batch": said["batch"], "step": said["step"], "rollout": 0} | (changes or {})
        exchange.publish(said["name"], marker, hf)
        if spoil is not None:
            spoil(hf)
        return said

    return make


def test_a_batch_is_slimes_samples(
    offered: Callable[..., dict[str, Any]], ask: Callable[..., Step], place: Path
) -> None:
    said = offered()
    samples = Exchange(place / "exchange").samples(said)
    data = {tuple(one.tokens): one for one in ask(1).data}
    assert len(samples) == len(data) == 6
    assert said["wants"] | {"loss": "ppo", "low": 0.2, "high": 0.2, "temperature": 1.0} == said["wants"]
    tokens = sum(sum(one.mask) for one in data.values())
    for sample in samples:
        mine = data[tuple(sample["tokens"])]
        assert sample["response_length"] == len(sample["loss_mask"]) == len(sample["rollout_log_probs"])
        assert sample["loss_mask"] == mine.mask
        assert sample["rollout_log_probs"] == pytest.approx(mine.logprobs)
        assert sample["metadata"]["raw_reward"] == mine.reward
        assert abs(sample["reward"]) * sum(mine.mask) * 6 <= 1.2 * tokens  # seq_mean, as one number an answer


def test_weights_are_taken_when_whole_and_of_this_batch(
    offered: Callable[..., dict[str, Any]], ask: Callable[..., Step], work: Callable[..., Any], tmp_path: Path
) -> None:
    offered()
    assert work().advance(ask(1), quiet).reused is False
    assert folder.read(tmp_path / "training/demo/weights/one/1") is not None


@pytest.mark.parametrize("changes", [{"batch": "other"}, {"step": 7}, {"batch": None}], ids=str)
def test_weights_of_another_batch_are_not_taken(
    changes: dict[str, Any],
    offered: Callable[..., dict[str, Any]],
    ask: Callable[..., Step],
    work: Callable[..., Any],
    tmp_path: Path,
) -> None:
    offered(changes)
    with pytest.raises(UpstreamError, match="not of batch-1 and 1"):
        work().advance(ask(1), quiet)
    assert list((tmp_path / "training").rglob("state.json")) == []


def _cut(hf: Path) -> None:
    file = hf / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _gone(hf: Path) -> None:
    (hf / "adapter_config.json").unlink()


@pytest.mark.parametrize("spoil", [_cut, _gone])
def test_weights_that_are_not_whole_are_not_taken(
    spoil: Callable[[Path], None],
    offered: Callable[..., dict[str, Any]],
    ask: Callable[..., Step],
    work: Callable[..., Any],
) -> None:
    offered(spoil=spoil)
    with pytest.raises(UpstreamError, match="does not match what slime said"):
        work().advance(ask(1), quiet)


def test_whole_weights_for_a_lora_are_not_taken(
    offered: Callable[..., dict[str, Any]], ask: Callable[..., Step], work: Callable[..., Any], place: Path, tiny: Path
) -> None:
    said = offered()
    (place / "hf" / "adapter_model.safetensors").unlink()
    (place / "hf" / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    Exchange(place / "exchange").publish(said["name"], {"batch": "batch-1", "step": 1, "rollout": 0}, place / "hf")
    with pytest.raises(ConfigError, match="train: full"):
        work().advance(ask(1), quiet)


def test_shards_are_checked_tensor_by_tensor(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from reef.trainers.away import Base
    from reef.trainers.slime.work import merged

    whole = load_file(tiny / "model.safetensors")
    base = Base.read(tiny)
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    names = sorted(whole)
    save_file({name: whole[name] for name in names[:3]}, one)
    save_file({name: whole[name] for name in names[3:]}, other)
    content = merged([other, one], base)
    assert callable(content)
    content(tmp_path / "model.safetensors")
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    with pytest.raises(TrainError, match="do not fit"):
        merged([one], base)
    save_file({name: whole[name].int() if name == names[4] else whole[name] for name in names[3:]}, other)
    with pytest.raises(TrainError, match="do not fit"):
        merged([one, other], base)
    save_file({name: whole[name] * torch.inf if name == names[4] else whole[name] for name in names[3:]}, other)
    with pytest.raises(TrainError, match="not finite"):
        merged([one, other], base)


def test_a_full_disk_is_no_batchs_fault_and_leaves_nothing(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path
) -> None:
    made = work(seconds=0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(StoreError, match="space"):
            made.advance(ask(1), quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((place / "exchange" / "batches").iterdir()) == []
    with pytest.raises(UpstreamError, match="has not taken"):
        made.advance(ask(1), quiet)


def test_what_belongs_to_slimes_user_is_named(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slime may run as root and Reef as somebody else, who then cannot take the refusal away or read the weights."""
    exchange = Exchange(place / "exchange")
    with pytest.raises(UpstreamError, match="has not taken"):
        work(seconds=0.05).advance(ask(1), quiet)
    (said,) = exchange.batches()
    files.write(exchange.refused(said["name"]), {"name": said["name"], "why": "slime was started with lr 3"})

    def barred(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", barred)
    with pytest.raises(UpstreamError, match=r"started with lr 3\. Remove .*Permission denied"):
        work(seconds=0.05).advance(ask(1), quiet)


def test_a_batch_that_is_withdrawn_while_it_is_looked_at(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, read = Exchange(place / "exchange"), files.read
    with pytest.raises(UpstreamError, match="has not taken"):
        work(seconds=0.05).advance(ask(1), quiet)

    def slow(path: Path) -> Any:
        found = read(path)
        exchange.withdraw(path.parent.name)
        return found

    monkeypatch.setattr(files, "read", slow)
    assert exchange.batches() == []


@pytest.mark.parametrize("again", [False, True])
def test_slime_that_cannot_start_ends_what_started_it(place: Path, again: bool) -> None:
    exchange = Exchange(place / "exchange")
    exchange.root.mkdir(parents=True)
    if again:
        files.write(exchange.start, {"name": None, "rollout": None, "again": True})
    given = ["--exchange", str(exchange.root), "--save", str(place / "save")]
    slime = ["--", sys.executable, "-c", "raise SystemExit(3)"]
    ended = subprocess.run([sys.executable, "-m", "reef.trainers.slime.run", *given, *slime], timeout=60)
    assert ended.returncode == 3
    assert files.read(exchange.start) == {"name": None, "rollout": None}


def test_an_order_that_was_given_up_is_withdrawn(
    ask: Callable[..., Step], work: Callable[..., Any], place: Path
) -> None:
    for batch_id in ("first", "second"):
        with pytest.raises(UpstreamError, match="has not taken"):
            work(seconds=0.05).advance(ask(1, batch_id=batch_id), quiet)
    assert [said["batch"] for said in Exchange(place / "exchange").batches()] == ["second"]


@pytest.mark.parametrize("name", ["sao", "kl", "gspo", "dis", "sft", "epochs", "discover"])
def test_a_loss_that_slime_cannot_be_asked_for_is_refused(
    name: str, ask: Callable[..., Step], work: Callable[..., Any], place: Path
) -> None:
    from recipes.sao.recipe import SAORecipe
    from recipes.sft.recipe import SFTRecipe

    discover = {"learning_rate": 0.01, "gamma": 1.0, "advantage_max": 5.0, "kl": 0.1, "clip": 1.0, "seed": 0}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "sao": lambda: objective(SAORecipe(rank=2)),
        "kl": lambda: grpo(kl=0.1),
        "gspo": lambda: grpo(preset="gspo"),
        "dis": lambda: grpo(loss="dis"),
        "sft": lambda: objective(SFTRecipe(rank=2)),
        "epochs": lambda: objective(SFTRecipe(rank=2, kl=0.0)),
        "discover": lambda: {
            "objective": "recipes.tttd.loss:Entropic", "options": discover | {"rank": 2, "alpha": 16.0}
        },
    }  # fmt: skip
    with pytest.raises(ConfigError, match="local or ray"):
        work(seconds=1.0).advance(ask(1, **made[name]()), quiet)
    assert not (place / "exchange").exists()


# --- slime's side -----------------------------------------------------------------------------------------------------


@pytest.fixture
def args(place: Path) -> SimpleNamespace:
    return SimpleNamespace(save_hf=str(place / "hf-{rollout_id}"), global_batch_size=None)


def test_a_batch_that_starts_elsewhere_ends_slime_with_the_place_to_start_at(
    place: Path, args: SimpleNamespace
) -> None:
    from reef.trainers.slime.rollout import StartAgain, following

    exchange = Exchange(place)
    hf = place / "hf-3"
    hf.mkdir(parents=True)
    (hf / "model.safetensors").write_bytes(b"x")
    exchange.publish("one", {"batch": "b1", "step": 1, "rollout": 3}, hf)
    exchange.offer("two", {"parent": "one", "wants": WANTS}, [])
    vars(args).update(FITTING)
    assert following(exchange, args, "one")["name"] == "two"
    with pytest.raises(StartAgain, match="starts from one"):
        following(exchange, args, None)
    assert files.read(exchange.start) == {"name": "one", "rollout": 3, "again": True}


WANTS = {
    "loss": "ppo", "low": 0.2, "high": 0.28, "dual": None, "temperature": 1.0, "learning_rate": 1e-6,
    "betas": [0.9, 0.95], "weight_decay": 0.0, "clip": 1.0,
}  # fmt: skip
FITTING = {
    "calculate_per_token_loss": True, "lr": 1e-6, "lr_decay_style": "constant", "adam_beta1": 0.9, "adam_beta2": 0.95,
    "weight_decay": 0.0, "clip_grad": 1.0, "loss_type": "policy_loss", "advantage_estimator": "grpo",
    "rewards_normalization": False, "normalize_advantages": False, "use_rollout_logprobs": True,
    "rollout_temperature": 1.0, "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "use_kl_loss": False,
    "kl_coef": 0.0, "entropy_coef": 0.0, "use_tis": False, "use_opsm": False, "use_opd": False,
}  # fmt: skip


def test_every_argument_that_changes_the_loss_is_looked_at() -> None:
    from reef.trainers.slime.rollout import misfit

    assert misfit(SimpleNamespace(**FITTING), WANTS) is None
    for name, value in FITTING.items():
        other = (not value) if isinstance(value, bool) else "other" if isinstance(value, str) else (value or 0) + 1
        why = misfit(SimpleNamespace(**(FITTING | {name: other})), WANTS)
        assert why is not None, name
        assert name in why


def test_a_batch_that_is_damaged_is_not_trained(place: Path) -> None:
    exchange = Exchange(place)
    exchange.offer("one", {"parent": None}, [{"tokens": [1, 2]}])
    (said,) = exchange.batches()
    assert exchange.samples(said) == [{"tokens": [1, 2]}]
    (exchange.batch("one") / files.SAMPLES).write_text('{"tokens": [1, 3]}\n')
    with pytest.raises(files.Torn, match="digest"):
        exchange.samples(said)
    exchange.withdraw("one")
    exchange.withdraw("one")
    assert exchange.batches() == []
