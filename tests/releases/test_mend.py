"""Opening a chain that a crash or a bad disk has damaged."""

from __future__ import annotations

import logging
import subprocess
import time

import pytest

from reef.core.errors import ChainError
from reef.releases import Draft
from reef.releases.chain import GitChain


@pytest.fixture
def three(chain, base, lora):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    third = chain.publish("a", Draft("publish", {"weights": lora(2)}), second.id)
    other = chain.publish("b", base, None)
    return first, second, third, other


def loose(path, object_id):
    return path / "objects" / object_id[:2] / object_id[2:]


def spoil(path, object_id, content=b"not zlib"):
    file = loose(path, object_id)
    file.chmod(0o600)
    file.write_bytes(content)


def test_locks_of_killed_processes_are_removed(chain, path, three, lora, caplog):
    (path / "refs/heads/a.lock").write_text("")
    (path / "packed-refs.lock").write_text("")
    with caplog.at_level(logging.WARNING, "reef.releases"):
        said = GitChain(path).open()
    assert len(said) == 2
    assert "refs/heads/a.lock" in caplog.text
    assert not list(path.rglob("*.lock"))


def test_a_lock_left_while_running_does_not_block_for_ever(chain, path, three, lora):
    (path / "refs/heads/a.lock").write_text("")
    started = time.monotonic()
    made = chain.publish("a", Draft("publish", {"weights": lora(7)}), three[2].id)
    assert time.monotonic() - started < 10
    assert chain.head("a") == made


@pytest.mark.parametrize("content", ["", "\0" * 41, "0" * 40 + "\n", "e" * 40 + "\n", None])
def test_a_damaged_branch_file_goes_back_to_the_last_good_release(chain, path, three, content, caplog, lora):
    ref = path / "refs/heads/a"
    ref.unlink() if content is None else ref.write_text(content)
    fresh = GitChain(path)
    with caplog.at_level(logging.WARNING, "reef.releases"):
        said = fresh.open()
    assert len(said) == 1
    assert f"back to the last good one, {three[2].id}" in caplog.text
    assert fresh.head("a") == three[2]
    assert fresh.head("b") == three[3]
    assert GitChain(path).open() == []
    assert fresh.publish("a", Draft("publish", {"weights": lora(9)}), three[2].id).seq == 3


@pytest.mark.parametrize("what", ["commit", "tree", "release.json", "weights/weights.json", "weights"])
@pytest.mark.parametrize("how", ["lost", "empty", "spoilt"])
def test_a_damaged_head_object_goes_back_one_release(chain, path, three, what, how, lora):
    head = three[2]
    name = {"commit": head.id, "tree": f"{head.id}^{{tree}}"}.get(what, f"{head.id}:{what}")
    object_id = subprocess.run(
        ["git", "--git-dir", str(path), "rev-parse", name], capture_output=True, text=True, check=True
    ).stdout.strip()
    if how == "lost":
        loose(path, object_id).unlink()
    else:
        spoil(path, object_id, b"" if how == "empty" else b"not zlib")
    fresh = GitChain(path)
    said = fresh.open()
    assert len(said) == (1 if how == "lost" else 2)
    assert head.id in said[-1]
    assert fresh.head("a") == three[1]
    assert fresh.verify("a") == []
    made = fresh.publish("a", Draft("publish", {"weights": lora(2)}, step=3), three[1].id)
    assert made.seq == 2
    assert fresh.verify("a") == []


def test_a_head_without_any_good_release_harms_only_its_scenario(chain, path, three):
    for release in three[:3]:
        spoil(path, release.id)
    fresh = GitChain(path)
    said = fresh.open()
    assert len(said) == 4
    assert "names no good release" in said[-1]
    assert fresh.head("b") == three[3]
    with pytest.raises(ChainError, match="the head of a is damaged"):
        fresh.head("a")


def test_a_half_made_repository_is_completed(tmp_path, base):
    path = tmp_path / "x.git"
    (path / "reef").mkdir(parents=True)
    (path / "refs").mkdir()
    (path / "HEAD").write_text("ref: refs/heads/default\n")
    (path / "config.lock").write_text("[core]\n")  # `git init` was killed here, and would refuse to start again
    chain = GitChain(path)
    assert chain.open() == ["removed config.lock, left by a process that was killed"]
    assert chain.publish("a", base, None).seq == 0


def test_verify_names_what_is_wrong_deep_in_the_history(chain, path, three):
    place = chain.files(three[1].id, "weights")["adapter_model.safetensors"]
    place.unlink()
    fresh = GitChain(path)
    assert fresh.open() == [], "only heads are checked at start"
    (sentence,) = fresh.verify("a")
    assert three[1].id in sentence
    assert "adapter_model.safetensors" in sentence
