"""SFT, SDFT and OPD: the worked numbers of their equations, which units train and how, and their settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.opd.loss import OPD, reverse
from recipes.opd.recipe import OPDRecipe
from recipes.sdft.loss import SDFT, after
from recipes.sdft.recipe import SDFTRecipe
from recipes.sft.loss import cross_entropy
from recipes.sft.recipe import SFTRecipe
from reef.core.errors import ConfigError, MissingError
from reef.core.nouns import Batch, Choice, Json, Record, Report, Sample, Timing, Unit
from reef.core.wire import Datum, Step, Stepped
from reef.engines import WeightFiles
from reef.recipe import chats
from reef.trainers import folder as steps
from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import distil_advantage, jsd, kl, token_mean
from reef.trainers.local.objective import Total
from reef.trainers.local.step import advance
from tests.engines.kit import make_tiny

ASKED = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is a lake?"}]}


def unit(number: int = 1, shown: Json = "A lake is water.", *, body: Json = None, exact: bool = True) -> Unit:
    name = f"{number:032x}"
    data = json.dumps(ASKED if body is None else body).encode()
    record = Record(name, "demo", "r0", "live", "chat", "complete", data, Timing(0.0), choices=(Choice(0, "Hm"),))
    report = Report(f"rep_{number:032x}", "demo", (name,), 0.0, demonstration=shown)
    sample = Sample((3, 4, 5, 6, 7, 8), 2, (1, 1, 1, 1), (-1.0, -0.5, -2.0, -0.7), None, name)
    return Unit(f"{name}:0", record, 0, report, None, sample if exact else None, seq=number)


# --- worked numbers ---------------------------------------------------------------------------------------------------


def test_cross_entropy_of_what_was_shown_alone() -> None:
    logprobs = torch.tensor([0.5, 0.25, 0.8]).log()
    assert float(token_mean(cross_entropy(logprobs), torch.ones(3), Total(1, 3))) == pytest.approx(0.767528, abs=1e-6)


def test_divergences_over_the_whole_vocabulary() -> None:
    pupil, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.7, 0.2, 0.1]]).log()
    assert float(jsd(pupil, teacher, 0.0)) == pytest.approx(0.085123, abs=1e-6)  # forward
    assert float(jsd(pupil, teacher, 1.0)) == pytest.approx(0.092033, abs=1e-6)  # reverse
    assert float(kl(teacher, pupil)) == pytest.approx(0.085123, abs=1e-6)


def test_the_first_tokens_of_each_answer_are_skipped() -> None:
    assert after(torch.ones(5), (5,), 3).tolist() == [0, 0, 0, 1, 1]
    assert after(torch.tensor([1.0, 0, 1, 1, 1, 1]), (4, 2), 1).tolist() == [0, 0, 1, 1, 0, 1]
    assert after(torch.ones(3), (3,), 3).tolist() == [0, 0, 0]


def test_advantages_of_distillation() -> None:
    pupil, teacher = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    found = distil_advantage(pupil, teacher)
    assert found.tolist() == pytest.approx([-0.693147, 0.693147], abs=1e-6)
    assert float((pupil - teacher).mean()) == pytest.approx(0.0, abs=1e-6)
    assert distil_advantage(pupil, pupil).tolist() == [0.0, 0.0]


# --- which units, and what they become --------------------------------------------------------------------------------


def test_what_was_shown_is_the_answer_that_is_learnt() -> None:
    """The answer that was given instead never trains, and needs no tokens."""
    batch = SFTRecipe(batch_size=2).batch([unit(1, exact=False), unit(2, {"role": "assistant", "content": "Water."})])
    assert isinstance(batch, Batch)
    samples = [one.sample for one in batch.units]
    assert all(sample is not None and sample.tokens == () for sample in samples)
    chat = json.loads(str(samples[0] and samples[0].chat))
    assert chat["messages"] == [*ASKED["messages"], {"role": "assistant", "content": "A lake is water."}]
    assert json.loads(str(samples[1] and samples[1].chat))["messages"][-1]["content"] == "Water."
    assert SFTRecipe(batch_size=3).batch([unit(1), unit(2)]) is None


def test_a_demonstration_may_call_tools_and_be_in_blocks() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = chats.demonstrated(unit(body=ASKED | {"tools": tools}).record, call)
    assert made is not None
    assert json.loads(str(made.chat)) == {"messages": [*ASKED["messages"], call], "tools": tools}
    assert chats.shown([{"type": "text", "text": "a"}]) == "a"
    assert chats.shown({"content": [{"type": "text", "text": "a"}, {"type": "image"}]}) == "a"
    assert chats.shown(call) is None


@pytest.mark.parametrize("recipe", [SFTRecipe(batch_size=1), SDFTRecipe(batch_size=1)])
@pytest.mark.parametrize("shown", ["", "  ", None, {"role": "assistant", "content": ""}])
def test_what_shows_nothing_is_settled(recipe: Any, shown: Json) -> None:
    empty, good = unit(1, shown), unit(2)
    assert [(one.id, why) for one, why in recipe.discard([empty, good])] == [(empty.id, "no demonstration")]
    assert [one.id for one in recipe.batch([empty, good]).units] == [good.id]


def test_demonstrations_do_not_age_unless_a_bound_is_set() -> None:
    assert not SFTRecipe().ages
    assert SFTRecipe(max_staleness=3).ages


def test_the_teacher_reads_the_demonstration_behind_the_users_words() -> None:
    batch = SDFTRecipe(batch_size=1, template="Like this: {demonstration}").batch([unit(), unit(2, exact=False)])
    assert batch is not None
    (one,) = batch.units
    assert one.sample is not None
    (context,) = one.sample.contexts
    said = json.loads(context)["messages"][-1]
    assert said == {"role": "user", "content": "What is a lake?\n\nLike this: A lake is water."}
    assert one.sample.tokens == (3, 4, 5, 6, 7, 8)  # the pupil's own
    assert SDFTRecipe(batch_size=1).batch([unit(exact=False)]) is None


def test_requests_of_other_dialects_are_said_in_chat() -> None:
    record = replace(
        unit().record, dialect="messages", request=json.dumps({"max_tokens": 5, "system": "Be kind.", **ASKED | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}}).encode()
    )  # fmt: skip
    said = chats.spoken(record)["messages"]
    assert [message["role"] for message in said] == ["system", "user"]
    assert chats.spoken(replace(record, request=b"{")) == {"messages": []}
    assert chats.demonstrated(replace(record, request=b"{"), "x") is None


def test_every_answer_trains_with_a_teacher() -> None:
    batch = OPDRecipe(teacher="t", batch_size=2).batch([unit(1), unit(2, exact=False), unit(3)])
    assert batch is not None
    assert [one.seq for one in batch.units] == [1, 3]
    assert OPDRecipe(teacher="t").objective().options["teacher"] == "t"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SFTRecipe(epochs=0), "epochs"),
        (lambda: SFTRecipe(kl=-1), "kl"),
        (lambda: SDFTRecipe(template="no place"), "template"),
        (lambda: SDFTRecipe(divergence="other"), "divergence"),
        (lambda: SDFTRecipe(average=2), "average"),
        (lambda: OPDRecipe(), "teacher"),
        (lambda: OPDRecipe(teacher="t", scale=0), "scale"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


# --- steps on a small model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return Llama.load(folder, torch.float32)


def resolve(release: str) -> WeightFiles:
    if release != "base":
        raise MissingError(f"no release {release}")
    return WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d" * 64}})


def data(recipe: Any, model: Llama) -> list[Datum]:
    """The samples of a batch with log-probs that the model really gave, so that ratios are 1."""
    import msgspec

    batch = recipe.batch([unit(1), unit(2, "Lakes are wet.")])
    assert batch is not None
    return msgspec.convert([msgspec.to_builtins(one.sample) for one in batch.units], list[Datum])


def step(recipe: Any, model: Llama, training: Path, number: int = 1, rate: float = 0.05) -> Stepped:
    objective = replace(recipe, learning_rate=rate).objective()
    order = Step(
        scenario="s", part="weights", line="base-1", step=number, base_release="base", base_step=0,
        objective=objective.path, options=dict(objective.options), batch_id=f"b{number}",
        unit_ids=[f"u{number}"], cursor=1,
        data=data(recipe, model),
    )  # fmt: skip
    return advance(model, training, order, resolve)


def test_a_step_of_several_epochs_learns_its_demonstrations(model: Llama, tmp_path: Path) -> None:
    made = step(SFTRecipe(batch_size=2, epochs=8, rank=4), model, tmp_path)
    assert made.metrics["loss"] < 0.7 * made.metrics["loss_first"]
    assert made.metrics["grad_norm"] > 0
    again = step(SFTRecipe(batch_size=2, epochs=1, rank=4, kl=0.1), model, tmp_path / "other")
    assert again.metrics["kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"divergence": "reverse", "top_k": 4}, {"average": 0.1, "skip": 1}])
def test_the_pupil_comes_closer_to_its_teacher(model: Llama, tmp_path: Path, settings: dict[str, Any]) -> None:
    recipe = SDFTRecipe(batch_size=2, rank=4, cap=0.0, **settings)
    first = [step(recipe, model, tmp_path, number, 0.02).metrics["divergence"] for number in (1, 2, 3, 4)]
    assert 0 < first[-1] < first[0]


def test_nothing_left_to_train_is_no_loss_and_no_gradient(model: Llama, tmp_path: Path) -> None:
    made = step(SDFTRecipe(batch_size=2, rank=4, skip=4), model, tmp_path)
    assert (made.metrics["loss"], made.metrics["grad_norm"], made.metrics["tokens"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_that_is_the_policy_teaches_nothing(model: Llama, tmp_path: Path, top_k: int) -> None:
    made = step(OPDRecipe(teacher="base", batch_size=2, rank=4, top_k=top_k), model, tmp_path)
    assert made.metrics["reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    assert made.metrics["grad_norm"] == 0.0


def test_the_gradient_over_several_tokens_is_that_of_the_reverse_kl() -> None:
    teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    found = []
    for loss in (lambda logs: reverse(logs, teacher), lambda logs: kl(logs, teacher)):
        logits = torch.tensor([[0.3, -0.2, 0.5]], requires_grad=True)
        loss(logits.log_softmax(-1)).sum().backward()
        found.append(logits.grad)
    assert found[0] is not None
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert float(found[0].abs().sum()) > 0.1


def test_a_pupil_comes_closer_to_another_model(folder: Path, model: Llama, tmp_path: Path) -> None:
    taught = step(SFTRecipe(batch_size=2, epochs=8, rank=4), model, tmp_path / "teacher")
    recipe = OPDRecipe(teacher=taught.folder, batch_size=2, rank=4, cap=2.0)
    found = [step(recipe, model, tmp_path / "pupil", number, 0.02).metrics["reverse_kl"] for number in (1, 2, 3, 4)]
    assert 0 < found[-1] < found[0]
    state = steps.read(Path(taught.folder))
    assert state is not None
    assert all(
        math.isfinite(float(one.sum())) for one in load_file(Path(taught.folder) / "adapter_model.safetensors").values()
    )


def test_their_objectives_are_named_by_their_recipes() -> None:
    for recipe, made_of in ((SDFTRecipe(), SDFT), (OPDRecipe(teacher="t"), OPD)):
        objective = recipe.objective()
        assert objective.path.endswith(f".loss:{made_of.__name__}")
        assert made_of(**objective.options).plan.rank == 8
