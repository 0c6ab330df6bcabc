"""Providers that score, fail, refuse or share the work: what a client and its record get of it."""

import asyncio
import json

import anthropic
import openai
import pytest

from reef.core.nouns import Usage
from reef.engines.fake import FakeEngine
from reef.engines.upstream import UpstreamEngine
from reef.gateway.context import Target
from reef.records import raw
from tests.flow.kit_wire import (
    DIALECTS,
    DONE,
    JSON,
    PATHS,
    TRAILING,
    USAGE,
    WORDS,
    Provider,
    ask,
    begun,
    chunk,
    event,
    failure,
    post,
    recorded,
    replies,
    reply,
    stream,
    streams,
    told,
)
from tests.gateway.conftest import TOKEN, running

# --- log-probs --------------------------------------------------------------------------------------------------------


def scored(*tokens):
    return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in tokens]}


async def test_log_probs_that_stand_for_other_tokens(native, provider):
    """case 12: none beside the reasoning, all in one chunk later: passed on, never padded, never trained on."""
    said = (
        chunk(reasoning_content="hm", role="assistant").replace(
            b'"finish_reason"', b'"logprobs": null, "finish_reason"'
        )
        + chunk(content="a")
        + chunk(content="b", logprobs=scored("a", "b"))
        + chunk("stop")
        + event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        + DONE
    )
    provider.script = streams(said, size=11)
    answer = await post(native, "chat", ask("chat", logprobs=True))
    assert answer.content == said
    record = await recorded(native, answer)
    assert (record.choices[0].logprobs, record.choices[0].output_ids) == (None, None)
    assert record.untrainable == "the engine gave 2 log-probs for 3 tokens, and no token ids"


async def check_json(gateway, record):
    """What is shown and exported of a record is JSON that any reader reads."""

    def wrong(name):
        raise AssertionError(f"{name} in what should be JSON")

    async with gateway.client() as client:
        shown = await client.get(f"/reef/scenarios/default/records/{record.id}")
    assert shown.status_code == 200
    json.loads(shown.content, parse_constant=wrong)
    json.loads(raw.line(record), parse_constant=wrong)
    if record.reply is not None:
        json.loads(record.reply, parse_constant=wrong)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_log_probs_that_are_no_json(chatty, provider, dialect, whole):
    """case 13: minus infinity, bytes null, no top_logprobs: passed on; what is stored is valid JSON."""
    token = {"token": "a", "logprob": float("-inf"), "bytes": None}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": [token]}}
    if whole:
        body = {"id": "x", "choices": [choice | {"message": {"role": "assistant", "content": "a"}}], "usage": USAGE}
        said = json.dumps(body).encode()
        provider.script = replies(said)
    else:
        said = event({"choices": [choice | {"delta": {"content": "a"}}]}) + TRAILING + DONE
        provider.script = streams(said)
    assert b"-Infinity" in said
    more = {"chat": {"logprobs": True}, "responses": {"include": ["message.output_text.logprobs"]}}.get(dialect, {})
    answer = await post(chatty, dialect, ask(dialect, stream=not whole, **more))
    record = await recorded(chatty, answer)
    assert (record.status, record.choices[0].text, record.usage) == ("complete", "a", Usage(26, 2))
    if dialect == "chat":
        assert answer.content == said
    else:
        assert b"Infinity" not in answer.content
    await check_json(chatty, record)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_replies_that_are_no_json(native, provider, dialect, whole):
    """case 13, for the dialects whose answers are kept whole: minus infinity somewhere in them."""
    if whole:
        said = json.dumps(reply(dialect) | {"score": float("-inf")}).encode()
        provider.script = replies(said)
    else:
        said = stream(dialect).replace(b'{"id": "', b'{"score": -Infinity, "id": "', 9)
        provider.script = streams(said, size=21)
    assert b"-Infinity" in said
    answer = await post(native, dialect, ask(dialect, stream=not whole))
    assert answer.content == said
    record = await recorded(native, answer)
    assert (record.status, record.choices[0].text, record.usage) == ("complete", WORDS, Usage(26, 2))
    assert json.loads(record.reply)["score"] is None
    await check_json(native, record)


