"""GEPA's search by itself: fronts, merges, the budget, and that nothing is compared that should not be."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.gepa import merge, pareto
from recipes.gepa.search import Measure, Plan, Rewrite, Seen, Text, advance, better, minibatch, over
from recipes.gepa.state import Candidate, State, dump, load

VAL = tuple(f"v{n}" for n in range(4))
TRAIN = tuple(f"t{n}" for n in range(6))


def plan(**fields):
    return Plan(**({"train": TRAIN, "validation": VAL, "start": {"a": ""}} | fields))


class World:
    """Scores texts and rewrites them, and remembers what it was asked."""

    def __init__(self, score, rewrite=lambda request: Text(f"{request.texts[request.component]}+")):
        self.score, self.rewrite, self.asked = score, rewrite, []

    def __call__(self, request):
        self.asked.append(request)
        if isinstance(request, Rewrite):
            return self.rewrite(request)
        return [Seen(task, self.score(request.texts, task), "answer", "said") for task in request.tasks]

    def of(self, kind):
        return [one for one in self.asked if isinstance(one, kind)]

    @property
    def calls(self):
        return sum(len(one.tasks) for one in self.of(Measure))


def play(state, made, world, rounds=10_000):
    while rounds and over(state, made) is None:
        steps = advance(state, made)
        try:
            request = next(steps)
            while True:
                request = steps.send(world(request))
        except StopIteration:
            rounds -= 1
    return state


# --- the front --------------------------------------------------------------------------------------------------------


def test_5a_a_candidate_that_others_cover_is_dominated():
    on = {"t0": {0, 1}, "t1": {1}, "t2": {2}}
    assert pareto.survivors(on, [0.4, 0.6, 0.5]) == {1: 2, 2: 1}
    chance = random.Random(1)
    drawn = Counter(pareto.draw(on, [0.4, 0.6, 0.5], chance) for _ in range(6_000))
    assert drawn[0] == 0
    assert drawn[1] / 6_000 == pytest.approx(2 / 3, abs=0.02)
    assert drawn[2] / 6_000 == pytest.approx(1 / 3, abs=0.02)


def test_a_front_has_everybody_with_the_best_score():
    scores = [{"t0": 1.0, "t1": 0.0}, {"t0": 1.0, "t1": 0.5}, {"t1": 0.5}]
    assert pareto.fronts(scores) == {"t0": {0, 1}, "t1": {1, 2}}


def test_of_equals_the_oldest_stands():
    assert pareto.survivors({"t0": {0, 1}, "t1": {0, 1}}, [0.5, 0.5]) == {0: 2}


SCORES = st.lists(
    st.dictionaries(st.sampled_from(VAL), st.sampled_from([0.0, 0.5, 1.0]), min_size=1), min_size=1, max_size=7
)


@given(SCORES)
def test_every_front_keeps_somebody(scores):
    on, means = pareto.fronts(scores), [pareto.mean(one) for one in scores]
    standing = pareto.survivors(on, means)
    assert all(standing.keys() & members for members in on.values())
    assert all(count == sum(place in members for members in on.values()) > 0 for place, count in standing.items())
    for place in standing:  # nobody who stands is covered by the others who do
        others = standing.keys() - {place}
        assert not all(members & others for members in on.values() if place in members)


# --- one mutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("child", "kept"), [(0.5, False), (0.4, False), (0.6, True)])
def test_5b_only_strictly_better_on_the_minibatch_is_validated(child, kept):
    """5-B: sums 1.5 against 1.5 are a rejection; 1.5 against more goes to the whole validation."""
    world = World(lambda texts, task: child if texts["a"] else 0.5)
    state = play(State(), plan(budget=14), world)
    assert len(state.candidates) == 1 + kept
    assert [one.stage for one in world.of(Measure)] == ["validation", "minibatch", "minibatch"] + ["validation"] * kept
    first, second = [one for one in world.of(Measure) if one.stage == "minibatch"]
    assert (first.tasks, first.seed) == (second.tasks, second.seed)
    assert state.calls == world.calls == 10 + 4 * kept


def test_5c_a_perfect_minibatch_is_skipped_and_counted():
    world = World(lambda texts, task: 1.0 if task in TRAIN else 0.0)
    state = play(State(), plan(budget=20), world)
    assert world.of(Rewrite) == []
    assert state.calls == world.calls == 4 + 3 * 3  # three rounds begin while ten calls are left
    assert state.rewrites == 0


@pytest.mark.parametrize(("budget", "calls"), [(3, 0), (4, 4), (7, 4), (13, 4), (14, 14), (150, 144)])
def test_5d_the_budget_is_never_exceeded(budget, calls):
    """5-D, strictly: with cap 7, 4 validation tasks and minibatches of 3, no child runs. What is left would pay for the
    parent's minibatch only, or for a child that could not be validated, so it is not spent."""
    growing = World(lambda texts, task: len(texts["a"]) / 1000)
    state = play(State(), plan(budget=budget), growing)
    assert state.calls == growing.calls == calls
    assert len(growing.of(Rewrite)) == max(0, budget - 4) // 10


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 80), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_whatever_happens_the_budget_holds_and_the_search_ends(budget, train, validation, size, draw):
    made = plan(
        train=tuple(f"t{n}" for n in range(train)),
        validation=tuple(f"v{n}" for n in range(validation)),
        start={"a": "", "b": "x"},
        budget=budget,
        minibatch=size,
    )
    world = World(
        lambda texts, task: draw.choice([None, 0.0, 0.3, 1.0]),
        lambda request: Text(draw.choice(["", "one", "two", "three"]), "nothing to say"),
    )
    state = play(State(), made, world)
    assert state.calls == world.calls <= budget
    assert over(state, made) is not None
    for place, one in enumerate(state.candidates):
        assert all(parent < place for parent in one.parents)
        assert len(one.scores) >= 0.9 * validation
        assert all(one.texts != other.texts for other in state.candidates[:place])
    if state.candidates:
        assert state.means[state.ranking[0]] == max(state.means)


