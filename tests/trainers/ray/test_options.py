"""What the configuration may say, what becomes of it, and how a batch is dealt out. No Ray is started."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reef.core.errors import ConfigError, DigestError, TrainError, WireError
from reef.trainers import options
from reef.trainers.ray import Options
from reef.trainers.ray.cluster import LONGEST, Cluster, threads
from reef.trainers.ray.files import Sight, Spool
from reef.trainers.ray.group import Group
from reef.trainers.ray.worker import Reply, _reply


@pytest.mark.parametrize(
    "address", [None, "auto", "10.0.0.5:6379", "head.example:6379", "ray://head:10001", "[::1]:6379"]
)
def test_addresses(address: str | None) -> None:
    assert options("ray", {"address": address}).address == address


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 0}, "workers is 0; give a whole number from 1 to 1024"),
        ({"workers": True}, "workers is True"),
        ({"gpus": 2}, "gpus is 2; give a whole number from 0 to 1"),
        ({"cpus": 0}, "cpus is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"timeout": 0}, "timeout is 0; give seconds"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"address": "10.0.0.5"}, "give host:port of a Ray head"),
        ({"address": "http://10.0.0.5:8265"}, "give host:port of a Ray head"),
    ],
)
def test_what_cannot_be_meant_says_what_can(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options("ray", given)


def test_without_ray_the_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'reef-learn\[local,ray\]'"):
        Options()


def test_the_machine_is_shared_out_and_a_cluster_is_asked_for_little() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert threads(Options()) == cpus
    assert threads(Options(workers=2 * cpus)) == 1
    assert threads(Options(address="auto")) == 1
    assert threads(Options(address="auto", cpus=7)) == 7


def test_rays_folder_is_in_the_run_folder_or_short_and_private(tmp_path: Path) -> None:
    """Its sockets lie deep below it, and a path of theirs has 107 characters."""
    long = tmp_path / ("x" * 60)
    (long / "run").mkdir(parents=True)
    found = Path(str(Cluster(Options(), long / "training").spool)).parent
    assert len(str(found)) <= LONGEST
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert Path(str(Cluster(Options(), long / "training").spool)).parent == found
    assert Cluster(Options(address="auto"), long / "training").spool is None
    found.parent.rmdir()


def test_no_torch_and_no_ray_before_the_first_order() -> None:
    code = "import sys, reef.trainers.ray.work; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_keeps_what_it_was_sent_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    here = tmp_path / "here"
    here.write_bytes(b"abc")
    seen = Sight.of(here)
    away, other = Sight("/elsewhere/step/a", 5, 1, 1), Sight("/elsewhere/step/b", 0, 2, 1)
    assert spool.missing([seen, away, other]) == [away, other]
    spool.receive(away, 0, b"hel")
    assert spool.missing([away]) == [away]  # half of it is not it
    spool.receive(away, 0, b"hel")
    spool.receive(away, 3, b"lo")
    spool.receive(other, 0, b"")
    assert spool.missing([seen, away, other]) == []
    assert spool.path(seen) == here
    assert spool.path(away).read_bytes() == b"hello"
    assert spool.path(away).parent == spool.path(other).parent  # a folder stays one
    changed = Sight(away.path, 5, 1, 2)
    assert spool.missing([changed]) == [changed]
    spool.receive(changed, 0, b"world")
    assert spool.path(changed).read_bytes() == b"world"
    assert spool.missing([seen]) == []
    assert list((tmp_path / "spool").rglob("a")) == []
    here.write_bytes(b"abcd")
    assert spool.missing([seen]) == [seen]


class Told:
    """What a `Group` asks of Ray, with the answers of workers that cannot begin."""

    def __init__(self, reply: Reply) -> None:
        self.listen = self.pid = self.join = self.missing = self.receive = self
        self._reply = reply

    def remote(self, *given: Any) -> Any:
        return ("host", 1) if len(given) < 2 else self._reply


@pytest.mark.parametrize(
    ("error", "fate"),
    [(RuntimeError("no CUDA"), WireError), (TrainError("no model"), WireError), (DigestError("another"), DigestError)],
)
def test_workers_that_cannot_begin_are_no_batchs_fault(error: Exception, fate: type[Exception]) -> None:
    group = Group(SimpleNamespace(ray=None, own=True), Options(workers=1), SimpleNamespace())  # type: ignore[arg-type]
    group._workers = [Told(_reply(error))]
    group._wait = lambda calls, waiting: list(calls)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(fate):
        group._meet(lambda: None)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: Disk quota exceeded (os error 122)")],
)
def test_a_workers_full_disk_is_no_batchs_fault(error: Exception) -> None:
    assert _reply(error).error == "StoreError"
    assert _reply(RuntimeError("something else")).fate == "failed"
