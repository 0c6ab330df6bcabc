"""Large files: pointers, verification, and what ordinary git and git-lfs make of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import DigestError, InputError
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.releases.lfs import LARGE, large, parse_pointer, pointer


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(0, 10**15))
def test_a_pointer_reads_back(digest, size):
    assert parse_pointer(pointer(digest, size)) == (digest, size)
    assert parse_pointer(pointer(digest, size)[:-1]) is None
    assert parse_pointer(b"x" + pointer(digest, size)) is None


def test_what_is_large():
    assert large("tiny.safetensors", 10)
    assert large("harness.json", LARGE)
    assert not large("harness.json", LARGE - 1)


def object_of(chain: GitChain, release_id: str, name: str = "adapter_model.safetensors") -> Path:
    return chain.files(release_id, "weights")[name]


@pytest.mark.parametrize("remote", ["path", "file://"])
def test_an_ordinary_clone_has_the_exact_bytes(chain, path, base, lora, tmp_path, remote):
    head = chain.publish("default", base, None)
    drafts = [lora(n, 200_000 + n) for n in range(3)]
    for part in drafts:
        head = chain.publish("default", Draft("publish", {"weights": part}), head.id)
    rules = NewPart("tree", {"harness.json": b'{"text":"\r\n' + b"y" * LARGE + b'"}'})
    head = chain.publish("default", Draft("publish", {"harness": rules}), head.id)
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}

    def git(*arguments: str, cwd: Path = tmp_path) -> None:
        subprocess.run(["git", *arguments], cwd=cwd, env=env, check=True, capture_output=True)

    git("lfs", "install", "--skip-smudge")
    git("config", "--global", "core.autocrlf", "true")  # must change nothing
    git("clone", str(path) if remote == "path" else f"file://{path}", "copy")
    copy = tmp_path / "copy"
    assert parse_pointer((copy / "weights/adapter_model.safetensors").read_bytes()) is not None
    git("lfs", "pull", cwd=copy)
    for part, new in (("weights", drafts[-1]), ("harness", rules)):
        for name, content in new.files.items():
            assert (copy / part / name).read_bytes() == content
    git("checkout", "HEAD~2", cwd=copy)
    git("lfs", "pull", cwd=copy)
    model = (copy / "weights/adapter_model.safetensors").read_bytes()
    assert model == drafts[1].files["adapter_model.safetensors"]
    git("lfs", "fsck", cwd=copy)


def test_a_clone_without_its_objects_says_so(chain, path, base, lora, tmp_path):
    first = chain.publish("default", base, None)
    second = chain.publish("default", Draft("publish", {"weights": lora(1)}), first.id)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(path), str(tmp_path / "copy.git")], check=True)
    copy = GitChain(tmp_path / "copy.git")
    assert copy.open() == []
    assert copy.head("default") == second
    assert copy.files(first.id, "weights")
    with pytest.raises(DigestError, match=r"weights/adapter_model.safetensors of release .* only an LFS pointer"):
        copy.files(second.id, "weights")
    assert "only an LFS pointer" in copy.verify("default")[0]
    shutil.copytree(path / "lfs", tmp_path / "copy.git/lfs", dirs_exist_ok=True)
    assert copy.verify("default") == []


def test_a_pointer_is_not_accepted_as_weights(chain, base):
    """case 55"""
    first = chain.publish("a", base, None)
    part = NewPart("full", {"model.safetensors": pointer("0" * 64, 130)})
    with pytest.raises(InputError, match="git lfs pull"):
        chain.publish("a", Draft("publish", {"weights": part}), first.id)


def test_changed_bytes_are_never_handed_out(chain, path, base, lora):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    place = object_of(chain, second.id)
    good = place.read_bytes()
    place.chmod(0o600)
    place.write_bytes(good[:-1] + b"?")
    with pytest.raises(DigestError, match=r"weights/adapter_model.safetensors of release .* does not match"):
        chain.files(second.id, "weights")
    place.write_bytes(good[:-1])
    with pytest.raises(DigestError, match="bytes where"):
        chain.files(second.id, "weights")
    place.unlink()
    with pytest.raises(DigestError, match="missing"):
        chain.files(second.id, "weights")
    third = chain.publish("a", Draft("publish", {"weights": lora(1)}, step=9), second.id)
    assert object_of(chain, third.id).read_bytes() == good, "publishing the same bytes again heals the object"
    assert chain.verify("a") == []


def test_a_verification_is_remembered_until_the_file_changes(chain, base, lora, monkeypatch):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    place = object_of(chain, second.id)
    hashed = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *rest, **more: hashed.append(self) or real(self, *rest, **more))
    chain.files(second.id, "weights")
    assert hashed == []
    stat = place.stat()
    os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    chain.files(second.id, "weights")
    assert hashed == [place]


def test_a_damaged_small_file_is_made_again(chain, base):
    first = chain.publish("a", base, None)
    place = chain.files(first.id, "weights")["weights.json"]
    place.chmod(0o600)
    place.write_bytes(b"{}")
    assert chain.files(first.id, "weights")["weights.json"].read_bytes() == b'{"kind":"base"}'
    place.unlink()
    assert chain.files(first.id, "weights")["weights.json"].read_bytes() == b'{"kind":"base"}'


def test_what_killed_processes_left_is_removed(chain, path, base):
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (path / "reef/tmp" / f"{dead}-0123").write_bytes(b"half")
    mine = path / "reef/tmp" / f"{os.getpid()}-4567"
    mine.write_bytes(b"being written")
    old = path / "reef/tmp" / f"{os.getpid()}-89ab"
    old.write_bytes(b"from another life of this process id")
    os.utime(old, (0, 0))
    GitChain(path).open()
    assert list((path / "reef/tmp").iterdir()) == [mine]
