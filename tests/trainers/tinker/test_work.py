"""The tinker backend against a stub of the service that really trains: the same steps, whatever fails in between."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reef.core.errors import ConfigError, TrainError, UpstreamError
from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.trainers import Ground, folder
from tests.trainers.tinker.kit import KEY, calls, faults, options

pytestmark = pytest.mark.model
torch = pytest.importorskip("torch")

BASE = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}, "kind": "base"})


def objective(recipe: Any) -> dict[str, Any]:
    made = recipe.objective()
    return {"objective": made.path, "options": dict(made.options)}


def grpo(**changes: Any) -> dict[str, Any]:
    from recipes.grpo.recipe import GRPORecipe

    return objective(GRPORecipe(**({"rank": 2, "alpha": 32.0, "kl": 0.0, "learning_rate": 0.01} | changes)))


def fitted(data: list[Datum]) -> list[Datum]:
    """In groups of four and two, each of which says something."""
    return [
        msgspec.structs.replace(one, group=f"g{number // 4}", reward=float(number % 2))
        for number, one in enumerate(data)
    ]


@pytest.fixture
def service(tmp_path: Path) -> Path:
    return tmp_path / "service"


@pytest.fixture
def ask(order: Callable[..., Step]) -> Callable[..., Step]:
    def make(step: int = 1, **changes: Any) -> Step:
        wanted = order(step, **(grpo() | changes))
        return msgspec.structs.replace(wanted, data=fitted(wanted.data))

    return make


@pytest.fixture
def work(tiny: Path, tmp_path: Path, service: Path) -> Callable[..., Any]:
    from reef.trainers.tinker.work import TinkerWork

    def make(training: str = "training", resolve: Any = lambda release: BASE, **changes: Any) -> Any:
        ground = Ground(tiny, tmp_path / training, resolve, "tiny", "d" * 64)
        return TinkerWork(ground, options(service, tiny, **changes))

    return make


def quiet(stage: str, done: int, total: int) -> None:
    pass


def weights(done: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(done.folder) / "adapter_model.safetensors")


def same(one: Any, other: Any, **near: float) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], **(near or {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize(
    "method",
    [
        {"preset": "dapo"},
        {"loss": "cispo", "reduction": "constant"},
        {"loss": "dis"},
        {"preset": "gspo"},
        {"preset": "dapo", "dual_clip": 3.0},
        {"kl": 0.1},
    ],
    ids=["ppo", "cispo", "dis", "gspo", "dual", "kl"],
)
def test_two_steps_are_the_embedded_trainers(
    method: dict[str, Any], ask: Callable[..., Step], work: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    """The service is another model's worth of code, so what agrees is the data, the loss, and the optimizer's terms."""
    from reef.trainers.local.llama import Llama
    from reef.trainers.local.step import advance

    model = Llama.load(tiny, torch.float32)
    remote = work()
    for step in (1, 2):
        wanted = ask(step, **grpo(**method))
        far = remote.advance(wanted, quiet)
        near = advance(model, tmp_path / "near", wanted, lambda release: BASE)
        same(far, near, rtol=1e-3, atol=3e-4)  # of updates of 0.01 each
        for name, value in far.metrics.items():
            if name in near.metrics and name != "train_seconds":
                assert value == pytest.approx(near.metrics[name], rel=1e-3, abs=1e-5), name


def test_a_common_loss_is_one_pass_and_any_other_two(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    work().advance(ask(1), quiet)
    (told,) = calls(service, "forward_backward")
    assert (told["loss"], told["config"]) == ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert calls(service, "custom") == []
    work().advance(ask(1, line="two", **grpo(loss="dis")), quiet)
    assert len(calls(service, "custom")) == 1
    assert calls(service, "forward_backward")[-1]["loss"] == "cross_entropy"


def test_a_restart_goes_on_exactly_where_the_line_was(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    one = work("one")
    one.advance(ask(1), quiet)
    kept = one.advance(ask(2), quiet)
    assert calls(service, "open") == []  # the client is still at the state it saved
    work("two").advance(ask(1), quiet)
    again = work("two").advance(ask(2), quiet)
    (opened,) = calls(service, "open")
    first = json.loads((Path(again.folder).parent / "1" / "remote.json").read_bytes())
    assert opened["path"] == first["state"]
    same(kept, again)


@pytest.mark.parametrize(
    "fault",
    [
        {"connect": ["APIConnectionError"]},
        {"create": ["RateLimitError", "InternalServerError"]},
        {"forward_backward": ["RequestFailedError"]},
        {"optim_step": ["APITimeoutError"]},
        {"save_state": ["APIConnectionError"]},
        {"urls": ["InternalServerError"]},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_failure_that_passes_costs_time_and_nothing_else(
    fault: dict[str, list[str]], ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    whole = work("whole").advance(ask(1), quiet)
    faults(service, **fault)
    same(whole, work("other").advance(ask(1), quiet))


def test_a_service_that_stays_away_is_no_batchs_fault(
    ask: Callable[..., Step],
    work: Callable[..., Any],
    service: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults(service, optim_step=["RateLimitError"] * 4)
    with caplog.at_level(logging.DEBUG), pytest.raises(UpstreamError, match="failed 4 times") as told:
        work().advance(ask(1), quiet)
    assert KEY not in caplog.text + str(told.value)
    assert "[key]" in caplog.text
    assert list((tmp_path / "training").rglob("state.json")) == []
    assert work().advance(ask(1), quiet).reused is False


def test_a_call_that_hangs_ends_in_time(ask: Callable[..., Step], work: Callable[..., Any], service: Path) -> None:
    faults(service, forward_backward=["hang"])
    with pytest.raises(UpstreamError, match=r"no answer within 0\.5 s"):
        work(seconds=0.5, attempts=1).advance(ask(1), quiet)


def test_a_caller_who_leaves_is_noticed_while_a_call_hangs(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path, tmp_path: Path
) -> None:
    faults(service, forward_backward=["hang"])

    class GoneError(Exception):
        pass

    def report(stage: str, done: int, total: int) -> None:
        if calls(service, "forward_backward"):
            raise GoneError

    with pytest.raises(GoneError):
        work().advance(ask(1), report)
    assert list((tmp_path / "training").rglob("state.json")) == []


def test_what_a_person_must_do_is_said_at_once(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = work()
    faults(service, create=["PermissionDeniedError"])
    with pytest.raises(UpstreamError, match="REEF_TEST_TINKER_KEY"):
        made.advance(ask(1), quiet)
    assert len(calls(service, "create")) == 1
    with pytest.raises(TrainError, match="BadRequestError"):
        work(base_model="tiny/other").advance(ask(1), quiet)
    with pytest.raises(ConfigError, match=r"reef-learn\[tinker\]"):
        work(package="no_such_package_here")
    made_of = options(service, Path("unused"))
    monkeypatch.delenv("REEF_TEST_TINKER_KEY")
    from reef.trainers.tinker.service import Service

    with pytest.raises(ConfigError, match="REEF_TEST_TINKER_KEY"):
        Service(made_of)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"config": {"r": 3}}, "rank 3"),
        ({"config": {"lora_alpha": None}}, "lora_alpha"),
        ({"drop": 0}, "not whole"),
        ({"nan": 1}, "not finite"),
        ({"wide": 1}, "does not fit"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_lora_that_is_not_ours_is_never_a_step(
    spoil: dict[str, Any], said: str, ask: Callable[..., Step], work: Callable[..., Any], service: Path, tmp_path: Path
) -> None:
    made = work()
    (service / "spoil.json").write_text(json.dumps(spoil))
    with pytest.raises(TrainError, match=said):
        made.advance(ask(1), quiet)
    assert list((tmp_path / "training").rglob("state.json")) == []


def test_weights_that_are_cut_off_are_fetched_again(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    made = work()
    (service / "spoil.json").write_text(json.dumps({"cut": 40}))
    assert made.advance(ask(1), quiet).reused is False
    assert len(calls(service, "urls")) == 2


def test_a_lora_of_another_alpha_is_the_same_function(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    given = work("as-it-is").advance(ask(1), quiet)
    scaled = work("scaled").advance(ask(1, **grpo(alpha=8.0)), quiet)
    for name, tensor in weights(given).items():
        torch.testing.assert_close(weights(scaled)[name], tensor * (4.0 if "lora_B" in name else 1.0))
    assert json.loads((Path(scaled.folder) / "weights.json").read_bytes())["alpha"] == 8.0


def recipes(name: str) -> dict[str, Any]:
    from recipes.opd.recipe import OPDRecipe
    from recipes.openclawrl.recipe import OpenClawRecipe
    from recipes.sao.recipe import SAORecipe
    from recipes.sdft.recipe import SDFTRecipe
    from recipes.sft.recipe import SFTRecipe

    small = {"rank": 2, "alpha": 32.0}
    made: dict[str, Callable[[], Any]] = {
        "sao": lambda: SAORecipe(**small),
        "sao-full": lambda: SAORecipe(critic="full", **small),
        "opd": lambda: OPDRecipe(teacher="r0", **small),
        "opd-sampled": lambda: OPDRecipe(teacher="r0", top_k=0, **small),
        "openclaw": lambda: OpenClawRecipe(**small),
        "openclaw-sampled": lambda: OpenClawRecipe(distil="sampled", **small),
        "sdft": lambda: SDFTRecipe(**small),
        "sft": lambda: SFTRecipe(**small),
        "sft-plain": lambda: SFTRecipe(kl=0.0, epochs=2, **small),
    }
    return objective(made[name]())


def discover(kl: float) -> dict[str, Any]:
    options = {"learning_rate": 0.01, "gamma": 1.0, "advantage_max": 5.0, "kl": kl, "clip": 1.0, "seed": 0}
    return {"objective": "recipes.tttd.loss:Entropic", "options": options | {"rank": 2, "alpha": 32.0}}


@pytest.mark.parametrize("name", ["sao", "sao-full", "opd", "openclaw", "sdft", "sft"])
def test_a_method_that_needs_more_is_refused_before_anything_is_sent(
    name: str, ask: Callable[..., Step], work: Callable[..., Any], service: Path
) -> None:
    with pytest.raises(ConfigError, match="local or ray"):
        work().advance(ask(1, **recipes(name)), quiet)
    assert calls(service) == []


@pytest.mark.parametrize("name", ["opd-sampled", "openclaw-sampled", "sft-plain", "discover", "discover-kl"])
def test_a_method_of_log_probs_is_the_embedded_trainers(
    name: str, ask: Callable[..., Step], work: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    from reef.trainers.local.llama import Llama
    from reef.trainers.local.step import advance

    chosen = discover(0.1 if name == "discover-kl" else 0.0) if "discover" in name else recipes(name)
    wanted = ask(1, **chosen)
    far = work().advance(wanted, quiet)
    near = advance(Llama.load(tiny, torch.float32), tmp_path / "near", wanted, lambda release: BASE)
    same(far, near, rtol=1e-3, atol=3e-4)  # of updates of 0.01 each


def test_samples_of_another_temperature_are_left_out(ask: Callable[..., Step], work: Callable[..., Any]) -> None:
    wanted = ask(1)
    hot = [msgspec.structs.replace(one, temperature=0.7) for one in wanted.data]
    done = work().advance(msgspec.structs.replace(wanted, data=[*wanted.data[:3], *hot[3:]]), quiet)
    assert done.metrics["left_out"] == 3.0
    with pytest.raises(TrainError, match=r"temperature 0\.7"):
        work().advance(msgspec.structs.replace(wanted, line="two", data=hot), quiet)


def test_a_line_starts_at_a_release_it_made_and_at_no_other(
    ask: Callable[..., Step], work: Callable[..., Any], service: Path, tmp_path: Path
) -> None:
    done = work().advance(ask(1), quiet)
    kind, files, meta = folder.part_files(Path(done.folder))
    assert "remote.json" not in files
    made = WeightFiles(kind, files, meta)
    second = work().advance(ask(2), quiet)
    from_release = work(resolve=lambda release: made).advance(ask(2, line="two", base_step=1, base_release="r1"), quiet)
    same(second, from_release)
    with pytest.raises(TrainError, match="roll back to the base"):
        work("elsewhere", resolve=lambda release: made).advance(
            ask(2, line="three", base_step=1, base_release="r1"), quiet
        )
    with pytest.raises(TrainError, match="alpha"):
        work(resolve=lambda release: made).advance(
            ask(2, line="four", base_step=1, base_release="r1", **grpo(alpha=4.0)), quiet
        )
