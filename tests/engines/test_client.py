from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from reef.core.errors import ContextError, EngineError, InputError, LimitError, MissingError
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.local.client import LocalEngine, why_not
from reef.engines.local.text import Text
from tests.engines.kit import RECEIPT, Releases, ask, running


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
    assert chunks[-1]["usage"] == expected["usage"]
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
            (ask("x", n=3), LimitError, None),
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