def test_components_take_turns():
    world = World(lambda texts, task: 0.0)
    play(State(), plan(start={"a": "", "b": "x", "c": "y"}, budget=4 + 6 * 6), world)
    assert [one.component for one in world.of(Rewrite)][:5] == ["a", "b", "c", "a", "b"]


def test_a_minibatch_is_of_different_tasks_and_an_epoch_of_all():
    made = plan(train=tuple(f"t{n}" for n in range(7)))
    epoch = [minibatch(made, number) for number in range(3)]
    assert all(len(set(one)) == 3 for one in epoch)
    assert {task for one in epoch for task in one} == set(made.train)
    assert [minibatch(made, number) for number in range(3, 6)] != epoch
    assert [minibatch(made, number) for number in range(3)] == epoch
    assert minibatch(plan(train=("t0", "t1")), 5) in [("t0", "t1"), ("t1", "t0")]


def test_what_was_there_already_is_not_measured_again():
    world = World(lambda texts, task: 0.0, lambda request: Text(""))
    state = play(State(), plan(budget=40), world)
    assert all(not one.texts["a"] for one in world.of(Measure))
    assert state.usable == 0
    assert state.rewrites == 9


def test_the_search_stops_where_nothing_can_be_better():
    world = World(lambda texts, task: 1.0 if texts["a"] or task in VAL else 0.0)
    state = play(State(), plan(), world)
    assert state.calls == 4
    assert over(state, plan()) == "nothing can be better on the validation tasks"


def test_a_task_that_was_not_measured_is_in_no_sum():
    before = [Seen("a", 1.0), Seen("b", None), Seen("c", 0.0)]
    after = [Seen("a", 0.0), Seen("b", 1.0), Seen("c", None)]
    assert better(before, after) == (1.0, 0.0)


def test_when_nothing_can_be_measured_the_search_ends():
    state = play(State(), plan(), World(lambda texts, task: None))
    assert state.candidates == []
    assert "cannot be measured with what is served now" in state.over
    assert state.calls == 4
    later = World(lambda texts, task: 0.0 if task in VAL else None)
    state = play(State(), plan(), later)
    assert state.calls == 7
    assert len(state.candidates) == 1


def test_a_candidate_that_misses_more_than_a_tenth_is_not_kept():
    def score(texts, task):
        return None if texts["a"] and task == "v0" else float(bool(texts["a"]))

    state = play(State(), plan(budget=30), World(score))
    assert len(state.candidates) == 1
    assert "validation tasks could be measured" in "\n".join(state.log)


def test_it_climbs_to_the_best_mean_of_equals_to_the_oldest():
    world = World(lambda texts, task: min(3, len(texts["a"])) / 4)
    state = play(State(), plan(), world)
    assert state.candidates[state.ranking[0]].texts == {"a": "+++"}
    assert state.means[state.ranking[0]] == 0.75
    assert state.ranking[0] == 3
    assert set(state.candidates[3].learnt) <= set(TRAIN)


def test_the_same_plan_gives_the_same_search():
    def world():
        return World(lambda texts, task: (hash((texts["a"], len(task))) % 7) / 10)

    assert dump(play(State(), plan(seed=3), world())) == dump(play(State(), plan(seed=3), world()))


# --- merging ----------------------------------------------------------------------------------------------------------


def test_5e_a_join_takes_what_each_changed():
    base, x, y = {"p": "a", "q": "b"}, {"p": "a'", "q": "b"}, {"p": "a", "q": "b'"}
    assert merge.join(base, x, y, x) == {"p": "a'", "q": "b'"}
    both, other = {"p": "a'", "q": "b"}, {"p": "a''", "q": "b"}
    assert merge.join(base, both, other, other) == {"p": "a''", "q": "b"}
    assert merge.join(base, both, other, both) == {"p": "a'", "q": "b"}
    assert merge.disjoint(base, x, y)
    assert not merge.disjoint(base, both, other)


