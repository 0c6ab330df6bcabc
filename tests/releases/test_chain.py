"""The chain's contract: compare-and-swap, idempotent retries, parts carried over, candidates, ids, contention."""

from __future__ import annotations

import multiprocessing
import os
import queue
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from reef.core.errors import ChainError, ConflictError, InputError, MissingError, StaleHead
from reef.core.nouns import Consumed, Evaluation, Guard
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain

RULES = NewPart("tree", {"harness.json": b'{"entries":[]}'}, {})


def git(path: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "--git-dir", str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_chain_grows_and_is_read_again(chain, path, base, lora):
    assert chain.head("a") is None
    assert chain.history("a") == []
    first = chain.publish("a", base, None)
    evaluation = Evaluation(
        "guarded",
        "accept",
        "better on 3 of 4 tasks",
        "c" * 40,
        first.id,
        (Guard("finite", True, float("nan"), None, "all numbers are finite"),),
        {"mean": 0.5, "lost": float("inf")},
        2,
        1.25,
    )
    draft = Draft(
        "publish",
        {"weights": lora(1)},
        base=first.id,
        step=1,
        line="l1",
        evaluation=evaluation,
        recipe="sao",
        consumed={"weights": Consumed(7, ("r:0", "s:1"))},
        actor="learner",
        reason="it learnt",
    )
    second = chain.publish("a", draft, first.id)
    assert (first.seq, second.seq) == (0, 1)
    assert (first.parent, second.parent) == (None, first.id)
    assert second.evaluation is not None
    assert second.evaluation.metrics == {"mean": 0.5}, "what cannot be measured is missing"
    assert second.evaluation.guards[0].value is None
    fresh = GitChain(path)
    fresh.open()
    assert fresh.head("a") == second
    assert fresh.history("a") == [second, first]
    assert fresh.history("a", limit=1) == [second]
    assert fresh.history("a", before=second.id) == [first]
    assert fresh.history("a", before=first.id) == []
    assert fresh.get(second.id[:9]) == second
    assert second.consumed == {"weights": Consumed(7, ("r:0", "s:1"))}
    assert fresh.verify("a") == []
    git(path, "fsck", "--strict")


def test_history_never_goes_on_in_another_scenario(chain, base):
    first, other = chain.publish("a", base, None), chain.publish("b", base, None)
    last = chain.publish("b", Draft("publish", {}, step=1), other.id)
    assert chain.history("b", before=last.id) == [other]
    for release_id in (last.id, last.id[:10], "0" * 40):
        with pytest.raises(MissingError, match="no release"):
            chain.history("a", before=release_id)
    assert chain.history("a") == [first]


def test_files_come_back_byte_for_byte(chain, base, lora):
    first = chain.publish("a", base, None)
    part = lora(3, 100_000)
    second = chain.publish("a", Draft("publish", {"weights": part, "harness": RULES}), first.id)
    found = chain.files(second.id, "weights")
    assert {name: file.read_bytes() for name, file in found.items()} == dict(part.files)
    assert chain.files(second.id, "harness")["harness.json"].read_bytes() == b'{"entries":[]}'
    with pytest.raises(MissingError, match="no part harness"):
        chain.files(first.id, "harness")


def test_a_file_on_disk_is_copied_and_the_original_may_go(chain, base, tensors, tmp_path):
    first = chain.publish("a", base, None)
    source = tmp_path / "w"
    source.write_bytes(tensors(5, 90_000))
    second = chain.publish("a", Draft("publish", {"weights": NewPart("full", {"model.safetensors": source})}), first.id)
    source.write_bytes(b"overwritten by the next step")
    assert chain.files(second.id, "weights")["model.safetensors"].read_bytes() == tensors(5, 90_000)


def test_parts_not_named_are_carried_over(chain, base, lora):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"harness": RULES}), first.id)
    assert second.parts["weights"] == first.parts["weights"]
    third = chain.publish("a", Draft("publish", {"weights": lora(1)}), second.id)
    assert third.parts["harness"] == second.parts["harness"]
    assert set(chain.files(third.id, "harness")) == {"harness.json"}
    back = chain.publish("a", Draft("rollback", {}, base=first.id), third.id)
    assert back.parts == first.parts, "a rollback takes exactly the parts of its base"
    assert back.seq == 3
    again = chain.publish("a", Draft("rollback", {}, base=third.id), back.id)
    assert again.parts == third.parts
    assert chain.files(again.id, "weights") == chain.files(third.id, "weights")
    assert chain.verify("a") == []


def test_a_wrong_expected_head_changes_nothing(chain, base, lora):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    for expected in (first.id, None, "0" * 40, "f" * 40):
        with pytest.raises(StaleHead) as caught:
            chain.publish("a", Draft("publish", {"weights": lora(2)}), expected)
        assert caught.value.head == second.id
    with pytest.raises(StaleHead) as caught:
        chain.publish("new", Draft("publish", {"weights": lora(2)}), second.id)
    assert caught.value.head is None
    assert chain.head("a") == second
    assert isinstance(caught.value, ConflictError)


