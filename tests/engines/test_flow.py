"""A packed stream on its way: what little unpacks to is bounded, and never keeps others waiting."""

import asyncio
import gzip

import brotli
import pytest
import zstandard

from reef.core.errors import UpstreamError
from reef.engines import Ask, flow
from reef.engines.decode import STEP
from reef.engines.dialect import reader
from reef.engines.flow import MAX_REST, Flow, count_scores
from reef.engines.http import Response

ASK = Ask("0" * 32, "r", "chat", b"{}", True)
PACK = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstandard.compress}
TEXT = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def passing(plain, name):
    """A flow whose bytes are all there already: whoever gets a turn meanwhile gets it from the flow."""
    response = Response(None)
    response.status, response.headers = 200, {"content-encoding": name}
    response.put(PACK[name](plain))
    response.finish()
    return Flow("host", ASK, response, reader("chat"))


async def turns_of_others(work):
    turns = 0

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.ensure_future(others())
    try:
        return await work, turns
    finally:
        other.cancel()


async def everything(passed):
    return [piece async for piece in pieces_of(passed)]


async def pieces_of(passed):
    while (piece := await passed.next()) is not None:
        yield piece


@pytest.mark.parametrize("name", PACK)
async def test_others_get_their_turn(name):
    plain = TEXT + (b": " + b"a" * 1000 + b"\n\n") * 4000 + DONE
    pieces, turns = await turns_of_others(everything(passing(plain, name)))
    assert b"".join(piece.data for piece in pieces) == plain
    assert [piece.terminal for piece in pieces][-2:] == [False, True]
    assert turns >= len(plain) // STEP - 1


@pytest.mark.parametrize("name", PACK)
async def test_the_limit_counts_what_it_unpacks_to(monkeypatch, name):
    monkeypatch.setattr(flow, "MAX_STREAM", 1_000_000)
    with pytest.raises(UpstreamError, match="1000000 bytes"):
        await everything(passing(TEXT + b": aaa\n" * 1_000_000, name))


@pytest.mark.parametrize("name", PACK)
async def test_what_follows_the_end_is_bounded(name):
    """The end itself has passed: what a provider unpacks behind it is nobody's."""
    work = everything(passing(TEXT + DONE + b": aaa\n" * 1_000_000, name))
    pieces, turns = await turns_of_others(work)
    assert pieces[-1].data.startswith(DONE)
    assert len(pieces[-1].data) <= MAX_REST + 2 * STEP
    assert turns < 4_000_000 // STEP


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"choices": [{"logprobs": {"content": [{"logprob": -Infinity}, {}]}}]}', 2),
        ('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}", 0),
        ('{"choices": [1]}', 0),
        ("[]", 0),
        ("", 0),
    ],
)
def test_scores_of_odd_json(text, count):
    assert count_scores(text) == count
