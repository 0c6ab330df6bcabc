"""How much each token may do: requests and tokens in any 60 seconds, and requests at once, over all gateways.

Knows: a sliding minute in sixty-one slices, reservations that are settled, who counts as at work. Does not know: what
is measured in tokens, or who asks. A token without limits costs nothing here.

- Reserve first, settle after: a reservation counts from the start, what was not used is given back, what was used
  beyond it counts too (then nothing more is admitted until that is a minute old).
- A minute, and not a bucket that refills: a full bucket lets twice its limit through in its first minute.
- The numbers are in a file in the run folder that every gateway maps; a lock on it is held for some microseconds.
- Requests at once are counted for each gateway; those of one that died are dropped when they are in the way, and when
  its successor takes its seat. Its reservations count until their minute is over.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from reef.gateway.auth import Token
from reef.gateway.errors import Refusal
from reef.gateway.seat import Seat, Shared
from reef.records.tokens import OLD

if TYPE_CHECKING:
    from reef.gateway.seat import Numbers

MINUTE = 60.0
SEATS = 64
"""Gateways of one server that can share a meter."""
TOKENS = 1024
"""Tokens with limits that can be at work in the same minute."""

_SLICES = 61
# One token's doubles: who it is (2), requests at once of each seat, then for requests and for tokens the time of each
# slice's last entry and its amount.
_AT_ONCE = 2
_REQUESTS = _AT_ONCE + SEATS
_TOKENS = _REQUESTS + 2 * _SLICES
_WIDTH = _TOKENS + 2 * _SLICES


class Lease:
    """One admitted request. `settle` once its use is known, `release` in any case; both may be called again."""

    __slots__ = ("_key", "_meter", "_open", "_reserved", "_since")

    def __init__(self, meter: Meter | None, key: bytes = b"", reserved: int = 0, since: float = 0.0) -> None:
        self._meter: Meter | None = meter
        self._key = key
        self._reserved: int | None = reserved
        self._since = since
        self._open = meter is not None

    def settle(self, tokens: int | None) -> None:
        """What it used. None: nothing, as it ended before anything ran; the request itself still counts."""
        if self._meter is not None and self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            self._meter._settle(self._key, reserved, tokens or 0, self._since)

    def release(self) -> None:
        """It is over. What was never settled stays as it was reserved."""
        if self._meter is not None and self._open:
            self._open = False
            self._meter._leave(self._key)


_UNMETERED = Lease(None)
_ALONE: AbstractContextManager[None] = nullcontext()


class Meter:
    """One for each gateway process, used from its event loop. `folder` None: this process alone (tests)."""

    def __init__(self, folder: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[bytes, int] = {}  # where a token's doubles begin; checked at each use
        self._keys: dict[str, bytes] = {}
        self._seat: Seat | None = None
        self._shared: Shared | None = None
        self._column = 0
        self._view: Numbers = array("d")
        if folder is None:
            self._view = array("d", bytes(8 * _WIDTH * TOKENS))
            return
        self._seat = Seat(folder, SEATS)
        self._column = self._seat.number
        self._shared = Shared(folder / "meter", _WIDTH * TOKENS)
        self._view = self._shared.view
        with self._shared:
            for place in range(0, _WIDTH * TOKENS, _WIDTH):
                if self._view[place]:
                    self._view[place + _AT_ONCE + self._column] = 0.0  # whoever sat here is dead

    def reserve(self, token: Token, tokens: int) -> Lease:
        """Admit one request that may use so many tokens. Refusal (429) with the seconds until it would pass.

        More tokens than the limit are counted as the limit: such a request runs alone in its minute.
        """
        quota = token.quota
        if not quota:
            return _UNMETERED
        key = self._key(token.name)
        wanted = 0
        if quota.tokens_per_minute is not None:
            wanted = min(max(tokens, 0), quota.tokens_per_minute)
        with self._alone():
            now = self._clock()
            place = self._find(key, now)
            waits: list[tuple[float, str]] = []
            if (most := quota.requests_per_minute) is not None and (
                wait := _wait(self._view, place + _REQUESTS, now, most - 1)
            ):
                waits.append((wait, f"{most} requests a minute"))
            if (most := quota.tokens_per_minute) is not None and (
                wait := _wait(self._view, place + _TOKENS, now, most - wanted)
            ):
                waits.append((wait, f"{most} tokens a minute"))
            if (most := quota.concurrent) is not None and self._at_once(place, most) >= most:
                waits.append((1.0, f"{most} at once"))
            if not waits:
                self._view[place + _AT_ONCE + self._column] += 1.0
                _add(self._view, place + _REQUESTS, now, 1.0)
                _add(self._view, place + _TOKENS, now, float(wanted))
                return Lease(self, key, wanted, now)
        wait, what = max(waits)
        seconds = max(1, math.ceil(wait))
        raise Refusal(
            429,
            "rate_limit_exceeded",
            f"this token may do {what}, and has; try again in {seconds} s",
            headers={"retry-after": str(seconds)},
        )

    def close(self) -> None:
        """Leave the seat. Leases still open count no more."""
        if self._shared is not None and self._seat is not None:
            self._places.clear()
            self._view = array("d")
            self._shared.close()
            self._seat.close()

    def _settle(self, key: bytes, reserved: int, used: int, since: float) -> None:
        if used == reserved or not len(self._view):
            return
        with self._alone():
            now = self._clock()
            place = self._find(key, now) + _TOKENS
            if used > reserved:
                _add(self._view, place, now, float(used - reserved))
            else:
                _take(self._view, place, since, float(reserved - used))

    def _leave(self, key: bytes) -> None:
        if not len(self._view):
            return
        with self._alone():
            place = self._find(key, self._clock()) + _AT_ONCE + self._column
            self._view[place] = max(0.0, self._view[place] - 1.0)

    def _alone(self) -> AbstractContextManager[None]:
        return _ALONE if self._shared is None else self._shared

    def _key(self, name: str) -> bytes:
        """Both sides of a rotation are one: a rotation doubles no limit."""
        if (key := self._keys.get(name)) is None:
            if len(self._keys) >= 4 * TOKENS:
                self._keys.clear()
            key = self._keys[name] = hashlib.sha256(name.removesuffix(OLD).encode()).digest()[:16]
        return key

    def _find(self, key: bytes, now: float) -> int:
        """Where the token's doubles begin. One that is not there gets a free place, or that of an idle token."""
        first, second = _numbers(key)
        view = self._view
        place = self._places.get(key)
        if place is not None and view[place] == first and view[place + 1] == second:
            return place
        free = None
        for place in range(0, _WIDTH * TOKENS, _WIDTH):
            if view[place] == first and view[place + 1] == second:
                self._places[key] = place
                return place
            if free is None and not view[place]:
                free = place
                break  # places are taken in order and never given back, so there is nothing behind it
        if free is None:
            free = next((p for p in range(0, _WIDTH * TOKENS, _WIDTH) if self._idle(p, now)), None)
        if free is None:
            raise Refusal(
                429, "rate_limit_exceeded", "too many tokens at once; try again", headers={"retry-after": "1"}
            )
        for index in range(free, free + _WIDTH):
            view[index] = 0.0
        view[free + 1], view[free] = second, first
        self._places[key] = free
        return free

    def _idle(self, place: int, now: float) -> bool:
        view = self._view
        times = (
            *view[place + _REQUESTS : place + _REQUESTS + _SLICES],
            *view[place + _TOKENS : place + _TOKENS + _SLICES],
        )
        return not any(time > now - MINUTE for time in times) and not any(view[place + _AT_ONCE : place + _REQUESTS])

    def _at_once(self, place: int, most: int) -> float:
        """Requests at work. What the dead have left is looked for only when it would be in the way."""
        begin = place + _AT_ONCE
        total = sum(self._view[begin : begin + SEATS])
        if total >= most and self._seat is not None:
            for number in range(SEATS):
                if self._view[begin + number] and not self._seat.taken(number):
                    total -= self._view[begin + number]
                    self._view[begin + number] = 0.0
        return total


