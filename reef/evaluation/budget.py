"""The error budget: how small a chance of being wrong each candidate may have, so that a life's releases are true.

Knows: the share that the k-th candidate since the last release has, and what a release leaves to the next ones.
Does not know: candidates, tests, or what alpha is: all is in parts of alpha.

- An *era* lasts from one release to the next. It has a budget, at first 1, and its candidates' shares of that sum to 1.
  By the union bound the chance that it ends with a false release is at most alpha * budget, however its candidates
  depend on each other (they share the incumbent's answers).
- A release adds 1 to what its era left, at most MOST in all. So over any life the chances given out are at most
  alpha * (releases + 1), and that bounds the expected number of false releases (alpha-investing: Foster, Stine 2008).
- The shares fall off slowly: 1/k^2, the usual schedule, leaves the tenth candidate no power, and learning freezes.
- 35% go to the first candidates (each gets 9/10 of the one before), where most releases of a scenario that learns come
  from; 55% evenly to the first 300; 10% to all after them, half of the rest in each stretch twice as long.
"""

from __future__ import annotations

FRONT, FALL = 0.35, 0.9
EVEN, SPAN = 0.55, 300
MOST = 4.0


def share(turn: int) -> float:
    """The part of its era's budget that the candidate with this number, from 1, has. Never 0; in all 1."""
    if turn < 1:
        raise ValueError("candidates are counted from 1")
    front: float = FRONT * (1 - FALL) * FALL ** (turn - 1)
    if turn <= SPAN:
        return front + EVEN / SPAN
    stretch = ((turn - 1) // SPAN).bit_length()  # 1 for 301 to 600, 2 for 601 to 1200, and so on
    width = SPAN << (stretch - 1)
    return front + (1 - FRONT - EVEN) / (width << stretch)


def left(budget: float, turn: int) -> float:
    """The next era's budget, when a candidate with this number is released in an era with this one."""
    return min(MOST, 1 + budget * max(0.0, 1 - sum(map(share, range(1, turn + 1)))))
