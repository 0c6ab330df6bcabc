"""The chain's remote, with real git and git-lfs on local repositories: what a push brings, and what never happens."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ChainError
from reef.core.nouns import Release
from reef.releases import Draft, NewPart, clone, remote
from reef.releases.chain import GitChain
from reef.releases.remote import Remote
from reef.releases.transport import hide

Make = Callable[..., NewPart]


def git(*arguments: str, at: Path, check: bool = True) -> str:
    done = subprocess.run(["git", *arguments], cwd=at, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def branch(place: Path, name: str = "work") -> str:
    return git("rev-parse", "--verify", "--quiet", f"refs/heads/{name}", at=place, check=False)


def objects(place: Path) -> set[str]:
    return {file.name for file in (place / "lfs/objects").glob("*/*/*")}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """An empty repository to push to."""
    place = tmp_path / "there.git"
    git("init", "--quiet", "--bare", str(place), at=tmp_path)
    return place


@pytest.fixture
def one(path: Path, there: Path) -> Remote:
    return Remote(path, f"file://{there}")


@pytest.fixture
def grow(chain: GitChain, base: Draft, lora: Make) -> Callable[..., Release]:
    """Publish releases until the head has this number."""

    def grow(seq: int, name: str = "work", size: int = 256) -> Release:
        head = chain.head(name) or chain.publish(name, base, None)
        while head.seq < seq:
            part = lora(head.seq + 1 + 100 * (name != "work"), size)
            head = chain.publish(name, Draft("publish", {"weights": part}, step=head.seq + 1), head.id)
        return head

    return grow


def test_an_ordinary_clone_of_the_remote_has_the_exact_bytes(
    one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release], tmp_path: Path
) -> None:
    head, other = grow(2), grow(1, "other")
    told: list[Release] = []
    state = one.push({}, tell=told.append)
    assert (state.condition, state.error, state.tries) == ("in step", None, 0)
    assert state.heads == {"work": head.id, "other": other.id}
    assert state.numbers == {"work": 2, "other": 1}
    assert [release.seq for release in told if release.scenario == "work"] == [0, 1, 2]
    for name, release in (("work", head), ("other", other)):
        place = tmp_path / f"clone-{name}"
        git("clone", "--quiet", "--branch", name, f"file://{there}", str(place), at=tmp_path)
        git("lfs", "pull", at=place)
        for file, source in chain.files(release.id, "weights").items():
            assert (place / "weights" / file).read_bytes() == source.read_bytes()


def test_nothing_new_asks_nobody(
    one: Remote, there: Path, grow: Callable[..., Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(1)
    one.push({})
    there.rename(there.with_name("away"))
    assert one.push({}).condition == "in step"
    away = one.push({}, sure=True)
    assert away.condition == "unreachable"
    assert "; ;" not in str(away), "git's empty lines"


def test_a_push_takes_few_processes(one: Remote, grow: Callable[..., Release], monkeypatch: pytest.MonkeyPatch) -> None:
    grow(1)
    one.push({})
    grow(2)
    started: list[list[str]] = []
    real = subprocess.Popen.__init__

    def count(self: object, command: list[str], *rest: object, **more: object) -> None:
        started.append(command)
        real(self, command, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess.Popen, "__init__", count)
    one.push({})
    words = [next(word for word in command[1:] if word[0] != "-" and "=" not in word) for command in started]
    assert [word for word in words if word in ("ls-remote", "lfs", "push")] == ["ls-remote", "lfs", "push"]
    assert len(words) <= 5, words


def test_what_another_reef_published_stays(
    one: Remote, path: Path, chain: GitChain, there: Path, grow: Callable[..., Release], lora: Make, tmp_path: Path
) -> None:
    """Two on one remote: the second to publish is told so, its other scenario is pushed all the same."""
    grow(1)
    grow(1, "calm")
    one.push({})
    second = tmp_path / "second" / "releases.git"
    second.parent.mkdir()
    assert clone.begin(second, one.url) == ["calm", "work"]
    theirs, head = GitChain(second), chain.head("work")
    assert head is not None
    foreign = theirs.publish("work", Draft("publish", {"weights": lora(77)}, step=2), head.id)
    assert Remote(second, one.url).push({}).condition == "in step"
    mine, calm = grow(2), grow(2, "calm")
    told: list[Release] = []
    for sure in (False, True):
        state = one.push({"refs/reef/work/pinned": mine.id}, tell=told.append, sure=sure)
        assert state.condition == "other releases"
        assert state.others == {"work": foreign.id}
        assert state.error is not None
        assert "another Reef publishes there" in state.error
        assert branch(there) == foreign.id
        assert branch(there, "calm") == calm.id
        assert git("for-each-ref", "refs/reef", at=there) == ""
    assert (state.tries, [release.id for release in told]) == (2, [calm.id])
    git("update-ref", "refs/heads/theirs", foreign.id, at=there)
    git("update-ref", "-d", "refs/heads/work", at=there)
    assert one.push({}).condition == "in step"
    assert branch(there) == mine.id


def test_a_lease_lost_between_look_and_push_overwrites_nothing(
    one: Remote, there: Path, grow: Callable[..., Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grow(1)
    one.push({})
    mine = grow(2)
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    stranger = git(*who, "commit-tree", f"{first.id}^{{tree}}", "-p", first.id, "-m", "x", at=there)
    send = Remote._send

    def late(self: Remote, *rest: Any) -> int:
        sent = send(self, *rest)
        git("update-ref", "refs/heads/work", stranger, at=there)
        return sent

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "_send", late)
        assert one.push({}).condition == "other releases"
    assert branch(there) == stranger
    assert one.push({}).others == {"work": stranger}
    assert branch(there) == stranger != mine.id


def test_an_outage_is_kept_and_ends(one: Remote, path: Path, there: Path, grow: Callable[..., Release]) -> None:
    pushed = grow(1)
    one.push({})
    away = there.rename(there.with_name("away"))
    head = grow(3)
    for tries in (1, 2):
        state = one.push({})
        assert (state.condition, state.tries) == ("unreachable", tries)
    again = remote.read(path)
    assert again is not None
    assert again.since == state.since is not None
    assert again.heads == {"work": pushed.id}
    seen = remote.view(again, {"work": head.id})
    assert (seen["scenarios"]["work"]["seq"], seen["scenarios"]["work"]["behind"]) == (1, True)
    assert str(there) in str(seen["error"])
    assert remote.view(again, {})["error"] is None, "who sees no scenario reads nothing of them"
    away.rename(there)
    told: list[Release] = []
    state = Remote(path, one.url).push({}, tell=told.append)
    assert (state.condition, state.tries, state.since, state.error) == ("in step", 0, None, None)
    assert [release.seq for release in told] == [2, 3]


def test_a_half_pushed_remote_is_completed(
    one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release]
) -> None:
    """Somebody pushed the branch with git alone: the large files are sent, of every release."""
    grow(2)
    git("push", "--quiet", "--no-verify", str(there), "refs/heads/work", at=chain.path)
    assert objects(there) == set()
    assert one.push({}).condition == "in step"
    assert objects(there) == objects(chain.path)
    assert all(one.pushed(digest) for digest in objects(there))


def test_a_remote_that_lost_all_gets_all_again(
    one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release]
) -> None:
    grow(2)
    one.push({})
    subprocess.run(["rm", "-rf", str(there)], check=True)
    git("init", "--quiet", "--bare", str(there), at=there.parent)
    head = grow(3)
    assert one.push({}).condition == "in step"
    assert (branch(there), objects(there)) == (head.id, objects(chain.path))


def test_a_branch_set_back_at_the_remote_comes_forward_again(
    one: Remote, there: Path, grow: Callable[..., Release]
) -> None:
    early = grow(1)
    head = grow(3)
    one.push({})
    git("update-ref", "refs/heads/work", early.id, at=there)
    assert one.push({}, sure=True).condition == "in step"
    assert branch(there) == head.id


@pytest.mark.parametrize("place", ["remote.after_lfs", "remote.after_refs"])
def test_a_push_that_was_killed_is_repaired_by_the_next(
    place: str, one: Remote, path: Path, there: Path, grow: Callable[..., Release]
) -> None:
    grow(1)
    one.push({})
    head = grow(2)
    script = (
        "from pathlib import Path; from reef.releases.remote import Remote\n"
        f"Remote(Path({str(path)!r}), {one.url!r}).push({{}})"
    )
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "REEF_FAILPOINT": place}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (branch(there) == head.id) == (place == "remote.after_refs")
    told: list[Release] = []
    assert one.push({}, tell=told.append).condition == "in step"
    assert ([release.id for release in told], branch(there)) == ([head.id], head.id)
    assert objects(there) == objects(path)


def test_what_the_receiving_side_cannot_write_is_waited_out(
    one: Remote, path: Path, chain: GitChain, there: Path, grow: Callable[..., Release], lora: Make
) -> None:
    """First it takes no large files, so its branch must not move; then no git objects that are not small."""
    (there / "lfs").mkdir()
    (there / "lfs/objects").write_text("in the way")
    grow(1)
    state = one.push({})
    assert (state.condition, state.heads, branch(there)) == ("refused", {}, "")
    assert "large files" in (state.error or "")
    (there / "lfs/objects").unlink()
    assert one.push({}).condition == "in step"
    part = lora(2)
    noise = NewPart("lora", {**part.files, "notes.txt": os.urandom(40_000).hex()[:60_000].encode()}, part.meta)
    head = chain.head("work")
    assert head is not None
    made = chain.publish("work", Draft("publish", {"weights": noise}, step=2), head.id)
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "from pathlib import Path; from reef.releases.remote import Remote\n"
        f"print(Remote(Path({str(path)!r}), {one.url!r}).push({{}}).condition)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "refused", done.stderr
    found = remote.read(path)
    assert found is not None
    assert found.heads["work"] == branch(there) == head.id
    assert one.push({}).condition == "in step"
    assert branch(there) == made.id


def test_marks_come_and_go(one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release], lora: Make) -> None:
    head = grow(1)
    held = chain.publish("work", Draft("candidate", {"weights": lora(50)}, base=head.id, step=2), None)
    ref, note = f"refs/reef/work/candidates/{held.id}", f"refs/reef/work/held/{held.id}"
    marks = {ref: held.id, note: one.keep(b"why"), "refs/reef/work/pinned": head.id}
    assert one.push(marks).condition == "in step"
    assert objects(there) == objects(chain.path)
    assert git("cat-file", "blob", note, at=there) == "why"
    git("update-ref", "refs/reef/work/theirs", head.id, at=there)
    git("config", "receive.denyDeletes", "true", at=there)  # it keeps what it has, which is no trouble
    assert one.push({ref: held.id}).condition == "in step"
    git("config", "receive.denyDeletes", "false", at=there)
    assert one.push({}).condition == "in step"
    left = git("for-each-ref", "--format=%(refname)", "refs/reef", at=there).splitlines()
    assert "refs/reef/work/theirs" in left
    assert ref not in left


def test_a_fresh_chain_comes_from_the_remote_alone(
    one: Remote, chain: GitChain, grow: Callable[..., Release], lora: Make, tmp_path: Path
) -> None:
    old, head, other = grow(1), grow(3), grow(1, "other")
    held = chain.publish("work", Draft("candidate", {"weights": lora(50)}, base=head.id, step=4), None)
    one.push({f"refs/reef/work/candidates/{held.id}": held.id})
    place = tmp_path / "fresh" / "releases.git"
    place.parent.mkdir()
    (place.with_name("releases.git.partial") / "reef").mkdir(parents=True)  # what a start that was killed left
    assert clone.begin(place, one.url) == ["other", "work"]
    assert clone.begin(place, one.url) == [], "once"
    fresh = GitChain(place)
    assert fresh.open() == []
    assert fresh.verify("work") == fresh.verify("other") == []
    assert [release.id for release in fresh.history("work")] == [release.id for release in chain.history("work")]
    for release in (head, other, held):
        found = fresh.files(release.id, "weights")
        assert {name: file.read_bytes() for name, file in found.items()} == {
            name: file.read_bytes() for name, file in chain.files(release.id, "weights").items()
        }
    with pytest.raises(Exception, match="pruned"):
        fresh.files(old.id, "weights")
    fetching = GitChain(place, partial(clone.fetch, Remote(place, one.url)))
    found = fetching.files(old.id, "weights")
    assert found["adapter_model.safetensors"].read_bytes() == lora(1).files["adapter_model.safetensors"]
    state = Remote(place, one.url).push({f"refs/reef/work/candidates/{held.id}": held.id}, sure=True)
    assert (state.condition, state.absent) == ("in step", 0)
    after = fresh.publish("work", Draft("publish", {"weights": lora(9)}, step=4), head.id)
    assert Remote(place, one.url).push({}).heads["work"] == after.id


def test_an_old_release_that_the_remote_lost_is_named(
    one: Remote, there: Path, grow: Callable[..., Release], tmp_path: Path
) -> None:
    old = grow(1)
    grow(2)
    one.push({})
    place = tmp_path / "fresh.git"
    clone.begin(place, one.url)
    subprocess.run(["rm", "-rf", str(there / "lfs")], check=True)
    with pytest.raises(ChainError, match="the remote file://"):
        GitChain(place, partial(clone.fetch, Remote(place, one.url))).files(old.id, "weights")


def test_a_start_from_what_cannot_be_served_leaves_nothing(
    one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release], tmp_path: Path
) -> None:
    place = tmp_path / "fresh.git"
    with pytest.raises(ChainError, match=r"start again when that is repaired, or without releases\.remote"):
        clone.begin(place, str(tmp_path / "nowhere.git"))
    assert clone.begin(place, one.url) == []  # empty: a life of its own
    assert GitChain(place).open() == []
    half = tmp_path / "half.git"
    head = grow(1)
    git("push", "--quiet", "--no-verify", str(there), "refs/heads/work", at=chain.path)
    with pytest.raises(ChainError, match=f"does not hold all of release {head.id} of work.*reef push"):
        clone.begin(half, one.url)
    assert list(tmp_path.glob("half*")) == []
    one.push({})
    assert clone.begin(half, one.url) == ["work"]
    code = tmp_path / "code"
    git("init", "--quiet", "--initial-branch=main", str(code), at=tmp_path)
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "--allow-empty", "-m", "x", at=code)
    with pytest.raises(ChainError, match=r"the branches of .* \(main\) hold no releases"):
        clone.begin(tmp_path / "strange.git", str(code))


def test_what_else_lies_at_the_remote_stays_out_and_stays_there(
    one: Remote, there: Path, grow: Callable[..., Release], tmp_path: Path
) -> None:
    head = grow(1)
    one.push({"refs/reef/work/pinned": head.id})
    for ref in ("refs/heads/work-aside", "refs/reef/work/notes", "refs/reef/gone/pinned"):
        git("update-ref", ref, head.id, at=there)
    git("update-ref", f"refs/reef/work/candidates/{'0' * 40}", f"{head.id}^{{tree}}", at=there, check=False)
    before = git("for-each-ref", at=there)
    place = tmp_path / "fresh.git"
    assert clone.begin(place, one.url) == ["work"]
    assert git("for-each-ref", "--format=%(refname)", "refs/heads", at=place) == "refs/heads/work"
    state = remote.read(place)
    assert state is not None
    assert state.marks == {"refs/reef/work/pinned": head.id}
    assert GitChain(place).open() == []
    assert Remote(place, one.url).push(state.marks, sure=True).condition == "in step"
    assert git("for-each-ref", at=there) == before


def test_releases_that_are_here_are_never_replaced(
    one: Remote, chain: GitChain, grow: Callable[..., Release], tmp_path: Path
) -> None:
    """A plain clone in the place of the chain has no mark of ours, and is one all the same."""
    grow(1)
    one.push({})
    head = grow(2)
    place = tmp_path / "clone.git"
    git("clone", "--quiet", "--mirror", str(chain.path), str(place), at=tmp_path)
    assert clone.begin(place, one.url) == []
    assert branch(place) == head.id


def test_a_head_without_its_large_file_is_not_pushed(
    one: Remote, chain: GitChain, there: Path, grow: Callable[..., Release], tmp_path: Path
) -> None:
    """An older one without does not hold the others up: it is counted."""
    first = grow(1)
    grow(2)
    old, new = (chain.files(found.id, "weights")["adapter_model.safetensors"] for found in (first, grow(3)))
    new.rename(tmp_path / "aside")
    state = one.push({})
    assert (state.condition, branch(there)) == ("refused", "")
    assert f"large file {new.name} is missing here" in str(state.error)
    (tmp_path / "aside").rename(new)
    old.unlink()
    state = one.push({})
    assert (state.condition, state.absent) == ("in step", 1)
    assert not one.pushed(old.name)
    grow(4)
    assert one.push({}).absent == 1


def test_what_the_remote_took_cannot_be_noted(one: Remote, path: Path, grow: Callable[..., Release]) -> None:
    """The error is one of ours and says what to do, whoever asked: a push, or a start from the remote alone."""
    grow(1)
    one.push({})
    grow(2)
    (path / "reef/pushed").unlink()
    (path / "reef/pushed").mkdir()
    with pytest.raises(ChainError, match=r"cannot (read|write) .*pushed"):
        one.took(["0" * 64])
    state = one.push({})
    assert state.condition == "refused"
    assert "pushed" in (state.error or "")
    (path / "reef/pushed").rmdir()
    (path / "reef/pushed").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ChainError, match=r"cannot write .*pushed.*free some"):
            one.took(["0" * 64])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert one.push({}).condition == "in step"


def test_another_address_begins_anew(one: Remote, path: Path, grow: Callable[..., Release], tmp_path: Path) -> None:
    head = grow(1)
    one.push({})
    other = tmp_path / "other.git"
    git("init", "--quiet", "--bare", str(other), at=tmp_path)
    two = Remote(path, str(other))
    assert not any(two.pushed(digest) for digest in objects(path))
    assert two.push({}).heads == {"work": head.id}
    assert objects(other) == objects(path)


def test_pushes_exclude_each_other(one: Remote, path: Path, there: Path, grow: Callable[..., Release]) -> None:
    head = grow(3)
    told: list[Release] = []
    threads = [
        threading.Thread(target=Remote(path, one.url).push, args=({},), kwargs={"tell": told.append}) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (branch(there), len(told)) == (head.id, 4)


def test_a_password_is_never_told(path: Path, grow: Callable[..., Release], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hide("https://me:canary@h/x and ssh://git@h/y") == "https://***@h/x and ssh://***@h/y"
    grow(1)

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("authorization"))
            self.send_response(401)
            self.send_header("www-authenticate", 'Basic realm="x"')
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str | None] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("GIT_TRACE", "1")
    monkeypatch.setenv("GIT_CURL_VERBOSE", "1")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    try:
        state = Remote(path, f"http://me:canary@127.0.0.1:{server.server_port}/x.git").push({})
    finally:
        server.shutdown()
        server.server_close()
    assert any(asked), "it was given to whom it belongs"
    assert state.condition == "unreachable"
    assert "canary" not in (path / "reef/remote.json").read_text() + (path / "config").read_text()


def test_a_hook_of_the_user_does_not_run(
    one: Remote, there: Path, grow: Callable[..., Release], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-push").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-push").chmod(0o755)
    (tmp_path / "gitconfig").write_text(f"[core]\n\thooksPath = {hooks}\n[push]\n\tgpgSign = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    head = grow(1)
    assert one.push({}).condition == "in step"
    monkeypatch.delenv("GIT_DIR")
    assert branch(there) == head.id
