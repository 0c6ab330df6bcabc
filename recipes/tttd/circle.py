"""Circle packing: n circles in the unit square, the largest sum of radii. Two ways to act, one exact verifier.

Knows: rows of circles and the radii that suit them, programs that print circles, what a model is asked.
Does not know: how a search goes on. scipy and the sandbox are loaded when something is verified.

- `Rows`: an answer is how many circles stand in each row. Their centres follow from it; a linear program finds the
  radii, and nothing but the radii: an optimiser that may move centres would make the discovery itself.
- `Program`: an answer is a Python program that prints circles. For models that can write one.
"""

from __future__ import annotations

import hashlib
import json
import random

from reef.core.nouns import Json

from . import verifier
from .digits import Digits, Spelled
from .problems import Judged
from .verifier import Circle

Centre = tuple[float, float]
TAIL = 500  # characters of a program's output that the next prompt shows


class Rows(Spelled):
    """4 to 8 rows of 2 to 8 circles. Row i of R lies at height (i + 1/2) / R, its k circles at (j + 1/2) / k."""

    def __init__(self, n: int = 32) -> None:
        self.name = f"circle_packing n={n}"
        self.n = n
        self.digits = Digits(n, 2, 8, 4, 8)
        self.max_tokens = 16

    def prompt(self, state: str, judged: Judged) -> str:
        return (
            f"{self.n} circles lie in rows in a square. Their counts, row by row, as digits: {state}. "
            f"Score {judged.value:.4f}. Write counts with a higher score, digits only."
        )

    def verify(self, state: str) -> Judged:
        circles = verifier.shrink(radii(centres(state)), self.n)
        return judged(circles) if circles is not None else Judged(0.0, False, "")

    def polish(self, state: str) -> float:
        """The value after an optimiser also moved the centres. Context, not evidence: it reaches records by itself."""
        best, start = 0.0, radii(centres(state))
        for scale in (1.0, 0.95):  # it gets stuck where all circles touch
            found = verifier.shrink(refine([(x, y, scale * r) for x, y, r in start]), self.n)
            best = max(best, verifier.total(found) if found is not None else 0.0)
        return best


class Program:
    """A program of the standard library prints the circles as JSON. It runs in the sandbox (`bwrap`), without network
    and files, for at most `seconds`."""

    def __init__(self, n: int = 26, *, seconds: float = 60.0, memory: int = 512) -> None:
        if n < 1:
            raise ValueError("a packing has at least one circle")
        self.name = f"circle_program n={n}"
        self.n, self.seconds, self.memory = n, seconds, memory
        self.max_tokens = 4096

    def start(self, numbers: random.Random) -> str:
        """Equal circles on the smallest grid that holds them. There is one: `numbers` decide nothing."""
        return (
            f"import json\n\nn, k = {self.n}, 1\nwhile k * k < n:\n    k += 1\n"
            "circles = [[(i % k + 0.5) / k, (i // k + 0.5) / k, 0.5 / k] for i in range(n)]\n"
            'print(json.dumps({"circles": circles}))\n'
        )

    def prompt(self, state: str, judged: Judged) -> str:
        tail = f"\nThe end of its output:\n```\n{judged.note}\n```\n" if judged.note else "\n"
        return (
            f"Place {self.n} circles in the unit square, inside it and without overlap, so that the sum of their radii "
            f"is as large as possible. This Python program reaches {judged.value:.10f}:\n```python\n{state}\n```{tail}"
            "Write a better program in one Python block. It may use the standard library only, runs for at most "
            f"{self.seconds:g} seconds, and prints one line of JSON: "
            '{"circles": [[x, y, radius], ...]}.'
        )

    def parse(self, text: str) -> str | None:
        from reef.evaluation.sandbox import code

        return code(text).strip() or None

    def verify(self, state: str) -> Judged:
        from reef.evaluation.sandbox import printed

        text, why = printed(state, seconds=self.seconds, memory=self.memory)
        lines = text.strip().splitlines()
        if why is not None or not lines:
            return Judged(0.0, False, "", why or "it printed nothing")
        try:
            circles = verifier.shrink(verifier.read(lines[-1]), self.n)
        except ValueError as error:
            return Judged(0.0, False, "", str(error))
        if circles is None:
            return Judged(0.0, False, "", "the circles are no packing")
        return judged(circles, "\n".join(lines[:-1])[-TAIL:])

    def grammar(self) -> Json:
        return None