def _numbers(key: bytes) -> tuple[float, float]:
    """A token's 16 bytes as two numbers that compare like them (never zero, never nan)."""
    first, second = struct.unpack("<QQ", key)
    return float((first >> 11) + 1), float(second >> 11)


def _wait(view: Numbers, place: int, now: float, room: float) -> float:
    """Seconds until the minute holds at most `room`. 0.0: now."""
    if sum(view[place + _SLICES : place + 2 * _SLICES]) <= room:  # even with what is too old to count
        return 0.0
    edge = now - MINUTE
    times = view[place : place + _SLICES]
    amounts = view[place + _SLICES : place + 2 * _SLICES]
    live = [(at, amount) for at, amount in zip(times, amounts, strict=True) if amount and edge < at]
    total = sum(amount for _, amount in live)
    if total <= room:
        return 0.0
    for at, amount in sorted(live):
        total -= amount
        if total <= room:
            return min(at, now) - edge
    return MINUTE


def _add(view: Numbers, place: int, now: float, amount: float) -> None:
    """Count in the slice of this second. A slice is as old as its newest entry, so it never ends too early."""
    index = place + int(now) % _SLICES
    if int(view[index]) != int(now):
        view[index + _SLICES] = 0.0
    view[index] = now
    view[index + _SLICES] += amount


def _take(view: Numbers, place: int, since: float, amount: float) -> None:
    """Give back what was counted at `since`, if it still counts."""
    index = place + int(since) % _SLICES
    if int(view[index]) == int(since):
        view[index + _SLICES] = max(0.0, view[index + _SLICES] - amount)
