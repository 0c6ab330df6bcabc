"""pydantic-ai on chat, responses and messages. It shows no headers: a record is found by the answer's own id."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from task import ASK, TOKEN, URL, lookup, run


def openai():
    return OpenAIProvider(base_url=f"{URL}/v1", api_key=TOKEN)


def agent(scenario, model):
    return Agent(model, tools=[lookup], model_settings={"extra_headers": {"x-reef-scenario": scenario}})


def ids(messages):
    return [message.provider_response_id for message in messages if isinstance(message, ModelResponse)]


def whole(scenario, model):
    result = asyncio.run(agent(scenario, model).run(ASK))
    return result.output, ids(result.all_messages())


def streamed(scenario, model):
    async def read():
        async with agent(scenario, model).run_stream(ASK) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
            return "".join(pieces), ids(result.all_messages())

    return asyncio.run(read())


def chat_whole(scenario):
    return whole(scenario, OpenAIChatModel("m", provider=openai()))


def chat_streamed(scenario):
    return streamed(scenario, OpenAIChatModel("m", provider=openai()))


def responses_whole(scenario):
    return whole(scenario, OpenAIResponsesModel("m", provider=openai()))


def responses_streamed(scenario):
    return streamed(scenario, OpenAIResponsesModel("m", provider=openai()))


def anthropic_whole(scenario):
    return whole(scenario, AnthropicModel("m", provider=AnthropicProvider(base_url=URL, api_key=TOKEN)))


def anthropic_streamed(scenario):
    return streamed(scenario, AnthropicModel("m", provider=AnthropicProvider(base_url=URL, api_key=TOKEN)))


run(chat_whole, chat_streamed, responses_whole, responses_streamed, anthropic_whole, anthropic_streamed)
