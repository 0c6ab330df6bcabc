"""SGLang as an engine, over a stub of its interface; and, with -m sglang, over a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ConfigError, ContextError, EngineError, InputError
from reef.core.nouns import Span
from reef.engines import Ask, Head, Piece
from reef.engines.local.text import Text
from reef.engines.remote.sglang import MARK, Options, SglangEngine
from reef.engines.sse import Events
from tests.engines.remote.hostile import edit, says
from tests.engines.remote.kit import (
    BASE,
    FULLS,
    LORAS,
    SGLANG,
    World,
    ask,
    away,
    collect,
    engine_of,
    running,
    told,
    trainable,
    truth,
)
from tests.engines.remote.real import verify
from tests.engines.remote.stub import On, serving
from tests.engines.remote.stub_sglang import SglangStub


def chunks(pieces: list[Any]) -> list[dict[str, Any]]:
    events = Events().feed(b"".join(piece.data for piece in pieces))
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data or "") for event in events[:-1]]


async def test_a_prompt_goes_as_the_ids_of_our_own_template(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        _, (piece,), answer = await collect(engine, ask(text="café"))
    text = Text(world.folder)
    expected = text.encode("<|im_start|>user\ncafé<|im_end|>\n<|im_start|>assistant\n")
    (sent,) = [seen.body for seen in stub.asked("/generate") if "sampling_seed" in seen.body["sampling_params"]]
    assert sent["input_ids"] == expected == list(answer.prompt_ids or ())
    assert "text" not in sent
    assert "lora_path" not in sent
    body = json.loads(piece.data)
    (choice,) = answer.choices or ()
    assert body["object"] == "chat.completion"
    assert body["model"] == answer.model == "tiny"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": choice.text, "refusal": None}
    assert body["usage"]["completion_tokens"] == len(choice.output_ids or ()) == len(choice.logprobs or ())


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_those_of_the_weights(world: World, place: Path, stream: bool, incremental: bool) -> None:
    async with running(SGLANG, world, place, stub={"incremental": incremental, "delay": 0.001}) as (engine, (stub,)):
        _, pieces, answer = await collect(engine, ask(LORAS[0], stream=stream, n=2))
        assert trainable(answer)
        assert [choice.index for choice in answer.choices or ()] == [0, 1]
        first, second = answer.choices or ()
        assert first.output_ids != second.output_ids  # one seed, two choices
        weights = told(stub.said[-1])
        assert weights != stub.base
        assert first.logprobs == pytest.approx(truth(stub, answer, weights))
        assert first.spans == (Span(LORAS[0], 0, len(first.output_ids or ())),)
        again = await collect(engine, ask(LORAS[0], stream=not stream, n=2))
        assert [choice.output_ids for choice in again[2].choices or ()] == [first.output_ids, second.output_ids]
    if stream:
        text = ["", ""]
        for chunk in chunks(pieces):
            assert chunk["object"] == "chat.completion.chunk"
            for choice in chunk["choices"]:
                text[choice["index"]] += choice["delta"].get("content") or ""
        assert text == [first.text, second.text]


async def test_unasked_seeds_differ_where_the_server_is_deterministic(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, _):
        said = {(await collect(engine, ask(seed=None)))[2].choices for _ in range(3)}
    assert len(said) == 3


async def test_every_field_that_changes_the_distribution_is_pinned(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask(max_tokens=None))
        sent = stub.seen[-1].body["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, 1.0, -1, 0)
    assert (sent["frequency_penalty"], sent["presence_penalty"], sent["repetition_penalty"]) == (0, 0, 1)
    assert sent["max_new_tokens"] == 2048 - len(stub.said[-1].prompt) - 1


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}),
        *({"presence_penalty": 1.0}, {"logit_bias": {"5": 1.0}}, {"min_tokens": 3}),
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_answers_that_were_drawn_otherwise_are_untrainable(
    world: World, place: Path, fields: dict[str, Any]
) -> None:
    async with running(SGLANG, world, place) as (engine, _):
        head, _, answer = await collect(engine, ask(**fields))
    assert head.status == 200
    assert answer.untrainable
    assert next(iter(fields)) in answer.untrainable


async def test_stop_strings_end_an_answer_and_are_not_in_it(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, _):
        _, _, free = await collect(engine, ask(max_tokens=8))
        (choice,) = free.choices or ()
        stop = choice.text[3]
        _, _, answer = await collect(engine, ask(max_tokens=8, stop=[stop]))
    (cut,) = answer.choices or ()
    assert cut.text == choice.text[: choice.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert trainable(answer)


async def test_log_probs_are_told_when_asked_for(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, _):
        _, (piece,), answer = await collect(engine, ask(logprobs=True, top_logprobs=2))
        _, (plain,), _ = await collect(engine, ask())
    content = json.loads(piece.data)["choices"][0]["logprobs"]["content"]
    (choice,) = answer.choices or ()
    assert "".join(each["token"] for each in content) == choice.text
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert json.loads(plain.data)["choices"][0]["logprobs"] is None


async def test_usage_comes_in_a_stream_that_asks_for_it(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, _):
        _, pieces, answer = await collect(engine, ask(stream=True, stream_options={"include_usage": True}))
        _, bare, _ = await collect(engine, ask(stream=True))
    used = [chunk["usage"] for chunk in chunks(pieces) if "usage" in chunk]
    assert [each["completion_tokens"] for each in used] == [len((answer.choices or ())[0].output_ids or ())]
    assert not any("usage" in chunk for chunk in chunks(bare))


async def test_calls_are_taken_out_of_the_text(world: World, place: Path) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    text = Text(world.folder)
    ids = [*text.encode(call), 2]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def says_call(piece: Any) -> Any:
        meta = piece["meta_info"] | {"output_token_logprobs": [[-1.0, each, None] for each in ids]}
        meta |= {"completion_tokens": len(ids), "finish_reason": {"type": "stop", "matched": 2}}
        return {"text": call, "output_ids": ids, "meta_info": meta}

    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask())
        stub.faults.append(On("/generate", edit(says_call)))
        _, (piece,), answer = await collect(engine, ask(tools=[tool]))
        (choice,) = answer.choices or ()
    message = json.loads(piece.data)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert choice.finish_reason == "tool_calls"
    assert choice.message["tool_calls"] == message["tool_calls"]
    assert list(choice.output_ids or ()) == ids
    assert "<tools>" in text.tokenizer.decode(stub.seen[-1].body["input_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_refused_before_anything_runs(
    world: World, place: Path, stream: bool, late: bool
) -> None:
    async with running(SGLANG, world, place, stub={"late_errors": late}) as (engine, (stub,)):
        await engine.load(BASE)
        with pytest.raises(ContextError):
            await collect(engine, ask(text="word " * 450, stream=stream))
        with pytest.raises(ContextError):
            await collect(engine, ask(text="word " * 4500, stream=stream))
        assert not [said for said in stub.said if len(said.prompt) > 2000]


async def test_full_weights_are_a_labelled_set_and_old_caches_are_gone(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        seen = []
        for release in (BASE, FULLS[0], FULLS[1], FULLS[0], BASE):
            await engine.load(release)
            for _ in range(2):
                _, _, answer = await collect(engine, ask(release, text="the same long question " * 3))
                assert trainable(answer)
                weights = told(stub.said[-1])
                assert (answer.choices or ())[0].logprobs == pytest.approx(truth(stub, answer, weights))
            seen.append((weights, stub.version))
        assert stub.prefixes
    base, one, two, back, rest = seen
    assert len({base[0], one[0], two[0]}) == 3
    assert (one, base[0]) == (back, rest[0])
    assert base[1] == "default"
    assert one[1].startswith(MARK)
    assert rest[1] == f"{MARK}base"
    updates = [seen.body for seen in stub.asked("/update_weights_from_disk")]
    assert all(each["flush_cache"] is True for each in updates)
    assert updates[-1]["model_path"] == str(world.folder)


async def test_two_clients_of_one_server_never_mix_their_weights(world: World, place: Path) -> None:
    """A gateway and the learner: each looks, leaves, and comes back while the other changed the weights."""
    stub = SglangStub(world.folder, delay=0.001)
    async with (
        serving(stub),
        engine_of(SGLANG, world, place, stub) as one,
        engine_of(SGLANG, world, place, stub) as other,
    ):
        for _ in range(4):
            for engine, release in ((one, FULLS[0]), (other, FULLS[1]), (one, FULLS[0]), (other, BASE)):
                _, _, answer = await collect(engine, ask(release))
                assert (answer.choices or ())[0].logprobs == pytest.approx(truth(stub, answer, told(stub.said[-1])))
                expected = f"{MARK}base" if release == BASE else stub.version
                assert stub.version == expected


async def test_weights_of_another_hand_are_an_error_not_an_answer(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask(FULLS[0]))
        stub.version = "somebody-elses"
        stub.base = "foreign"
        _, _, answer = await collect(engine, ask(FULLS[0]))  # looked at again, and given what is asked for
        assert trainable(answer)
        assert told(stub.said[-1]) != "foreign"


async def test_other_weights_in_the_middle_of_a_stream_are_its_end(world: World, place: Path) -> None:
    """The client has a part already: to begin again would give it a second beginning behind the first."""
    async with running(SGLANG, world, place, stub={"delay": 0.001}) as (engine, (stub,)):
        await collect(engine, ask(FULLS[0]))
        before, number = len(stub.asked("/generate")), itertools.count()

        def other(chunk: Any) -> Any:
            if next(number) == 2:
                chunk["meta_info"]["weight_version"] = "somebody-elses"
            return chunk

        stub.faults.append(On("/generate", edit(other)))
        got: list[Any] = []
        with pytest.raises(EngineError):
            async for item in engine.answer(ask(FULLS[0], stream=True)):
                got.append(item)
        assert [type(item) for item in got[:2]] == [Head, Piece]
        assert not any(isinstance(item, Head) for item in got[1:])
        assert len(stub.asked("/generate")) == before + 1


async def test_an_adapter_of_that_name_from_elsewhere_is_replaced(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask())
        stub._take(LORAS[0], str(world.known[LORAS[1]].files["adapter_config.json"].parent))
        foreign = stub.loras[LORAS[0]].weights
        _, _, answer = await collect(engine, ask(LORAS[0]))
        assert trainable(answer)
        assert foreign not in told(stub.said[-1])


async def test_an_adapter_that_the_server_dropped_is_read_again_by_itself(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, stub={"max_loaded": 1}) as (engine, (stub,)):
        for release in (LORAS[0], LORAS[1], LORAS[0]):
            _, _, answer = await collect(engine, ask(release))
            assert trainable(answer)
            assert told(stub.said[-1]).endswith(stub.loras[release].weights)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_started_anew_is_given_its_adapter_again(
    world: World, place: Path, stream: bool, late: bool
) -> None:
    async with running(SGLANG, world, place, stub={"late_errors": late}) as (engine, (stub,)):
        await collect(engine, ask(LORAS[0]))
        stub.fresh()
        _, _, answer = await collect(engine, ask(LORAS[0], stream=stream))
        assert trainable(answer)
        assert LORAS[0] in stub.loras


async def test_rated_tokens_agree_with_answers_and_come_from_no_cache(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        _, _, answer = await collect(engine, ask(LORAS[0]))
        whole = [*(answer.prompt_ids or ()), *((answer.choices or ())[0].output_ids or ())]
        start = len(answer.prompt_ids or ())
        (rated,) = await engine.rate(LORAS[0], [whole], [start])
        assert rated == pytest.approx((answer.choices or ())[0].logprobs)
        assert stub.said[-1].cached == 0
        (base,) = await engine.rate(BASE, [whole], [start])
        assert base != pytest.approx(rated)


async def test_a_count_is_made_here(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
        _, _, answer = await collect(engine, Ask("0" * 32, LORAS[0], "count", body, False))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(
            Text(world.folder).encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        )
        assert not stub.said


async def test_forms_go_as_the_server_takes_them(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask(structured_outputs={"choice": ["a.b", "c"]}))
        assert stub.seen[-1].body["sampling_params"]["regex"] == "(a\\.b)|(c)"
        await collect(
            engine, ask(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "array"}}})
        )
        assert json.loads(stub.seen[-1].body["sampling_params"]["json_schema"]) == {"type": "array"}
        with pytest.raises(InputError, match="grammar"):
            await collect(engine, ask(structured_outputs={"grammar": "root ::= 'a'"}))


async def test_older_servers_have_another_name_for_what_they_are(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        del stub.routes["GET", "/model_info"]
        _, _, answer = await collect(engine, ask())
        assert trainable(answer)


async def test_a_server_without_adapters_says_how_to_start_it(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, stub={"lora": False}) as (engine, _):
        with pytest.raises(EngineError, match="--enable-lora"):
            await engine.load(LORAS[0])
        assert trainable((await collect(engine, ask()))[2])


async def test_a_folder_that_the_server_does_not_see_is_named(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, seen_as="/elsewhere") as (engine, _):
        with pytest.raises(EngineError, match="seen_as"):
            await engine.load(LORAS[0])
        with pytest.raises(EngineError, match="seen_as"):
            await engine.load(FULLS[0])


async def test_live_requests_go_before_evaluation_where_the_server_can(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, priority=True) as (engine, (stub,)):
        await collect(engine, ask(priority=0))
        await collect(engine, ask(priority=1))
        asked = [seen.body["priority"] for seen in stub.asked("/generate")[-2:]]
    assert asked[0] > asked[1]


async def test_a_served_name_is_checked_until_weights_changed_it(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, changes={"model": "served"}) as (engine, (stub,)):
        await collect(engine, ask(FULLS[0]))
        assert stub.name != "served"  # the server calls itself by the folder now
        async with engine_of(SGLANG, world, place, stub, changes={"model": "served"}) as other:
            assert trainable((await collect(other, ask(FULLS[0])))[2])
        stub.fresh()
        stub.name = "something-else"
        async with engine_of(SGLANG, world, place, stub, changes={"model": "served"}) as third:
            with pytest.raises(EngineError, match=r"engines\.model"):
                await collect(third, ask())


async def test_it_says_that_it_is_not_verified(world: World, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    stub = SglangStub(world.folder)
    async with serving(stub):
        with caplog.at_level(logging.WARNING):
            engine = SglangEngine(away(world, place, stub))
        await engine.close()
    assert "not run against a real server" in caplog.text
    assert "-m sglang" in caplog.text


async def test_refusals_pass_and_are_untrainable(world: World, place: Path) -> None:
    async with running(SGLANG, world, place) as (engine, (stub,)):
        await collect(engine, ask())
        stub.faults.append(On("/generate", says(429, retry_after="3")))
        head, _, answer = await collect(engine, ask())
        assert (head.status, head.headers["retry-after"]) == (429, "3")
        assert answer.untrainable


@pytest.mark.parametrize("wrong", [{"loras": 0}, {"max_tokens": 0}, {"wait": 0}, {"patience": 0}, {"turn": -1}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options(**wrong)


async def test_leaving_stops_the_work(world: World, place: Path) -> None:
    async with running(SGLANG, world, place, stub={"delay": 0.02}) as (engine, (stub,)):
        items = engine.answer(ask(stream=True, max_tokens=300))
        async for _ in items:
            if stub.running:
                break
        await items.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(2):
            await stub.idle()


# --- a real server ----------------------------------------------------------------------------------------------------


async def test_what_verifies_a_server_passes_one_that_is_right(world: World, place: Path) -> None:
    stub = SglangStub(world.folder)
    async with serving(stub):
        found = await verify(SglangEngine, stub.url, world.folder, place)
    assert found.worst < 1e-6
    assert set(found.seconds) == {"load lora", "load full", "back to the base"}


async def test_what_verifies_a_server_finds_one_that_is_not(world: World, place: Path) -> None:
    stub = SglangStub(world.folder)
    async with serving(stub):
        stub.prefixes.clear = lambda: None  # type: ignore[method-assign]
        with pytest.raises((AssertionError, EngineError)):
            await verify(SglangEngine, stub.url, world.folder, place)


@pytest.mark.sglang
@pytest.mark.skipif("REEF_SGLANG_URL" not in os.environ, reason="REEF_SGLANG_URL names no server")
async def test_a_real_server(tmp_path: Path) -> None:
    """What kind sglang relies on. REEF_SGLANG_URL: the server, REEF_SGLANG_MODEL: its model's folder here,
    REEF_SGLANG_PLACE: a folder that both see (default: a temporary one)."""
    found = await verify(
        SglangEngine,
        os.environ["REEF_SGLANG_URL"],
        Path(os.environ["REEF_SGLANG_MODEL"]),
        Path(os.environ.get("REEF_SGLANG_PLACE", tmp_path)),
        key=os.environ.get("REEF_SGLANG_KEY"),
    )
    assert math.isfinite(found.worst)
    assert found.worst < 0.2, found
