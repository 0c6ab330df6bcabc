"""What the trainer offers a method: passes of base, policy, teacher and moving average; log-probs of any ids over what
was legal; and the moving average itself across restarts."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reef.core.errors import MissingError, TeacherError, TrainError
from reef.core.wire import Datum, Step, Stepped
from reef.engines import Resolver, WeightFiles
from reef.trainers import folder as steps
from reef.trainers.local import llama
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Outputs, Plan, Rows
from reef.trainers.local.rows import Known, build
from reef.trainers.local.shadow import Shadow
from reef.trainers.local.shelf import Shelf
from reef.trainers.local.step import advance, forward
from tests.engines.kit import make_lora, make_tiny

Make = Callable[..., Step]
Samples = Callable[..., list[Datum]]
DISTIL = "tests.trainers.objectives:Distil"
META = {"base": {"name": "tiny", "digest": "d" * 64}}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("spoken") / "model")


@pytest.fixture(scope="module")
def model(spoken: Path) -> Llama:
    return Llama.load(spoken, torch.float32)


@pytest.fixture
def one(model: Llama, samples: Samples) -> Rows:
    data = [msgspec.structs.replace(datum, temperature=0.5 + number) for number, datum in enumerate(samples(3))]
    (rows,) = build(data, model.layout)
    return rows


def hinted(samples: Samples, seed: int = 0) -> list[Datum]:
    """Six samples: three with one context, one with two, one of them a demonstration."""
    chats = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("Say the", "Do not")]
    found = samples(6, seed=seed)
    for number, contexts in ((0, 1), (2, 2), (3, 1)):
        found[number] = msgspec.structs.replace(found[number], contexts=chats[:contexts], group=f"g{number % 2}")
    shown = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "the an"}]}
    empty: dict[str, Any] = {"tokens": [], "prompt_length": 0, "mask": [], "logprobs": []}
    found[5] = msgspec.structs.replace(found[5], chat=json.dumps(shown), **empty)
    return found


def part(done: Stepped, name: str = "adapter_model.safetensors") -> dict[str, Tensor]:
    return load_file(Path(done.folder) / name)


# --- outputs ----------------------------------------------------------------------------------------------------------


def outputs(model: Llama, rows: Rows) -> tuple[Outputs, Tensor]:
    hidden = model.hidden(rows.packed)[rows.predicts].detach().requires_grad_()
    return Outputs(model, hidden, rows), hidden


@pytest.mark.parametrize("legal", [False, True])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_log_probs_of_any_ids_are_those_of_the_whole_distribution(
    model: Llama, one: Rows, legal: bool, holes: bool, learns: bool
) -> None:
    """Values and gradients against a plain log-softmax; with a grammar over its ids only; nothing at observations."""
    if learns:
        weights = {name: tensor.clone().requires_grad_() for name, tensor in model.weights.items()}
        model = Llama(model.layout, weights, torch.float32)
    count = len(one.targets)
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(count, model.layout.vocab, generator=generator) < 0.5
    allowed[:, :20] = True
    allowed.scatter_(1, one.targets[:, None], True)
    mask = one.mask.clone()
    mask[:] = 1
    mask[2 :: 3 if holes else count + 2] = 0
    rows = replace(one, mask=mask, legal=allowed if legal else None)
    trained = mask != 0
    mine, hidden = outputs(model, rows)
    reference, other = outputs(model, rows)
    logs = (reference.logits() / rows.temperatures[:, None]).log_softmax(-1)
    assert not legal or bool(torch.isinf(logs[~allowed]).all())

    top = mine.top(4)
    ids = torch.randint(20, (count, 2), generator=generator)
    chosen = mine.chosen(ids)
    weight = torch.randn(count, 8, generator=generator) * trained[:, None]
    loss = (torch.cat((mine.logprobs()[:, None], top.logprobs, top.sampled[:, None], chosen), 1) * weight).sum()
    loss.backward()
    wanted = [logs.gather(1, index) for index in (rows.targets[:, None], top.ids, rows.targets[:, None], ids)]
    expected = torch.cat(wanted, 1)[trained]
    (expected * weight[trained]).sum().backward()
    found = torch.cat((mine.logprobs()[:, None], top.logprobs, top.sampled[:, None], chosen), 1)[trained]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(top.logprobs.detach()[trained].sort(descending=True).values, top.logprobs.detach()[trained])
    best = logs.topk(4).indices.sort().values[trained]
    assert torch.equal(top.ids.sort().values[trained], best)
    if holes:
        assert torch.equal(mine.logprobs()[~trained], rows.logprobs[~trained])
        assert torch.equal(top.sampled[~trained], rows.logprobs[~trained])
        assert chosen[~trained].unique().tolist() == pytest.approx([-math.log(model.layout.vocab)])


def test_no_state_is_multiplied_with_the_head_where_nothing_is_trained(
    model: Llama, one: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for whole in (llama.sampled, llama.picked):

        def counted(hidden: Tensor, *rest: Any, whole: Any = whole) -> Any:
            seen.append(len(hidden))
            return whole(hidden, *rest)

        monkeypatch.setattr(llama, whole.__name__, counted)
    mask = torch.zeros_like(one.mask)
    mask[:2] = 1
    found, _ = outputs(model, replace(one, mask=mask))
    found.logprobs()
    found.top(3)
    assert seen == [2, 2]


# --- a grammar --------------------------------------------------------------------------------------------------------


def test_a_grammar_holds_for_its_own_sample_only(model: Llama, samples: Samples) -> None:
    """q was drawn over what was legal, so pi is over the same ids; another sample of the micro-batch is free."""
    data = [msgspec.structs.replace(datum, mask=[1] * len(datum.mask)) for datum in samples(2)]
    even = [msgspec.structs.replace(data[0], legal="even")]
    response = data[0].tokens[data[0].prompt_length :]

    def masks(grammar: str, ids: Any) -> Tensor:
        assert grammar == "even"
        found = torch.zeros(len(ids), model.layout.vocab, dtype=torch.bool)
        found[:, 0:200] = True
        return found

    known = Known(model.layout, None, masks)
    (both,) = build([*even, data[1]], known)
    (free,) = build(data, known)
    with torch.no_grad():
        held, loose = forward(model, None, both).logprobs(), forward(model, None, free).logprobs()
        logs = forward(model, None, both).logits()
    assert both.legal is not None
    assert free.legal is None
    limited = ~both.legal.all(-1)
    assert int(limited.sum()) == len(response)
    assert bool((held[limited] > loose[limited]).all())
    torch.testing.assert_close(held[~limited], loose[~limited])
    heat = both.temperatures[:, None]
    assert float((logs / heat).softmax(-1)[limited][:, 200:].sum()) == 0


def test_the_engines_own_forms(model: Llama, samples: Samples) -> None:
    """An answer in two runs (an observation between them) under a choice of words: each run begins the form anew."""
    form = json.dumps({"choice": ["the", "an"]})
    shelf = Shelf(model)
    ids = shelf.text().encode("the")
    response = [*ids, 2, 77, 78, *shelf.text().encode("an")]
    mask = [1] * (len(ids) + 1) + [0, 0] + [1] * (len(response) - len(ids) - 3)
    datum = msgspec.structs.replace(
        samples(1)[0], tokens=[5, 6, *response], prompt_length=2, mask=mask, logprobs=[0.0] * len(mask), legal=form
    )
    (rows,) = build([datum], shelf.known())
    assert rows.legal is not None
    counts = rows.legal.sum(-1).tolist()
    assert counts[-1] < 10
    assert counts[0] < 10
    assert counts[len(ids)] == 1  # only the end is left after the word
    assert counts[len(ids) + 1 : len(ids) + 3] == [model.layout.vocab] * 2
    with torch.no_grad():
        found = forward(model, None, rows)
        assert found.logprobs()[len(ids)].item() == pytest.approx(0, abs=1e-6)
        assert found.logprobs()[-1].item() > -6
    wrong = msgspec.structs.replace(datum, tokens=[5, 6, *response[:-1], 99])
    with pytest.raises(TrainError, match="not legal in the form"):
        build([wrong], shelf.known())


def test_a_token_that_its_grammar_forbids_is_no_sample(model: Llama, samples: Samples) -> None:
    data = [msgspec.structs.replace(samples(1)[0], legal="none", mask=[1] * len(samples(1)[0].mask))]
    known = Known(model.layout, None, lambda grammar, ids: torch.zeros(len(ids), model.layout.vocab, dtype=torch.bool))
    with pytest.raises(TrainError, match="does not allow"):
        build(data, known)
    with pytest.raises(TrainError, match="grammar, which this trainer cannot read"):
        build(data, model.layout)


@pytest.mark.parametrize("form", ["null", "[]", "5", "{}", '{"regex": 5}', '{"json": null, "regex": "a"}', "{"])
def test_a_form_that_is_none_costs_its_own_sample_only(model: Llama, samples: Samples, form: str) -> None:
    data = samples(3)
    data[1] = msgspec.structs.replace(data[1], legal=form)
    left_out: list[str] = []
    batch = build(data, Shelf(model).known(), left_out=left_out)
    assert sum(len(rows.lengths) for rows in batch) == 2
    (reason,) = left_out
    assert data[1].record_id in reason


# --- steps with contexts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 0])
def test_contexts_groups_and_demonstrations_do_not_depend_on_the_split(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples, rank: int
) -> None:
    results = []
    name = "adapter_model.safetensors" if rank else "model.safetensors"
    for number, tokens in enumerate((1, 60, 10_000)):
        for step in (1, 2):
            wanted = order(
                step, objective=DISTIL, data=hinted(samples, step), options={"learning_rate": 1e-3, "rank": rank}
            )
            done = advance(model, tmp_path / str(number), wanted, base, micro_tokens=tokens)
        assert done.metrics["grouped"] == 3
        results.append(done)
    for other in results[1:]:
        for metric in ("loss", "grad_norm"):
            assert other.metrics[metric] == pytest.approx(results[0].metrics[metric], rel=1e-5 if rank else 1e-4)
        for file in (name, "modules.safetensors"):
            one, two = part(results[0], file), part(other, file)
            apart = torch.cat([(one[key] - two[key]).flatten().abs().float() for key in one])
            # Adam makes a whole step of a gradient that is all rounding: of full weights a few have such a one.
            assert float(apart.max()) < (1e-5 if rank else 2e-3)
            assert float((apart > 1e-5).float().mean()) < 1e-3


def test_the_moving_average_survives_a_restart_to_the_bit(
    spoken: Path, tmp_path: Path, order: Make, base: Resolver, samples: Samples
) -> None:
    """Computed here from the saved policies of three steps, each made by a fresh process's worth of objects."""
    slow: dict[str, Tensor] = {}
    for step in (1, 2, 3):
        model = Llama.load(spoken, torch.float32)
        if not slow:
            slow = {name: one.detach().clone() for name, one in Lora.fresh(model, 2, 4.0, 0).parameters().items()}
        wanted = order(step, objective=DISTIL, data=hinted(samples, step), options={"learning_rate": 1e-2})
        done = advance(model, tmp_path, wanted, base)
        for name, tensor in part(done).items():
            slow[name].lerp_(tensor, 0.25)
        kept = part(done, "modules.safetensors")
        assert int(kept.pop("shadow.started")) == 1
        found = {name.removeprefix("shadow.").replace("/", "."): one for name, one in kept.items()}
        assert set(found) == set(slow)
        assert all(torch.equal(found[name], slow[name]) for name in slow)
    assert any(not torch.equal(slow[name], tensor) for name, tensor in part(done).items())


