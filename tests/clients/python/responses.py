"""The openai package on responses."""

from openai import OpenAI
from task import ASK, BOTH, RECEIPT, SCENARIOS, SCHEMA, TELLS, TOKEN, URL, called, run

TOOL = {"type": "function", "name": "lookup", "description": TELLS, "parameters": SCHEMA}


def client(scenario):
    return OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, default_headers={"x-reef-scenario": scenario})


def results(response):
    """The outputs of the calls in a response, as input items."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": called(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]


def whole(scenario):
    items, receipts = [{"role": "user", "content": ASK}], []
    while True:
        raw = client(scenario).responses.with_raw_response.create(model="m", input=items, tools=[TOOL])
        response = raw.parse()
        receipts.append(raw.headers[RECEIPT])
        assert response._request_id == receipts[-1]
        assert response.usage.total_tokens > 0
        if not (more := results(response)):
            return response.output_text, receipts
        items += [item.to_dict() for item in response.output] + more


def streamed(scenario):
    items, receipts = [{"role": "user", "content": ASK}], []
    while True:
        stream = client(scenario).responses.create(model="m", input=items, tools=[TOOL], stream=True)
        receipts.append(stream.response.headers[RECEIPT])
        events = list(stream)
        assert events[0].type == "response.created"
        assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
        assert events[-1].type == "response.completed"
        response = events[-1].response
        assert response.usage.total_tokens > 0
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.to_dict() for item in done] == [item.to_dict() for item in response.output]
        if not (more := results(response)):
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text == response.output_text
            return text, receipts
        items += [item.to_dict() for item in done] + more


def helped(scenario):
    """The package's own accumulator, which needs the events in their order."""
    items, receipts = [{"role": "user", "content": BOTH}], []
    while True:
        with client(scenario).responses.stream(model="m", input=items, tools=[TOOL]) as stream:
            receipts.append(stream._raw_stream.response.headers[RECEIPT])
            stream.until_done()
            response = stream.get_final_response()
        if not (more := results(response)):
            return response.output_text, receipts
        said = [item.to_dict() for item in response.output]
        items += [{key: item[key] for key in item if key != "parsed_arguments"} for item in said] + more


def continued(scenario):
    """`previous_response_id` instead of the history, and the answer read again by its id."""
    receipts, more, last = [], [{"role": "user", "content": ASK}], None
    while True:
        raw = client(scenario).responses.with_raw_response.create(
            model="m", input=more, tools=[TOOL], previous_response_id=last
        )
        response = raw.parse()
        receipts.append(raw.headers[RECEIPT])
        again = client(scenario).responses.retrieve(response.id)
        assert again.output == response.output
        last = response.id
        if not (more := results(response)):
            return response.output_text, receipts


run(whole, streamed, helped, *([continued] if SCENARIOS == ["chatty"] else []))