@pytest.mark.parametrize("whole", [True, False])
async def test_log_probs_alone_are_answered_by_our_own_engine(tmp_path, whole):
    """case 13: `logprobs: true` without `top_logprobs`, streamed or not."""
    async with running(tmp_path, FakeEngine()) as gateway:
        answer = await post(gateway, "chat", ask("chat", stream=not whole, logprobs=True))
        assert answer.status_code == 200
        record = await recorded(gateway, answer)
    assert (record.status, record.untrainable) == ("complete", None)
    assert len(record.choices[0].logprobs) == len(record.choices[0].output_ids)


# --- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_inside_a_stream(either, provider, dialect):
    """Each dialect's error event is the last thing a client gets; no end follows it, and the record is no success."""
    theirs = dialect if either.native else "chat"
    said = begun(theirs) + failure(theirs, "overloaded today")
    provider.script = streams(said, size=17)
    answer = await post(either, dialect, ask(dialect))
    record = await recorded(either, answer)
    assert (record.status, record.error) == ("interrupted", "overloaded today")
    assert record.choices[0].text == "Half"
    assert record.untrainable
    if either.native or dialect == "chat":
        assert answer.content == said
    last = told(answer.content)[-1]
    assert "overloaded today" in json.dumps(last)
    assert last.get("type") in (None, "error", "response.failed")
    assert not any(end in answer.content for end in (b"[DONE]", b"message_stop", b"response.completed"))


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_place_that_a_client_left_is_free(native, provider, streamed):
    """case 14: the provider is stopped within a second, and the slot is another's."""

    async def script(request):
        if len(provider.seen) > 1:
            return await replies(reply("chat"))(request)
        await asyncio.sleep(20)

    native.server.config.app.work.most = 1
    provider.script = script
    async with native.client() as client:
        task = asyncio.create_task(client.post(PATHS["chat"], content=ask("chat", stream=streamed), headers=JSON))
        while not provider.seen:
            await asyncio.sleep(0.005)
        assert (await post(native, "chat", ask("chat", stream=False))).status_code == 429
        task.cancel()
        await asyncio.wait_for(provider.left.wait(), 1.0)
    for _ in range(100):
        if (answer := await post(native, "chat", ask("chat", stream=False))).status_code == 200:
            break
        await asyncio.sleep(0.01)
    assert answer.status_code == 200


