"""The addition study: split, check, what must hold."""

from recipes.sao import study
from recipes.sao.study import HELD_OUT, TRAIN, Sum, demands, figures, reward
from reef.study.run import Answer


def answer(text, finish="stop"):
    return Answer(text, "", "", finish, {}, 3)


def test_the_split_is_by_unordered_pair():
    assert (len(TRAIN), len(HELD_OUT)) == (54, 27)
    sides = [{frozenset((one.a, one.b)) for one in side} for side in (TRAIN, HELD_OUT)]
    assert not sides[0] & sides[1]
    assert study.split() == (TRAIN, HELD_OUT)  # the same each time


def test_the_last_number_counts_and_only_if_the_answer_ended():
    one = Sum(3, 4)
    assert one.prompt == "What is 3+4? Reply with only the number."
    assert reward(one, answer("3 + 4 = 7.")) == 1.0
    assert reward(one, answer("7", "length")) == 0.0
    assert reward(one, answer("7 and not 8")) == 0.0
    assert reward(one, answer("")) == 0.0
    assert reward(one, answer("9" * 500)) == 0.0


def test_figures_have_the_masked_share_by_lag():
    measured = {"score": 0.1, "given": None, "ended": 0.2, "tokens": 11.0, "distinct": 9, "answers": 81}
    step = {"reward": 0.5, "verdict": "accept", "trained": 96, "dropped": 0}
    steps = [
        {**step, "lag": 0.0, "masked": 0.0},
        {**step, "lag": 3.0, "masked": 0.2},
        {**step, "lag": 3.0, "masked": 0.4},
    ]
    steps[1]["verdict"] = "reject"
    kept = {"base": measured, "steps": steps, "curve": [[0, 0.1]]}
    found = figures(kept, {**measured, "score": 0.8, "given": 0.9}, {"kl": 0.1})
    assert (found["base"], found["end"], found["given_base"], found["given_end"]) == (0.1, 0.8, None, 0.9)
    assert found["masked_at_lag_0"] == 0.0
    assert abs(found["masked_at_lag_3"] - 0.3) < 1e-9
    assert (found["accepted"], found["rejected"], found["trained"]) == (2, 1, 96)
    assert found["curve"] == [[0, 0.1], [384, 0.8]]
    assert found["training"] == [[16.0, 0.5], [48.0, 0.5], [80.0, 0.5]]


def run(base, end, given=(0.4, 0.9)):
    return {"base": base, "end": end, "given_base": given[0], "given_end": given[1]}


MAIN = {0: run(0.10, 0.75), 1: run(0.06, 0.70), 2: run(0.12, 0.55)}
WHOLE = {"main": MAIN, "shuffled": {0: run(0.08, 0.18)}, "lag3": {0: run(0.08, 0.55)}}


def met(results):
    return [one.met for one in demands(results)]


def test_what_must_hold():
    assert met(WHOLE) == [True] * 5
    assert met({**WHOLE, "main": {**MAIN, 0: run(0.13, 0.75)}})[0] is False
    assert met({**WHOLE, "main": {**MAIN, 1: run(0.06, 0.69), 0: run(0.1, 0.69)}})[1] is False  # the median
    assert met({**WHOLE, "main": {**MAIN, 2: run(0.06, 0.49)}})[1] is False  # the minimum
    assert met({**WHOLE, "main": {**MAIN, 2: run(0.06, 0.8, (0.9, 0.9))}})[2] is False  # it only learnt to stop
    assert met({**WHOLE, "shuffled": {0: run(0.08, 0.19)}})[3] is False
    assert met({**WHOLE, "lag3": {0: run(0.08, 0.54)}})[4] is False


def test_what_is_not_known_is_not_claimed():
    assert met({}) == [None] * 5
    assert met({"main": {0: MAIN[0]}}) == [True, None, None, None, None]


def test_the_late_arm_may_be_late():
    late = {arm.name: arm for arm in study.STUDY.arms}["lag3"]
    assert late.config["reef"]["max_staleness"] >= late.options["late"] == 3
