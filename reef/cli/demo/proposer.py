"""The scripted proposer of the demos: what a check said again and again becomes an instruction.

Knows: sentences of the form 'every Python file must begin with the line "X"', wherever they stand in its prompt.
Does not know: the tasks, the model, or whether what it proposes will help; the gate finds out.

A sentence about one kind of work becomes a skill, which is read only when the work is of that kind; one about files
becomes a rule, which stands in every prompt.
"""

from __future__ import annotations

import json
import re
from typing import Any

_WANTED = re.compile(r'every ([\w ]{3,40}) must (begin|end) with the line "([^"\n\\]{1,80})"')


def propose(prompt: str) -> str:
    """The answer of a proposer: a reason and mutations, as JSON."""
    mutations: list[dict[str, Any]] = []
    for what, where, line in dict.fromkeys(_WANTED.findall(prompt)):
        words = f'Every {what} {where}s with the line "{line}".'
        name = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")
        if what.endswith("entry"):
            config = {"name": name, "description": f"How a {what} is written", "text": words}
            mutations.append({"op": "create", "id": name, "kind": "skill", "config": config})
        else:
            mutations.append({"op": "create", "id": name, "kind": "rules", "config": {"text": words}})
    said = ", ".join(mutation["id"] for mutation in mutations)
    return json.dumps(
        {"reason": f"The checks want it so: {said}" if said else "nothing to mend", "mutations": mutations}
    )