VAL6 = tuple(f"v{n}" for n in range(6))


def siblings(**fields):
    """A seed, and two children that each changed another text, each better on other tasks."""
    low = dict.fromkeys(VAL6, 0.0)
    one = low | {"v0": 1.0, "v1": 1.0, "v2": 1.0}
    other = low | {"v3": 1.0, "v4": 1.0}
    candidates = [
        Candidate({"p": "a", "q": "b"}, (), low),
        Candidate({"p": "a'", "q": "b"}, (0,), one, ("t0",)),
        Candidate({"p": "a", "q": "b'"}, (0,), other, ("t1",)),
    ]
    return State(candidates, calls=18, due=True, **fields)


def joint(texts, task):
    """Right on what either of the two texts helps with."""
    return float((texts["p"] != "a" and task in VAL6[:3]) or (texts["q"] != "b" and task in VAL6[3:5]))


def test_two_that_are_best_at_different_things_are_joined():
    made, world = plan(validation=VAL6, start={"p": "a", "q": "b"}), World(joint)
    state = play(siblings(), made, world, rounds=1)
    assert state.candidates[-1].texts == {"p": "a'", "q": "b'"}
    assert state.candidates[-1].parents == (1, 2)
    assert set(state.candidates[-1].learnt) == {"t0", "t1"}
    assert state.means[-1] == pytest.approx(5 / 6)
    tried, rest = world.of(Measure)
    assert tried.stage == "merge"
    assert len(tried.tasks) == 5
    assert set(tried.tasks) | set(rest.tasks) == set(VAL6), "what the trial gave is not asked again"
    assert tried.seed == rest.seed == made.seed
    assert state.calls == 18 + 6
    assert state.tried == [(1, 2)]
    again = play(state, made, World(joint), rounds=1)
    assert again.merges == 1, "a pair is joined once"


def test_a_join_that_is_worse_than_a_parent_is_dropped():
    made, world = plan(validation=VAL6, start={"p": "a", "q": "b"}), World(lambda texts, task: 0.0)
    state = play(siblings(), made, world, rounds=1)
    assert len(state.candidates) == 3
    assert state.calls == 18 + 5
    assert state.merges == 1


def test_there_are_at_most_so_many_merges():
    made = plan(validation=VAL6, start={"p": "a", "q": "b"}, merges=5)
    state = play(siblings(merges=5), made, World(joint), rounds=1)
    assert state.merges == 5
    assert len(state.candidates) == 3


def choose(state, tried=()):
    texts, parents = [one.texts for one in state.candidates], [one.parents for one in state.candidates]
    scores = [one.scores for one in state.candidates]
    return merge.choose(texts, parents, scores, state.means, (1, 2), tried, random.Random(0))


def test_who_may_be_joined():
    assert choose(siblings()).ancestor == 0
    assert choose(siblings(), [(1, 2)]) is None
    line = siblings()
    line.candidates[2] = Candidate({"p": "a'", "q": "b'"}, (1,), line.candidates[2].scores)
    assert choose(line) is None, "one is the other's ancestor"
    better_ancestor = siblings()
    better_ancestor.candidates[0] = Candidate({"p": "a", "q": "b"}, (), dict.fromkeys(VAL6, 0.9))
    assert choose(better_ancestor) is None
    both = siblings()
    both.candidates[2] = Candidate({"p": "a''", "q": "b"}, (0,), both.candidates[2].scores)
    assert choose(both) is None, "no text was changed by exactly one of them"
    few = siblings()
    few.candidates[2] = Candidate(few.candidates[2].texts, (0,), {"v3": 1.0, "v4": 1.0, "v0": 0.0})
    assert choose(few) is None, "they have fewer than five tasks in common"
    there = siblings()
    there.candidates.append(Candidate({"p": "a'", "q": "b'"}, (0,), dict.fromkeys(VAL6, 0.0)))
    assert choose(there) is None, "the join is there already"


@given(st.dictionaries(st.sampled_from(VAL6), st.sampled_from([0.0, 1.0]), min_size=5), st.integers(0, 99))
def test_a_trial_has_five_different_tasks_of_each_sort(first, seed):
    second = {task: 1.0 - score if int(task[1:]) % 2 else score for task, score in first.items()}
    chosen = merge.sample(first, second, random.Random(seed))
    assert len(chosen) == len(set(chosen)) == 5
    for better_one in (lambda t: first[t] > second[t], lambda t: first[t] < second[t]):
        there = [task for task in first if better_one(task)]
        assert sum(map(better_one, chosen)) >= min(2, len(there))


# --- the JSON form ----------------------------------------------------------------------------------------------------


def test_a_state_is_read_back_as_it_was():
    state = play(siblings(), plan(validation=VAL6, start={"p": "a", "q": "b"}, budget=60), World(joint))
    assert load(dump(state)) == state
    assert dump(state)["fronts"].keys() == set(VAL6)
