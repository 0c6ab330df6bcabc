"""The Ray that the workers run in: one of this trainer's own, or a cluster that is joined by its address.

Knows: how Ray is started, watched, joined and left, and how little of it is needed.
Does not know: workers, steps, torch.

- A Ray of our own listens on the loopback address only, has no dashboard, sends no usage statistics, and keeps its
  files in a folder that goes with it. Its processes end with this one, however that ends: the kernel sees to it.
- A cluster that is away is nobody's batch's fault: WireError, and the step is asked for again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from reef.core.errors import ConfigError, WireError
from reef.trainers.ray import Options

OBJECTS = 200 << 20
"""Bytes of the object store of a Ray of our own: a batch, and files by the chunk."""
LONGEST = 40
"""Characters of its folder's path: Ray puts unix sockets 60 deeper, which may have 107."""
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between tries to join

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # Python processes for tasks that never come
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # a driver whose head is gone would end itself after a minute
    "RAY_DEDUP_LOGS": "0",
}
_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # by its name for other systems: listen on the loopback alone
    "RAY_worker_niceness": "0",  # of this process, which is the trainer's, and not 15 below it
}


class Cluster:
    """`training` is the training folder: a Ray of our own keeps its files beside it, where the path is short enough."""

    def __init__(self, options: Options, training: Path) -> None:
        self._address, self._options = options.address, options
        self._place = _place(training)
        self._head: tuple[str, int] | None = None  # of a Ray of our own
        self._over = threading.Event()
        self.ray: Any = None

    @property
    def own(self) -> bool:
        return self._address is None

    @property
    def logs(self) -> str:
        return f"{self._place}/session_latest/logs" if self.own else "the cluster's logs (ray logs)"

    @property
    def spool(self) -> str | None:
        """Where workers keep files: below the folder of a Ray of our own, elsewhere in the system's."""
        return str(self._place / "spool") if self.own else None

    def open(self, waiting: Callable[[], None]) -> None:
        """Start or join, unless that is done. `waiting` is called between tries and may raise."""
        if self.ray is not None:
            return
        wanted = _QUIET | (_ALONE if self.own else {})
        if not self.own and "RAY_AUTH_TOKEN" in os.environ:
            wanted["RAY_AUTH_MODE"] = "token"  # read once, when Ray is loaded
        os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
        import ray

        with _signals():
            if self.own:
                self._start(ray)
            else:
                self._join(ray, waiting)
        self.ray = ray

    def alive(self) -> bool:
        """Whether a Ray of our own still has all its processes. A cluster's are not ours to see: its calls fail."""
        if self.ray is None:
            return False
        if self._head is None:
            return True
        from ray._private import worker  # the driver's own processes; no public call tells

        node = getattr(worker, "_global_node", None)
        if node is not None and any(name in ("gcs_server", "raylet") for name, _ in node.dead_processes()):
            return False
        try:
            socket.create_connection(self._head, timeout=5).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave a cluster; end a Ray of our own and remove its folder."""
        found, self.ray, self._head = self.ray, None, None
        if found is None:
            return
        with _signals(), contextlib.suppress(Exception):  # what is dead already complains
            found.shutdown()
        self._over.set()
        if self.own:
            shutil.rmtree(self._place, ignore_errors=True)

    def _start(self, ray: Any) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True, mode=0o700)
        began = time.monotonic()
        # Who does not know it cannot talk to this Ray. Left to itself, Ray keeps one in the user's home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        started: Future[None] = Future()
        over = self._over = threading.Event()

        def keep() -> None:
            """What a thread starts ends with that thread, says the kernel; so this one stays."""
            try:
                self._init(ray)
                started.set_result(None)
            except Exception as error:
                started.set_exception(error)
            over.wait()

        threading.Thread(target=keep, name="ray", daemon=True).start()
        try:
            started.result()
        except Exception as error:  # Ray's errors are of many kinds, and a half-started one is left behind
            with contextlib.suppress(Exception):
                ray.shutdown()
            over.set()
            raise WireError(
                f"Ray cannot be started here ({type(error).__name__}: {error}); look into {self.logs}, or set "
                "training.backend to local"
            ) from None
        host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        self._head = (host, int(port))
        log.info("Ray started in %.1f s; its files are in %s", time.monotonic() - began, self._place)

    def _init(self, ray: Any) -> None:
        options = self._options
        ray.init(
            address="local",
            num_cpus=options.workers * threads(options),
            num_gpus=options.workers * options.gpus,
            include_dashboard=False,
            object_store_memory=OBJECTS,
            configure_logging=False,
            log_to_driver=True,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._place),
        )

    def _join(self, ray: Any, waiting: Callable[[], None]) -> None:
        until, pause = time.monotonic() + self._options.timeout, PAUSE
        while True:
            try:
                self._knock()
                ray.init(address=self._address, configure_logging=False, log_to_driver=True, namespace="reef")
                log.info("joined the Ray cluster at %s", self._address)
                return
            except Exception as error:
                with contextlib.suppress(Exception):
                    ray.shutdown()
                if "version mismatch" in str(error).lower():
                    raise WireError(f"the Ray cluster at {self._address}: {error}") from None
                if time.monotonic() + pause > until:
                    raise WireError(
                        f"the Ray cluster at {self._address} could not be joined for {self._options.timeout:.0f} s "
                        f"({type(error).__name__}: {error}); start it (ray start --head), or correct "
                        "training.options.address"
                    ) from None
                log.warning("the Ray cluster at %s cannot be joined (%s); trying again", self._address, error)
            end = time.monotonic() + pause
            while time.monotonic() < end:
                waiting()
                time.sleep(0.2)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _knock(self) -> None:
        """OSError where nobody listens, which Ray itself would take a minute to say."""
        if self._address not in (None, "auto"):
            host, _, port = str(self._address).removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Keep the process's own answer to SIGTERM. Ray replaces it by one that prints a trace and dies, and at its end by
    none. Done in C: Python lets its main thread alone touch signals."""
    libc = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(1024) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, action in kept.items():
        libc.sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(int(number), action, None)


def threads(options: Options) -> int:
    """CPUs of each worker."""
    if options.cpus is not None:
        return options.cpus
    if options.address is not None:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // options.workers)


def _place(training: Path) -> Path:
    """The folder of a Ray of our own: beside the training folder, or, where that path is too long, a private one by
    the same name each time, so that what a killed one left is found again."""
    wanted = (training.parent / "run").resolve() / "ray"
    if len(str(wanted)) <= LONGEST and os.access(wanted.parent, os.W_OK):
        return wanted
    name = f"reef-{os.getuid()}-{hashlib.sha256(str(training.resolve()).encode()).hexdigest()[:10]}"
    parent = Path("/tmp") / name  # noqa: S108 (checked below: ours, 0700, no link)
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    status = parent.lstat()
    if parent.is_symlink() or not parent.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{parent} exists and is not a private folder of yours; remove it, or use a shorter state_dir"
        )
    return parent / "ray"
