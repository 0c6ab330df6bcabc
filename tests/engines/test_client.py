from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core import rpc, wire
from reef.core.errors import BusyError, ContextError, EngineError, InputError, MissingError
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import Reader, read, translate
from reef.engines.local.client import Draft, LocalEngine, why_not
from reef.engines.local.text import Text
from tests.engines.dialect.script import Scripted, asking
from tests.engines.kit import RECEIPT, Releases, ask, make_tiny, running


async def collect(engine: LocalEngine, request: Ask) -> tuple[Head, list[Piece], Answer]:
    head, *pieces, answer = [each async for each in engine.answer(request)]
    assert isinstance(head, Head)
    assert isinstance(answer, Answer)
    return head, [piece for piece in pieces if isinstance(piece, Piece)], answer


def events(pieces: list[Piece]) -> list[Any]:
    lines = b"".join(piece.data for piece in pieces).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_an_answer_in_one_piece(tiny: Path) -> None:
    async with running(tiny, Releases(), model="tiny-model") as engine:
        assert await engine.ready()
        head, pieces, answer = await collect(engine, ask("Hello", seed=1, max_tokens=12))
    assert (head.status, head.headers["content-type"]) == (200, "application/json")
    assert [piece.terminal for piece in pieces] == [True]
    body = json.loads(pieces[0].data)
    assert body["id"] == f"chatcmpl-{RECEIPT}"
    assert (body["object"], body["model"]) == ("chat.completion", "tiny-model")
    (choice,) = body["choices"]
    (kept,) = answer.choices or ()
    assert choice["message"] == {"role": "assistant", "content": kept.text, "refusal": None}
    assert choice["finish_reason"] == kept.finish_reason
    assert choice["logprobs"] is None
    ids = kept.output_ids or ()
    assert body["usage"]["completion_tokens"] == len(ids) == len(kept.logprobs or ())
    assert body["usage"]["prompt_tokens"] == len(answer.prompt_ids or ())
    assert [(span.release_id, span.start, span.end) for span in kept.spans] == [("base", 0, len(ids))]
    text = Text(tiny)
    assert text.decode(ids) == kept.text
    assert answer.prompt_ids == tuple(text.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
    assert answer.sampling is not None
    assert (answer.sampling.seed, answer.sampling.max_tokens, answer.sampling.temperature) == (1, 12, 1.0)
    assert answer.untrainable is None


async def test_a_stream_says_the_same(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        _, whole, _ = await collect(engine, ask("Hello", seed=1, max_tokens=30, n=2))
        options = {"include_usage": True}
        request = ask("Hello", seed=1, max_tokens=30, n=2, stream=True, stream_options=options)
        head, pieces, answer = await collect(engine, request)
        _, plain, _ = await collect(engine, ask("Hello", seed=1, max_tokens=3, stream=True))
    assert head.headers["content-type"].startswith("text/event-stream")
    assert [piece.terminal for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    chunks = events(pieces)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    expected = json.loads(whole[0].data)
    counts, cached = expected["usage"], {"cached_tokens": expected["usage"]["prompt_tokens"] - 1}
    assert chunks[-1]["usage"] == {**counts, "prompt_tokens_details": cached}  # the same prompt for the second time
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == expected["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [expected["choices"][index]["finish_reason"]]
        assert mine[-1]["finish_reason"]
    assert len(answer.choices or ()) == 2
    assert answer.choices[0].output_ids != answer.choices[1].output_ids  # type: ignore[index]
    assert all("usage" not in chunk and chunk["choices"] for chunk in events(plain))


async def test_log_probs_are_public_when_asked_for(tiny: Path) -> None:
    fields = {"seed": 4, "max_tokens": 25, "logprobs": True, "top_logprobs": 2}
    async with running(tiny, Releases()) as engine:
        _, whole, answer = await collect(engine, ask("Hello", **fields))
        _, pieces, _ = await collect(engine, ask("Hello", stream=True, **fields))
    content = json.loads(whole[0].data)["choices"][0]["logprobs"]["content"]
    streams = [c["choices"][0]["logprobs"] for c in events(pieces)]
    streamed = [entry for each in streams if each for entry in each["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in content], abs=1e-4)
    (kept,) = answer.choices or ()
    ended = kept.finish_reason == "stop"
    assert [entry["logprob"] for entry in content] == list(kept.logprobs or ())[: len(content)]
    assert len(content) == len(kept.output_ids or ()) - ended
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"] - 1e-6
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]


async def test_stop_strings_end_the_answer(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        _, _, free = await collect(engine, ask("Hello", seed=2, max_tokens=40))
        said = (free.choices or ())[0].text
        stop = said[10:13]
        _, pieces, answer = await collect(engine, ask("Hello", seed=2, max_tokens=40, stop=[stop]))
    body = json.loads(pieces[0].data)["choices"][0]
    assert body["finish_reason"] == "stop"
    assert body["message"]["content"] == said[: said.index(stop)]
    (kept,) = answer.choices or ()
    assert (free.choices or ())[0].output_ids[: len(kept.output_ids or ())] == kept.output_ids  # type: ignore[index]


async def test_seeds_decide_and_their_lack_does_not(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        answers = await asyncio.gather(
            *(
                collect(engine, ask("Hello", max_tokens=20, **({"seed": seed} if seed else {})))
                for seed in (1, 1, 2, 0, 0)
            )
        )
    ids = [(answer.choices or ())[0].output_ids for _, _, answer in answers]
    assert ids[0] == ids[1]
    assert len({ids[0], *ids[2:]}) == 4


async def test_refusals_come_before_anything_ran(tiny: Path) -> None:
    releases = Releases()
    async with running(tiny, releases, queue=2) as engine:
        for request, error, param in (
            (ask("x" * 600), ContextError, "messages"),
            (ask("x", max_tokens=-5), InputError, "max_tokens"),
            (ask([]), InputError, "messages"),
            (ask("x", n=3), BusyError, None),
            (Ask(RECEIPT, "base", "chat", b"{", False), InputError, None),
            (Ask(RECEIPT, "base", "messages", b"{}", False), InputError, None),
        ):
            with pytest.raises(error) as caught:
                await collect(engine, request)
            assert caught.value.param == param
        assert releases.asked == []
        with pytest.raises(MissingError):
            await collect(engine, ask("x", release="unknown"))
        with pytest.raises(MissingError):
            await engine.load("unknown")
        await collect(engine, ask("x", max_tokens=1))


async def test_the_answer_is_cut_to_the_context(tiny: Path) -> None:
    async with running(tiny, Releases(), context=64) as engine:
        _, pieces, answer = await collect(engine, ask("Hello", max_tokens=5000, seed=1))
        assert answer.sampling is not None
        assert answer.sampling.max_tokens == 64 - len(answer.prompt_ids or ())
        body = json.loads(pieces[0].data)
        if body["choices"][0]["finish_reason"] == "length":
            assert body["usage"]["total_tokens"] == 64


async def test_leaving_early_stops_the_work(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:

        async def busy() -> int:
            detail: dict[str, Any] = (await engine._client.call(_ping())).detail  # type: ignore[attr-defined]
            return int(detail["running"] + detail["waiting"])

        stream = engine.answer(ask("Hello", stream=True, max_tokens=480, n=8, temperature=2))
        async for each in stream:
            if isinstance(each, Piece) and b'"content":"' in each.data:
                break
        assert await busy() > 0
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(100):
            if not await busy():
                break
            await asyncio.sleep(0.01)
        assert not await busy()


def _ping() -> Any:
    from reef.core.wire import Ping

    return Ping()


async def test_rating_over_the_wire(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        _, _, answer = await collect(engine, ask("Hello", seed=1, max_tokens=12))
        (kept,) = answer.choices or ()
        prompt = list(answer.prompt_ids or ())
        (rated,) = await engine.rate("base", [prompt + list(kept.output_ids or ())], [len(prompt)])
        assert rated == pytest.approx(list(kept.logprobs or ()), abs=1e-4)
        for sequences, starts in (([[1, 2]], [2]), ([[1, 2]], [0]), ([[1, 999]], [1]), ([[1, 2]], [])):
            with pytest.raises(InputError):
                await engine.rate("base", sequences, starts)


async def test_no_engine_is_not_ready(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "none.sock", model="tiny")
    assert not await engine.ready()
    with pytest.raises(EngineError, match="not reachable"):
        await collect(engine, ask("x"))
    with pytest.raises(EngineError, match="not reachable"):
        await engine.load("base")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7}, None),
        ({"temperature": 0}, "temperature 0"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 5}, "top_k 5"),
    ],
)
async def test_what_cannot_train_says_why(tiny: Path, fields: dict[str, Any], reason: str | None) -> None:
    async with running(tiny, Releases()) as engine:
        _, _, answer = await collect(engine, ask("Hello", max_tokens=2, **fields))
    assert answer.sampling is not None
    assert answer.untrainable == why_not(answer.sampling)
    assert (answer.untrainable is None) == (reason is None)
    assert (answer.untrainable or "").startswith(reason or "")


# --- tools ------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "look")]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def wired(*choices: Sequence[str], finish: str = "stop", pieces: bool = False) -> list[wire.Message]:
    """What the engine sends of scripted texts, a token a delta, the choices in turn."""
    messages: list[wire.Message] = []
    for place in range(max(map(len, choices))):
        for choice, texts in enumerate(choices):
            if place < len(texts):
                token, text = 100 * choice + place, texts[place]
                own = [text] if pieces else None
                messages.append(
                    wire.Delta(
                        choice=choice, text=text, ids=[token], logprobs=[-token / 7], release_id="base", pieces=own
                    )
                )
    return [*messages, *(wire.Finished(choice=choice, finish_reason=finish) for choice in range(len(choices)))]


def drafted(
    messages: list[wire.Message], *, stream: bool = False, tools: Any = TOOLS, **fields: Any
) -> tuple[list[Piece], Answer]:
    """The pieces and the record of scripted messages."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": None, "stop": ()}
    begun = wire.Begun(prompt_ids=[1, 2], sampling=sampling, model="tiny", context_length=512)
    draft = Draft(ask("Hi", stream=stream, tools=tools, **fields), begun)
    pieces = [Piece(data) for data in draft.opening()]
    for message in messages:
        pieces += [Piece(data) for data in draft.take(message)]
    return [*pieces, *draft.closing()], draft.answer()


def chat_reader(pieces: list[Piece], *, stream: bool) -> Reader:
    return read("chat", b"".join(piece.data for piece in pieces), stream=stream)


def told(number: int, name: str = "add", arguments: str = '{"a": 1}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{RECEIPT}_{number}", "type": "function", "function": function}


def test_calls_are_answered_in_chats_form() -> None:
    messages = wired(["Let me ", "see.\n<tool", f"{CALL[5:]}\n", CALL, "\n"])
    (piece,), answer = drafted(messages)
    body = json.loads(piece.data)
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [told(0), told(1)]}
    (choice,) = body["choices"]
    assert choice["message"] == {**message, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    counts = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    (kept,) = answer.choices or ()
    assert (kept.text, kept.message, kept.finish_reason) == ("Let me see.", message, "tool_calls")
    # What was sampled stays what it was: training is on tokens.
    assert kept.output_ids == (0, 1, 2, 3, 4)
    assert kept.logprobs == tuple(-token / 7 for token in range(5))
    assert [(span.start, span.end) for span in kept.spans] == [(0, 5)]
    assert answer.prompt_ids == (1, 2)
    assert answer.untrainable is None


def test_calls_are_streamed_behind_what_is_said() -> None:
    pieces, answer = drafted(wired(["Let me ", "see.\n<tool", f"{CALL[5:]}\n", CALL, "\n"]), stream=True)
    deltas = [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in events(pieces)]
    assert deltas == [
        ({"role": "assistant", "content": "", "refusal": None}, None),
        ({"content": "Let me"}, None),
        ({"content": " see."}, None),
        ({"tool_calls": [{"index": 0, **told(0)}]}, None),
        ({"tool_calls": [{"index": 1, **told(1)}]}, None),
        ({}, "tool_calls"),
    ]
    assert answer == drafted(wired(["Let me ", "see.\n<tool", f"{CALL[5:]}\n", CALL, "\n"]))[1]


def test_a_call_alone_has_no_content() -> None:
    (piece,), answer = drafted(wired([CALL]))
    assert json.loads(piece.data)["choices"][0]["message"]["content"] is None
    (kept,) = answer.choices or ()
    assert (kept.text, kept.message["content"]) == ("", None)


@pytest.mark.parametrize(
    "text",
    [
        "No tool is needed. \n",
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>\n',
        '<tool_call>{"name": "add", "argu',
        "<tool_call>",
        "a <tool_cal",
        "",
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_what_is_no_call_is_text(text: str, finish: str) -> None:
    for stream in (False, True):
        pieces, answer = drafted(wired(list(text) or [""], finish=finish), stream=stream, tool_choice="required")
        (kept,) = answer.choices or ()
        assert (kept.text, kept.message, kept.finish_reason) == (text, None, finish)
        (said,) = chat_reader(pieces, stream=stream).choices()
        assert (said.text, said.message, said.finish_reason) == (text, None, finish)


def test_an_answer_that_was_cut_says_so() -> None:
    _, answer = drafted(wired([CALL, "\nand th"], finish="length"))
    (kept,) = answer.choices or ()
    assert (kept.text, kept.finish_reason, kept.message["tool_calls"]) == ("\nand th", "length", [told(0)])


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_nothing_is_read_into_the_text(fields: dict[str, Any]) -> None:
    texts = ["a ", CALL, "", " \n"]
    pieces, answer = drafted(wired(texts), stream=True, **fields)
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in events(pieces)]
    assert deltas == ["", "a ", CALL, " \n", None]
    (kept,) = answer.choices or ()
    assert (kept.text, kept.message, kept.finish_reason) == ("".join(texts), None, "stop")


def test_one_call_when_no_more_are_wanted() -> None:
    pieces, answer = drafted(wired([CALL, CALL, CALL]), stream=True, parallel_tool_calls=False)
    (kept,) = answer.choices or ()
    assert kept.message["tool_calls"] == [told(0)]
    assert kept.output_ids == (0, 1, 2)
    assert chat_reader(pieces, stream=True).choices()[0].message == kept.message


def test_choices_call_apart() -> None:
    look = '<tool_call>{"name": "look"}</tool_call>'
    messages = wired([CALL[:20], CALL[20:], CALL], ["It is 3", ".", f" {look}"], ["none", "<tool_call>"])
    for stream in (False, True):
        pieces, answer = drafted(messages, stream=stream, n=3)
        kept = answer.choices or ()
        assert [choice.finish_reason for choice in kept] == ["tool_calls", "tool_calls", "stop"]
        assert [choice.text for choice in kept] == ["", "It is 3.", "none<tool_call>"]
        assert kept[0].message["tool_calls"] == [told(0), told(3)]
        assert kept[1].message["tool_calls"] == [told(1, "look", "{}")]
        assert kept[2].message is None
        said = chat_reader(pieces, stream=stream).choices()
        assert [(each.text, each.message) for each in said] == [(each.text, each.message) for each in kept]


@given(st.lists(st.sampled_from([CALL, CALL[:30], CALL[30:], "words", " ", "\n", "<tool_call>", "é"])), st.data())
def test_any_cut_gives_the_same_answer(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    messages = wired([text[a:b] for a, b in pairwise([0, *cuts, len(text)])])
    (expected,) = drafted(wired([text]))[1].choices or ()
    for stream in (False, True):
        pieces, answer = drafted(messages, stream=stream)
        (kept,) = answer.choices or ()
        (said,) = chat_reader(pieces, stream=stream).choices()
        for found in (kept, said):
            assert (found.text, found.message, found.finish_reason) == (
                (expected.text, expected.message, expected.finish_reason)
            )


def test_log_probs_of_calls_are_not_lost() -> None:
    texts = ["see ", "<tool_call>", *CALL[11:], "\n"]
    pieces, _ = drafted(wired(texts, pieces=True), stream=True, logprobs=True)
    streams = [chunk["choices"][0]["logprobs"] for chunk in events(pieces)]
    assert [entry["token"] for each in streams if each for entry in each["content"]] == texts


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_other_dialects_get_the_calls(dialect: str, stream: bool) -> None:
    pieces, answer = drafted(wired(["Well. ", CALL[:9], CALL[9:], f"\n{CALL}"]), stream=stream)
    head = Head(200, {"content-type": "text/event-stream" if stream else "application/json"})
    own: dict[str, Any] = {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    if dialect == "responses":
        own = {"messages": ..., "max_tokens": ..., "input": "Hi", "tools": [{"type": "function", "name": "add"}]}
    made = translate(asking(stream, dialect, **own))
    items = [item async for item in made.answer(Scripted(head, *pieces, answer).answer(made.ask))]
    data = b"".join(item.data for item in items if isinstance(item, Piece))
    (said,) = read(dialect, data, stream=stream).choices()
    (kept,) = answer.choices or ()
    assert (said.text, said.finish_reason) == ("Well.", "tool_calls")
    functions = [call["function"]["name"] for call in said.message["tool_calls"]]
    arguments = [json.loads(call["function"]["arguments"]) for call in said.message["tool_calls"]]
    assert (functions, arguments) == (["add", "add"], [{"a": 1}, {"a": 1}])
    (last,) = [item for item in items if isinstance(item, Answer)]
    assert (last.choices, last.prompt_ids) == ((kept,), answer.prompt_ids)


async def test_the_prompt_holds_the_tools_when_they_are_sent(tmp_path: Path) -> None:
    roomy = make_tiny(tmp_path / "m", max_position_embeddings=2048)
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    async with running(roomy, Releases(), context=2048) as engine:
        text = Text(roomy)
        for tool_choice, shown in (("auto", True), ("required", True), ("none", False)):
            request = ask("Hello", max_tokens=4, tools=tools, tool_choice=tool_choice)
            _, _, answer = await collect(engine, request)
            prompt = text.decode(answer.prompt_ids or ())
            assert ('"name": "f"' in prompt) is shown
            *_, counted = [item async for item in engine.answer(replace(request, dialect="count"))]
            assert isinstance(counted, Answer)
            assert counted.usage is not None
            assert counted.usage.prompt_tokens == len(answer.prompt_ids or ())
        with pytest.raises(InputError, match="not among the request's tools"):
            await collect(engine, ask("x", tools=tools, tool_choice={"type": "function", "function": {"name": "g"}}))


async def test_an_engine_that_never_answers_is_an_error_in_the_end(tmp_path: Path) -> None:
    """Case 42: it takes the connection, says that it is ready, and never loads, rates or begins."""

    async def forever() -> wire.Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def never() -> AsyncIterator[wire.Message]:
        yield await forever()

    async def pong() -> wire.Message:
        return wire.Pong(pid=1, kind="engine")

    def handle(message: wire.Message) -> Any:
        if isinstance(message, wire.Ping):
            return pong()
        return never() if isinstance(message, wire.Generate) else forever()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "e.sock"))
    server = await rpc.serve(listener, handle)
    engine = LocalEngine(tmp_path / "e.sock", model="m", patience=0.05)
    assert await engine.ready()
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s to Load"):
        await engine.load("r1")
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s to Rate"):
        await engine.rate("r1", [[1, 2]], [1])
    with pytest.raises(EngineError, match=r"did not begin an answer within 0\.05 s"):
        await collect(engine, ask("Hello"))
    await engine.close()
    server.close()
