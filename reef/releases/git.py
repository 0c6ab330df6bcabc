"""Git plumbing on one bare repository: run a command, read objects, move a ref. No index, no work tree.

Knows: how to call git so that nothing of the user's set-up (environment, configuration, hooks, identity) changes what
happens, how to make a ref's move durable, and how to tell a lost race from a failure.
Does not know: what a release is.

- `mutex` is an flock that the git child which moves a ref inherits, so whoever holds it knows that no other ref update
  of ours is running and that a `*.lock` file under refs/ was left by a process that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reef.core.disk import advice, sync
from reef.core.errors import ChainError
from reef.core.failpoint import failpoint

ZERO = "0" * 40
"""The old value that means "the ref must not exist yet"."""

_ID = re.compile(r"[0-9a-f]{40}")
_LOCKS = ("HEAD.lock", "packed-refs.lock", "config.lock", "shallow.lock")
_HEADER = 1024  # longer than any object header: names are ids and short paths
_LOCK_WAIT = 1000  # milliseconds that git itself waits for a ref lock

_WRITING = ("hash-object", "commit-tree", "update-ref", "init", "config")
_version: tuple[int, int] | None = None  # git's, asked once a process


class Git:
    """One bare repository. Blocking; safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.options: tuple[str, ...] = ()
        self._env: dict[str, str] | None = None

    def run(
        self,
        *arguments: str,
        data: bytes = b"",
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
        check: bool = True,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `git <arguments>` with `data` on its standard input. ChainError when `check` and it failed.

        `keep` are descriptors that the child inherits (the mutex).
        """
        if self._env is None:
            self._env = _environment(self.path)
        command = ["git", *self.options, *arguments]
        try:
            done = subprocess.run(
                command,
                input=data,
                capture_output=True,
                cwd=self.path,
                env={**self._env, **(env or {})},
                pass_fds=keep,
                check=False,
            )
        except FileNotFoundError:
            if not self.path.is_dir():
                raise ChainError(f"the release chain at {self.path} is gone; open it again") from None
            raise ChainError("git is not installed or not on the PATH; Reef keeps its releases with it") from None
        except OSError as error:
            raise ChainError(f"git could not be started: {error}") from error
        if check and done.returncode:
            raise ChainError(_failure(arguments[0], done, self.path))
        return done

    def line(self, *arguments: str, data: bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """The only line a command prints."""
        return self.run(*arguments, data=data, env=env).stdout.decode().strip()

    def tree(self, entries: Sequence[str]) -> str:
        """Write a tree of entries as `ls-tree` prints them; its id. `git mktree` would do, but it neither syncs what it
        writes (it does not read core.fsync) nor fails when it cannot write."""
        found: list[tuple[bytes, bytes]] = []
        for entry in entries:
            kind, _, name = entry.partition("\t")
            mode, _, number = kind.split(" ")
            held = f"{mode.lstrip('0')} {name}\0".encode() + bytes.fromhex(number)
            found.append((name.encode() + b"/" * (mode == "040000"), held))  # git's order takes folders so
        data = b"".join(held for _, held in sorted(found))
        return self.line("hash-object", "-w", "-t", "tree", "--stdin", data=data)

    def adapt(self) -> None:
        """Choose the options that make this git's writes durable; git before 2.36 spells them otherwise."""
        global _version
        if _version is None:
            said = self.run("version").stdout.decode()
            found = re.search(r"(\d+)\.(\d+)", said)
            if not found:
                raise ChainError(f"cannot read the version of git from {said!r}")
            _version = int(found[1]), int(found[2])
        durable = "core.fsync=all" if _version >= (2, 36) else "core.fsyncObjectFiles=true"
        settings = (durable, f"core.filesRefLockTimeout={_LOCK_WAIT}", "core.logAllRefUpdates=always")
        self.options = tuple(word for setting in settings for word in ("-c", setting))

    @contextlib.contextmanager
    def mutex(self) -> Iterator[int]:
        """Hold the repository's lock across processes and threads; yields the descriptor to hand to git."""
        try:
            descriptor = os.open(self.path / "reef" / "mutex", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ChainError(
                f"the release chain at {self.path} cannot be opened for writing: {error}; {advice(error)}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def read_ref(self, ref: str) -> str | None:
        """The id a ref points to, or None. ChainError when the ref's file does not hold an id."""
        try:
            value = (self.path / ref).read_text("ascii", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            packed = self.path / "packed-refs"
            if not packed.exists():
                return None
            return self.run("rev-parse", "--verify", "--quiet", ref, check=False).stdout.decode().strip() or None
        except OSError as error:
            raise ChainError(f"cannot read {ref} in {self.path}: {error}") from error
        if not _ID.fullmatch(value):
            raise ChainError(f"{ref} in {self.path} is damaged; restarting Reef restores the last good release")
        return value

    def move_ref(self, ref: str, new: str, old: str, message: str, mutex: int) -> bool:
        """Compare-and-swap: point `ref` at `new` if it is at `old` (ZERO: absent); False when it is elsewhere.

        The caller holds the mutex. A lock file that git still meets after waiting for it belongs to no one alive, so
        it is removed and the move tried once more. Returns after the move is on disk.
        """
        move = ("update-ref", "-m", message, "--create-reflog", ref, new, old)
        done = self.run(*move, keep=[mutex], check=False)
        if done.returncode and b".lock': File exists" in done.stderr:
            self.unlock()
            done = self.run(*move, keep=[mutex], check=False)
        if done.returncode:
            present = self.read_ref(ref) or ZERO
            if present == new:  # git failed after the move (it could not close its log): the move counts
                return True
            if present != old:
                return False
            raise ChainError(_failure("update-ref", done, self.path))
        failpoint("releases.ref_unsynced")
        settle(self.path / ref)
        settle((self.path / ref).parent)
        settle(self.path / "logs" / ref)  # what a damaged head is restored from
        return True

    def unlock(self) -> list[str]:
        """Remove lock files of killed processes. The caller holds the mutex."""
        stale = self.locks()
        for lock in stale:
            (self.path / lock).unlink(missing_ok=True)
        return stale

    def locks(self) -> list[str]:
        """Lock files there are. To a caller that holds the mutex they are of killed processes."""
        found = [self.path / name for name in _LOCKS if (self.path / name).exists()]
        return [str(lock.relative_to(self.path)) for lock in (*found, *sorted((self.path / "refs").rglob("*.lock")))]

    def objects(self, names: Sequence[str]) -> list[tuple[str, bytes] | None]:
        """(id, content) of each named object (`<id>`, `<id>:path`), None for one that is missing or damaged."""
        if not names:
            return []
        done = self.run("cat-file", "--batch", data="".join(f"{name}\n" for name in names).encode(), check=False)
        found: list[tuple[str, bytes] | None] = []
        rest = memoryview(done.stdout)
        for _ in names:
            end = bytes(rest[:_HEADER]).find(b"\n")
            words = bytes(rest[: max(end, 0)]).decode("utf-8", "replace").split(" ")
            if end < 0:  # git stops at a damaged object: this one is lost, the others are asked for again
                return [*found, None, *self.objects(names[len(found) + 1 :])]
            if len(words) == 3 and _ID.fullmatch(words[0]) and words[2].isdigit():
                size = int(words[2])
                if len(rest) < end + 2 + size:
                    return [*found, None, *self.objects(names[len(found) + 1 :])]
                found.append((words[0], bytes(rest[end + 1 : end + 1 + size])))
                rest = rest[end + 2 + size :]
            else:
                found.append(None)
                rest = rest[end + 1 :]
        return found


def settle(path: Path) -> None:
    """fsync a file or folder. A path that is gone (a ref that was packed) is settled."""
    try:
        sync(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ChainError(f"cannot make {path} durable: {error}; {advice(error)}") from error


def _environment(path: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    home = str(path)  # a git too old for GIT_CONFIG_GLOBAL looks for its configuration here, and finds none
    return clean | {
        "GIT_DIR": str(path),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_AUTHOR_NAME": "Reef",
        "GIT_AUTHOR_EMAIL": "reef@localhost",
        "GIT_COMMITTER_NAME": "Reef",
        "GIT_COMMITTER_EMAIL": "reef@localhost",
        "HOME": home,
        "XDG_CONFIG_HOME": home,
        "LC_ALL": "C",
    }


def _failure(command: str, done: subprocess.CompletedProcess[bytes], path: Path) -> str:
    said = done.stderr.decode("utf-8", "replace").strip().replace("\n", "; ") or f"exit status {done.returncode}"
    return f"git {command} failed on the release chain at {path}: {said}{_advice(command, said, done.returncode)}"


def _advice(command: str, said: str, code: int) -> str:
    if code == -signal.SIGXFSZ or any(words in said for words in ("No space left", "File too large", "quota exceeded")):
        return " (free some disk space, or raise the quota, and try again)"
    if "Permission denied" in said or "Read-only file system" in said:
        return " (let the server's user write there: owner and rights)"
    if command in _WRITING:  # git does not always say why it could not
        return " (check its disk space and rights, and try again)"
    return ""