def test_a_retry_returns_the_same_release(chain, base, lora):
    first = chain.publish("a", base, None)
    assert chain.publish("a", base, None) == first
    draft = Draft("publish", {"weights": lora(1)}, step=1)
    second = chain.publish("a", draft, first.id)
    assert chain.publish("a", draft, first.id) == second
    third = chain.publish("a", Draft("publish", {"weights": lora(2)}), second.id)
    assert chain.publish("a", draft, first.id) == second, "also when the head has moved on"
    assert chain.publish("a", base, None) == first
    assert chain.head("a") == third
    with pytest.raises(StaleHead):
        chain.publish("a", replace(draft, reason="another"), first.id)
    fourth = chain.publish("a", draft, third.id)
    assert fourth.seq == 3, "the same change on another parent is another release"


def test_scenarios_do_not_touch_each_other(chain, base, lora):
    a, b = chain.publish("a", base, None), chain.publish("b.x-y_z", base, None)
    assert a.id != b.id
    chain.publish("a", Draft("publish", {"weights": lora(1)}), a.id)
    assert chain.head("b.x-y_z") == b
    with pytest.raises(MissingError, match="no release"):
        chain.publish("a", Draft("rollback", {}, base=b.id), chain.head("a").id)
    assert chain.get(b.id[:12]) == chain.get(b.id[:12], ["b.x-y_z"]) == b
    said = set()
    for name in (b.id, b.id[:12], "0" * 40, "0" * 12):  # one of another scenario and none at all look the same
        with pytest.raises(MissingError) as caught:
            chain.get(name, ["a"])
        said.add(caught.value.message.replace(name, "…"))
    assert len(said) == 1
    for name in ("", "A", "../x", "a..b", "x.lock", "a/b", "-a"):
        with pytest.raises(InputError, match="cannot name a scenario"):
            chain.publish(name, base, None)
        assert chain.head(name) is None


def test_candidates_have_their_own_refs_and_do_not_move_the_head(chain, path, base, lora):
    first = chain.publish("a", base, None)
    draft = Draft("candidate", {"weights": lora(1)}, base=first.id, step=1, line="l")
    one = chain.publish("a", draft, None)
    assert one.parent == one.base == first.id
    assert chain.head("a") == first
    assert git(path, "rev-parse", f"refs/reef/a/candidates/{one.id}") == one.id
    assert chain.publish("a", draft, None) == one, "a retry makes no second candidate"
    assert chain.get(one.id[:10]) == one
    assert chain.files(one.id, "weights")["adapter_model.safetensors"].exists()
    promoted = chain.publish("a", Draft("promote", {}, base=one.id, step=1), first.id)
    assert promoted.parts == one.parts
    assert chain.history("a") == [promoted, first]
    with pytest.raises(InputError, match="exactly one part"):
        chain.publish("a", Draft("candidate", {"weights": lora(1)}), first.id)
    with pytest.raises(InputError, match="exactly one part"):
        chain.publish("a", Draft("candidate", {"weights": lora(1), "harness": RULES}, base=first.id), None)


def test_what_a_lost_race_left_is_not_a_release(chain, path, base, lora):
    first = chain.publish("a", base, None)
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    tree = git(path, "rev-parse", f"{second.id}^{{tree}}")
    orphan = git(path, "-c", "user.name=x", "-c", "user.email=x@x", "commit-tree", tree, "-p", first.id, "-m", "orphan")
    for wrong in (orphan, tree, "deadbeef" * 5, "abc", "g" * 40, "", "HEAD", "--all"):
        with pytest.raises(MissingError):
            chain.get(wrong)


def test_pickled_weights_and_odd_names_are_refused(chain, base, tensors):
    first = chain.publish("a", base, None)
    for name in ("model.bin", "a.pt", "b.pth", "w.pkl", "x.ckpt", "noext"):
        with pytest.raises(InputError, match="safetensors only"):
            chain.publish("a", Draft("publish", {"weights": NewPart("full", {name: b"x"})}), first.id)
    for name in ("../up.json", "a/b.json", ".hidden", "", "new\nline.json", "é.json"):
        with pytest.raises(InputError, match="a part's file is named"):
            chain.publish("a", Draft("publish", {"weights": NewPart("full", {name: b"x"})}), first.id)
    whole = tensors(1)
    for damaged in (b"", b"\x80\x04pickle" * 20, whole[:20], b"\xff" * 300):
        with pytest.raises(InputError, match="not a safetensors file"):
            chain.publish("a", Draft("publish", {"weights": NewPart("full", {"m.safetensors": damaged})}), first.id)
    with pytest.raises(InputError, match="cannot read"):
        lost = NewPart("full", {"m.safetensors": Path("/nonexistent/m.safetensors")})
        chain.publish("a", Draft("publish", {"weights": lost}), first.id)
    with pytest.raises(InputError, match="plain JSON"):
        chain.publish("a", Draft("publish", {"weights": NewPart("lora", {}, {"alpha": object()})}), first.id)
    assert chain.head("a") == first


