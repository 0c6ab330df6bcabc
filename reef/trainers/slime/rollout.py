"""Slime's side: the function that `--rollout-function-path reef.trainers.slime.rollout.generate` names.

Knows: slime's documented hook (args, rollout number, data source), its `Sample`, its arguments, the exchange folder.
Does not know: models. Imports slime only when it is called, and needs no torch of its own.

Slime calls it for rollout n when rollout n - 1 is trained and saved. So it first says where those weights are, then
waits for the batch that starts from them, and hands it over as samples: nothing is generated here.

- A batch that starts from other weights ends slime, after `start.json` says which; `run` starts it again there.
- A batch that wants another loss or optimizer than slime was started with is refused, with the argument to change.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef.trainers.slime.exchange import Exchange, read, write

POLL = 0.2  # seconds between two looks for a batch

log = logging.getLogger(__name__)


class StartAgain(RuntimeError):
    """Slime holds other weights than the batch starts from: its process must end and begin at those."""


def generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The next batch as a `RolloutFnTrainOutput`. Blocks until Reef offers one."""
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput  # type: ignore[import-not-found]
    from slime.utils.types import Sample  # type: ignore[import-not-found]

    if evaluation:
        return RolloutFnEvalOutput(data={})  # Reef evaluates what it serves
    exchange = Exchange(Path(args.rollout_buffer_url))  # an argument: the environment does not reach Ray's actors
    here = publish(exchange, args, rollout_id - 1)
    said = following(exchange, args, here)
    samples = [Sample.from_dict(sample) for sample in exchange.samples(said)]
    args.global_batch_size = len(samples)  # one optimizer step for the whole batch, whatever its size
    claim = {"name": said["name"], "parent": said["parent"]}
    write(exchange.claim(rollout_id), claim)
    log.info("rollout %d trains batch %s of %d samples", rollout_id, said["name"], len(samples))
    return RolloutFnTrainOutput(samples=[[sample] for sample in samples])


def publish(exchange: Exchange, args: Any, trained: int) -> str | None:
    """Make the weights of the rollout before known; the batch that slime is at now, None at the base model."""
    claim = read(exchange.claim(trained)) if trained >= 0 else None
    here = origin(exchange) if claim is None or exchange.start.is_file() else claim["name"]
    if claim is None or here != claim["name"]:
        return here  # slime begins here: nothing was trained in this process
    if read(exchange.weights(here)) is None:
        place = Path(args.save_hf.format(rollout_id=trained))
        if not place.is_dir():
            raise FileNotFoundError(f"{place} is not there: slime must save after every rollout (--save-interval 1)")
        said = read(exchange.batch(here) / "batch.json") or {}
        exchange.publish(here, {"batch": said.get("batch"), "step": said.get("step"), "rollout": trained}, place)
    return here


def origin(exchange: Exchange) -> str | None:
    """Where `run` started slime: the batch whose weights it loaded, None for the base model."""
    said = read(exchange.start)
    exchange.start.unlink(missing_ok=True)
    return said["name"] if said is not None else None


def following(exchange: Exchange, args: Any, here: str | None) -> dict[str, Any]:
    """The offered batch that starts from these weights; waits for it. StartAgain for one that starts from others."""
    while True:
        for said in exchange.batches():
            name = said["name"]
            if read(exchange.weights(name)) is not None or read(exchange.refused(name)) is not None:
                continue
            if why := misfit(args, said["wants"]):
                write(exchange.refused(name), {"name": name, "why": why})
                continue
            if said["parent"] != here:
                place = {"name": said["parent"], "rollout": rollout_of(exchange, said["parent"])}
                write(exchange.start, {**place, "again": True})
                raise StartAgain(f"batch {name} starts from {said['parent'] or 'the base model'}, slime is at {here}")
            _tidy(exchange, args, said["parent"])
            return said
        time.sleep(POLL)


def rollout_of(exchange: Exchange, name: str | None) -> int | None:
    """The rollout whose saved state holds a batch's weights."""
    found = read(exchange.weights(name)) if name is not None else None
    return int(found["rollout"]) if found is not None else None


def _tidy(exchange: Exchange, args: Any, parent: str | None) -> None:
    """The Hugging Face folder before the parent's: Reef holds its own copy of those weights by now."""
    said = read(exchange.batch(parent) / "batch.json") if parent is not None else None
    rollout = rollout_of(exchange, said["parent"]) if said is not None else None
    if rollout is not None:
        shutil.rmtree(args.save_hf.format(rollout_id=rollout), ignore_errors=True)


def misfit(args: Any, wants: Mapping[str, Any]) -> str | None:
    """Which of slime's arguments is not what a batch wants, and what it must be; None when all are."""
    asked: list[tuple[str, Any]] = [
        ("calculate_per_token_loss", True),
        ("lr", wants["learning_rate"]),
        ("lr_decay_style", "constant"),
        ("adam_beta1", wants["betas"][0]),
        ("adam_beta2", wants["betas"][1]),
        ("weight_decay", wants["weight_decay"]),
        ("clip_grad", wants["clip"]),
    ]
    if wants["loss"] == "cross_entropy":
        asked += [("loss_type", "sft_loss")]
    else:
        cispo = wants["loss"] == "cispo"
        asked += [
            ("loss_type", "policy_loss"),
            ("advantage_estimator", "cispo" if cispo else "grpo"),
            ("rewards_normalization", False),
            ("normalize_advantages", False),
            ("use_rollout_logprobs", True),
            ("rollout_temperature", wants["temperature"]),
            ("eps_clip", wants["low"]),
            ("eps_clip_high", wants["high"]),
            ("eps_clip_c", wants["dual"]),
            ("use_kl_loss", False),
            ("kl_coef", 0.0),
            ("entropy_coef", 0.0),
            ("use_tis", False),
            ("use_opsm", False),
            ("use_opd", False),
        ]
    for name, value in asked:
        has = getattr(args, name, None)
        if not (_same(has, value)):
            return (
                f"slime was started with {name} {has}, the recipe wants {value}; start it with that (docs/trainers.md)"
            )
    return None


def _same(has: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(has, int | float) and not isinstance(has, bool):
        return math.isclose(has, wanted, rel_tol=1e-6)
    return bool(has == wanted)
