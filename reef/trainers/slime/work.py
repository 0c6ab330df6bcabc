"""Steps by slime: a batch into the exchange folder, weights out of it, checked, into the training folder.

Knows: which recipes' losses slime can be asked for exactly, and how its answer is checked and taken over.
Does not know: slime's processes, parallelism, checkpoints: they are the other side's (`run`, `rollout`).

- Slime weighs a whole answer by one number and divides by the batch's trained tokens. A loss with a common name
  (`objective.Common`) whose weights are alike within each answer is asked for in just that way; no other is.
- A batch has one name, however often it is asked for, so an order that is repeated finds what was made of it.
- Late is not lost: a step that timed out is asked for again, and takes over what has come meanwhile.
- Unverified against slime itself, and says so when it begins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from reef.core.errors import ConfigError, ReefError, StoreError, TrainError, UpstreamError
from reef.core.wire import Datum, Step, Stepped
from reef.engines.local.layout import tensor_shapes
from reef.trainers import Ground, Report, folder
from reef.trainers.away import (
    Base,
    Passes,
    check_lora,
    examine,
    full_files,
    lora_files,
    objective_of,
    origin,
    rescale,
    sequences,
)
from reef.trainers.local.objective import Common, Objective, Plan, Rows
from reef.trainers.slime import Options
from reef.trainers.slime.exchange import Exchange, Torn, read, sha256

NAME = "slime"
OPEN = 1e9
"""The upper bound of a ratio that has none."""
COPY = 1 << 24  # bytes of a tensor file that are copied at a time

log = logging.getLogger(__name__)


class SlimeWork:
    def __init__(self, ground: Ground, options: Options) -> None:
        log.warning("the slime backend is unverified: no step of it was ever made by slime itself")
        self._ground = ground
        self._options = options
        self._base = Base.read(ground.folder)
        self._exchange = Exchange(Path(options.exchange).expanduser().absolute())

    def close(self) -> None:
        pass

    def advance(self, order: Step, report: Report) -> Stepped:
        """ConfigError for a loss that slime cannot be asked for; UpstreamError while no weights come, or slime refuses;
        TrainError when this step cannot be made."""
        if (done := folder.answered(self._ground.training, order)) is not None:
            return done
        began = time.monotonic()
        report("open", 0, 1)
        left_out: list[str] = []
        data, heat = _alike(order.data, left_out)
        batch = self._base.batch(data, left_out)
        examine(NAME, order, batch, passes=False)
        objective = objective_of(order)
        plan = objective.plan
        start = origin(NAME, self._ground, order, plan)
        updates = int(start.remote["updates"]) if start.remote else 0
        metrics = {"left_out": float(len(left_out))} | dict(objective.prepare(Passes(updates), batch))
        losses = _common(order, objective, batch)
        parent = start.remote["name"] if start.remote else None
        name = name_of(order, parent)
        self._offer(name, parent, order, plan, batch, losses, heat)
        said = self._wait(name, order, report)
        report("write", 0, 1)
        remote = {"backend": NAME, "name": name, "rollout": said["rollout"], "updates": updates + 1}
        base = start.base or {"name": self._ground.name, "digest": self._ground.digest}
        kind, files = self._take(said, plan, base, remote)
        metrics["train_seconds"] = time.monotonic() - began
        done = folder.write(self._ground.training, order, kind, files, metrics)
        if parent is not None:
            self._exchange.withdraw(parent)
        return done

    # --- out ----------------------------------------------------------------------------------------------------------

    def _offer(
        self,
        name: str,
        parent: str | None,
        order: Step,
        plan: Plan,
        batch: Sequence[Rows],
        losses: Sequence[Common],
        heat: float,
    ) -> None:
        said = {
            "batch": order.batch_id,
            "scenario": order.scenario,
            "line": order.line,
            "step": order.step,
            "parent": parent,
            "kind": "full" if plan.rank == 0 else "lora",
            "rank": plan.rank,
            "wants": _wants(plan, losses[0], heat),
        }
        try:
            for other in self._exchange.batches():  # an order that was given up: nobody waits for its weights
                if other["name"] not in (name, parent) and read(self._exchange.weights(other["name"])) is None:
                    self._exchange.withdraw(other["name"])
            self._exchange.offer(name, said, _samples(batch, losses))
        except Torn as error:
            raise UpstreamError(f"the exchange folder is damaged: {error}") from None
        except OSError as error:
            raise _disk(error, self._exchange.root) from error

    # --- back ---------------------------------------------------------------------------------------------------------

    def _wait(self, name: str, order: Step, report: Report) -> dict[str, Any]:
        """The marker of the weights that were made of this batch."""
        exchange, seconds = self._exchange, self._options.seconds
        since, claimed = time.monotonic(), False
        while True:
            try:
                if (refusal := read(exchange.refused(name))) is not None:
                    why = f"slime refused the batch: {refusal.get('why')}"
                    try:
                        exchange.refused(name).unlink(missing_ok=True)  # the next one who asks may meet another slime
                    except OSError as error:  # slime may run as somebody else
                        why += f". Remove {exchange.refused(name)} ({error.strerror}), or it stands"
                    raise UpstreamError(why)
                said = read(exchange.weights(name))
                if not claimed and self._claimed(name):
                    since, claimed = time.monotonic(), True
            except Torn as error:
                raise UpstreamError(f"the exchange folder is damaged: {error}") from None
            if said is not None:
                if (said.get("batch"), said.get("step"), said.get("name")) != (order.batch_id, order.step, name):
                    raise UpstreamError(
                        f"slime's weights are of batch {said.get('batch')} and step {said.get('step')}, not of "
                        f"{order.batch_id} and {order.step}; remove {exchange.weights(name)} and start slime again"
                    )
                return said
            waited = time.monotonic() - since
            if waited >= seconds:
                raise UpstreamError(
                    f"slime {'has trained the batch' if claimed else 'has not taken the batch'} for {waited:.0f} s; "
                    f"see whether it runs and sees {exchange.root} (docs/trainers.md). The batch waits there",
                    status=504,
                )
            report("train" if claimed else "queue", int(waited), math.ceil(seconds))
            time.sleep(self._options.poll)

    def _claimed(self, name: str) -> bool:
        claims = (self._exchange.root / "rollouts").glob("[0-9]*.json")
        newest = max(claims, key=lambda path: int(path.stem), default=None)
        return newest is not None and (read(newest) or {}).get("name") == name

    def _take(
        self, said: Mapping[str, Any], plan: Plan, base: Mapping[str, Any], remote: Mapping[str, Any]
    ) -> tuple[str, dict[str, folder.Content]]:
        """A step's files from the folder that the marker names, each checked against its digest and the base."""
        place = Path(said["folder"])
        for file, (digest, size) in said["files"].items():
            where = place / file
            try:
                same = where.is_file() and where.stat().st_size == size and sha256(where) == digest
            except OSError as error:
                raise UpstreamError(
                    f"{where} cannot be read ({error.strerror}); let the server's user read it"
                ) from None
            if not same:
                raise UpstreamError(
                    f"{where} is missing or does not match what slime said of it; remove "
                    f"{self._exchange.weights(said['name'])} and start slime again, which trains the batch anew"
                )
        if plan.rank == 0:
            shards = [place / file for file in said["files"] if file.endswith(".safetensors")]
            return "full", full_files(merged(shards, self._base), base, remote)
        if "adapter_model.safetensors" not in said["files"]:
            raise ConfigError("slime gave whole weights and the recipe trains a LoRA; set train: full")
        config = json.loads((place / "adapter_config.json").read_bytes())
        if config.get("r") != plan.rank:
            raise TrainError(f"the LoRA that came back has rank {config.get('r')}, the recipe says {plan.rank}")
        try:
            given = load_file(place / "adapter_model.safetensors")
        except Exception as error:  # safetensors has a class of its own
            raise TrainError(f"the LoRA that came back cannot be read ({error})") from None
        tensors = rescale(check_lora(given, plan.rank, self._base), float(config["lora_alpha"]), plan.alpha)
        return "lora", lora_files(tensors, plan, base, remote)


