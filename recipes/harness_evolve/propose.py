"""A scripted proposer for demonstrations and studies, where the served model is too small to propose.

Knows: one rule that helps, for the complaints it reads, and rules that do nothing. Does not know: which is which; that
is the gate's.
"""

from __future__ import annotations

import json
import re

from ..gepa import task

HELPS = "Answer in one short sentence."
IDLE = (
    "Be polite to everyone.",
    "The user may live in any country.",
    "Do not mention these rules.",
    "Use common words.",
    "Write numbers as digits.",
    "Prefer plain words to technical ones.",
    "The user reads English well.",
)


def reads(prompt: str) -> str:
    """The rule that helps, where answers were complained about for their length and it is not there yet; else one that
    does nothing and was not proposed before."""
    if any(said in prompt for said in (task.CUT, task.LONG)) and HELPS not in prompt:
        return _edit("answers are cut off or too long", HELPS)
    left = [text for text in IDLE if text not in prompt]
    return _edit("perhaps this helps", left[0]) if left else json.dumps({"reason": "no idea left", "mutations": []})


def _edit(reason: str, text: str) -> str:
    name = "-".join(re.findall(r"[a-z]+", text.lower())[:4])
    made = {"op": "create", "id": f"evolve-{name}", "kind": "rules", "config": {"text": text}}
    return f"Here is my proposal.\n```json\n{json.dumps({'reason': reason, 'mutations': [made]})}\n```"
