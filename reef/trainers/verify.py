"""Whether a backend does, for real, what a step promises: a few small steps on text of its own, and what must hold.

    python -m reef.trainers.verify tinker --model FOLDER --set base_model=NAME
    python -m reef.trainers.verify slime --model FOLDER --set exchange=FOLDER --full

Knows: the Work protocol, and what can be seen in a step's files. Does not know: a particular backend.
It writes to a temporary folder, and costs what four steps of four short samples cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from reef.core.errors import ReefError
from reef.core.load import load
from reef.core.wire import Datum, Step, Stepped
from reef.engines import WeightFiles
from reef.trainers import WORKS, Ground, Work, folder, options

TEXTS = (
    ("The capital of France is", " Paris, and the capital of Italy is Rome."),
    ("Two and two make", " four, and four and four make eight."),
    ("A week begins on Monday and", " ends on Sunday, seven days later."),
    ("Water freezes at zero degrees", " and boils at a hundred, by the sea."),
)
APART = 0.05
"""How far apart two runs of the same steps may be, of how far a step moves the weights."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reef.trainers.verify", description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=sorted(WORKS))
    parser.add_argument("--model", required=True, type=Path, help="the base model's folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one of training.options")
    parser.add_argument("--full", action="store_true", help="train all weights, not a LoRA")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (1e-4)")
    wanted = parser.parse_args(given)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        chosen = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in wanted.set)}
        with tempfile.TemporaryDirectory(prefix="reef-verify-") as place:
            return 1 if _verify(wanted.backend, wanted.model, chosen, Path(place), wanted.full, wanted.rate) else 0
    except (ReefError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _verify(backend: str, model: Path, chosen: Mapping[str, Any], place: Path, full: bool, rate: float) -> int:
    """Says what holds and what does not; how many do not."""
    base = WeightFiles("base", {}, {"base": {"name": model.name, "digest": ""}, "kind": "base"})
    ground = Ground(model, place, lambda release: base, model.name)
    made: dict[tuple[str, int], Stepped] = {}

    def work() -> Work:
        found: Work = load(WORKS[backend], what="trainer")(ground, options(backend, chosen))
        return found

    def step(by: Work, line: str, number: int) -> None:
        print(f"step {number} of line {line} …", flush=True)
        made[line, number] = by.advance(_order(model, line, number, full, rate), lambda stage, done, total: None)

    first = work()
    step(first, "a", 1)
    step(first, "a", 2)
    first.close()
    step(work(), "b", 1)  # back at the base model
    last = work()
    step(last, "b", 2)  # goes on from what another process made
    last.close()
    one, two, again, after = (_weights(made[key]) for key in (("a", 1), ("a", 2), ("b", 1), ("b", 2)))
    moved = _apart(one, two)
    held = {
        f"two steps differ ({moved:.2e})": moved > 0,
        f"a line that starts again makes the same step ({_apart(one, again):.2e})": _apart(one, again) <= APART * moved,
        f"a restart goes on where the line was ({_apart(two, after):.2e})": _apart(two, after) <= APART * moved,
    }
    losses = [made["a", number].metrics.get("cross_entropy") for number in (1, 2)]
    if losses[0] is not None and losses[1] is not None:
        held[f"the loss on the same text falls ({losses[0]:.4f}, {losses[1]:.4f})"] = losses[1] < losses[0]
    for what, holds in held.items():
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return sum(not holds for holds in held.values())


def _order(model: Path, line: str, number: int, full: bool, rate: float) -> Step:
    from reef.engines.local.text import Text

    text, data = Text(model), []
    for place, (prompt, answer) in enumerate(TEXTS):
        before, behind = text.encode(prompt), text.encode(answer)
        count = len(behind)
        data.append(
            Datum(
                tokens=before + behind, prompt_length=len(before), mask=[1] * count, logprobs=[0.0] * count,
                reward=None, record_id=f"{number:016x}{place:016x}", choice=0, temperature=1.0, lag=0,
            )
        )  # fmt: skip
    return Step(
        scenario="verify",
        part="weights",
        line=line,
        step=number,
        base_release="base",
        base_step=0,
        objective="recipes.sft.loss:SFT",
        options={"learning_rate": rate, "epochs": 1, "kl": 0.0, "rank": 0 if full else 8, "alpha": 16.0, "seed": 0},
        batch_id=f"{line}-{number}",
        unit_ids=[f"{line}-{number}"],
        cursor=number,
        data=data,
    )


def _weights(done: Stepped) -> dict[str, Any]:
    from safetensors.torch import load_file

    _, files, _ = folder.part_files(Path(done.folder))
    found: dict[str, Any] = load_file(next(file for name, file in files.items() if name.endswith(".safetensors")))
    return found


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Root mean square difference."""
    if one.keys() != other.keys():
        return float("inf")
    total = sum(float((one[name].float() - other[name].float()).square().sum()) for name in one)
    count: int = sum(one[name].numel() for name in one)
    return float((total / count) ** 0.5)


if __name__ == "__main__":
    sys.exit(main())