async def test_a_body_of_40_mb(native, provider):
    """case 16: within the documented limit it reaches the provider as it came; over a lower one it is a 413."""
    sent = ask("chat", stream=False).replace(b"\\u0048ello", b"x" * 40_000_000)
    provider.script = replies(reply("chat"))
    assert (await post(native, "chat", sent)).status_code == 200
    assert provider.seen == [sent]
    async with native.client() as client:
        refused = await client.post("/reef/report", content=sent, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


# --- more than one provider -------------------------------------------------------------------------------------------


@pytest.fixture
async def two(tmp_path):
    """Two providers that keep responses, each its own; a model's name picks one."""

    def script(name):
        async def answer(request):
            number = len(providers[name].seen)
            body = json.loads(providers[name].seen[-1])
            wanted = body.get("previous_response_id")
            if wanted is not None and not wanted.startswith(f"resp-{name}"):
                return await replies({"error": {"message": f"Previous response '{wanted}' not found."}}, 400)(request)
            return await replies(reply("responses") | {"id": f"resp-{name}-{number}"})(request)

        return answer

    providers = {}
    async with Provider() as one, Provider() as other:
        for name, made in (("a", one), ("b", other)):
            providers[name], made.script = made, script(name)
        engines = {name: UpstreamEngine(made.url, speaks=["responses"]) for name, made in providers.items()}

        def route(scenario, model):
            return Target(model, engines[model], None)

        async with running(tmp_path, engines["a"], route=route) as gateway:
            gateway.providers = providers
            yield gateway
        await engines["b"].close()


async def respond(gateway, model, text, before=None):
    body = {"model": model, "input": text} | ({"previous_response_id": before} if before else {})
    return await post(gateway, "responses", json.dumps(body).encode())


async def test_a_follow_up_goes_on_where_its_state_is(two):
    """case 18: with the same model the provider keeps the state, and gets the id as it came."""
    first = await respond(two, "a", "one")
    second = await respond(two, "a", "two", first.json()["id"])
    assert second.status_code == 200
    asked = json.loads(two.providers["a"].seen[1])
    assert (asked["previous_response_id"], asked["input"]) == (first.json()["id"], "two")


async def test_a_follow_up_elsewhere_takes_its_conversation_along(two):
    """case 18: alternating between two providers, none is asked for what only the other knows."""
    last, said = None, []
    for number, model in enumerate("abab"):
        said.append(f"turn {number}")
        answer = await respond(two, model, said[-1], last)
        assert answer.status_code == 200, answer.text
        last = answer.json()["id"]
        asked = json.loads(two.providers[model].seen[-1])
        if number:
            assert "previous_response_id" not in asked
            texts = [item["content"][0]["text"] for item in asked["input"] if item["role"] == "user"]
            assert texts == said
    assert len(two.providers["a"].seen) == len(two.providers["b"].seen) == 2


async def test_a_follow_up_to_what_nobody_knows(two):
    """case 18: an id that Reef has no record of is its provider's to know: its refusal comes back as it is."""
    refused = await respond(two, "a", "x", "resp-elsewhere-7")
    assert refused.status_code == 400
    assert "not found" in refused.json()["error"]["message"]


# --- tries ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("asked", ["0.01", "abc", None])
async def test_tries_of_clients_and_ours_do_not_multiply(native, provider, dialect, asked):
    """case 19: the SDKs' two retries are three tries in all; the provider's header reaches them as it was."""
    headers = {} if asked is None else {"retry-after": asked}
    provider.script = replies(
        {"type": "error", "error": {"type": "rate_limit_error", "message": "busy"}}, 429, **headers
    )
    given = {"base_url": native.url + ("" if dialect == "messages" else "/v1"), "api_key": TOKEN, "max_retries": 2}
    if dialect == "messages":
        async with anthropic.AsyncAnthropic(**given) as client:
            client._calculate_retry_timeout = lambda *_: 0.001
            with pytest.raises(anthropic.RateLimitError) as caught:
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    else:
        async with openai.AsyncOpenAI(**given) as client:
            client._calculate_retry_timeout = lambda *_: 0.001
            with pytest.raises(openai.RateLimitError) as caught:
                if dialect == "chat":
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
                else:
                    await client.responses.create(model="m", input="Hi")
    assert caught.value.response.headers.get("retry-after") == asked
    assert len(provider.seen) == 3


async def test_tries_for_one_leave_others_alone(native, provider):
    """case 19: while one request waits for its next try, another is answered at once."""

    async def script(request):
        if b"Patience" in provider.seen[-1] and sum(b"Patience" in body for body in provider.seen) == 1:
            return await replies({"error": {"message": "busy"}}, 429, **{"retry-after": "1"})(request)
        return await replies(reply("chat"))(request)

    provider.script = script
    slow = asyncio.create_task(post(native, "chat", ask("chat", stream=False, user="Patience")))
    while not provider.seen:
        await asyncio.sleep(0.005)
    assert (await post(native, "chat", ask("chat", stream=False))).status_code == 200
    assert not slow.done()
    assert (await slow).status_code == 200
    assert len(provider.seen) == 3