def test_the_moving_average_of_one_number(model: Llama) -> None:
    shadow = Shadow(model, Plan(1e-3, rank=2), 0.05)
    one, two = ({name: torch.full(size, value) for name, size in Lora.shapes(model, 2).items()} for value in (1.0, 2.0))
    shadow.update(one)
    shadow.update(two)
    values = {float(tensor.unique()) for tensor in shadow.tensors(two).values()}
    assert list(values) == pytest.approx([1.05])
    with pytest.raises(TrainError, match="other parameters"):
        shadow.update({"x": torch.zeros(1)})


# --- teachers ---------------------------------------------------------------------------------------------------------


def known_lora(model: Llama, place: Path, seed: int = 1) -> WeightFiles:
    make_lora(place, model.layout, seed=seed)
    return WeightFiles("lora", {file.name: file for file in place.iterdir()}, META)


@pytest.mark.parametrize("kind", ["release", "folder", "full", "model", "base"])
def test_a_teacher_is_a_release_or_a_folder(model: Llama, tmp_path: Path, one: Rows, kind: str) -> None:
    """The same weights by every door give the same log-probs; a base release is the base."""
    files = known_lora(model, tmp_path / "lora")
    lora = Lora.load(model, load_file(files.files["adapter_model.safetensors"]), 4, 8.0)
    merged = dict(model.weights)
    for name, (a, b) in lora.pairs.items():
        merged[f"{name}.weight"] = model.weights[f"{name}.weight"] + lora.scale * b.detach() @ a.detach()
    whole = tmp_path / "whole"
    shutil.copytree(model.folder or "", whole)
    save_file(merged, whole / "model.safetensors")
    full = WeightFiles("full", {"model.safetensors": whole / "model.safetensors"}, META)
    known = {"r1": files, "r2": full, "r0": WeightFiles("base", {}, META)}
    name = {"release": "r1", "folder": str(tmp_path / "lora"), "full": "r2", "model": str(whole), "base": "r0"}[kind]
    found = Shelf(model).teacher(name, known.__getitem__, "d" * 64)
    with torch.no_grad():
        wanted = forward(model, None if kind == "base" else lora, one).logprobs()
        torch.testing.assert_close(forward(found.model, found.lora, one).logprobs(), wanted, rtol=1e-4, atol=1e-4)


