"""The problems: circles judged exactly, what is no result, legal digits and their grammar, merit factors, programs."""

from __future__ import annotations

import itertools
import math
import random
import shutil
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.tttd import verifier
from recipes.tttd.circle import Program, Rows, centres, radii, refine
from recipes.tttd.controls import climbed, drawn
from recipes.tttd.digits import Digits
from recipes.tttd.problems import Judged, choose
from recipes.tttd.sequence import Runs, energy, merit, signs
from recipes.tttd.verifier import Circle, fault, read, shrink, total
from reef.core.errors import ConfigError, InputError


def square(k: int, r: float) -> list[Circle]:
    return [((i % k + 0.5) / k, (i // k + 0.5) / k, r) for i in range(k * k)]


def dyadic(k: int) -> list[Circle]:
    return [((2 * (i % k) + 1) / (2 * k), (2 * (i // k) + 1) / (2 * k), 1 / (2 * k)) for i in range(k * k)]


def test_two_circles_that_touch() -> None:
    pair: list[Circle] = [(0.25, 0.25, 0.25), (0.75, 0.75, 0.25)]
    assert fault(pair, 2) is None
    assert total(pair) == 0.5
    assert "outside" in str(fault([(0.25, 0.25, 0.36), (0.75, 0.75, 0.36)], 2))


def test_a_dyadic_grid_is_exactly_tangent() -> None:
    assert fault(dyadic(4), 16) is None
    assert total(dyadic(4)) == 2.0


def test_a_grid_of_tenths_fails_by_rounding_alone() -> None:
    tenths: list[Circle] = [(0.1 + 0.2 * (i % 5), 0.1 + 0.2 * (i // 5), 0.1) for i in range(25)]
    plain: list[Circle] = [(x / 10, y / 10, 0.1) for x in (1, 3, 5, 7, 9) for y in (1, 3, 5, 7, 9)]
    assert 0.3 - 0.1 < 0.2
    for grid in (tenths, plain):
        assert fault(grid, 25, 1e-12) is None
        assert fault(grid, 25) is not None
        assert fault([(x, y, r - 1e-16) for x, y, r in plain], 25) is None
        smaller = shrink(grid, 25)
        assert smaller is not None
        assert fault(smaller, 25) is None
        assert 2.5 - 1e-13 < total(smaller) < 2.5
    larger = [(*plain[0][:2], 0.1 + 1e-9), *plain[1:]]
    assert fault(larger, 25, 1e-12) is not None
    assert fault(larger, 25, 1e-6) is None


def test_epsilon_is_the_smallest() -> None:
    pair: list[Circle] = [(0.25, 0.5, 0.25), (0.75 - 2.0**-40, 0.5, 0.25)]
    assert verifier.excess(pair) == pytest.approx(2.0**-41, rel=1e-12)
    smaller = shrink(pair, 2)
    assert smaller is not None
    assert [r for _, _, r in smaller] == [0.25 - 2.0**-41] * 2
    assert shrink([(0.25, 0.5, 0.26), (0.75, 0.5, 0.26)], 2) is None  # more than rounding


@pytest.mark.parametrize(
    ("circles", "n", "why"),
    [
        ([(0.5, 0.5, math.nan)], 1, "finite"),
        ([(math.inf, 0.5, 0.1)], 1, "finite"),
        ([(0.5, 0.5, -0.1)], 1, "negative"),
        ([(0.5, 0.5, 0.1)], 2, "not 2"),
        ([(0.5, 0.5, 0.1)] * 3, 2, "not 2"),
        ([(0.5, 0.5, 0.1), (0.5, 0.5, 0.0)], 2, None),  # a point in a circle: dist 0 < 0.1
    ],
)
def test_what_is_no_packing(circles: list[Circle], n: int, why: str | None) -> None:
    assert (why or "overlap") in str(fault(circles, n))
    assert shrink(circles, n) is None


def test_points_may_meet() -> None:
    assert fault([(0.5, 0.5, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 0.0)], 3) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.randoms(use_true_random=False))
def test_what_was_shrunk_is_exactly_a_packing(n: int, numbers: random.Random) -> None:
    """Against a judge of its own, over every pair, in fractions."""
    found = radii([(numbers.random(), numbers.random()) for _ in range(n)])
    smaller = shrink(found, n)
    assert smaller is not None
    exact = [tuple(map(Fraction, circle)) for circle in smaller]
    for x, y, r in exact:
        assert r >= 0
        assert r <= x <= 1 - r
        assert r <= y <= 1 - r
    for (x, y, r), (u, v, s) in itertools.combinations(exact, 2):
        assert (x - u) ** 2 + (y - v) ** 2 >= (r + s) ** 2
    assert total(smaller) == pytest.approx(sum(r for _, _, r in found), abs=1e-8)


def test_centres_that_lie_closer_than_a_linear_program_usually_minds() -> None:
    centres = [(6e-8, 0.5), *[(0.0, 0.0)] * 4, (0.75, 0.5), (0.5, 0.75), (0.25, 0.5)]
    assert shrink(radii(centres), 8) is not None


@pytest.mark.parametrize(
    ("points", "value"),
    [
        ([(0.5, 0.5)], 0.5),
        ([(i / 5 + 0.1, j / 5 + 0.1) for i in range(5) for j in range(5)], 2.5),
        ([(i / 6 + 1 / 12, j / 6 + 1 / 12) for i in range(6) for j in range(6)], 3.0),
        ([(i / 6 + 1 / 12, j / 6 + 1 / 12) for i in range(6) for j in range(6)][:32], 32 / 12),
        ([(i / 5 + 0.1, j / 5 + 0.1) for i in range(5) for j in range(5)] + [(0.2, 0.2)], 2.541421356),
        ([(0.29289321881345254,) * 2, (0.7071067811865476,) * 2], 2 - math.sqrt(2)),
    ],
)
def test_anchors(points: list[tuple[float, float]], value: float) -> None:
    smaller = shrink(radii(points), len(points))
    assert smaller is not None
    assert total(smaller) == pytest.approx(value, abs=2e-8)


# --- results as data --------------------------------------------------------------------------------------------------


def test_circles_from_json() -> None:
    expected = [(0.25, 0.5, 0.1), (1.0, 0.0, 0.0)]
    assert read("[[0.25, 0.5, 0.1], [1, 0, 0]]") == expected
    assert read('{"sum": 9.9, "circles": [{"x": 0.25, "y": 0.5, "r": 0.1}, [1, 0, 0]]}') == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "3", '"circles"', "{}", '{"circles": 3}', "[[0.5, 0.5]]", "[[0.5, 0.5, 0.1, 0.1]]",
        "[[0.5, 0.5, true]]", "[[0.5, 0.5, NaN]]", "[[0.5, 0.5, Infinity]]", "[[0.5, 0.5, 1e999]]",
        '[[0.5, 0.5, "0.1"]]', "[[0.5, 0.5, null]]", '[{"x": 0.5, "y": 0.5, "r": 0.1, "r": 0.2}]',
        '[{"x": 0.5, "y": 0.5}]', '[{"x": 0.5, "y": 0.5, "r": 0.1, "z": 0}]', '{"circles": [], "circles": []}',
        "[[0.5, 0.5, " + "9" * 400 + "]]", "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_result(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


# --- digits -----------------------------------------------------------------------------------------------------------


def test_the_space_of_row_layouts() -> None:
    assert Rows(32).digits.count() == 216_142
    assert Rows(26).digits.count() == 42_213


def every(digits: Digits) -> set[str]:
    return {
        "".join(map(str, each))
        for size in range(digits.least, digits.most + 1)
        for each in itertools.product(range(digits.low, digits.high + 1), repeat=size)
        if sum(each) == digits.total
    }


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 12), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_digits_against_all_of_them(sum_: int, low: int, wide: int, least: int, more: int, data: st.DataObject) -> None:
    try:
        digits = Digits(sum_, low, low + wide, least, least + more)
    except ValueError:
        return
    whole = every(digits)
    assert digits.count() == len(whole)
    walked = {""}
    done: set[str] = set()
    while walked:  # every walk along legal digits ends at a legal answer, and every legal answer is such a walk
        answer = walked.pop()
        left = digits.total - sum(map(int, answer))
        if left == 0 and len(answer) >= digits.least:
            done.add(answer)
        nexts = digits.legal(len(answer), left)
        assert nexts or left == 0
        walked |= {answer + str(digit) for digit in nexts}
    assert done == whole
    numbers = random.Random(data.draw(st.integers(0, 99)))
    if whole:
        drawn = digits.draw(numbers)
        assert drawn in whole
        assert digits.read(f" {','.join(drawn)}. ") == drawn
    if len(whole) > 1 and len({len(one) for one in whole}) > 1:
        assert digits.read("9" * 9) is None


def test_moves_stay_legal() -> None:
    problem, numbers = Rows(32), random.Random(1)
    state = problem.start(numbers)
    for _ in range(200):
        other = problem.move(state, numbers)
        assert other != state
        assert problem.parse(other) == other
        state = other


@pytest.mark.parametrize("text", ["", "55555", "5 5 5 5 5 5 3", "3333333344", "I say 565655.", "5,6,5,6,1,9", "99995"])
def test_what_is_no_layout(text: str) -> None:
    assert Rows(32).parse(text) is None
    assert Rows(32).parse(" 6, 6 5 555.\n") == "665555"


@pytest.mark.parametrize("problem", [Rows(32), Rows(26), Runs(27)], ids=lambda problem: problem.name)
def test_a_grammar_writes_legal_answers_and_nothing_else(problem: Rows | Runs) -> None:
    llguidance = pytest.importorskip("llguidance")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    plain = Tokenizer(models.BPE({**{str(digit): digit for digit in range(10)}, "x": 10, "</s>": 11}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["</s>"])
    known = llguidance.LLTokenizer(plain.to_str(), eos_token=11)
    grammar = llguidance.LLMatcher.grammar_from_lark(problem.grammar()["grammar"])
    numbers = random.Random(0)
    for _ in range(3):
        matcher, made = llguidance.LLMatcher(known, grammar), ""
        while True:
            left = problem.n - sum(map(int, made))
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(12) if mask[token // 8] >> token % 8 & 1]
            ending = left == 0
            assert allowed == ([11] if ending else problem.digits.legal(len(made), left))
            if ending:
                break
            token = numbers.choice(allowed)
            assert matcher.consume_token(token)
            made += str(token)
        assert problem.parse(made) == made


# --- values -----------------------------------------------------------------------------------------------------------


def test_rows_are_judged_the_same_each_time() -> None:
    problem = Rows(32)
    one, other = problem.verify("656564"), problem.verify("656564")
    assert one == other
    assert one.valid
    assert one.value == pytest.approx(2.738690, abs=1e-5)
    assert one.key != problem.verify("656565").key
    assert "656564" in problem.prompt("656564", one)
    assert centres("23")[2] == (1 / 6, 0.75)


def test_polishing_is_never_worse_and_still_valid() -> None:
    start = radii(centres("3232"))
    better = shrink(refine(start, 60), 10)
    assert better is not None
    assert total(better) > sum(r for _, _, r in start)


def test_barker_sequences() -> None:
    assert energy(signs("5221111")) == 6
    assert merit(signs("5221111")) == Fraction(169, 12)
    assert energy(signs("33221")) == energy(signs("33221")[::-1])
    assert Runs(11).verify("331211").value == pytest.approx(12.1)
    assert Runs(13).verify("5221111") == Judged(169 / 12, True, "1111225")
    best = max(merit([1 if bits >> place & 1 else -1 for place in range(9)]) for bits in range(2**9))
    assert best == max(merit(signs(one)) for one in every(Runs(9).digits))


def test_problems_by_name() -> None:
    assert choose("autocorrelation", 27).name == "autocorrelation n=27"
    assert choose("recipes.tttd.circle:Rows", 26).name == "circle_packing n=26"
    for name, n, error in (
        ("circles", 26, InputError),
        ("circle_packing", 3, InputError),
        ("a:B", 1, ConfigError),
        ("autocorrelation", 2, InputError),
        ("autocorrelation", 100_000, InputError),
        ("os:system", 3, ConfigError),
        ("fractions:Fraction", 3, ConfigError),
        ("builtins:dict", 3, ConfigError),
    ):
        with pytest.raises(error):
            choose(name, n)


def test_searches_without_a_model_count_distinct_calls() -> None:
    problem = Rows(20)
    for search in (drawn, climbed):
        tally, again = search(problem, 40, 0), search(problem, 40, 0)
        assert len(tally.known) == len(tally.curve) == 40
        assert tally.curve == again.curve == sorted(tally.curve)
        assert tally.known[tally.best].value == tally.curve[-1]
    assert len(drawn(Runs(4), 1000, 0).known) == Runs(4).digits.count()  # it ends where there is nothing new
    with pytest.raises(ValueError, match="neighbours"):
        climbed(Program(1), 5, 0)


# --- programs ---------------------------------------------------------------------------------------------------------

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@needs_bwrap
def test_a_program_prints_circles() -> None:
    problem = Program(26)
    state = problem.start(random.Random(0))
    judged = problem.verify(state)
    assert judged.valid
    assert judged.value == pytest.approx(26 / 12)
    talk = "Sure:\n```python\nprint('looking')\nif __name__ == '__main__':\n    print([[0.5, 0.5, 0.5]])\n```\n"
    program = Program(1)
    answer = program.parse(talk)
    assert answer is not None
    judged = program.verify(answer)
    assert (judged.value, judged.note) == (0.5, "looking")
    assert "looking" in program.prompt(answer, judged)


@needs_bwrap
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("1/0", "ZeroDivisionError"),
        ("pass", "printed nothing"),
        ("print('[[0.5, 0.5, NaN]]')", "NaN"),
        ("print('[[0.5, 0.5, 0.6]]')", "no packing"),
        ("while True: pass", "1 s"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "Error"),
    ],
)
def test_a_program_that_is_wrong_is_worth_nothing(code: str, why: str) -> None:
    judged = Program(1, seconds=1.0).verify(code)
    assert (judged.value, judged.valid) == (0.0, False)
    assert why in judged.note
