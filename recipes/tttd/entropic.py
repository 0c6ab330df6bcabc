"""The entropic objective's numbers: how sharply a group of rewards is weighed, and what each rollout is worth.

Source: TTT-Discover, arXiv 2601.16175. Plain Python over lists, so that every number can be checked by hand.
Knows: beta, advantages, the shaping by the distance to the base. Does not know: tensors, tokens' texts, files.

    J_beta = log E[exp(beta R)]: the mean reward as beta -> 0, the largest as beta -> infinity
    q_beta(n) = softmax(beta R)_n; beta solves KL(q_beta || uniform) = gamma, so it fits any shift and scale of R
    A_n = exp(beta (R_n - R_max)) / mean over m != n of exp(beta (R_m - R_max)) - 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GAMMA = math.log(2)
LEAST = 4  # rewards a group needs: with two of them the best one's advantage has no limit
LARGEST = 1e6  # beta for rewards of spread 1; beyond it the constraint counts as out of reach
HALVINGS = 60
TINY = 1e-12


def divergence(rewards: Sequence[float], beta: float) -> float:
    """KL(softmax(beta R) || uniform) in nats, from 0 to ln(N / ties at the maximum)."""
    top = max(rewards)
    weights = [math.exp(beta * (reward - top)) for reward in rewards]
    total = math.fsum(weights)
    parts = [weight / total for weight in weights]
    return max(0.0, math.fsum(part * math.log(part * len(parts)) for part in parts if part > 0))


def temperature(rewards: Sequence[float], gamma: float = GAMMA) -> float | None:
    """The beta at which the divergence is `gamma`; None where no beta reaches it: too many rewards tie at the maximum
    (all of them, in a constant group), or nearly so."""
    top, low = max(rewards), min(rewards)
    if top == low or math.log(len(rewards) / sum(reward == top for reward in rewards)) <= gamma:
        return None
    spread = top - low
    unit = [(reward - top) / spread for reward in rewards]  # from -1 to 0: beta is found for these, then scaled back
    below, above = 0.0, 1.0
    while divergence(unit, above) < gamma:
        if above >= LARGEST:
            return None
        above *= 2
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        below, above = (middle, above) if divergence(unit, middle) < gamma else (below, middle)
    return above / spread


def advantages(
    rewards: Sequence[float], gamma: float = GAMMA, *, beta: float | None = None, cap: float | None = None
) -> list[float]:
    """The leave-one-out advantage of each rollout of one group; `beta` given is used as it is.

    A constant group, or one of fewer than `LEAST` rewards (with an adaptive beta), is worth 0. Where the constraint is
    out of reach the limit beta -> infinity holds: winners (N - 1) / (m - 1) - 1, losers -1. `cap`: the most a rollout
    may be worth. ValueError when a reward is not a finite number.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError("every reward must be a finite number")
    many = len(rewards)
    if many < 2 or max(rewards) == min(rewards) or (beta is None and many < LEAST):
        return [0.0] * many
    top = max(rewards)
    if beta is None:
        found = temperature(rewards, gamma)
        beta = LARGEST / (top - min(rewards)) if found is None else found
    weights = [math.exp(beta * (reward - top)) for reward in rewards]
    total = math.fsum(weights)
    worth = [weight / ((total - weight) / (many - 1) + TINY) - 1 for weight in weights]
    return worth if cap is None else [min(cap, one) for one in worth]


def shape(sampled: Sequence[Sequence[float]], base: Sequence[Sequence[float]], weight: float) -> list[list[float]]:
    """What is added to the advantage of each response token: weight * (mean of d - d), d = ln q - ln base. Its sum over
    the batch is 0: it moves worth from tokens that the base finds strange to those it would have said itself."""
    apart = [[one - other for one, other in zip(a, b, strict=True)] for a, b in zip(sampled, base, strict=True)]
    flat = [one for row in apart for one in row]
    mean = math.fsum(flat) / len(flat) if flat else 0.0
    return [[weight * (mean - one) for one in row] for row in apart]
