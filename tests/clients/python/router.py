"""litellm, which calls OpenAI's chat and Anthropic's messages with its own HTTP code."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from task import ASK, FUNCTION, RECEIPT, TOKEN, URL, called, run

litellm.suppress_debug_info = True
BASES = {"openai/m": f"{URL}/v1", "anthropic/m": URL}


def ask(scenario, model, messages, **more):
    return litellm.completion(
        model=model,
        api_base=BASES[model],
        api_key=TOKEN,
        extra_headers={"x-reef-scenario": scenario},
        messages=messages,
        tools=[FUNCTION],
        max_tokens=500,
        **more,
    )


def receipt_of(answer):
    return answer._hidden_params["additional_headers"][f"llm_provider-{RECEIPT}"]


def loop(scenario, model, stream):
    messages, receipts = [{"role": "user", "content": ASK}], []
    while True:
        answer = ask(scenario, model, messages, stream=stream)
        receipts.append(receipt_of(answer))
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content, receipts
        messages.append(message.model_dump())
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call.function.arguments)})


def openai_whole(scenario):
    return loop(scenario, "openai/m", False)


def openai_streamed(scenario):
    return loop(scenario, "openai/m", True)


def anthropic_whole(scenario):
    return loop(scenario, "anthropic/m", False)


def anthropic_streamed(scenario):
    return loop(scenario, "anthropic/m", True)


run(openai_whole, openai_streamed, anthropic_whole, anthropic_streamed)