def test_a_teacher_is_read_once_and_again_when_its_files_change(model: Llama, tmp_path: Path) -> None:
    shelf, place = Shelf(model), tmp_path / "lora"
    known_lora(model, place)
    first = shelf.teacher(str(place), known_missing, None)
    assert shelf.teacher(str(place), known_missing, None) is first
    shutil.rmtree(place)
    known_lora(model, place, seed=2)
    second = shelf.teacher(str(place), known_missing, None)
    assert second is not first
    for number in range(2):  # and no more than two are kept
        shelf.teacher(
            str(known_lora(model, tmp_path / str(number)).files["adapter_config.json"].parent), known_missing, None
        )
    assert shelf.teacher(str(place), known_missing, None) is not second


def known_missing(release: str) -> WeightFiles:
    raise MissingError(f"no release {release}")


def test_a_lora_on_some_linears_is_enough(model: Llama, tmp_path: Path) -> None:
    files = known_lora(model, tmp_path)
    tensors = load_file(files.files["adapter_model.safetensors"])
    save_file({name: one for name, one in tensors.items() if "q_proj" in name}, tmp_path / "adapter_model.safetensors")
    found = Shelf(model).teacher(str(tmp_path), known_missing, None).lora
    assert found is not None
    assert {name for name, (_, b) in found.pairs.items() if bool(b.any())} == {
        f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)
    }


