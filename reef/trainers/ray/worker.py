"""One worker: a Ray actor that makes its share of each step. Torch is loaded once it has joined its team, not before.

Knows: the driver's calls, and that a step runs in one thread while others ask how far it is.
Does not know: where it was placed, what becomes of a step, what happens when it dies (the driver's business).

- Nothing it answers is an exception: Ray would wrap it, and the driver must tell a batch that cannot be trained from a
  worker that is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from reef.core.disk import advice, full
from reef.core.errors import DigestError, MissingError, ReefError
from reef.core.wire import Step
from reef.engines import WeightFiles
from reef.trainers.origin import Origin
from reef.trainers.ray.files import Sight, Spool, write

if TYPE_CHECKING:
    from reef.trainers.local.llama import Llama
    from reef.trainers.local.shelf import Shelf
    from reef.trainers.ray.team import Member

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """The base model: its folder on the driver's machine, its files there, its name and the sha256 of its weights."""

    folder: str
    files: tuple[Sight, ...]
    name: str
    digest: str | None
    compute: str  # bfloat16 | float32


@dataclass(frozen=True, slots=True)
class Weights:
    """`WeightFiles` by how they are seen: each name with the file behind it."""

    kind: str
    files: tuple[tuple[str, Sight], ...]
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """All of a step but its batch. `teacher` is (name, its weights, or None where the chain has no such release)."""

    source: Weights
    kept: tuple[Sight, ...]
    cold: bool
    teacher: tuple[str, Weights | None] | None

    def files(self) -> list[Sight]:
        weights = [self.source, self.teacher[1] if self.teacher is not None else None]
        return [*self.kept, *(file for one in weights if one is not None for _, file in one.files)]


@dataclass(frozen=True, slots=True)
class Reply:
    """made: done (the first worker's has kind, files by size, metrics); stopped: asked to; error: a ReefError's name
    and words; failed: any other exception's; peer: another worker is gone."""

    fate: str
    kind: str = ""
    files: tuple[tuple[str, int], ...] = ()
    metrics: Mapping[str, float] | None = None
    error: str = ""
    words: str = ""
    param: str | None = None


class _Stopped(Exception):
    """The driver wants no more of this step."""


