"""Streams that break off at the provider, read with the openai and anthropic packages: what the application sees.

The model's name says how the provider breaks: `cut` drops the connection, `clean` ends without an end, `event` sends
the dialect's error event. A flow's answer is the error that was raised, or the last event when none was.
"""

import anthropic
import openai
from task import ASK, RECEIPT, TOKEN, URL, run

FAULTS = ("cut", "clean", "event")


def read(stream):
    receipts, last = [stream.response.headers[RECEIPT]], None
    try:
        for event in stream:
            last = event
    except Exception as error:
        return type(error).__name__, receipts
    return f"silent after {getattr(last, 'type', last)}", receipts


def chat(scenario, fault):
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)
    messages, headers = [{"role": "user", "content": ASK}], {"x-reef-scenario": scenario}
    return read(client.chat.completions.create(model=fault, messages=messages, stream=True, extra_headers=headers))


def responses(scenario, fault):
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)
    headers = {"x-reef-scenario": scenario}
    return read(client.responses.create(model=fault, input=ASK, stream=True, extra_headers=headers))


def messages(scenario, fault):
    client = anthropic.Anthropic(base_url=f"{URL}/s/{scenario}", api_key=TOKEN, max_retries=0)
    asked = [{"role": "user", "content": ASK}]
    return read(client.messages.create(model=fault, max_tokens=500, messages=asked, stream=True))


def flow(call, fault):
    def made(scenario):
        return call(scenario, fault)

    made.__name__ = f"{call.__name__}_{fault}"
    return made


run(*(flow(call, fault) for call in (chat, responses, messages) for fault in FAULTS))
