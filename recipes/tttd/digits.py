"""Answers that are digits with a fixed sum: counts of rows, lengths of runs. Legal ones only, under a grammar.

Knows: how many such answers there are, a uniform draw, a neighbour, a grammar in which nothing else can be written.
Does not know: what the digits mean, or what an answer is worth.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache

from reef.core.nouns import Json

_ANSWER = re.compile(r"\s*([0-9](?:[\s,]*[0-9])*)\s*\.?\s*")


@dataclass(frozen=True, slots=True)
class Digits:
    """From `least` to `most` digits, each from `low` to `high` (1 to 9), that add up to `total`."""

    total: int
    low: int
    high: int
    least: int
    most: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.high <= 9 and 1 <= self.least <= self.most):
            raise ValueError("digits go from low to high, 1 to 9, and their number from least to most")
        if self.count() == 0:
            raise ValueError(f"no {self.least} to {self.most} digits of {self.low} to {self.high} sum to {self.total}")

    def count(self) -> int:
        """How many legal answers there are."""
        return sum(_ways(self, number, self.total) for number in range(self.least, self.most + 1))

    def legal(self, made: int, left: int) -> list[int]:
        """The digits that may follow `made` digits with `left` to go: a legal answer can be reached from them."""
        return [digit for digit in range(self.low, self.high + 1) if self._open(made + 1, left - digit)]

    def read(self, text: str) -> str | None:
        """The answer a text is, digits without anything between them; None when it is none, or not a legal one."""
        found = _ANSWER.fullmatch(text)
        if found is None:
            return None
        digits = re.sub(r"[\s,]", "", found[1])
        right = self.least <= len(digits) <= self.most and sum(map(int, digits)) == self.total
        return digits if right and all(self.low <= int(digit) <= self.high for digit in digits) else None

    def draw(self, numbers: random.Random) -> str:
        """A legal answer, each as likely as any other."""
        sizes = range(self.least, self.most + 1)
        (size,) = numbers.choices(sizes, [_ways(self, size, self.total) for size in sizes])
        made, left = "", self.total
        for after in reversed(range(size)):
            choices = range(self.low, self.high + 1)
            (digit,) = numbers.choices(choices, [_ways(self, after, left - digit) for digit in choices])
            made, left = made + str(digit), left - digit
        return made

    def move(self, answer: str, numbers: random.Random) -> str:
        """A neighbour: one unit moved from a digit to another, two digits exchanged, a digit split, or two made one."""
        while True:
            digits = [int(digit) for digit in answer]
            one, other = numbers.randrange(len(digits)), numbers.randrange(len(digits))
            kind = numbers.randrange(4)
            if kind == 0:
                digits[one] -= 1
                digits[other] += 1
            elif kind == 1:
                digits[one], digits[other] = digits[other], digits[one]
            elif kind == 2:
                part = numbers.randint(1, digits[one])
                digits[one : one + 1] = [part, digits[one] - part]
            elif one + 1 < len(digits):
                digits[one : one + 2] = [digits[one] + digits[one + 1]]
            if all(self.low <= digit <= self.high for digit in digits):
                found = self.read("".join(map(str, digits)))
                if found is not None and found != answer:
                    return found

    def grammar(self) -> str:
        """In the Lark dialect of llguidance: one rule for each (digits made, rest), so that a text has a legal end or
        cannot be written."""
        rules: dict[tuple[int, int], str] = {}
        todo = [(0, self.total)]
        while todo:
            made, left = todo.pop()
            if (made, left) in rules:
                continue
            ways = []
            for digit in self.legal(made, left):
                after = (made + 1, left - digit)
                ways.append(f'"{digit}"' if left == digit else f'"{digit}" {_rule(*after)}')
                if left != digit:
                    todo.append(after)
            rules[made, left] = f"{_rule(made, left)}: {' | '.join(ways)}"
        return "\n".join(["start: " + _rule(0, self.total), *(rules[key] for key in sorted(rules))]) + "\n"

    def _open(self, made: int, left: int) -> bool:
        """Whether a legal answer can begin with `made` digits that leave `left`."""
        sizes = range(max(self.least - made, 0), self.most - made + 1)
        return left >= 0 and any(size * self.low <= left <= size * self.high for size in sizes)


def _rule(made: int, left: int) -> str:
    return f"r{made}_{left}"


class Spelled:
    """What problems whose answers are such digits have in common."""

    digits: Digits

    def start(self, numbers: random.Random) -> str:
        return self.digits.draw(numbers)

    def move(self, state: str, numbers: random.Random) -> str:
        return self.digits.move(state, numbers)

    def parse(self, text: str) -> str | None:
        return self.digits.read(text)

    def grammar(self) -> Json:
        return {"grammar": self.digits.grammar()}


@lru_cache(100_000)
def _ways(digits: Digits, size: int, left: int) -> int:
    """How many sequences of `size` digits add up to `left`."""
    if size == 0:
        return int(left == 0)
    if not size * digits.low <= left <= size * digits.high:
        return 0
    return sum(_ways(digits, size - 1, left - digit) for digit in range(digits.low, digits.high + 1))
