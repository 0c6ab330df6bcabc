"""On the embedded model: steps of the objective, under the grammar, make the better layouts likelier."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import orjson
import pytest
import torch

from recipes.tttd.circle import Rows as Problem
from recipes.tttd.recipe import DiscoverRecipe
from reef.core.wire import Datum, Step
from reef.engines import WeightFiles
from reef.engines.local.folder import prepare
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Outputs
from reef.trainers.local.rows import build
from reef.trainers.local.shelf import Shelf
from reef.trainers.local.step import advance

pytestmark = pytest.mark.model

LAYOUTS = ("656564", "88844", "2824286", "33338822")
BASE = WeightFiles("base", {}, {"base": {"name": "smollm2-135m", "digest": None}, "kind": "base"})


@torch.no_grad()
def rate(model: Llama, shelf: Shelf, lora: Lora | None, data: list[Datum]) -> dict[str, list[float]]:
    """The log-probs of each answer's tokens, over the legal ones."""
    found: dict[str, list[float]] = {}
    for datum in data:
        (rows,) = build([datum], shelf.known())
        found[datum.record_id] = (
            Outputs(model, model.hidden(rows.packed, lora)[rows.predicts], rows).logprobs().tolist()
        )
    return found


@pytest.mark.timeout(300)
def test_steps_make_better_layouts_likelier(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = prepare("smollm2-135m").path
    model = Llama.load(folder)
    shelf, problem = Shelf(model), Problem(32)
    start = problem.verify("47383412")
    text = shelf.text()
    prompt = text.encode(text.render([{"role": "user", "content": problem.prompt("47383412", start)}]))
    legal = orjson.dumps(problem.grammar()).decode()
    data = []
    for layout in LAYOUTS:
        ids = text.encode(layout)
        assert len(ids) == len(layout)  # a token each
        data.append(
            Datum(
                tokens=prompt + ids, prompt_length=len(prompt), mask=[1] * len(ids), logprobs=[0.0] * len(ids),
                reward=problem.verify(layout).value, record_id=layout, choice=0, temperature=1.0, lag=0, group="0",
                legal=legal,
            )
        )  # fmt: skip
    objective = DiscoverRecipe().objective()
    before = rate(model, shelf, None, data)
    assert sum(before["33338822"]) < -1
    assert before["33338822"][-1] == pytest.approx(0, abs=1e-3)  # the one legal digit
    lora: Lora | None = None
    for step in (1, 2):
        now = rate(model, shelf, lora, data)
        sampled = [msgspec.structs.replace(one, logprobs=[min(0.0, x) for x in now[one.record_id]]) for one in data]
        order = Step(
            scenario="demo", part="weights", line="one", step=step, base_release="r0", base_step=0,
            objective=objective.path, options=dict(objective.options), batch_id=f"b{step}",
            unit_ids=[f"{step}{one.record_id}" for one in data], cursor=step, data=sampled,
        )  # fmt: skip
        done = advance(model, tmp_path, order, lambda release: BASE, shelf=shelf)
        assert done.metrics["mismatch"] < 0.1
        assert math.isfinite(done.metrics["beta"])
        lora = Lora.load(model, load_file(Path(done.folder) / "adapter_model.safetensors"), 8, 16.0)
    after = rate(model, shelf, lora, data)
    assert sum(after["656564"]) > sum(before["656564"]) + 0.5
