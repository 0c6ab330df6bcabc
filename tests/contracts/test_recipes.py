"""What every recipe keeps to: pure choices among the units it is shown, checked fields. A new recipe is one Case."""

import dataclasses
import json
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.feedback_rules.recipe import FeedbackRules
from recipes.gepa.recipe import GEPARecipe
from recipes.grpo.recipe import GRPORecipe
from recipes.harness_evolve.recipe import HarnessEvolve
from recipes.opd.recipe import OPDRecipe
from recipes.openclawrl.recipe import OpenClawRecipe
from recipes.sao.recipe import SAORecipe
from recipes.sdft.recipe import SDFTRecipe
from recipes.sft.recipe import SFTRecipe
from recipes.tttd.recipe import DiscoverRecipe
from reef import recipe as room
from reef.cordis.compose import propose
from reef.core.errors import ConfigError
from reef.core.load import load
from reef.core.nouns import Batch, Record, Report, Sample, Timing, Unit
from reef.evaluation import Task
from reef.evaluation.ask import Question
from reef.evaluation.scorers import make
from reef.harness.tree import Entry, write
from reef.recipe.bench import Measured
from reef.recipe.record import RecordRecipe


@dataclass(frozen=True)
class Case:
    """A recipe that learns from three units, and a value that each of its fields refuses. `grid`: only certain units
    are a batch. `needs`: a unit without what it says, or without exact tokens, is none for it."""

    made: object
    refused: dict[str, object]
    grid: bool = False
    needs: tuple[str, ...] = ("says", "trainable")
    searches: bool = False


RECIPES = {
    "record": Case(RecordRecipe(), {}),
    "sao": Case(SAORecipe(batch_size=3), {"batch_size": 0, "learning_rate": -1.0, "critic": "none", "rank": -1}),
    "grpo": Case(GRPORecipe(groups=1, group_size=3), {"groups": 0, "group_size": 1, "preset": "ppo", "kl": -1.0}),
    "openclawrl": Case(OpenClawRecipe(batch_size=3), {"batch_size": 0, "votes": 0, "clip": 0.0, "subset": "all"}),
    "tttd": Case(DiscoverRecipe(), {"rank": 0, "learning_rate": 2.0}, grid=True),
    "sft": Case(SFTRecipe(batch_size=3), {"batch_size": 0, "epochs": 0}, needs=("says",)),
    "sdft": Case(SDFTRecipe(batch_size=3), {"batch_size": 0, "template": "?"}),
    "opd": Case(OPDRecipe(teacher="t", batch_size=3), {"teacher": "", "top_k": -1}, needs=("trainable",)),
    "feedback_rules": Case(FeedbackRules(batch_size=3), {"batch_size": 0, "max_rules": 0, "max_length": 1}),
    "harness_evolve": Case(
        HarnessEvolve(batch_size=3),
        {"batch_size": 0, "proposer": "", "kinds": ["extension"], "max_chars": 0, "tasks": "", "max_score": "low"},
        searches=True,
    ),
    "gepa": Case(
        GEPARecipe(tasks="train", validation="other", batch_size=3),
        {
            "tasks": "",
            "validation": "",
            "minibatch": 0,
            "max_metric_calls": 0,
            "merges": -1,
            "components": ["command"],
            "reflector": "",
            "max_chars": 0,
            "seed": -1,
        },
        searches=True,
    ),
}
TREE = (Entry("house", "rules", {"text": "Be polite to everyone."}),)


@pytest.fixture(params=RECIPES.values(), ids=RECIPES.keys())
def case(request):
    return request.param


@pytest.fixture
def recipe(case):
    return case.made


