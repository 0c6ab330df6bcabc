"""vLLM as an engine, over a stub of its HTTP interface: what it is asked, and what is made of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import BusyError, ConfigError, ContextError, EngineError, InputError, StoreError
from reef.core.nouns import Span
from reef.engines import Ask, Piece
from reef.engines.remote.vllm import MARK, Options
from reef.engines.sse import Events
from tests.engines.remote.hostile import ALWAYS, dies, late, nothing, says
from tests.engines.remote.kit import (
    BASE,
    FULLS,
    LORAS,
    VLLM,
    World,
    ask,
    collect,
    engine_of,
    running,
    told,
    trainable,
    truth,
)
from tests.engines.remote.stub import On, serving
from tests.engines.remote.stub_vllm import VllmStub


def served(world: World, place: Path, count: int = 1, **options: Any) -> Any:
    """As `running`, with the patience that a busy machine needs."""
    given = {"patience": 60.0, "wait": 20.0} | options
    return running(VLLM, world, place, count, **given | {"changes": {"idle": 30.0} | given.get("changes", {})})


def chunks(pieces: list[Piece]) -> list[dict[str, Any]]:
    events = Events().feed(b"".join(piece.data for piece in pieces))
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data or "") for event in events[:-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_those_of_the_weights(world: World, place: Path, stream: bool) -> None:
    async with served(world, place) as (engine, (stub,)):
        for release in (BASE, LORAS[0], FULLS[0]):
            _, _, answer = await collect(engine, ask(release, stream=stream, n=2))
            assert trainable(answer), answer.untrainable
            weights = told(stub.said[-1])
            (first, second) = answer.choices or ()
            assert first.logprobs == pytest.approx(truth(stub, answer, weights))
            assert first.spans == (Span(release, 0, len(first.output_ids or ())),)
            assert first.output_ids != second.output_ids
            assert answer.model == "tiny"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(answer.prompt_ids or ())


@pytest.mark.parametrize("release", [BASE, LORAS[0]])
async def test_the_client_sees_only_what_it_asked_for(world: World, place: Path, release: str) -> None:
    async with served(world, place) as (engine, _):
        _, (piece,), answer = await collect(engine, ask(release))
        _, pieces, streamed = await collect(engine, ask(release, stream=True))
        _, (scored,), _ = await collect(engine, ask(release, logprobs=True, top_logprobs=2))
        _, (ids,), _ = await collect(engine, ask(release, return_token_ids=True))
    body = json.loads(piece.data)
    assert body["model"] == "tiny"
    assert "prompt_token_ids" not in body
    assert body["choices"][0]["logprobs"] is None
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["message"]["content"] == (answer.choices or ())[0].text
    for chunk in chunks(pieces):
        assert chunk["model"] == "tiny"
        assert "prompt_token_ids" not in chunk
        for choice in chunk["choices"]:
            assert "token_ids" not in choice
            assert choice["logprobs"] is None
    assert release not in b"".join(each.data for each in pieces).decode()
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks(pieces) for choice in chunk["choices"])
    assert text == (streamed.choices or ())[0].text
    assert len(json.loads(scored.data)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert json.loads(ids.data)["prompt_token_ids"] == list(answer.prompt_ids or ())


async def test_every_field_that_changes_the_distribution_is_pinned(world: World, place: Path) -> None:
    async with served(world, place, max_tokens=7) as (engine, (stub,)):
        _, _, answer = await collect(engine, ask(max_tokens=None))
        sent = stub.asked("/v1/chat/completions")[-1].body
        await collect(engine, ask(max_tokens=3, temperature=0.5, presence_penalty=0.25))
        other = stub.asked("/v1/chat/completions")[-1].body
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, 1.0, -1, 0)
    assert (sent["frequency_penalty"], sent["presence_penalty"], sent["repetition_penalty"]) == (0, 0, 1)
    assert sent["max_completion_tokens"] == 7
    assert answer.sampling is not None
    assert answer.sampling.max_tokens == 7
    assert (other["temperature"], other["presence_penalty"], other["max_completion_tokens"]) == (0.5, 0.25, 3)
    assert "priority" not in sent


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}),
        *({"presence_penalty": 1.0}, {"logit_bias": {"5": 1.0}}, {"min_tokens": 3}),
        *({"response_format": {"type": "json_object"}}, {"tool_choice": "required"}),
    ],
)
async def test_answers_that_were_drawn_otherwise_are_untrainable(
    world: World, place: Path, fields: dict[str, Any]
) -> None:
    async with served(world, place) as (engine, _):
        _, _, answer = await collect(engine, ask(**fields))
    assert answer.untrainable
    assert next(iter(fields)) in answer.untrainable


async def test_a_colder_draw_trains_where_log_probs_are_of_it(world: World, place: Path) -> None:
    async with served(world, place, stub={"raw": False}) as (engine, _):
        _, _, answer = await collect(engine, ask(temperature=0.7))
    assert trainable(answer)
    assert answer.sampling is not None
    assert answer.sampling.temperature == 0.7


async def test_a_prompt_beyond_the_context_is_refused(world: World, place: Path) -> None:
    async with served(world, place) as (engine, _):
        with pytest.raises(ContextError):
            await collect(engine, ask(text="word " * 2000))


async def test_a_count_is_the_prompts_tokens(world: World, place: Path) -> None:
    async with served(world, place) as (engine, _):
        _, _, answer = await collect(engine, ask())
        counted = Ask("0" * 32, LORAS[0], "count", ask().body, False)
        _, (piece,), _ = await collect(engine, counted)
        assert json.loads(piece.data) == {"input_tokens": len(answer.prompt_ids or ())}
        with pytest.raises(InputError):
            await collect(engine, Ask("0" * 32, BASE, "responses", b"{}", False))


async def test_rated_tokens_are_those_that_were_drawn(world: World, place: Path) -> None:
    async with served(world, place) as (engine, _):
        for release in (LORAS[1], FULLS[1]):
            _, _, answer = await collect(engine, ask(release))
            (choice,) = answer.choices or ()
            whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
            (rated,) = await engine.rate(release, [whole], [len(answer.prompt_ids or ())])
            assert rated == pytest.approx(choice.logprobs)


async def test_a_server_started_anew_is_given_its_weights_again(world: World, place: Path) -> None:
    """Also when nobody noticed that it was away."""
    async with served(world, place) as (engine, (stub,)):
        for release in (LORAS[0], FULLS[0]):
            await collect(engine, ask(release))
            stub.fresh()
            await asyncio.sleep(1.1)  # longer than its word on full weights holds
            _, _, answer = await collect(engine, ask(release))
            assert trainable(answer)
            assert (answer.choices or ())[0].logprobs == pytest.approx(truth(stub, answer, told(stub.said[-1])))


async def test_a_server_that_dies_is_left_out_and_comes_back(world: World, place: Path) -> None:
    async with served(world, place, 2) as (engine, stubs):
        stubs[0].faults.append(On("/v1/chat/completions", dies()))
        stubs[1].faults.append(On("/v1/chat/completions", dies()))
        with pytest.raises(EngineError):  # both die, one after the other
            await collect(engine, ask(LORAS[0]))
        assert not await engine.ready()
        await stubs[0].start()
        for _ in range(100):
            if await engine.ready():
                break
            await asyncio.sleep(0.1)
        _, _, answer = await collect(engine, ask(LORAS[0]))
        assert trainable(answer)


async def test_a_request_goes_to_another_server_before_its_first_byte(world: World, place: Path) -> None:
    async with served(world, place, 2) as (engine, stubs):
        for stub in stubs:
            stub.faults.append(On("/v1/chat/completions", dies(), times=1))
        stubs[1].faults.clear()
        answers = [await collect(engine, ask(session=str(number), stream=True)) for number in range(12)]
        assert all(trainable(answer) for _, _, answer in answers)
        assert len(stubs[1].said) >= 12


async def test_a_session_stays_on_one_server(world: World, place: Path) -> None:
    async with served(world, place, 2) as (engine, stubs):
        for number in range(8):
            before = [len(stub.asked("/v1/chat/completions")) for stub in stubs]
            for _ in range(3):
                await collect(engine, ask(session=f"session {number}"))
            after = [len(stub.asked("/v1/chat/completions")) for stub in stubs]
            assert sorted(a - b for a, b in zip(after, before, strict=True)) == [0, 3]
        assert all(stub.asked("/v1/chat/completions") for stub in stubs)


async def test_a_load_puts_an_adapter_on_every_server_and_full_weights_on_one(world: World, place: Path) -> None:
    async with served(world, place, 2) as (engine, stubs):
        await engine.load(LORAS[0])
        assert all(LORAS[0] in stub.loras for stub in stubs)
        await engine.load(FULLS[0])
        assert sorted(stub.version.startswith(MARK) for stub in stubs) == [False, True]


async def test_adapters_not_used_for_longest_go(world: World, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef.engines.remote.pool.RECENT", 0.0)
    async with served(world, place, loras=2) as (engine, (stub,)):
        for release in LORAS:
            await collect(engine, ask(release))
        assert set(stub.loras) == set(LORAS[1:])
        _, _, answer = await collect(engine, ask(LORAS[0]))
        assert trainable(answer)


async def test_two_processes_take_turns_with_full_weights(world: World, place: Path) -> None:
    """Two engines over one server, as a gateway and the learner are: every answer is of one release, and nobody waits
    for ever."""
    stub = VllmStub(world.folder, delay=0.001)
    async with (
        serving(stub),
        engine_of(VLLM, world, place, stub, turn=0.05, wait=30.0, patience=60.0) as one,
        engine_of(VLLM, world, place, stub, turn=0.05, wait=30.0, patience=60.0) as other,
    ):

        async def some(engine: Any, release: str) -> None:
            for _ in range(5):
                _, _, answer = await collect(engine, ask(release, stream=True, receipt=release[:32]))
                assert trainable(answer)
                whole = truth(stub, answer, by_release[release])
                assert (answer.choices or ())[0].logprobs == pytest.approx(whole)

        by_release: dict[str, str] = {}
        for release in (*FULLS, BASE):  # which weights are whose
            await collect(one, ask(release))
            by_release[release] = told(stub.said[-1])
        await asyncio.gather(some(one, FULLS[0]), some(other, FULLS[1]), some(other, FULLS[0]), some(one, BASE))
        assert all(len(said.origin) == 1 for said in stub.said)


async def test_who_waits_too_long_for_full_weights_is_told_what_helps(world: World, place: Path) -> None:
    async with served(world, place, stub={"delay": 0.05}, wait=0.5) as (engine, (stub,)):
        async with aclosing(engine.answer(ask(FULLS[0], stream=True, max_tokens=60, ignore_eos=True))) as items:
            async for item in items:
                if isinstance(item, Piece):
                    break
            with pytest.raises(BusyError, match=r"another server .*LoRA"):
                await collect(engine, ask(FULLS[1]))
            _, _, answer = await collect(engine, ask(FULLS[0]))  # meanwhile the others go on
            assert trainable(answer)
        del stub


@pytest.mark.parametrize(("release", "path"), [(LORAS[0], VLLM.load), (FULLS[0], VLLM.swap)])
async def test_a_server_that_only_says_it_loaded_is_found_out(
    world: World, place: Path, release: str, path: str
) -> None:
    async def pretend(stub: Any, request: Any, call: Any) -> Any:
        reply = await nothing()(stub, request, call)
        if release in LORAS:  # it lists the adapter, and answers with the base
            stub._take_nothing = True
        return reply

    async with served(world, place) as (engine, (stub,)):
        stub.faults.append(On(path, pretend, times=ALWAYS))
        with pytest.raises(EngineError) as caught:
            await engine.load(release)
        assert stub.url in caught.value.message
        stub.faults.clear()
        _, _, answer = await collect(engine, ask())  # the base is still answered
        assert trainable(answer)


async def test_a_server_without_development_calls_says_what_to_do(world: World, place: Path) -> None:
    async with served(world, place, stub={"dev": False, "runtime_lora": False}) as (engine, _):
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE"):
            await engine.load(FULLS[0])
        with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await engine.load(LORAS[0])
        _, _, answer = await collect(engine, ask())
        assert trainable(answer)


async def test_a_server_of_another_model_is_not_used(world: World, place: Path) -> None:
    async with served(world, place, changes={"model": "other"}) as (engine, _):
        assert not await engine.ready()
        with pytest.raises(EngineError, match=r"engines\.model"):
            await collect(engine, ask())


async def test_priority_goes_where_it_is_known(world: World, place: Path) -> None:
    async with served(world, place, stub={"priorities": True}, priority=True) as (engine, (stub,)):
        await collect(engine, ask(priority=1))
        assert stub.asked("/v1/chat/completions")[-1].body["priority"] == 1


async def test_refusals_pass_and_are_untrainable(world: World, place: Path) -> None:
    async with served(world, place) as (engine, (stub,)):
        stub.faults.append(On("/v1/chat/completions", says(400, {"error": {"message": "no such thing"}})))
        head, (piece,), answer = await collect(engine, ask())
    assert head.status == 400
    assert b"no such thing" in piece.data
    assert answer.untrainable


async def test_leaving_stops_the_work(world: World, place: Path) -> None:
    async with served(world, place, stub={"delay": 0.02}) as (engine, (stub,)):
        async with aclosing(engine.answer(ask(stream=True, max_tokens=300, ignore_eos=True))) as items:
            async for item in items:
                if isinstance(item, Piece):
                    break
        for _ in range(100):
            if not stub.running:
                break
            await asyncio.sleep(0.02)
        assert not stub.running


@pytest.mark.parametrize("wrong", [{"loras": 0}, {"wait": 0}, {"turn": -1}, {"max_tokens": 0}, {"patience": 0}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with contextlib.suppress(KeyError), pytest.raises(ConfigError):
        Options(**wrong)


@pytest.mark.parametrize(("release", "path"), [(FULLS[0], "/collective_rpc"), (LORAS[0], "/v1/load_lora_adapter")])
async def test_an_order_to_load_is_tried_again_where_an_answer_would_not_be(
    world: World, place: Path, release: str, path: str
) -> None:
    """An update asks three times, and a candidate that no server loads is turned down."""
    async with served(world, place) as (engine, (stub,)):
        stub.faults.append(On(path, says(500)))
        with pytest.raises(EngineError):
            await engine.load(release)
        with pytest.raises(EngineError):
            await collect(engine, ask(release))
        await engine.load(release)
        assert trainable((await collect(engine, ask(release)))[2])


async def test_a_load_may_be_silent_for_longer_than_an_answer(world: World, place: Path) -> None:
    async with served(world, place, changes={"idle": 0.3}) as (engine, (stub,)):
        stub.faults += [On("/collective_rpc", late(1.0)), On("/v1/load_lora_adapter", late(1.0))]
        await engine.load(FULLS[0])
        await engine.load(LORAS[0])


async def test_staged_full_weights_go_when_others_are_served(world: World, place: Path) -> None:
    async with served(world, place) as (engine, _):
        await engine.load(FULLS[0])
        (first,) = [folder for folder in place.glob("**/weights/*") if folder.is_dir()]
        await engine.load(FULLS[1])
        assert first.is_dir()  # a server may read it again
        os.utime(first, (0, 0))
        await engine.load(BASE)
        assert not first.exists()


async def test_a_full_disk_is_neither_the_servers_nor_the_releases_fault(world: World, place: Path) -> None:
    async with served(world, place) as (engine, _):
        await collect(engine, ask())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.link", nolink)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
            try:
                with pytest.raises(StoreError, match="free some disk space"):
                    await engine.load(FULLS[0])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(place.glob("**/weights/.*.partial")) == []
        await engine.load(FULLS[0])


def nolink(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")
