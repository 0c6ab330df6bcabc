"""What the scripts here share. Each runs its flows in every scenario and writes one JSON line for each.

A flow is a function of the scenario's name: it completes the task with one tool call and returns the answer's text and
the receipts it found, in order. The scripts run in `.clients/venv`, apart from Reef, as an application would.
"""

import json
import os
import traceback

URL, TOKEN = os.environ["REEF_URL"], os.environ["REEF_TOKEN"]
SCENARIOS = os.environ["SCENARIOS"].split(",")
ASK = "What is the colour? Use the tool."
BOTH = "What are the colour and the shape? Use the tool for both at once."
RECEIPT = "x-reef-agent-record-id"
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TELLS = "Look a value up by its key."
FUNCTION = {"type": "function", "function": {"name": "lookup", "description": TELLS, "parameters": SCHEMA}}


def lookup(key: str) -> str:
    """Look a value up by its key.

    Args:
        key: what to look up
    """
    return {"colour": "coral é 珊瑚", "shape": "a branch"}[key]


def called(arguments: str) -> str:
    """What the tool returns for arguments that are still JSON."""
    return lookup(**json.loads(arguments))


def run(*flows):
    with open(os.environ["OUT"], "w") as out:
        for scenario in SCENARIOS:
            for flow in flows:
                line = {"scenario": scenario, "flow": flow.__name__}
                try:
                    answer, receipts = flow(scenario)
                    line |= {"answer": answer, "receipts": receipts}
                except Exception:
                    line["error"] = traceback.format_exc()[-3000:]
                out.write(json.dumps(line) + "\n")