def judged(circles: list[Circle], note: str = "") -> Judged:
    """A valid packing's value. Packings that differ in the order of their circles are one."""
    digest = hashlib.sha256(json.dumps(sorted(circles)).encode()).hexdigest()
    return Judged(verifier.total(circles), True, digest[:32], note)


def centres(state: str) -> list[Centre]:
    """Where the circles of a row layout stand."""
    counts = [int(digit) for digit in state]
    return [
        ((place + 0.5) / many, (row + 0.5) / len(counts)) for row, many in enumerate(counts) for place in range(many)
    ]


def radii(points: list[Centre]) -> list[Circle]:
    """The radii of the largest sum around fixed centres, by a linear program: feasible to its tolerance."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    place = np.array(points)
    wall = np.minimum(place, 1 - place).min(axis=1)
    one, other = np.triu_indices(len(points), 1)
    apart = np.hypot(*(place[one] - place[other]).T)
    close = apart < wall[one] + wall[other]  # no other pair can touch
    one, other, apart = one[close], other[close], apart[close]
    rows = np.arange(len(apart))
    pairs = coo_matrix((np.ones(2 * len(rows)), (np.r_[rows, rows], np.r_[one, other])), shape=(len(rows), len(points)))
    limits = {"A_ub": pairs, "b_ub": apart} if len(rows) else {}
    bounds, exact = np.c_[np.zeros(len(points)), wall], {"primal_feasibility_tolerance": 1e-10}  # as far as it goes
    found = linprog(-np.ones(len(points)), **limits, bounds=bounds, method="highs", options=exact)
    sizes = found.x if found.success else np.zeros(len(points))
    return [(x, y, max(0.0, float(r))) for (x, y), r in zip(points, sizes, strict=True)]


def refine(circles: list[Circle], steps: int = 300) -> list[Circle]:
    """SLSQP over centres and radii, with the exact derivatives of the pairs' constraints; then radii once more."""
    import numpy as np
    from scipy.optimize import minimize

    n = len(circles)
    one, other = np.triu_indices(n, 1)
    rows, each = np.arange(len(one)), np.arange(n)
    walls = np.zeros((4 * n, 3 * n))
    for side, (axis, sign) in enumerate(((0, 1.0), (1, 1.0), (0, -1.0), (1, -1.0))):
        walls[side * n + each, axis * n + each] = sign
        walls[side * n + each, 2 * n + each] = -1.0
    shift = np.r_[np.zeros(2 * n), np.ones(2 * n)]

    def pairs(v):  # type: ignore[no-untyped-def]
        x, y, r = v[:n], v[n : 2 * n], v[2 * n :]
        return (x[one] - x[other]) ** 2 + (y[one] - y[other]) ** 2 - (r[one] + r[other]) ** 2

    def slopes(v):  # type: ignore[no-untyped-def]
        found = np.zeros((len(one), 3 * n))
        for axis in (0, 1):
            away = 2 * (v[axis * n + one] - v[axis * n + other])
            found[rows, axis * n + one], found[rows, axis * n + other] = away, -away
        touch = -2 * (v[2 * n + one] + v[2 * n + other])
        found[rows, 2 * n + one] = found[rows, 2 * n + other] = touch
        return found

    slope = np.r_[np.zeros(2 * n), -np.ones(n)]
    found = minimize(
        lambda v: -v[2 * n :].sum(),
        np.array(circles).T.ravel(),
        jac=lambda v: slope,
        method="SLSQP",
        bounds=[(0, 1)] * (2 * n) + [(0, 0.5)] * n,
        constraints=[
            {"type": "ineq", "fun": pairs, "jac": slopes},
            {"type": "ineq", "fun": lambda v: walls @ v + shift, "jac": lambda v: walls},
        ],
        options={"maxiter": steps, "ftol": 1e-12},
    )
    points = np.clip(found.x[: 2 * n], 0, 1).reshape(2, n).T
    return max(circles, radii([(float(x), float(y)) for x, y in points]), key=lambda one: sum(r for _, _, r in one))