def test_a_teacher_that_does_not_fit_says_why(model: Llama, tmp_path: Path) -> None:
    shelf = Shelf(model)
    place = known_lora(model, tmp_path / "lora").files["adapter_config.json"].parent

    def refused(
        words: str, where: object = place, resolve: Resolver = known_missing, digest: str | None = None
    ) -> None:
        with pytest.raises(TeacherError, match=words):
            shelf.teacher(str(where), resolve, digest)

    refused("neither a folder nor a release", "r9")
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    refused("uses use_dora")
    (place / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    refused("does not fit the base")
    (place / "adapter_config.json").write_text("{")
    refused("cannot be read")
    (place / "adapter_model.safetensors").unlink()
    refused(r"no adapter_model\.safetensors")

    small = make_tiny(tmp_path / "small", vocab_size=270)
    refused("vocabulary of 270 tokens", small)
    other = make_tiny(tmp_path / "other")
    raw = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(raw.replace('"the": ', '"eht": ').replace('["th", "e"], ', ""))
    refused("another tokenizer", other)
    (other / "model.safetensors").unlink()
    refused(r"no model\.safetensors", other)


def test_a_teacher_of_another_base_is_nobodys_batch(model: Llama, tmp_path: Path) -> None:
    files = known_lora(model, tmp_path / "lora")
    with pytest.raises(TeacherError, match=r"^the teacher r1 belongs to the base model tiny"):
        Shelf(model).teacher("r1", lambda _: files, "e" * 64)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", "[1]"),
        ("adapter_config.json", '{"r": "x"}'),
        ("adapter_config.json", '{"r": 100000000}'),
        ("adapter_config.json", '{"r": 4, "lora_alpha": "z"}'),
        ("adapter_config.json", '{"r": 4, "lora_alpha": NaN}'),
        ("adapter_model.safetensors", ""),
        ("weights.json", "[1]"),
        ("weights.json", '{"base": "x"}'),
        ("state.json", "xx"),
    ],
)
def test_a_damaged_teacher_is_one_named_error(model: Llama, tmp_path: Path, file: str, content: str) -> None:
    """Never an error of some library, which would count against the batch."""
    known_lora(model, tmp_path)
    (tmp_path / "weights.json").touch()
    (tmp_path / "weights.json").write_text("{}")
    (tmp_path / file).write_text(content)
    with pytest.raises(TeacherError):
        Shelf(model).teacher(str(tmp_path), known_missing, None)


