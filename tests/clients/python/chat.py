"""The openai package on chat completions."""

from openai import OpenAI
from task import ASK, BOTH, FUNCTION, RECEIPT, TOKEN, URL, called, run


def client(scenario):
    return OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, default_headers={"x-reef-scenario": scenario})


def whole(scenario):
    messages, receipts = [{"role": "user", "content": ASK}], []
    while True:
        raw = client(scenario).chat.completions.with_raw_response.create(model="m", messages=messages, tools=[FUNCTION])
        answer = raw.parse()
        receipts.append(raw.headers[RECEIPT])
        assert answer._request_id == receipts[-1]
        assert answer.usage.total_tokens > 0
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content, receipts
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call.function.arguments)})


def streamed(scenario):
    messages, receipts = [{"role": "user", "content": ASK}], []
    while True:
        stream = client(scenario).chat.completions.create(
            model="m", messages=messages, tools=[FUNCTION], stream=True, stream_options={"include_usage": True}
        )
        receipts.append(stream.response.headers[RECEIPT])
        text, calls, reason, usage = "", {}, None, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for part in choice.delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                    call["arguments"] += part.function.arguments or ""
        assert usage.total_tokens > 0
        assert reason == ("tool_calls" if calls else "stop")
        if not calls:
            return text, receipts
        functions = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls.values()
        ]
        messages.append({"role": "assistant", "content": text or None, "tool_calls": functions})
        for call in calls.values():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": called(call["arguments"])})


def helped(scenario):
    """The package's own accumulator, which checks every chunk against its types; usage is not asked for."""
    messages, receipts = [{"role": "user", "content": BOTH}], []
    while True:
        with client(scenario).chat.completions.stream(model="m", messages=messages, tools=[FUNCTION]) as stream:
            receipts.append(stream._raw_stream.response.headers[RECEIPT])
            assert all(event.chunk.usage is None for event in stream if event.type == "chunk")
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content, receipts
        messages.append(message.to_dict())
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call.function.arguments)})


run(whole, streamed, helped)
