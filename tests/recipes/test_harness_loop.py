"""Both methods in the real loop: from reports to a release whose rules are served, or to a reason why there is none."""

import hashlib
import json

import pytest

from recipes.gepa import task
from recipes.gepa.recipe import GEPARecipe
from recipes.harness_evolve.null import KNOWN, run
from recipes.harness_evolve.recipe import HarnessEvolve
from reef.cli import parts
from reef.core.errors import EngineError
from reef.engines.fake import FakeEngine
from reef.evaluation import Means, Sizes
from reef.evaluation.book import Book
from reef.evaluation.policies import Better
from reef.evaluation.suite import Listed, Sources
from reef.harness import tree
from reef.harness.apply import Wish
from reef.loop.binding import Searching
from tests.loop.kit import NAME, World

SETS = {"train": task.TRAIN, "validation": task.VALIDATION}
WISH = Wish(apply=True)


def answer(release_id, body):
    """A model that comes to an end half of the time where it was told to, and else never."""
    asked = body["messages"][-1]["content"]
    if asked in KNOWN:
        return KNOWN[asked]
    told = any(words in str(body["messages"][0]) for words in ("one short sentence", "single sentence"))
    drawn = hashlib.sha256(json.dumps([body["messages"], body.get("seed")]).encode()).digest()[0]
    return f"{asked[:-1]} is a thing." if told and drawn % 2 else f"{asked[:-1]} is a thing of which one can say that"


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    made.engine = FakeEngine(reply=answer)
    await made.open()

    async def ask(engine, body):
        if engine is not None:
            raise EngineError("nobody of that name")
        return "I would rather not."

    book = Book.memory()
    means = Means(
        NAME, made.engine, made.head.id, book=book,
        suite=Sources(NAME, [Listed("gate", task.GATE)], book),
        renders=lambda release: parts.applied(made.chain, release, WISH),
    )  # fmt: skip
    made.evaluator = Better(means, Sizes(repeats=1), {})
    made.options = {"searching": Searching(means, Sizes(), WISH, SETS.__getitem__), "ask": ask}
    yield made
    await made.close()


def served(world):
    if "harness" not in world.head.parts:
        return []
    return [e.config["text"] for e in tree.read(world.chain.files(world.head.id, "harness")[tree.FILE].read_bytes())]


def gepa(reflector):
    return GEPARecipe(tasks="train", validation="validation", reflector=f"recipes.gepa.reflect:{reflector}")


async def test_gepa_finds_the_sentence_and_the_gate_lets_it_through(world):
    world.recipes = {"harness": gepa("reads")}
    await world.say(2, score=0.0, feedback=task.CUT)
    await world.settle()
    assert world.head.seq == 0
    await world.say(1, score=0.0, feedback=task.CUT)
    await world.settle()
    assert world.head.seq == 1
    assert any("sentence" in text for text in served(world))
    assert "gepa: validation" in world.head.reason
    assert world.works["harness"].metrics["metric_calls"] <= 150
    assert not list((world.training / NAME / "harness" / "search").glob("order-*"))


async def test_gepa_with_a_reflector_that_idles_leaves_what_is_served(world):
    world.recipes = {"harness": gepa("idles")}
    await world.say(3, score=0.0, feedback=task.CUT)
    await world.settle()
    assert world.head.seq == 0
    assert "nothing new was better than what is served" in world.works["harness"].last["reason"]
    assert world.works["harness"].dropped == {"no edit": 3}


async def test_evolution_lets_through_what_helps_and_nothing_that_does_not(world):
    world.recipes = {"harness": HarnessEvolve(proposer="recipes.harness_evolve.propose:reads")}
    for turn in range(4):
        await world.say(3, score=0.0, feedback=task.CUT)
        await world.settle()
        assert served(world) == ["Answer in one short sentence."], turn
    assert world.head.seq == 1
    assert "evolve: answers are cut off or too long (from rep_" in world.head.reason
    assert world.tools.ledger.rejected(NAME), "what was turned down is shown to the next proposer"


async def test_a_served_model_that_cannot_propose_is_a_reason_and_no_trouble(world):
    world.recipes = {"harness": HarnessEvolve()}
    await world.say(3, score=0.0, feedback=task.CUT)
    await world.settle()
    work = world.works["harness"]
    assert (world.head.seq, work.failures, work.dropped) == (0, 0, {"no edit": 3})
    assert "the proposer's answer cannot be used: there is no JSON object" in work.last["reason"]
    world.recipes = {"harness": HarnessEvolve(proposer="recipes.harness_evolve.propose:reads")}
    world.options["trigger"] = "hybrid"
    world.ask("Make the answers short, they are cut off: The answer was cut off.")
    await world.settle()
    assert served(world) == ["Answer in one short sentence."]


async def test_an_edit_that_changes_nothing_is_hardly_ever_released():
    """Candidates as good as what is served: the naive rule releases almost half of them."""
    made = await run(30)
    assert made["accept"] <= 1
    assert made["naive"] >= 8
