"""smolagents: an agent whose history of tools is plain text and whose loop ends with a tool of its own.

It keeps the answers' own ids, but not of streams: there a hook on the HTTP client below it sees the headers.
"""

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from task import ASK, RECEIPT, TOKEN, URL, lookup, run

TOOL = tool(lookup)


def loop(scenario, stream):
    model = OpenAIServerModel(
        "m", api_base=f"{URL}/v1", api_key=TOKEN, client_kwargs={"default_headers": {"x-reef-scenario": scenario}}
    )
    receipts = []
    model.client._client.event_hooks["response"].append(lambda answer: receipts.append(answer.headers[RECEIPT]))
    agent = ToolCallingAgent([TOOL], model, max_steps=4, verbosity_level=LogLevel.OFF, stream_outputs=stream)
    answer = agent.run(ASK)
    found = [step.model_output_message.raw for step in agent.memory.steps if hasattr(step, "model_output_message")]
    return answer, receipts if stream else [answered.id for answered in found]


def whole(scenario):
    return loop(scenario, False)


def streamed(scenario):
    return loop(scenario, True)


run(whole, streamed)