def unit(number, *, score=1.0, feedback=True, trainable=True, says=True):
    """A unit that every kind of recipe can learn from, unless told otherwise."""
    score, feedback = (score, feedback) if says else (None, False)
    name = f"{number:032x}"
    asked = b'{"messages": [{"role": "user", "content": "Name a number."}]}'
    record = Record(name, "a", "r0", "live", "chat", "complete", asked, Timing(0.0))
    text = f"Please mention the number {number} once." if feedback else None
    shown = f"Number {number}." if says else None
    cell = {"step": (number - 1) // 3, "group": 0, "rollout": (number - 1) % 3}
    cell |= {"groups_per_step": 1, "rollouts_per_group": 3}
    more = {"demonstration": shown, "metadata": cell if says else None}
    report = Report(f"rep_{name}", "a", (name,), 0.0, score=score, feedback=text, **more)
    sample = Sample((1, 2, 3), 2, (1,), (-0.5,), score, name) if trainable else None
    judged = {"verdict": 1, "hints": [f"Say {number}."]} if says else None
    return Unit(f"{name}:0", record, 0, report, score, sample, seq=number, assessment=judged)


UNITS = tuple(unit(number) for number in range(1, 8))


def test_every_recipe_is_here():
    assert RECIPES.keys() == room.RECIPES.keys()
    for name, case in RECIPES.items():
        assert load(room.RECIPES[name]) is type(case.made)


def test_it_is_a_frozen_dataclass_of_its_settings(recipe):
    fields = dataclasses.fields(recipe)
    assert type(recipe).part in ("weights", "harness", None)
    assert "part" not in {field.name for field in fields}
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        recipe.max_staleness = 3
    assert recipe.max_staleness is None
    if "max_staleness" in {field.name for field in fields}:  # a grid is of one release, whatever a file says
        assert dataclasses.replace(recipe, max_staleness=18).max_staleness == 18
    shown = {field.name: getattr(recipe, field.name) for field in fields}
    assert json.loads(json.dumps(shown)) == shown, "an empty YAML section is a whole recipe"


def test_a_field_that_is_wrong_is_named(case):
    for name, value in case.refused.items():
        with pytest.raises(ConfigError, match=name) as caught:
            dataclasses.replace(case.made, **{name: value})
        assert caught.value.param == name
    with pytest.raises(TypeError):
        type(case.made)(no_such_field=1)


def test_too_few_units_are_no_batch(recipe):
    for count in range(3):
        assert recipe.batch(UNITS[:count]) is None


def test_units_that_say_nothing_for_its_part_are_no_batch(case):
    recipe = case.made
    useless = {
        "weights": [unit(n, **{name: False}) for name in case.needs for n in range(1, 9)],
        "harness": [unit(n, feedback=False) for n in range(9)],
        None: UNITS,
    }
    assert recipe.batch(useless[recipe.part]) is None


def test_a_batch_is_some_of_the_units_it_was_shown(recipe):
    batch = recipe.batch(UNITS)
    assert (batch is None) == (recipe.part is None)
    if batch is not None:
        assert batch.part == recipe.part
        assert len(batch.units) == len({one.id for one in batch.units}) == 3
        assert {one.id for one in batch.units} <= {one.id for one in UNITS}
        assert all(isinstance(value, float) for value in batch.metrics.values())


@settings(deadline=None)
@given(st.integers(0, 12), st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", RECIPES)
def test_a_choice_is_repeated_exactly(name, count, draw):
    recipe = RECIPES[name].made
    units = [
        unit(n, score=draw.choice([None, 0.0, 1.0]), feedback=draw.random() < 0.7, trainable=draw.random() < 0.8)
        for n in draw.sample(range(50), count)
    ]
    shown = tuple(units)
    first = recipe.batch(units)
    assert tuple(units) == shown
    assert recipe.batch(shown) == first
    assert dataclasses.replace(recipe).batch(list(shown)) == first
    if first is not None:
        used = {one.id for one in first.units}
        assert used <= {one.id for one in shown}
        left = [one for one in units if one.id not in used]
        second = recipe.batch(left)
        assert second is None or second.id != first.id


def test_a_batchs_id_names_its_units(case):
    recipe = case.made
    batch = recipe.batch(UNITS[:3])
    if batch is None:
        return
    mixed = random.Random(1).sample(UNITS[:3], 3)
    assert {one.id for one in recipe.batch(mixed).units} == {one.id for one in batch.units}
    aged = [dataclasses.replace(one, lag=0 if case.grid else 2) for one in UNITS[:3]]
    assert recipe.batch(aged).id == batch.id, "the same units later are the same batch"
    assert recipe.batch(UNITS[3:6]).id != batch.id


def test_a_weights_recipe_names_an_objective_that_takes_its_options(recipe):
    if recipe.part != "weights":
        with pytest.raises(ConfigError):
            recipe.objective()
        return
    objective = recipe.objective()
    assert objective == recipe.objective()
    assert json.loads(json.dumps(dict(objective.options))) == dict(objective.options)
    made = load(objective.path)(**objective.options)
    assert all(callable(getattr(made, name)) for name in ("modules", "prepare", "loss", "aux_steps"))


def test_only_a_harness_recipe_proposes_and_the_same_each_time(case):
    recipe = case.made
    assert hasattr(recipe, "search") == case.searches
    batch = recipe.batch(UNITS) or Batch("b", "weights", UNITS[:3])
    mutations = list(recipe.propose(batch, TREE))
    assert list(recipe.propose(batch, TREE)) == mutations
    assert (mutations != []) == (recipe.part == "harness" and not case.searches)
    if mutations:
        composed = propose(TREE, mutations)
        assert composed.entries is not None, composed.refused
        assert TREE[0] in composed.entries
        assert list(recipe.propose(batch, composed.entries)) == [], "what stands already is not proposed again"


class Bench:
    """Tasks that a tree with more than TREE does better; a model that answers with an edit, or with `said`."""

    instruction, rejected = None, ()

    def __init__(self, folder, said=None):
        self.folder, self.said, self.calls = folder, said, 0

    async def ask(self, engine, body):
        edit = {"op": "create", "id": "brief", "kind": "rules", "config": {"text": "Be brief."}}
        whole = json.dumps({"reason": "too long", "mutations": [edit]})
        asked = body["messages"][-1]["content"]
        return self.said if self.said is not None else whole if "JSON" in asked else "```\nBe polite and brief.\n```"

    def tasks(self, source):
        scorer = make({"use": "contains", "answer": "x"})
        return [Task(f"{source} {n}", Question.of(f"{source} question {n}"), scorer) for n in range(5)]

    async def measure(self, tree, tasks, seed):
        self.calls += len(tasks)
        return [Measured(task, float("brief" in write(tree).decode()), "words") for task in tasks]

    async def story(self, unit):
        return f"user: Name a number.\n{unit.report.feedback}"

    def progress(self, stage, done, total):
        assert 0 <= done <= total


SEARCHES = [name for name, case in RECIPES.items() if case.searches]


@pytest.mark.parametrize("name", SEARCHES)
async def test_a_search_proposes_what_cordis_admits_and_the_same_each_time(name, tmp_path):
    recipe = RECIPES[name].made
    batch = recipe.batch(UNITS)
    found = await recipe.search(batch, TREE, Bench(tmp_path / "first"))
    assert found.mutations
    assert found.reason
    assert propose(TREE, found.mutations).entries is not None
    assert all(isinstance(value, float) for value in found.metrics.values())
    assert (await recipe.search(batch, TREE, Bench(tmp_path / "second"))).mutations == found.mutations
    assert (await recipe.search(None, TREE, Bench(tmp_path / "third"))).mutations == found.mutations


@pytest.mark.parametrize("said", ["", "no", "{", '{"mutations": [{}]}', "x" * 70_000])
@pytest.mark.parametrize("name", SEARCHES)
async def test_whatever_a_model_says_a_search_ends_with_a_reason(name, said, tmp_path):
    found = await RECIPES[name].made.search(RECIPES[name].made.batch(UNITS), TREE, Bench(tmp_path, said))
    assert found.mutations == () or propose(TREE, found.mutations).entries is not None
    assert found.reason


def test_recipes_load_without_torch():
    modules = ", ".join(sorted({type(case.made).__module__ for case in RECIPES.values()}))
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)
