"""langchain's models for OpenAI (chat and responses) and Anthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from task import ASK, RECEIPT, TOKEN, URL, lookup, run

TOOL = tool(lookup)


def openai(scenario, **more):
    return ChatOpenAI(
        model="m",
        base_url=f"{URL}/v1",
        api_key=TOKEN,
        default_headers={"x-reef-scenario": scenario},
        include_response_headers=True,
        **more,
    )


def anthropic(scenario):
    return ChatAnthropic(model="m", base_url=URL, api_key=TOKEN, default_headers={"x-reef-scenario": scenario})


def loop(model, stream):
    messages, receipts, hooked = [HumanMessage(ASK)], [], []
    if isinstance(model, ChatAnthropic):  # it shows no headers; a hook on the HTTP client below it does
        model._client._client.event_hooks["response"].append(lambda answer: hooked.append(answer.headers[RECEIPT]))
    bound = model.bind_tools([TOOL])
    while True:
        if stream:
            message = None
            for piece in bound.stream(messages):
                message = piece if message is None else message + piece
        else:
            message = bound.invoke(messages)
        receipts.append(hooked[-1] if hooked else message.response_metadata["headers"][RECEIPT])
        messages.append(message)
        if not message.tool_calls:
            return message.text, receipts
        messages += [ToolMessage(TOOL.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]


def chat_whole(scenario):
    return loop(openai(scenario), False)


def chat_streamed(scenario):
    return loop(openai(scenario), True)


def responses_whole(scenario):
    return loop(openai(scenario, use_responses_api=True), False)


def responses_streamed(scenario):
    return loop(openai(scenario, use_responses_api=True), True)


def anthropic_whole(scenario):
    return loop(anthropic(scenario), False)


def anthropic_streamed(scenario):
    return loop(anthropic(scenario), True)


run(chat_whole, chat_streamed, responses_whole, responses_streamed, anthropic_whole, anthropic_streamed)
