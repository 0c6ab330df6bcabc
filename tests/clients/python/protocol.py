"""reef-client, the public package for servers of this protocol: inference with its receipt, a report."""

from reef_client import ReefClient
from task import ASK, FUNCTION, TOKEN, URL, called, run


def whole(scenario):
    client = ReefClient(URL, token=TOKEN)
    messages, receipts = [{"role": "user", "content": ASK}], []
    while True:
        answer, receipt = client.inference_with_record(
            scenario, "/v1/chat/completions", {"model": "m", "messages": messages, "tools": [FUNCTION]}
        )
        receipts.append(receipt)
        message = answer["choices"][0]["message"]
        if not message.get("tool_calls"):
            break
        messages.append(message)
        for call in message["tool_calls"]:
            output = called(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    reported = client.report(scenario, {"score": 1.0, "feedback": "right"}, references=receipts)
    assert reported["scenario"] == scenario
    assert reported["request_type"] == "report"
    return message["content"], receipts


run(whole)