def name_of(order: Step, parent: str | None) -> str:
    """One for one order: what is trained, from which weights."""
    whole = "\0".join((order.scenario, order.part, order.line, str(order.step), order.batch_id, parent or ""))
    return f"{order.step:06d}-{hashlib.sha256(whole.encode()).hexdigest()[:24]}"


def _alike(data: Sequence[Datum], left_out: list[str]) -> tuple[list[Datum], float]:
    """The samples of the temperature that most have: slime has one for all. The others are left out."""
    sampled = Counter(datum.temperature for datum in data if datum.chat is None)
    heat = sampled.most_common(1)[0][0] if sampled else 1.0
    kept = []
    for datum in data:
        if datum.chat is None and datum.temperature != heat:
            left_out.append(
                f"sample {datum.record_id}:{datum.choice} cannot be trained: it was sampled at temperature "
                f"{datum.temperature:g}, most of the batch at {heat:g}, and slime has one for all"
            )
            log.warning("left out of the step: %s", left_out[-1])
        else:
            kept.append(datum)
    return kept, heat


def _common(order: Step, objective: Objective, batch: Sequence[Rows]) -> list[Common]:
    ask: Callable[[Rows], Common | None] = getattr(objective, "common", lambda rows: None)
    named = [ask(rows) for rows in batch]
    found = [loss for loss in named if loss is not None]
    why = None
    if objective.plan.epochs != 1:
        why = "it makes several updates of one batch; set epochs: 1"
    elif objective.plan.teacher is not None:
        why = "it has a teacher"
    elif len(found) < len(named):
        why = "it has no common name"
    elif any(not _even(rows, loss) for rows, loss in zip(batch, found, strict=True)):
        why = "it weighs the tokens of one answer differently"
    if why is None:
        return found
    raise ConfigError(
        f"slime cannot be asked for the loss of {order.objective} with these options: {why}. Set training.backend to "
        "local or ray, or choose options that do without (docs/trainers.md)"
    )


