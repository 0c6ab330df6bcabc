"""A person decides beside a living learner, and every answer's story is true to what the learner did."""

import pytest

from reef.core.errors import ConflictError
from reef.loop.audit import Audit
from reef.scenario import decide
from reef.scenario.learnt import Family
from reef.scenario.story import Page
from reef.scenario.why import Why
from tests.loop.kit import NAME, World


@pytest.fixture
async def world(tmp_path):
    made = await World(tmp_path).open()
    made.options = {"mode": "review"}
    yield made
    await made.close()


def asking(world: World) -> Why:
    audit = Audit(world.folder / "learn.db")
    return Why(world.chain, world.store, world.journal, audit, Family(world.chain))


async def lesson(world: World, receipt: str):
    (record,) = await world.store.get([receipt])
    story = await asking(world).record(record, Page())
    (found,) = story.lessons
    return story, found


async def test_learning_goes_on_from_what_a_person_promoted(world):
    asked, base = asking(world), world.head
    first = await world.say(12)
    await world.settle()
    held = world.ledger.looks(NAME)[0].candidate
    trained = [receipt for receipt in first if (await lesson(world, receipt))[1].fate == "trained"]
    story, found = await lesson(world, trained[0])
    assert (found.candidate, found.release, story.influenced.count) == (held, None, 0)
    release = decide.promote(NAME, held, world.chain, world.board, asked.audit, actor="ada", reason="looks fine")
    for receipt in trained:
        story, found = await lesson(world, receipt)
        assert found.release is not None
        assert found.release.release_id == release.id
        assert story.influenced.releases[0].current
    told = await asked.release(release, Page())
    assert (told.approved.by, told.approved.actor, told.measured.policy) == ("person", "ada", "scripted")
    assert told.learnt.own == len(trained)
    assert {source.agent_record_id for source in told.learnt.units} == set(trained)
    with pytest.raises(ConflictError, match="already"):
        decide.reject(NAME, held, world.chain, world.board, asked.audit, asked.family, actor="bo", reason="")
    await world.say(12)
    await world.settle()
    newest = world.ledger.looks(NAME)[0]
    assert newest.candidate != held
    assert newest.line.startswith(release.id[:12]), "the next line stands on what was promoted"
    assert world.head.id == release.id
    assert [item.release_id for item in told.ancestry.releases] == [base.id]


async def test_learning_begins_again_from_the_head_after_a_person_turned_it_down(world):
    asked, base = asking(world), world.head
    first = await world.say(12)
    await world.settle()
    held = world.ledger.looks(NAME)[0]
    decide.reject(NAME, held.candidate, world.chain, world.board, asked.audit, asked.family, actor="ada", reason="rude")
    await world.say(12)
    await world.settle()
    newest = world.ledger.looks(NAME)[0]
    assert (newest.verdict, newest.line == held.line, world.head.id) == ("hold", False, base.id)
    release = decide.promote(NAME, newest.candidate, world.chain, world.board, asked.audit, actor="ada", reason="")
    told = await asked.release(release, Page())
    assert [(row.candidate, row.actor, row.reason) for row in told.rejected.newest] == [(held.candidate, "ada", "rude")]
    fates = [(await lesson(world, receipt))[1] for receipt in first]
    lost = [item for item in fates if item.candidate == held.candidate]
    assert lost
    assert all("turned down: rude" in item.said and item.release is None for item in lost)
