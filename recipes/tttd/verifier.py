"""Circles in the unit square, judged exactly: every float is the rational number it is.

Knows: what a valid packing is, how to read one from text that nobody vouches for, by how much a nearly valid one must
shrink. Does not know: where circles come from, or which packing is good.

- n circles (x, y, r), finite, r >= 0; x - r >= 0, x + r <= 1 and the same for y; for each pair
  (r_i + r_j)^2 <= dx^2 + dy^2. The value is the sum of the radii as added up here.
- A packing that fails by rounding is worth what is left after the smallest epsilon that makes it pass was taken from
  every radius. Tolerances of other judges (1e-12, 1e-6) make records that are none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NoReturn

Circle = tuple[float, float, float]
"""x, y, radius."""
ROUNDING = 1e-9
"""The largest epsilon that counts as rounding (a linear program's own tolerance); what fails by more is invalid."""
_NEAR = 1e-7  # a pair that floats find this far from touching needs no exact look
_FINE = 2**128


def read(text: str) -> list[Circle]:
    """Circles from JSON: a list of [x, y, r] or {"x", "y", "r"}, or an object with such a list as `circles`; whatever
    else it says (a sum) counts for nothing. ValueError says what is wrong; nothing but numbers is a number."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_never)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if isinstance(found, dict):
        found = found.get("circles")
    if not isinstance(found, list):
        raise ValueError("the result is not a list of circles, nor an object with one as `circles`")
    return [_circle(one) for one in found]


def fault(circles: Sequence[Circle], n: int, tolerance: float = 0.0) -> str | None:
    """Why these are no packing of n circles, None when they are. `tolerance` may be exceeded by no wall and no pair."""
    if len(circles) != n:
        return f"there are {len(circles)} circles, not {n}"
    for number, circle in enumerate(circles):
        if not all(map(math.isfinite, circle)):
            return f"circle {number} has a number that is not finite"
        if circle[2] < 0:
            return f"circle {number} has a negative radius"
    slack = Fraction(tolerance)
    exact = [tuple(map(Fraction, circle)) for circle in circles]
    for number, (x, y, r) in enumerate(exact):
        if min(x - r, y - r, 1 - x - r, 1 - y - r) < -slack:
            return f"circle {number} is outside the square"
    for one, other in near(circles, tolerance):
        (x, y, r), (u, v, s) = exact[one], exact[other]
        reach = r + s - slack
        if reach > 0 and (x - u) ** 2 + (y - v) ** 2 < reach**2:
            return f"circles {one} and {other} overlap"
    return None


def shrink(circles: Sequence[Circle], n: int, most: float = ROUNDING) -> list[Circle] | None:
    """The same circles with the smallest epsilon taken from every radius that makes them a packing, radii rounded down
    to floats; none below 0. None when that takes more than `most`, or when they are no n circles."""
    why = fault(circles, n)
    if why is None:
        return list(circles)
    if len(circles) != n or not all(math.isfinite(one) and circle[2] >= 0 for circle in circles for one in circle):
        return None
    epsilon = excess(circles)
    while epsilon <= most:
        smaller = [(x, y, max(0.0, _below(Fraction(r) - epsilon))) for x, y, r in circles]
        if fault(smaller, n) is None:
            return smaller
        epsilon *= 2  # a radius stopped at 0 while its neighbour needed it to go on
    return None


def excess(circles: Sequence[Circle]) -> Fraction:
    """By how much every radius must at least shrink so that no wall and no pair is crossed (to 2^-128)."""
    exact = [tuple(map(Fraction, circle)) for circle in circles]
    needed = [max(r - x, r - y, x + r - 1, y + r - 1) for x, y, r in exact]
    for one, other in near(circles):
        (x, y, r), (u, v, s) = exact[one], exact[other]
        square = (x - u) ** 2 + (y - v) ** 2
        apart = Fraction(math.isqrt(math.floor(square * _FINE * _FINE)), _FINE)  # rounded down
        needed.append((r + s - apart) / 2)
    return max(Fraction(0), *needed)


def total(circles: Sequence[Circle]) -> float:
    """The sum of the radii, rounded once."""
    return float(sum((Fraction(r) for _, _, r in circles), Fraction(0)))


def near(circles: Sequence[Circle], tolerance: float = 0.0) -> list[tuple[int, int]]:
    """The pairs that touch, overlap or nearly do."""
    found = []
    for other in range(len(circles)):
        x, y, r = circles[other]
        for one in range(other):
            u, v, s = circles[one]
            if math.hypot(x - u, y - v) < (r + s) * (1 + _NEAR) + tolerance + _NEAR:
                found.append((one, other))
    return found


def _circle(given: Any) -> Circle:
    if isinstance(given, dict):
        if set(given) != {"x", "y", "r"}:
            raise ValueError("a circle has exactly x, y and r")
        given = [given["x"], given["y"], given["r"]]
    if not isinstance(given, list) or len(given) != 3:
        raise ValueError("a circle is three numbers: x, y, radius")
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in given):
        raise ValueError("a circle's x, y and radius are numbers, nothing else")
    try:
        x, y, r = (float(one) for one in given)
    except OverflowError:
        raise ValueError("a number is too large") from None
    if not all(map(math.isfinite, (x, y, r))):
        raise ValueError("a number is not finite")
    return x, y, r


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _never(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _below(value: Fraction) -> float:
    """The largest float that is not above."""
    found = float(value)
    return found if Fraction(found) <= value else math.nextafter(found, -math.inf)