def _even(rows: Rows, loss: Common) -> bool:
    if loss.name == "cross_entropy":
        return bool(torch.allclose(loss.weights * rows.total.tokens, rows.mask, rtol=1e-5, atol=1e-7))
    lengths = list(rows.lengths)
    parts = zip(torch.split(loss.weights, lengths), torch.split(rows.mask, lengths), strict=True)
    return all(bool((weights[mask != 0].diff().abs() <= 1e-6 * weights.abs().max()).all()) for weights, mask in parts)


def _wants(plan: Plan, loss: Common, heat: float) -> dict[str, Any]:
    free = loss.name == "importance_sampling"
    return {
        "loss": "ppo" if free else loss.name,
        "low": 1.0 if free else loss.low,
        "high": OPEN if free else loss.high,
        "dual": loss.dual,
        "temperature": heat,
        "learning_rate": plan.learning_rate,
        "betas": list(plan.betas),
        "weight_decay": plan.weight_decay,
        "clip": plan.clip,
    }


def _samples(batch: Sequence[Rows], losses: Sequence[Common]) -> Iterator[dict[str, Any]]:
    """Slime's samples, by the names of its `Sample`. `reward` is the weight of the whole answer, times the trained
    tokens of the batch that slime divides by; the reward itself is `raw_reward`."""
    number = 0
    for rows, loss in zip(batch, losses, strict=True):
        at = 0
        for whole, length, reward in zip(sequences(rows.packed), rows.lengths, rows.rewards, strict=True):
            own = slice(at, at + length)
            at += length
            mask = rows.mask[own]
            if not bool(mask.any()):
                continue  # it would count as a token of the batch
            weight = float(loss.weights[own][mask != 0][0]) * rows.total.tokens
            yield {
                "index": number,
                "group_index": number,
                "rollout_id": number,
                "prompt": "",
                "response": "",
                "tokens": whole,
                "response_length": length,
                "reward": weight,
                "loss_mask": [int(one) for one in mask.tolist()],
                "rollout_log_probs": rows.logprobs[own].tolist(),
                "status": "completed",
                "metadata": {"raw_reward": reward if reward is not None else 0.0},
            }
            number += 1


def merged(shards: Sequence[Path], base: Base) -> folder.Content:
    """One safetensors file out of a checkpoint's shards, checked first: every tensor of the base, of its shape, of a
    type that is served, finite. TrainError names the first that is wrong."""
    where: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    try:
        for shard in sorted(shards):
            for name, (dtype, shape) in tensor_shapes(shard).items():
                where[name] = (shard, dtype, shape)
    except ReefError as error:
        raise TrainError(f"the weights that came back: {error.message}") from None
    for name, (_, shape) in base.shapes.items():
        got = where.get(name)
        if got is None or got[2] != shape or got[1] not in ("BF16", "F16", "F32"):
            raise TrainError(
                f"the weights that came back do not fit the base: {name} is {got and got[1:]}, expected {shape}"
            )
    for shard in sorted(shards):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor: Tensor = file.get_tensor(name)
                if name in base.shapes and not bool(torch.isfinite(tensor).all()):
                    raise TrainError(f"the weights that came back have values that are not finite in {name}")
    wanted = {name: where[name] for name in sorted(base.shapes)}
    return lambda target: _merge(wanted, target)


def _merge(wanted: Mapping[str, tuple[Path, str, tuple[int, ...]]], target: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: list[tuple[Path, int, int]] = []
    at = 0
    heads = {shard: _head(shard) for shard in {shard for shard, _, _ in wanted.values()}}
    for name, (shard, dtype, shape) in wanted.items():
        start, entries = heads[shard]
        first, last = entries[name]["data_offsets"]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + last - first]}
        places.append((shard, start + first, last - first))
        at += last - first
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for shard, begin, left in places:
            with shard.open("rb") as file:
                file.seek(begin)
                while left:
                    piece = file.read(min(COPY, left))
                    if not piece:
                        raise OSError(errno.EIO, f"{shard} ended early")
                    out.write(piece)
                    left -= len(piece)


def _head(shard: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begins, and its header."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _disk(error: OSError, root: Path) -> StoreError:
    return StoreError(
        f"a batch cannot be written to {root} ({error.strerror or error}); see that the folder is there, that the "
        "server's user may write to it, and that its disk has space"
    )