class Worker:
    """`folder` is the driver's working folder, where objectives of the user's own are found."""

    def __init__(self, folder: str, spool: str | None, nice: int, threads: int) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads would starve the engine
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        with contextlib.suppress(OSError):
            os.nice(max(0, nice - os.nice(0)))
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        self._spool = Spool(_place(spool))
        self._news: list[tuple[str, int, int]] = []
        self._stop = threading.Event()
        self._member: Member | None = None
        self._model: Llama | None = None
        self._shelf: Shelf | None = None

    # --- joining ------------------------------------------------------------------------------------------------------

    def pid(self) -> tuple[str, int]:
        import torch.distributed  # noqa: F401 (here all workers load it at the same time)

        return socket.gethostname(), os.getpid()

    def listen(self, loopback: bool) -> tuple[str, int]:
        """Open the team's meeting point here; its address."""
        from torch._C._distributed_c10d import TCPStore

        if loopback:
            host = "127.0.0.1"
        else:
            import ray.util

            host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        self._store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return host, port

    def join(self, base: Base, host: str, port: int, rank: int, size: int, gpu: bool, timeout: float) -> Reply:
        """Meet the others and load the base model. Returns when all have."""
        try:
            self._join(base, host, port, rank, size, gpu, timeout)
            return Reply("made")
        except Exception as error:
            return _reply(error)

    def _join(self, base: Base, host: str, port: int, rank: int, size: int, gpu: bool, timeout: float) -> None:
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore
        from torch.distributed.device_mesh import DeviceMesh

        from reef.trainers.local.llama import Llama
        from reef.trainers.local.shelf import Shelf
        from reef.trainers.ray.team import Member

        wait = timedelta(seconds=timeout)
        store = self._store if rank == 0 else TCPStore(host, port, None, False, timeout=wait)
        if gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=PrefixStore("team", store),
            rank=rank,
            world_size=size,
            timeout=wait,
        )
        small = dist.new_group(backend="gloo", timeout=wait)
        mesh = DeviceMesh("cuda" if gpu else "cpu", list(range(size)))
        self._member = Member(mesh, small)
        self._base = base
        self._model = Llama.load(_model_folder(base), getattr(torch, base.compute))
        self._shelf = Shelf(self._model)

    # --- files --------------------------------------------------------------------------------------------------------

    def missing(self, files: Sequence[Sight]) -> list[Sight]:
        return self._spool.missing(files)

    def receive(self, one: Sight, offset: int, chunk: bytes) -> None:
        self._spool.receive(one, offset, chunk)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A part of a file that a step handed back."""
        with (self._spool.made / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    # --- a step -------------------------------------------------------------------------------------------------------

    def wants(self, objective: str, options: Mapping[str, Any]) -> Reply:
        """The teacher that an objective names, in `words`."""
        from reef.core.load import load

        try:
            return Reply("made", words=load(objective, what="objective")(**options).plan.teacher or "")
        except Exception as error:
            return _reply(error)

    def news(self, seen: int) -> list[tuple[str, int, int]]:
        return self._news[seen:]

    def stop(self) -> None:
        """Leave the step in the making, at the next place where all workers are."""
        self._stop.set()

    def step(self, order: bytes, task: Task) -> Reply:
        self._news = []
        self._stop.clear()
        self._spool.clear()
        try:
            return self._step(msgspec.msgpack.decode(order, type=Step), task)
        except Exception as error:
            assert self._member is not None
            self._member.forget()
            return _reply(error)
        finally:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)  # each of the actor's threads keeps what its steps freed

    def _step(self, order: Step, task: Task) -> Reply:
        import torch

        from reef.core.load import load
        from reef.trainers.local.objective import Objective
        from reef.trainers.local.rows import build
        from reef.trainers.local.step import learn, named
        from reef.trainers.local.working import files, open_working
        from reef.trainers.ray.team import moved

        member, model, shelf = self._member, self._model, self._shelf
        assert member is not None
        assert model is not None
        assert shelf is not None
        objective: Objective = load(order.objective, what="objective")(**order.options)
        torch.manual_seed(order.step)  # what an objective draws is the same in all workers

        def report(stage: str, done: int, total: int) -> None:
            if member.anybody(self._stop.is_set()):
                raise _Stopped
            self._news.append((stage, done, total))

        def teacher() -> Any:
            return shelf.teacher(*self._teacher(task, named(objective)), self._base.digest)

        if objective.plan.teacher is not None:
            teacher()
        left_out: list[str] = []
        working = open_working(model, objective, self._origin(task), member)
        batch = build(order.data, shelf.known(), tokens=member.micro_tokens(order.data), left_out=left_out)
        batch = [moved(rows, member.device) for rows in batch]
        with torch.device(member.device):
            metrics = learn(working, objective, batch, teacher, model, member, report)
        kind, made = files(working, lambda tensors: lambda file: write(file if member.first else None, tensors))
        sizes = []
        for name, content in made.items():
            file = self._spool.made / name
            if not isinstance(content, bytes):
                content(file)
            elif member.first:
                file.write_bytes(content)
            if member.first:
                sizes.append((name, file.stat().st_size))
        return Reply("made", kind, tuple(sizes), {"left_out": float(len(left_out))} | metrics)

    def _origin(self, task: Task) -> Origin:
        kept = self._spool.path(task.kept[0]).parent if task.kept else None
        return Origin(self._weights(task.source), kept, task.cold)

    def _teacher(self, task: Task, name: str) -> tuple[str, Any]:
        """The teacher's name as this machine knows it, and where its release is found."""
        weights = task.teacher[1] if task.teacher is not None else None

        def resolve(release: str) -> WeightFiles:
            if weights is None:
                raise MissingError(f"no release {release}")
            return self._weights(weights)

        if weights is not None and weights.kind == "folder" and weights.files:
            return str(self._spool.path(weights.files[0][1]).parent), resolve
        return name, resolve

    def _weights(self, weights: Weights) -> WeightFiles:
        files = {name: self._spool.path(one) for name, one in weights.files}
        return WeightFiles(weights.kind, files, weights.meta)


def _place(wanted: str | None) -> Path:
    """A folder of this worker's own. What a killed worker of this user left beside it is removed."""
    parent = Path(wanted or tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob("reef-ray-*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if old.lstat().st_uid == os.getuid() and not _runs(int(old.name.split("-")[2])):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"reef-ray-{os.getpid()}-", dir=parent))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _model_folder(base: Base) -> Path:
    """The base model here: the driver's folder if that is seen, else what has its path or name and is the same."""
    if all(one.here() for one in base.files):
        return Path(base.folder)
    from reef.engines.local.folder import prepare

    found = prepare(base.folder if os.path.isdir(base.folder) else base.name)
    if base.digest and found.digest != base.digest:
        raise DigestError(
            f"the base model on {socket.gethostname()} is another one than the trainer's ({found.path}, "
            f"{found.digest[:12]}, not {base.digest[:12]}); copy {base.folder} there"
        )
    return found.path


def _reply(error: Exception) -> Reply:
    """What became of a call that raised."""
    if isinstance(error, _Stopped):
        return Reply("stopped")
    if isinstance(error, ReefError):
        return Reply("error", error=type(error).__name__, words=error.message, param=error.param)
    if (no_room := full(error)) is not None:
        words = f"a worker on {socket.gethostname()} cannot write its step ({no_room.strerror}); {advice(no_room)}"
        return Reply("error", error="StoreError", words=words)
    text = "".join(traceback.format_exception(error))
    log.error("%s", text)
    words = f"{type(error).__name__}: {error}"
    lost = type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError") or "gloo" in str(error)
    return Reply("peer" if lost else "failed", error=type(error).__name__, words=words)
