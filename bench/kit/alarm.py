"""A timer that is exact to some microseconds; event loops round to milliseconds.

Knows: Linux's timer files. Does not know: what happens at the moment.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time


class Alarm:
    """Wakes the loop at a moment of the monotonic clock."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("exact timers need Linux; leave out open and stream with --only")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self._loop.add_reader(self._fd, self._ring)

    async def until(self, moment: int) -> None:
        """Return at `moment`, in nanoseconds; at once when it has passed."""
        if moment <= time.monotonic_ns():
            return
        self._rung.clear()
        setting = struct.pack("4q", 0, 0, moment // 10**9, moment % 10**9)
        self._libc.timerfd_settime(self._fd, 1, setting, None)
        await self._rung.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        os.read(self._fd, 8)
        self._rung.set()
