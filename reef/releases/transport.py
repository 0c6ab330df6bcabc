"""Git commands that talk to a remote: as the user would run them, without surprises, and never asking a person.

Knows: the user's environment (ssh agent, credential helper, proxies), what of it belongs to another repository, and how
to hide a password. Does not know: refs, releases, or what a command is for.

- The address is in the child's environment, not on its command line, where everybody on the machine reads it.
- A child runs in a session of its own, so it has no terminal to ask on, and can be ended with all it started.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Final

from reef.core.errors import ChainError

NAME: Final = "reef"
"""The remote's name, in a configuration that only these commands see."""
LONGEST: Final = 6 * 3600.0
"""Seconds after which a command counts as stuck."""

_SECRET = re.compile(r"(?<=://)[^/@\s]+@")
_LOCAL = (  # of another repository, if this process was started inside a git command
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_GRAFT_FILE",
    "GIT_SHALLOW_FILE", "GIT_REPLACE_REF_BASE", "GIT_NO_REPLACE_OBJECTS", "GIT_CURL_VERBOSE",
)  # fmt: skip
_PLAIN = {  # what would make the user's git do more, or something else, than it is told
    "core.hooksPath": os.devnull,
    "gc.auto": "0",
    "maintenance.auto": "false",
    "push.followTags": "false",
    "push.gpgSign": "false",
    "push.recurseSubmodules": "no",
    "fetch.prune": "false",
    "lfs.storage": "lfs",  # in the git directory, on both sides when the remote is a folder
    "lfs.fetchinclude": "",
    "lfs.fetchexclude": "",
    "lfs.allowincompletepush": "false",
    "http.lowSpeedLimit": "1",
    "http.lowSpeedTime": "120",
}


def hide(text: str) -> str:
    """An address, or a text with addresses, as it may be told: without names and passwords."""
    return _SECRET.sub("***@", text)


class Transport:
    """Runs git in the repository at `path`, with `NAME` for the remote at `url`. `stop` ends the newest command."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self._url = url
        self._child: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def run(self, *arguments: str, what: str, partly: bool = False) -> str:
        """What git printed. ChainError says that it could not `what` the remote.

        `partly`: a push that moved some refs and not others is no failure.
        """
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(
                ["git", *arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=self._path,
                env=_environment(self._path, self._url), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ChainError(f"git cannot be started ({error.strerror}); install git and git-lfs") from None
        self._child = child
        try:
            if self.stopped:
                _kill(child)
            out, err = child.communicate(timeout=LONGEST)
        except BaseException as error:
            _kill(child)
            child.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ChainError(f"cannot {what} the remote {hide(self._url)}: no end in {LONGEST:.0f} s") from None
            raise
        finally:
            self._child = None
        said = out.decode("utf-8", "replace")
        if child.returncode and not (partly and "\n!\t" in f"\n{said}"):
            why = hide(err.decode("utf-8", "replace"))
            why = "; ".join(line.strip() for line in why.splitlines() if line.strip())
            raise ChainError(f"cannot {what} the remote {hide(self._url)}: {why or f'exit code {child.returncode}'}")
        return said

    def stop(self) -> None:
        """End what is running, from another thread, and let nothing begin."""
        self.stopped = True
        if (child := self._child) is not None:
            _kill(child)


def _environment(path: Path, url: str) -> dict[str, str]:
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in _LOCAL and not name.startswith(("GIT_TRACE", "GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_"))
    }
    given = os.environ.get("GIT_CONFIG_COUNT", "")
    pairs = [
        (os.environ.get(f"GIT_CONFIG_KEY_{place}", ""), os.environ.get(f"GIT_CONFIG_VALUE_{place}", ""))
        for place in range(int(given) if given.isdigit() else 0)
    ]
    pairs += [*_PLAIN.items(), (f"remote.{NAME}.url", url)]
    for place, (key, value) in enumerate(pairs):
        mine |= {f"GIT_CONFIG_KEY_{place}": key, f"GIT_CONFIG_VALUE_{place}": value}
    return mine | {
        "GIT_CONFIG_COUNT": str(len(pairs)),
        "GIT_DIR": str(path),
        "GIT_TERMINAL_PROMPT": "0",
        "SSH_ASKPASS_REQUIRE": "never",
        "GCM_INTERACTIVE": "never",
        "LC_ALL": "C",
    }


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