@pytest.mark.parametrize(
    "changed",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": "x"}, {"rope_scaling": 5}, {"num_attention_heads": 0}],
)
def test_a_damaged_model_is_one_named_error(model: Llama, tmp_path: Path, changed: dict[str, object]) -> None:
    place = make_tiny(tmp_path / "whole")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(TeacherError):
        Shelf(model).teacher(str(place), known_missing, None)


@pytest.mark.parametrize("name", ["~nouser/x", "a" * 5000, "a\0b", "/proc/self"])
def test_a_name_that_is_no_teacher(model: Llama, name: str) -> None:
    with pytest.raises(TeacherError) as caught:
        Shelf(model).teacher(name, known_missing, None)
    assert len(caught.value.message) < 1000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(model: Llama, tmp_path: Path, file: str) -> None:
    place = make_tiny(tmp_path / "whole")
    (place / file).unlink(missing_ok=True)
    os.mkfifo(place / file)
    with pytest.raises(TeacherError):
        Shelf(model).teacher(str(place), known_missing, None)


def test_a_step_learns_from_its_teacher(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples
) -> None:
    known_lora(model, tmp_path / "lora")
    options = {"learning_rate": 1e-2, "teacher": str(tmp_path / "lora")}
    shelf = Shelf(model)
    found = [
        advance(
            model, tmp_path, order(step, objective=DISTIL, data=hinted(samples), options=options), base, shelf=shelf
        ).metrics["loss"]
        for step in range(1, 5)
    ]
    assert found == sorted(found, reverse=True)
    (plain,) = [
        msgspec.structs.replace(order(), line="x", objective=DISTIL, options={"learning_rate": 1e-2, "teacher": "gone"})
    ]
    with pytest.raises(TeacherError, match="neither a folder nor a release"):
        advance(
            model,
            tmp_path,
            msgspec.structs.replace(plain, data=hinted(samples)),
            lambda name: base(name) if name == "r0" else known_missing(name),
        )


def test_a_method_that_asks_for_a_teacher_nobody_named(
    model: Llama, tmp_path: Path, order: Make, base: Resolver, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trainers import objectives

    monkeypatch.setattr(
        objectives.Distil, "prepare", lambda self, context, batch: {"x": len(context.teacher(batch[0]).hidden)}
    )
    with pytest.raises(TeacherError, match="set the recipe's `teacher`"):
        advance(model, tmp_path, order(objective=DISTIL, data=hinted(samples), options={"learning_rate": 1e-2}), base)


def test_a_step_folder_is_a_teacher_too(model: Llama, tmp_path: Path, order: Make, base: Resolver) -> None:
    done = advance(model, tmp_path, order(), base)
    found = Shelf(model).teacher(done.folder, known_missing, "d" * 64)
    assert found.lora is not None
    wanted = part(done)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.lora.parameters().items())
    state = steps.read(Path(done.folder))
    assert state is not None
    with (Path(done.folder) / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(TeacherError, match="does not match its digest"):
        Shelf(model).teacher(done.folder, known_missing, None)
