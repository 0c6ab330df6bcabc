import asyncio
import json

import pytest

from reef.core.errors import EngineError, WireError
from reef.core.nouns import Cost
from reef.engines import Answer, Head, Piece
from reef.engines.fake import FakeEngine, Fault
from reef.evaluation import Price
from reef.evaluation import ask as module
from reef.evaluation.ask import Asker, Question, again
from reef.harness.apply import Applied

HELLO = Question.of("hello")


async def test_a_question_is_asked_behind_live_traffic_with_rules_and_sampling(engine, release):
    asker = Asker(engine, lambda one: Applied("Be brief."), model="m")
    side = await asker.side(release("r1"))
    question = Question.of("ünï", max_tokens=7, temperature=1.0, seed=5)
    [reply] = await asker.replies(side, [question])
    [ask] = engine.asked
    assert (ask.release_id, ask.priority, ask.stream, ask.dialect) == ("r1", 1, False, "chat")
    assert json.loads(ask.body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ünï"}],
        "max_tokens": 7,
        "temperature": 1.0,
        "seed": 5,
    }
    assert reply.text == "A fair answer about ünï"
    assert len(reply.output_ids) == len(reply.logprobs) == 5
    assert reply.prompt_ids


async def test_equal_parts_share_their_answers_and_others_do_not(engine, release):
    asker = Asker(engine)
    for name, weights, asked in [("c", "w1", 1), ("published", "w1", 1), ("other", "w2", 2)]:
        await asker.replies(await asker.side(release(name, weights)), [HELLO])
        assert len(engine.asked) == asked
    ruled = Asker(engine, lambda one: Applied(one.id))
    for name in ("a", "b"):
        await ruled.replies(await ruled.side(release(name, "w1")), [HELLO])
    assert len(engine.asked) == 4


async def test_what_is_kept_is_bounded(engine, release, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    asker = Asker(engine)
    side = await asker.side(release("r"))
    questions = [Question.of(str(number)) for number in range(3)]
    await asker.replies(side, questions)
    await asker.replies(side, questions[2:])
    assert len(engine.asked) == 3
    await asker.replies(side, questions[:1])
    assert len(engine.asked) == 4


async def test_a_failure_is_retried_twice_then_missing_and_never_kept(engine, release):
    asker = Asker(engine)
    side = await asker.side(release("r"))
    engine.faults.extend([Fault("refuse"), Fault("status", status=503)])
    assert (await asker.replies(side, [HELLO]))[0].missing is None
    assert len(engine.asked) == 3
    other = Question.of("other")
    engine.faults.extend([Fault("refuse")] * 3)
    [reply] = await asker.replies(side, [other])
    assert (reply.text, reply.missing) == ("", "the engine refused; try again")
    assert (await asker.replies(side, [other]))[0].missing is None


async def test_an_ask_that_hangs_is_missing(engine, release, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    engine.faults.extend([Fault("hang")] * 3)
    asker = Asker(engine)
    [reply] = await asker.replies(await asker.side(release("r")), [HELLO])
    assert reply.missing == "no answer within 0 s"


async def test_rules_that_leave_no_room_make_the_request_impossible_not_missing(release):
    engine = FakeEngine(context=20)
    asker = Asker(engine, lambda one: Applied("word " * 30))
    [reply] = await asker.replies(await asker.side(release("r")), [HELLO])
    assert reply.missing is None
    assert "20" in reply.impossible
    assert len(engine.asked) == 1


class Bytes(FakeEngine):
    """Answers with bytes only, as an upstream does."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    async def answer(self, ask):
        yield Head(200, {})
        yield Piece(self.data[:5])
        yield Piece(self.data[5:], terminal=True)
        yield Answer()


@pytest.mark.parametrize(
    ("content", "text"),
    [("hi", "hi"), (None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "odd"], "ab"), (7, "")],
)
async def test_an_answer_is_read_from_its_bytes(release, content, text):
    data = json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}).encode()
    asker = Asker(Bytes(data))
    [reply] = await asker.replies(await asker.side(release("r")), [HELLO])
    assert (reply.text, reply.finish_reason, reply.output_ids, reply.missing) == (text, "stop", None, None)


@pytest.mark.parametrize(
    "data", [b"not json at all", b'{"choices":[]}', b'{"choices":[{"message":null}]}', b"[1,2,3,4,5]"]
)
async def test_an_answer_that_is_none_is_missing(release, data):
    asker = Asker(Bytes(data))
    [reply] = await asker.replies(await asker.side(release("r")), [HELLO])
    assert "not a chat completion" in reply.missing


async def test_ratings_are_kept(engine, release):
    asker = Asker(engine)
    side = await asker.side(release("r"))
    first = await asker.rate(side, [[1, 2, 3]], [1])
    assert [len(row) for row in first] == [2]
    engine.rate = None
    assert await asker.rate(side, [[1, 2, 3]], [1]) == first
    assert await asker.rate(side, [], []) == []


async def test_other_errors_are_raised_at_once():
    calls = []

    async def broken():
        calls.append(1)
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await again(broken)
    assert len(calls) == 1

    async def gone():
        calls.append(1)
        raise WireError("gone")

    with pytest.raises(WireError):
        await again(gone)
    assert len(calls) == 4


async def test_no_more_than_sixteen_at_once(engine, release):
    running, most = 0, 0

    class Counting(FakeEngine):
        async def answer(self, ask):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            yield Head(200, {})
            raise EngineError("no")

    asker = Asker(Counting())
    await asker.replies(await asker.side(release("r")), [Question.of(str(number)) for number in range(40)])
    assert most == module.WIDTH


async def test_every_try_is_a_call_and_what_is_kept_costs_nothing(engine, release):
    asker = Asker(engine, price=Price(1e6, 2e6))
    side = await asker.side(release("r"))
    engine.says["r"] = lambda question: "one two three"
    engine.faults.append(Fault("refuse"))
    await asker.replies(side, [HELLO, HELLO])
    bill = asker.bill()
    assert (bill.calls, bill.prompt_tokens, bill.output_tokens, bill.money) == (3, 2, 6, 2 + 2 * 6)
    await asker.replies(side, [HELLO])
    assert asker.bill() == Cost()
    assert bill.seconds > 0


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, (5, 2)),
        ({"prompt_tokens": 5}, (0, 0)),
        ({"prompt_tokens": "5", "completion_tokens": 2}, (0, 0)),
        ({"prompt_tokens": -5, "completion_tokens": 2}, (0, 2)),
        ([], (0, 0)),
    ],
)
async def test_usage_is_read_from_the_answers_bytes(release, usage, counted):
    data = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}).encode()
    asker = Asker(Bytes(data))
    await asker.replies(await asker.side(release("r")), [HELLO])
    bill = asker.bill()
    assert (bill.prompt_tokens, bill.output_tokens) == counted
    assert bill.money is None, "without a price it is not known"


async def test_the_models_name_is_part_of_what_a_side_is(engine, release):
    one, two = [await Asker(engine, model=name).side(release("r")) for name in ("a", "b")]
    assert one.key != two.key