def test_any_reason_can_be_told(chain, base, lora):
    head = chain.publish("a", base, None)
    for number, reason in enumerate(("two\nlines\n\ndraft " + "0" * 64, "nul \0 byte", "🐠 é", "-n", "x" * 5000)):
        head = chain.publish("a", Draft("publish", {"weights": lora(number)}, reason=reason, actor=reason), head.id)
        assert (head.reason, head.actor) == (reason, reason)
    assert chain.verify("a") == []


def test_the_users_git_set_up_has_no_influence(tmp_path, base, lora, monkeypatch):
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "reference-transaction").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "reference-transaction").chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n hooksPath = {hooks}\n[commit]\n gpgSign = true\n[init]\n broken = = =\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "objects"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.hooksPath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(hooks))
    monkeypatch.chdir(tmp_path)
    chain = GitChain(Path("relative.git"))
    chain.open()
    first = chain.publish("a", base, None)
    os.chdir("/")
    assert chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id).seq == 1
    assert not (tmp_path / "objects").exists()


def test_packed_refs_are_read(chain, path, base, lora):
    first = chain.publish("a", base, None)
    git(path, "pack-refs", "--all", "--prune")
    assert not (path / "refs/heads/a").exists()
    assert chain.head("a") == first
    second = chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id)
    git(path, "gc", "--quiet")
    fresh = GitChain(path)
    assert fresh.open() == []
    assert fresh.history("a") == [second, first]


def test_a_missing_folder_or_git_is_said(chain, path, base, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ChainError, match="cannot be opened"):
        GitChain(blocked / "x").open()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ChainError, match="git is not installed"):
        GitChain(path).open()


def contend(path: Path, number: int, draft: Draft, expected: str, barrier, results) -> None:
    chain = GitChain(path)
    chain.open()
    barrier.wait()
    for _ in range(2):  # the second time is a retry after a lost reply
        try:
            results.put((number, "won", chain.publish("a", draft, expected).id))
        except StaleHead as error:
            results.put((number, "lost", error.head))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_of_sixteen_publishers_one_wins_each_round(chain, path, base, lora, kind):
    """case 56"""
    context = multiprocessing.get_context("fork")
    head = chain.publish("a", base, None)
    for round_ in range(3):
        forked = kind == "processes"
        barrier = context.Barrier(16) if forked else threading.Barrier(16)
        results = context.Queue() if forked else queue.Queue()
        drafts = [Draft("publish", {"weights": lora(round_ * 16 + n)}, step=n) for n in range(16)]
        make = context.Process if forked else threading.Thread
        running = [
            make(target=contend, args=(path, n, draft, head.id, barrier, results)) for n, draft in enumerate(drafts)
        ]
        for one in running:
            one.start()
        told = [results.get(timeout=60) for _ in range(32)]
        for one in running:
            one.join()
            assert not forked or one.exitcode == 0
        new = chain.head("a")
        assert (new.seq, new.parent) == (head.seq + 1, head.id)
        won = [(number, release) for number, outcome, release in told if outcome == "won"]
        assert won == [(won[0][0], new.id)] * 2, "one winner, who is told so again when it asks again"
        assert drafts[won[0][0]].step == new.step
        lost = [head for _, outcome, head in told if outcome == "lost"]
        assert lost == [new.id] * 30, "the others get the head there is now"
        head = new
    assert len(chain.history("a")) == 4
    assert chain.verify("a") == []
    assert GitChain(path).open() == []


def test_a_file_that_is_not_there_is_refused_before_anything_is_written(chain, path, base, lora, tmp_path):
    """case 56"""
    first = chain.publish("a", base, None)

    def written():
        return sorted(str(file) for file in path.rglob("*"))

    before = written()
    files = dict(lora(1).files) | {"zz.json": tmp_path / "nowhere.json"}
    for operation, base_id in (("publish", None), ("candidate", first.id)):
        with pytest.raises(InputError, match=r"cannot read weights/zz.json"):
            chain.publish("a", Draft(operation, {"weights": NewPart("lora", files)}, base=base_id), first.id)
        assert written() == before
    assert chain.head("a") == first
    assert chain.publish("a", Draft("publish", {"weights": lora(1)}), first.id).seq == 1, "the chain is usable still"


def test_the_same_draft_from_many_threads_is_one_release(chain, base, lora):
    head = chain.publish("a", base, None)
    draft = Draft("publish", {"weights": lora(1, 100_000)})
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(chain.publish("a", draft, head.id).id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert set(made) == {chain.head("a").id}
