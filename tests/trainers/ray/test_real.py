"""The embedded model, in float32, by two workers and by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.grpo.recipe import GRPORecipe
from reef.engines import WeightFiles
from reef.engines.local.folder import prepare
from reef.trainers import Ground
from reef.trainers.local.llama import Llama
from reef.trainers.local.step import advance
from reef.trainers.ray import Options
from tests.trainers.ray.kit import Lasting
from tests.trainers.ray.test_step import order, samples

pytestmark = pytest.mark.model


def test_two_workers_make_the_embedded_models_step(tmp_path: Path) -> None:
    model = prepare("smollm2-135m")
    base = WeightFiles("base", {}, {"base": {"name": model.name, "digest": model.digest}, "kind": "base"})
    wanted = order(1, GRPORecipe(rank=4, kl=0.1), options={"learning_rate": 1e-4}, data=samples(1, 6, groups=True))
    whole = Llama.load(model.path, torch.float32)
    mine = advance(whole, tmp_path / "local", wanted, lambda release: base, digest=model.digest)
    ground = Ground(model.path, tmp_path / "ray", lambda release: base, model.name, model.digest)
    work = Lasting(ground, Options(workers=2, cpus=1))
    theirs = work.advance(wanted, lambda stage, done, total: None)
    work.close()
    for name in set(mine.metrics) - {"train_seconds"}:
        assert theirs.metrics[name] == pytest.approx(mine.metrics[name], rel=1e-4, abs=1e-4), name
    one, other = (load_file(Path(done.folder) / "adapter_model.safetensors") for done in (mine, theirs))
    apart = torch.cat([(one[name] - other[name]).abs().reshape(-1) for name in one])
    moved = torch.cat([one[name].abs().reshape(-1) for name in one if "lora_B" in name])
    assert float(moved.max()) == pytest.approx(1e-4, rel=1e-2)  # a first step of Adam is a rate long
    assert float(apart.mean()) < 1e-7
    assert float(apart.max()) < 1e-4
