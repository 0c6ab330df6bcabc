"""A team of workers in a Ray cluster: placed, made to meet, told to make a step, listened to, and let go.

Knows: placement groups, actors, what their death looks like. Does not know: what a step is made of, or tries.

- A team is whole or nothing: when one worker is lost the others wait in vain, so all are killed.
- `Lost` is the end of a team, whatever took it: a worker, a machine, the head.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from reef.core.disk import advice, full
from reef.core.errors import BY_NAME, StoreError, TrainError, WireError
from reef.trainers import Report
from reef.trainers.ray import Options
from reef.trainers.ray.cluster import Cluster, threads
from reef.trainers.ray.files import CHUNK, Sight
from reef.trainers.ray.worker import Base, Reply, Task, Worker

LOOK = 0.2  # seconds between two looks at how far a step is
GRACE = 10.0  # seconds in which workers leave a step, or show that one of them is dead
CALL = 30.0  # seconds that a small question may take

log = logging.getLogger(__name__)


class Lost(Exception):
    """Workers are gone, or say nothing any more."""


class Group:
    def __init__(self, cluster: Cluster, options: Options, base: Base) -> None:
        self._cluster, self._options, self._base = cluster, options, base
        self._ray: Any = cluster.ray
        self._workers: list[Any] = []
        self._placement: Any = None
        self.pids: list[tuple[str, int]] = []

    def start(self, waiting: Callable[[], None]) -> None:
        """Place the workers and let them meet. WireError when the cluster has no room for them."""
        began = time.monotonic()
        try:
            self._place(waiting)
            self._meet(waiting)
        except self._faults() as error:
            raise Lost(f"the workers did not start: {_first_line(error)}") from None
        where = ", ".join(f"{host} {pid}" for host, pid in self.pids)
        log.info("%d workers after %.1f s: %s", len(self._workers), time.monotonic() - began, where)

    def wants(self, objective: str, options: Any) -> str | None:
        """The teacher that an objective names."""
        return self._ask(self._workers[0].wants.remote(objective, options)).words or None

    def send(self, files: Collection[Sight], waiting: Callable[[], None]) -> None:
        """Give every worker the files it does not see."""
        try:
            lacking = self._ray.get([one.missing.remote(list(files)) for one in self._workers], timeout=CALL)
            for file in dict.fromkeys(one for missing in lacking for one in missing):
                to = [worker for worker, missing in zip(self._workers, lacking, strict=True) if file in missing]
                with Path(file.path).open("rb") as source:
                    for offset in range(0, max(1, file.size), CHUNK):
                        waiting()
                        chunk = self._ray.put(source.read(CHUNK))
                        calls = [one.receive.remote(file, offset, chunk) for one in to]
                        self._ray.get(calls, timeout=self._options.timeout)
        except self._faults() as error:
            if (no_room := full(getattr(error, "cause", None) or error)) is not None:
                words = f"a worker cannot keep the weights that it needs ({no_room.strerror}); {advice(no_room)}"
                raise StoreError(words) from None
            raise Lost(_first_line(error)) from None

    def step(self, order: bytes, task: Task, report: Report) -> Reply:
        """One step by all of them: what the first one answers. Its files wait there (`fetch`). Whatever `report` raises
        stops the step."""
        try:
            shared = self._ray.put(order)
            calls = [one.step.remote(shared, task) for one in self._workers]
            try:
                replies = self._follow(calls, report)
            except self._faults():
                raise
            except BaseException:
                self._leave(calls)
                raise
        except self._faults() as error:
            raise Lost(_first_line(error)) from None
        return self._verdict(replies)

    def fetch(self, name: str, size: int, waiting: Callable[[], None], file: Path) -> None:
        """A file of the step that was made last, written here."""
        first = self._workers[0]
        try:
            with file.open("wb") as out:
                coming = first.read.remote(name, 0, CHUNK)
                for offset in range(CHUNK, size + CHUNK, CHUNK):
                    waiting()
                    chunk = self._ray.get(coming, timeout=self._options.timeout)
                    if offset < size:
                        coming = first.read.remote(name, offset, CHUNK)
                    out.write(chunk)
        except self._faults() as error:
            raise Lost(_first_line(error)) from None

    def close(self) -> None:
        """Kill the workers and give their place back. Both are asked of Ray's head: of one that is gone a minute is
        waited for an answer, and what is left of a Ray of our own goes with it."""
        if self._cluster.alive():
            for worker in self._workers:
                with contextlib.suppress(Exception):
                    self._ray.kill(worker)
            if self._placement is not None:
                from ray.util.placement_group import remove_placement_group

                with contextlib.suppress(Exception):
                    remove_placement_group(self._placement)
        self._workers, self._placement = [], None

    # --- starting -----------------------------------------------------------------------------------------------------

    def _place(self, waiting: Callable[[], None]) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options, cpus = self._options, threads(self._options)
        bundle = {"CPU": float(cpus)} | ({"GPU": float(options.gpus)} if options.gpus else {})
        self._placement = placement_group([bundle] * options.workers, strategy="PACK")
        ready = self._placement.ready()
        until = time.monotonic() + options.timeout
        while not self._ray.wait([ready], timeout=LOOK)[0]:
            waiting()
            self._watch()
            if time.monotonic() > until:
                have = self._ray.cluster_resources()
                raise WireError(
                    f"the Ray cluster had no room for {options.workers} workers of {bundle} in {options.timeout:.0f} s "
                    f"(it has {have.get('CPU', 0):.0f} CPU and {have.get('GPU', 0):.0f} GPU in all); set "
                    "training.options workers and cpus lower, or add machines"
                )
        made = self._ray.remote(Worker)
        for number in range(options.workers):
            chosen = made.options(
                num_cpus=cpus,
                num_gpus=options.gpus,
                max_concurrency=4,  # a step, and questions about it
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, number),
            )
            self._workers.append(chosen.remote(os.getcwd(), self._cluster.spool, os.nice(0), cpus))

    def _meet(self, waiting: Callable[[], None]) -> None:
        self.pids = self._wait([one.pid.remote() for one in self._workers], waiting)
        (host, port), *_ = self._wait([self._workers[0].listen.remote(self._cluster.own)], waiting)
        size, options = len(self._workers), self._options
        calls = [
            one.join.remote(self._base, host, port, rank, size, options.gpus > 0, options.timeout)
            for rank, one in enumerate(self._workers)
        ]
        try:
            self._verdict(self._wait(calls, waiting))
        except TrainError as error:  # no batch was looked at yet, so it is no batch's fault
            raise WireError(f"a worker cannot begin: {error.message}") from None

    def _wait(self, calls: Sequence[Any], waiting: Callable[[], None]) -> list[Any]:
        """All answers. One that fails is enough to end this."""
        until = time.monotonic() + self._options.timeout
        left = list(calls)
        while left:
            done, left = self._ray.wait(left, num_returns=len(left), timeout=LOOK)
            self._ray.get(done)
            waiting()
            self._watch()
            if time.monotonic() > until:
                raise Lost(f"a worker said nothing for {self._options.timeout:.0f} s")
        return list(self._ray.get(list(calls)))

    # --- a step -------------------------------------------------------------------------------------------------------

    def _follow(self, calls: Sequence[Any], report: Report) -> list[Reply]:
        """The answers of all, with the first one's progress on the way. A worker that failed alone leaves the others
        waiting for it: then what there is counts."""
        left, found = list(calls), dict[Any, Reply]()
        seen, heard, ending = 0, time.monotonic(), None
        while left:
            done, left = self._ray.wait(left, num_returns=len(left), timeout=LOOK)
            for call, reply in zip(done, self._ray.get(done), strict=True):
                found[call] = reply
                if reply.fate != "made" and ending is None:
                    ending = time.monotonic() + GRACE
            news = self._ray.get(self._workers[0].news.remote(seen), timeout=CALL)
            for one in news:
                report(*one)
            seen, now = seen + len(news), time.monotonic()
            heard = now if news else heard
            if ending is not None and now > ending:
                break
            if now > heard + self._options.timeout:
                raise Lost(f"a step made no progress for {self._options.timeout:.0f} s")
            self._watch()
        if left:
            self.close()
        return [found[call] for call in calls if call in found]

    def _leave(self, calls: Sequence[Any]) -> None:
        """Stop a step that nobody wants any more; workers that do not listen are killed."""
        with contextlib.suppress(Exception):
            for worker in self._workers:
                worker.stop.remote()
            _, left = self._ray.wait(list(calls), num_returns=len(calls), timeout=GRACE)
            if not left:
                return
        self.close()

    def _watch(self) -> None:
        if not self._cluster.alive():
            raise Lost("Ray's own processes are gone")

    @property
    def whole(self) -> bool:
        return bool(self._workers)

    def _ask(self, call: Any) -> Reply:
        try:
            return self._verdict([self._ray.get(call, timeout=self._options.timeout)])
        except self._faults() as error:
            raise Lost(_first_line(error)) from None

    def _verdict(self, replies: Sequence[Reply]) -> Reply:
        """The first worker's answer when all made it. A ReefError of one is raised here as it was there."""
        for reply in replies:
            if reply.fate == "error":
                raise BY_NAME.get(reply.error, TrainError)(reply.words, param=reply.param)
        for reply in replies:
            if reply.fate == "peer":
                raise Lost(reply.words)
            if reply.fate == "failed":
                raise TrainError(reply.words)
        return replies[0]

    def _faults(self) -> tuple[type[BaseException], ...]:
        """What Ray raises when a worker, a machine or the head is gone."""
        from ray.exceptions import RayError

        return (RayError, ConnectionError)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
