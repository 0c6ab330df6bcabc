"""Steps of the backend `ray`, from the trainer's process: what workers need, tries, and the result on disk.

Knows: the training folder, which it alone reads and writes; how often a step is tried.
Does not know: torch, or what a worker does.

- A step that loses a worker, a machine or a Ray of our own is made again from the last acknowledged one by fresh
  workers, `retries` times. Nothing was written until then, so nothing trains twice.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from reef.core.errors import MissingError, TrainError
from reef.core.wire import Step, Stepped
from reef.engines import WeightFiles
from reef.trainers import Ground, Report, folder, origin
from reef.trainers.ray import Options
from reef.trainers.ray.cluster import Cluster
from reef.trainers.ray.files import Sight
from reef.trainers.ray.group import Group, Lost
from reef.trainers.ray.worker import Base, Task, Weights

log = logging.getLogger(__name__)


class _Closed(Exception):
    """The process ends."""


class RayWork:
    """`compute` is what the base model is held and computed in. A `cluster` that is given outlives this."""

    def __init__(
        self, ground: Ground, options: Options, compute: str = "bfloat16", cluster: Cluster | None = None
    ) -> None:
        self._ground, self._options, self._compute = ground, options, compute
        self._cluster, self._given = cluster or Cluster(options, ground.training), cluster is not None
        self._group: Group | None = None
        self._closed = threading.Event()
        self._busy = threading.Lock()

    def advance(self, order: Step, report: Report) -> Stepped:
        with self._busy:
            return self._advance(order, report)

    def close(self) -> None:
        self._closed.set()
        with self._busy:  # a step in the making sees the flag within a second
            self._drop()
            if not self._given:
                self._cluster.close()

    @property
    def workers(self) -> list[tuple[str, int]]:
        """Host and process id of each, the first one first."""
        return self._group.pids if self._group is not None else []

    def _advance(self, order: Step, report: Report) -> Stepped:
        began = time.monotonic()
        self._told(report, "open", 0, 1)
        found = origin.find(self._ground.training, order, self._ground.resolve, self._ground.digest).own()
        for attempt in range(self._options.retries + 1):
            try:
                group = self._team(partial(self._told, report))
                task = self._task(order, found, group)
                group.send(task.files(), self._waiting)
                reply = group.step(msgspec.msgpack.encode(order), task, partial(self._told, report))
                self._told(report, "write", 0, 1)
                files: dict[str, folder.Content] = {
                    name: partial(group.fetch, name, size, self._waiting) for name, size in reply.files
                }
                metrics = dict(reply.metrics or {}) | {"train_seconds": time.monotonic() - began}
                return folder.write(self._ground.training, order, reply.kind, files, metrics)
            except Lost as lost:
                log.warning(
                    "step %d of line %s lost its workers (try %d of %d): %s",
                    order.step, order.line, attempt + 1, self._options.retries + 1, lost,
                )  # fmt: skip
                last = str(lost)
                self._drop()
                if not self._cluster.alive():
                    self._cluster.close()
            finally:
                if self._group is not None and not self._group.whole:
                    self._drop()
        raise TrainError(
            f"step {order.step} lost its workers {self._options.retries + 1} times, the last time: {last}; if memory "
            f"ran out use more workers or shorter samples, else look into {self._cluster.logs}"
        )

    def _team(self, report: Report) -> Group:
        """The workers, started where there are none."""
        if self._group is not None and self._cluster.alive():
            return self._group
        self._drop()
        if not self._cluster.alive():
            self._cluster.close()
        report("workers", 0, self._options.workers)
        self._cluster.open(self._waiting)
        place = self._ground.folder
        files = tuple(Sight.of(file) for file in sorted(place.iterdir()) if file.is_file())
        base = Base(str(place), files, self._ground.name, self._ground.digest, self._compute)
        self._group = Group(self._cluster, self._options, base)
        try:
            self._group.start(self._waiting)
        except BaseException:
            self._drop()
            raise
        report("workers", self._options.workers, self._options.workers)
        return self._group

    def _task(self, order: Step, found: origin.Origin, group: Group) -> Task:
        source = found.source
        kept: tuple[Sight, ...] = ()
        if found.kept is not None:
            kept = tuple(Sight.of(found.kept / name) for name in origin.STATE)
        name = group.wants(order.objective, order.options)
        teacher = None if name is None else (name, self._teacher(name))
        return Task(_weights(source), kept, found.cold, teacher)

    def _teacher(self, name: str) -> Weights | None:
        """The files of a teacher: a folder's, or a release's. None: there is no such release, as workers will say."""
        place = Path(name).expanduser()
        if place.is_dir():
            files = {file.name: file for file in sorted(place.iterdir()) if file.is_file()}
            return _weights(WeightFiles("folder", files, {}))
        try:
            return _weights(self._ground.resolve(name))
        except MissingError:
            return None

    def _told(self, report: Report, stage: str, done: int, total: int) -> None:
        self._waiting()
        report(stage, done, total)

    def _waiting(self) -> None:
        if self._closed.is_set():
            raise _Closed

    def _drop(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _weights(source: WeightFiles) -> Weights:
    files = tuple((name, Sight.of(file)) for name, file in source.files.items())
    return Weights(source.kind, files, dict(source.meta))
