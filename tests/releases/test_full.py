"""A disk that fills up during a publish: an error that says so, the old head intact, all well when there is room."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reef.core.errors import ChainError
from reef.releases import Draft
from reef.releases.chain import GitChain


@contextlib.contextmanager
def tmpfs(size: int) -> Iterator[Path | None]:
    """A small file system of its own; None where we may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def mountable() -> bool:
    with tmpfs(1 << 20) as folder:
        return folder is not None


def fill_a_disk(base, lora):
    with tmpfs(4 << 20) as disk:
        assert disk is not None
        chain = GitChain(disk / "releases.git")
        chain.open()
        head = chain.publish("a", base, None)
        filler = disk / "filler"
        outcomes = []
        for free in range(0, 60, 2):  # KiB left: from not even a temporary file to enough for everything
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            if free:
                os.truncate(filler, max(0, filler.stat().st_size - free * 1024))
            draft = Draft("publish", {"weights": lora(free, 9000)}, step=free)
            said = ""
            try:
                new = chain.publish("a", draft, head.id)
            except ChainError as error:
                said = error.message
            outcomes.append("refused" if said else "made")
            if said:
                assert "space" in said, said
                reopened = GitChain(disk / "releases.git")
                reopened.open()
                assert reopened.head("a") == head
                filler.unlink()
                new = chain.publish("a", draft, head.id)
            assert chain.head("a") == new
            assert new.seq == head.seq + 1
            head = new
            filler.unlink(missing_ok=True)
        assert outcomes[0] == "refused"
        assert outcomes[-1] == "made"
        assert chain.verify("a") == []
        assert list((disk / "releases.git/reef/tmp").iterdir()) == []


def cut_off(path, base, lora, limit):
    """In a child, with RLIMIT_FSIZE, which needs no rights: no file can grow beyond `limit` bytes."""
    chain = GitChain(path)
    chain.open()
    head = chain.publish("a", base, None)
    draft = Draft("publish", {"weights": lora(1, 9000)}, step=1, reason="r" * 2000)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                chain.publish("a", draft, head.id)
            except ChainError as error:
                status = 42 if "space" in error.message else 43
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    fresh = GitChain(path)
    fresh.open()
    assert fresh.head("a") == head
    assert fresh.publish("a", draft, head.id).seq == 1
    assert fresh.verify("a") == []


@pytest.mark.parametrize("limit", [0, 100, 600, 5000, *([None] if mountable() else [])])
def test_a_full_disk(path, base, lora, limit):
    if limit is None:
        fill_a_disk(base, lora)
    else:
        cut_off(path, base, lora, limit)
