"""The signal `answer`: an answer is a unit by itself, whether anybody reports on it or not."""

from reef.core.nouns import Choice, Sampling
from reef.experience.pool import Pool
from tests.experience.talk import SCENARIO, World, chat


def exact(count: int = 1, **fields):
    choices = [Choice(k, "yes", "stop", output_ids=(7 + k, 2), logprobs=(-0.5, -0.1)) for k in range(count)]
    return {"choices": choices, "prompt_ids": (1, 2, 3), "sampling": Sampling(), **fields}


async def read(world: World, cursor: int = 0) -> Pool:
    pool = Pool(SCENARIO, "weights", frozenset({"answer"}), lambda _: None, cursor, sessions=world.sessions)
    await pool.read(world.store)
    return pool


async def test_every_answer_counts_with_all_its_choices_and_no_report(world: World) -> None:
    one = await world.ask(chat("Is it?"), **exact())
    two = await world.ask(chat("Which?"), **exact(2))
    pool = await read(world)
    assert [unit.id for unit in pool.units()] == [f"{one}:0", f"{two}:0", f"{two}:1"]
    (first, *_) = pool.units()
    assert (first.report.id, first.report.references, first.score, first.report.feedback) == (one, (one,), None, None)
    assert first.sample is not None
    assert first.sample.tokens == (1, 2, 3, 7, 2)
    assert [unit.id for unit in (await read(world, pool.low())).units()] == [unit.id for unit in pool.units()]


async def test_what_cannot_train_or_is_nobodys_answer_does_not(world: World) -> None:
    plain = await world.ask(chat("Hi"), "hello")
    await world.ask(chat("Probe"), **exact(purpose="evaluation"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    main = await world.ask(chat("Do it", system="You act.", tools=tools), session="s", **exact())
    side = await world.ask(chat("Do it", system="Make a title."), session="s", **exact())
    pool = await read(world)
    assert [unit.id for unit in pool.units()] == [f"{main}:0"]
    assert {(drop.unit, drop.reason) for drop in pool.dropped} == {(f"{plain}:0", "untrainable"), (f"{side}:0", "side")}
