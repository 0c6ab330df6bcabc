"""The anthropic package on messages, with its counting and its list of models."""

from anthropic import Anthropic
from task import ASK, BOTH, RECEIPT, SCHEMA, TELLS, TOKEN, URL, lookup, run

TOOL = {"name": "lookup", "description": TELLS, "input_schema": SCHEMA}


def client(scenario):
    return Anthropic(base_url=URL, api_key=TOKEN, default_headers={"x-reef-scenario": scenario})


def further(messages, message):
    """Add an answer and the results of its calls; False when it has none."""
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    outputs = [{"type": "tool_result", "tool_use_id": c.id, "content": lookup(**c.input)} for c in calls]
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": outputs}]
    return bool(calls)


def whole(scenario):
    messages, receipts = [{"role": "user", "content": ASK}], []
    while True:
        raw = client(scenario).messages.with_raw_response.create(
            model="m", max_tokens=500, messages=messages, tools=[TOOL]
        )
        message = raw.parse()
        receipts.append(raw.headers[RECEIPT])
        assert message._request_id == receipts[-1]
        if not further(messages, message):
            return message.content[0].text, receipts


def streamed(scenario, said=ASK):
    messages, receipts = [{"role": "user", "content": said}], []
    while True:
        with client(scenario).messages.stream(model="m", max_tokens=500, messages=messages, tools=[TOOL]) as stream:
            receipts.append(stream.response.headers[RECEIPT])
            assert stream.request_id == receipts[-1]
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        if not further(messages, message):
            assert text == message.content[0].text
            return text, receipts


def helped(scenario):
    """Two calls in one answer."""
    return streamed(scenario, BOTH)


def plain(scenario):
    """Events as they come, with nothing that accumulates them, through the beta route."""
    stream = client(scenario).beta.messages.create(
        model="m", max_tokens=500, messages=[{"role": "user", "content": ASK}], stream=True
    )
    receipts = [stream.response.headers[RECEIPT]]
    events = [event for event in stream if event.type != "ping"]
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    return "".join(event.delta.text for event in events if event.type == "content_block_delta"), receipts


def counted(scenario):
    """Counting and listing: no receipts."""
    known = client(scenario)
    count = known.messages.count_tokens(model="m", messages=[{"role": "user", "content": ASK}], tools=[TOOL])
    assert count.input_tokens > 0
    listed = list(known.models.list(limit=1000))
    assert listed
    assert all(model.id and model.created_at and model.display_name for model in listed)
    return "", []


run(whole, streamed, helped, plain, counted)
