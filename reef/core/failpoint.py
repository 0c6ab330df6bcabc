"""Failpoints: named places beside each durable step where a test can kill the process, as `kill -9` would.

`REEF_FAILPOINT=name` kills at the first passing, `name:3` at the third. Unset (always, outside tests), a passing costs
one dictionary look-up.
"""

from __future__ import annotations

import os
import signal

_armed: dict[str, int] = {}


def arm(spec: str) -> None:
    """Arm one failpoint, `name` or `name:N`, in this process."""
    name, _, count = spec.partition(":")
    _armed[name] = int(count or 1)


def failpoint(name: str) -> None:
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("REEF_FAILPOINT"):
    arm(os.environ["REEF_FAILPOINT"])
