"""Bounded disk: what goes, what stays, what nobody can break by dying or publishing in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.core import failpoint
from reef.core.errors import ChainError, MissingError, PrunedError
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.releases.lfs import ABANDONED
from reef.releases.prune import LEAST, Policy, prune

MODEL = "adapter_model.safetensors"


def grow(chain, lora, base, count, name="a"):
    """The base release and `count` more, each with a LoRA of its own."""
    made = [chain.publish(name, base, None)]
    for number in range(1, count + 1):
        draft = Draft("publish", {"weights": lora(number)}, base=made[-1].id, step=number)
        made.append(chain.publish(name, draft, made[-1].id))
    return made


def is_whole(chain, release):
    with contextlib.suppress(PrunedError):
        chain.files(release.id, "weights")
        return True
    return False


def disk(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "mutex"}


def age(path: Path, seconds: float = ABANDONED + 60) -> None:
    then = time.time() - seconds
    for file in (path / "lfs/objects").rglob("*"):
        os.utime(file, (then, then))
    for file in (path / "reef/files").iterdir():
        os.utime(file, (then, then))


def test_only_the_newest_and_the_pinned_keep_their_large_files(chain, path, base, lora):
    made = grow(chain, lora, base, 6)
    before = disk(path)
    policy = Policy(releases=3, pinned=frozenset({made[1].id}))
    size = len(lora(1).files[MODEL])
    plan = prune(chain, policy, dry=True)
    assert disk(path) == before, "a dry run changes nothing"
    assert [release.seq for release in plan.releases] == [2, 3]
    assert (plan.freed, plan.waiting, plan.kept) == (2 * size, 0, 4 * size)
    assert prune(chain, policy) == plan
    assert [is_whole(chain, release) for release in made] == [True, True, False, False, True, True, True]
    assert chain.get(made[2].id) == made[2], "the release itself is never removed"
    assert chain.history("a") == made[::-1]
    assert chain.verify("a") == [], "what was removed on purpose is not damage"
    again = prune(chain, policy)
    assert (again.objects, again.releases) == ((), ())
    fresh = GitChain(path)
    assert fresh.open() == []
    assert not is_whole(fresh, made[2])
    assert fresh.publish("a", Draft("publish", {"weights": lora(2)}, step=7), made[-1].id).seq == 7
    assert is_whole(fresh, made[2]), "the same bytes published again are there for both"


def test_without_a_number_all_releases_stay_and_two_always_do(chain, base, lora):
    made = grow(chain, lora, base, 4)
    assert prune(chain, Policy()).objects == ()
    assert len(prune(chain, Policy(releases=0)).objects) == 4 - LEAST
    assert [is_whole(chain, release) for release in made[-2:]] == [True, True]


def test_shared_digests_stay(chain, base, lora):
    made = grow(chain, lora, base, 3)
    back = chain.publish("a", Draft("rollback", {}, base=made[1].id), made[-1].id)  # shares what release 1 has
    other = chain.publish("b", base, None)
    chain.publish("b", Draft("publish", {"weights": lora(2)}), other.id)  # another scenario shares release 2's
    chain.publish("a", Draft("publish", {"weights": lora(9)}), back.id)
    assert prune(chain, Policy(releases=2)).objects[0][0] == made[3].parts["weights"].files[MODEL][0]
    assert [is_whole(chain, release) for release in made] == [True, True, True, False]


def test_the_full_weights_that_a_lora_stands_on_stay(chain, base, lora, tensors):
    first = chain.publish("a", base, None)
    whole = NewPart("full", {"model.safetensors": tensors(1)})
    full = chain.publish("a", Draft("publish", {"weights": whole}, base=first.id), first.id)
    other = NewPart("full", {"model.safetensors": tensors(2)})
    digest = full.parts["weights"].files["model.safetensors"][0]
    head = full
    for number in range(3):
        part = lora(number + 10)
        head = chain.publish("a", Draft("publish", {"weights": part}, base=head.id), head.id)
    assert digest not in dict(prune(chain, Policy(releases=2)).objects)
    head = chain.publish("a", Draft("publish", {"weights": other}, base=head.id), head.id)
    named = NewPart("lora", lora(50).files, {"kind": "lora", "base": {"name": "m", "digest": digest}})
    head = chain.publish("a", Draft("publish", {"weights": named}, base=head.id), head.id)
    assert digest not in dict(prune(chain, Policy(releases=2)).objects), "named as a base"
    for number in range(2):
        head = chain.publish("a", Draft("publish", {"weights": lora(60 + number)}, base=head.id), head.id)
    assert digest in dict(prune(chain, Policy(releases=2)).objects)


def test_candidates_are_bounded_but_for_those_that_wait(chain, path, base, lora):
    first = chain.publish("a", base, None)
    drafts = [Draft("candidate", {"weights": lora(n)}, base=first.id, step=n) for n in range(9)]
    made = [chain.publish("a", draft, None) for draft in drafts]
    done = prune(chain, Policy(candidates=3, held=frozenset({made[1].id})))
    assert {found.id for found in done.candidates} == {found.id for found in (made[0], *made[2:6])}
    assert {found.id for found in chain.candidates("a")} == {found.id for found in (made[1], *made[6:])}
    assert [is_whole(chain, found) for found in made] == [False, True, *[False] * 4, *[True] * 3]
    fresh = GitChain(path)
    fresh.open()
    assert fresh.get(made[0].id) == made[0], "a candidate stays readable by its id"
    assert fresh.publish("a", drafts[0], None).parts == made[0].parts
    prune(chain, Policy(candidates=0))
    assert len(chain.candidates("a")) == LEAST + 0


def test_what_nobody_names_goes_when_it_is_old(chain, path, base, lora):
    grow(chain, lora, base, 2)
    sha256, size = "a" * 64, 5
    chain.objects.place(sha256).parent.mkdir(parents=True)
    chain.objects.place(sha256).write_bytes(b"x" * size)  # of a publish that is under way, or was killed
    assert prune(chain, Policy()).objects == ()
    age(path)
    assert prune(chain, Policy()).objects == ((sha256, size),)


def test_copies_of_small_files_go_when_unused(chain, path, base, lora):
    made = grow(chain, lora, base, 4)
    for release in made:
        chain.files(release.id, "weights")
    count = len(list(chain.objects.copies()))
    age(path)
    chain.files(made[1].id, "weights")  # in use: it is young again
    done = prune(chain, Policy(releases=2))
    assert len(done.copies) == 2  # weights.json of the base and of release 2; adapter_config.json is shared
    assert len(list(chain.objects.copies())) == count - 2
    assert chain.files(made[0].id, "weights")["weights.json"].read_bytes() == b'{"kind":"base"}'


def test_with_a_remote_only_what_it_has_goes(chain, base, lora):
    made = grow(chain, lora, base, 5)
    digests = [release.parts["weights"].files[MODEL][0] for release in made[1:]]
    candidate = chain.publish("a", Draft("candidate", {"weights": lora(90)}, base=made[-1].id), None)
    for number in range(3):
        chain.publish("a", Draft("candidate", {"weights": lora(91 + number)}, base=made[-1].id), None)
    done = prune(chain, Policy(releases=2, candidates=2), pushed=lambda digest: digest == digests[1])
    size = len(lora(1).files[MODEL])
    assert done.waiting == 2 * size
    assert [is_whole(chain, release) for release in made[1:]] == [True, False, True, True, True]
    assert not is_whole(chain, candidate), "a candidate is never pushed, so it does not wait"


def test_pruned_files_come_back_with_ordinary_git_lfs(chain, path, base, lora, tmp_path):
    made = grow(chain, lora, base, 4)
    remote = tmp_path / "remote.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(path), str(remote)], check=True)
    subprocess.run(["cp", "-r", str(path / "lfs"), str(remote)], check=True)
    prune(chain, Policy(releases=2))
    assert not is_whole(chain, made[1])
    subprocess.run(["git", "lfs", "fetch", f"file://{remote}", made[1].id], cwd=path, check=True, capture_output=True)
    assert is_whole(chain, made[1])
    assert not is_whole(chain, made[2])


@pytest.mark.parametrize("ref", ["", "\0" * 41, "e" * 40 + "\n"])
def test_nothing_goes_while_a_head_is_damaged(chain, path, base, lora, ref):
    grow(chain, lora, base, 4)
    grow(chain, lora, base, 4, "b")
    (path / "refs/heads/b").write_text(ref)
    before = disk(path / "lfs")
    with pytest.raises(ChainError, match="nothing is pruned while the head of b is damaged"):
        prune(GitChain(path), Policy(releases=2))
    assert disk(path / "lfs") == before


def test_killed_anywhere_it_goes_on_and_nothing_is_half_there(path, base, lora):
    for point in ("refs_pruned", "pruned_listed", "pruned_one", "pruned_one:2", "pruned_one:4"):
        place = path.with_name(f"{point.replace(':', '-')}.git")
        chain = GitChain(place)
        chain.open()
        made = grow(chain, lora, base, 6)
        for number in range(5):
            chain.publish("a", Draft("candidate", {"weights": lora(90 + number)}, base=made[-1].id), None)
        policy = Policy(releases=3, candidates=2)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                failpoint.arm(f"releases.{point}")
                prune(GitChain(place), policy)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        fresh = GitChain(place)
        assert fresh.open() == []
        for release in made:  # what is said to be whole is whole: files() reads every byte
            with contextlib.suppress(PrunedError):
                fresh.files(release.id, "weights")
        assert all(is_whole(fresh, release) for release in made[-3:])
        assert fresh.verify("a") == []
        age(place)
        prune(fresh, policy)
        assert [is_whole(fresh, release) for release in made[1:]] == [False] * 3 + [True] * 3
        assert len(fresh.candidates("a")) == 2
        assert len(list(fresh.objects.held())) == 3 + 2


def test_a_publish_that_reuses_a_file_never_loses_it(chain, path, base, lora):
    """An old object is wanted again by a publish while it is pruned: whichever is first, the release is whole."""
    head = grow(chain, lora, base, 3)[-1]
    stop, wrong = threading.Event(), []

    def sweep():
        mine = GitChain(path)
        while not stop.is_set():
            try:
                prune(mine, Policy(releases=2))
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for turn in range(12):
            draft = Draft("publish", {"weights": lora(turn % 4)}, base=head.id, step=10 + turn)
            head = chain.publish("a", draft, head.id)
            assert is_whole(GitChain(path), head)
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    assert chain.verify("a") == []


def test_a_file_pruned_during_a_publish_is_stored_again(chain, path, base, lora, monkeypatch):
    made = grow(chain, lora, base, 4)
    commit = GitChain._commit

    def slow(self, *rest):
        done = commit(self, *rest)
        assert len(prune(GitChain(path), Policy(releases=2)).objects) == 2
        return done

    monkeypatch.setattr(GitChain, "_commit", slow)
    head = chain.publish("a", Draft("publish", {"weights": lora(1)}, step=9), made[-1].id)
    assert is_whole(GitChain(path), head)
    monkeypatch.undo()
    with pytest.raises(PrunedError, match="carries over"):
        rules = NewPart("tree", {"harness.json": b"{}"})
        chain.publish("a", Draft("publish", {"harness": rules}, base=made[2].id), head.id)
    assert chain.head("a") == head


def test_a_scenario_without_a_chain_and_unknown_ids_do_no_harm(chain):
    assert prune(chain, Policy(releases=2, pinned=frozenset({"0" * 40}), held=frozenset({"x"}))).objects == ()
    with pytest.raises(MissingError):
        chain.get("0" * 40)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 5), st.data())
def test_what_is_kept_is_whole_and_the_rest_is_said_to_be_pruned(tmp_path_factory, base, lora, fills, keep, data):
    chain = GitChain(tmp_path_factory.mktemp("p") / "r.git")
    chain.open()
    made = [chain.publish("a", base, None)]
    for step, fill in enumerate(fills):
        made.append(chain.publish("a", Draft("publish", {"weights": lora(fill)}, step=step), made[-1].id))
    pinned = data.draw(st.sampled_from(made))
    done = prune(chain, Policy(releases=keep, pinned=frozenset({pinned.id})))
    kept = [*made[-max(keep, LEAST) :], pinned]
    needed = {digest for release in kept for digest, _ in release.parts["weights"].files.values()}
    for release in made:
        large = {release.parts["weights"].files[MODEL][0]} if MODEL in release.parts["weights"].files else set()
        assert is_whole(chain, release) == (large <= needed)
    assert {release.id for release in done.releases} == {r.id for r in made if not is_whole(chain, r)}
