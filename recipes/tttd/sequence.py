"""Low-autocorrelation binary sequences: n signs, the largest merit factor n^2 / (2 E). The verifier is whole numbers.

Source: Golay 1977 for the merit factor; Barker's sequences (n = 13: E = 6, factor 14.08) are the classical best ones.
Knows: runs of equal signs and what they are worth. Does not know: how a search goes on.

An answer is the lengths of the runs, one digit each: 5221111 is +++++--++-+-+. It suits small models under a grammar
and strong ones in free text alike.
"""

from __future__ import annotations

from fractions import Fraction

from .digits import Digits, Spelled
from .problems import Judged

LARGEST = 300  # signs: counting the legal answers takes seconds there, and grows with the square


class Runs(Spelled):
    """Runs of 1 to 7 equal signs; n from 3 to LARGEST."""

    def __init__(self, n: int = 27) -> None:
        if not 3 <= n <= LARGEST:
            raise ValueError(f"a sequence has 3 to {LARGEST} signs")
        self.name = f"autocorrelation n={n}"
        self.n = n
        self.digits = Digits(n, 1, 7, max(2, -(-n // 7)), n)
        self.max_tokens = n + 4

    def prompt(self, state: str, judged: Judged) -> str:
        return (
            f"A sequence of {self.n} signs in runs of equal signs. The lengths of its runs, as digits: {state}. Merit "
            f"factor {judged.value:.4f}. Write lengths, with the sum {self.n}, of a sequence with a higher merit "
            "factor, digits only."
        )

    def verify(self, state: str) -> Judged:
        """A sequence and its reverse have one key: they are as good as each other."""
        return Judged(float(merit(signs(state))), True, min(state, state[::-1]))


def signs(state: str) -> list[int]:
    """The sequence of 1 and -1 that these runs are."""
    found: list[int] = []
    for number, length in enumerate(state):
        found += [-1 if number % 2 else 1] * int(length)
    return found


def energy(sequence: list[int]) -> int:
    """E: the sum of the squared aperiodic autocorrelations at every shift but 0."""
    n = len(sequence)
    return sum(sum(sequence[i] * sequence[i + shift] for i in range(n - shift)) ** 2 for shift in range(1, n))


def merit(sequence: list[int]) -> Fraction:
    return Fraction(len(sequence) ** 2, 2 * energy(sequence))
