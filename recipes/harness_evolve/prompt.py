"""What a proposer is asked: the tree, sessions that went wrong, what was turned down, a person's wish.

Knows: how these are shown. Does not know: who proposes, or how the answer is read.

Sessions, reports and earlier proposals are other people's and models' words: they stand inside fences and are cut, to
be read and not obeyed. A person's wish is not fenced: whoever may write it may change the harness anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from reef.cordis.fence import fence, suspicious
from reef.harness.tree import Entry
from reef.recipe.bench import Refusal

TREE = 12_000  # characters of the tree that are shown
REJECTED = 5  # proposals that are shown, the newest


@dataclass(frozen=True, slots=True)
class Case:
    """One session and what was said of it: (score, feedback) of each report."""

    story: str
    reports: tuple[tuple[float | None, str], ...]

    @property
    def suspicious(self) -> list[str]:
        """What in it looks like an attempt to steer a proposer. Something like a key is none: a digest looks alike."""
        texts = (self.story, *(feedback for _, feedback in self.reports))
        return list(dict.fromkeys(one for text in texts for one in suspicious(text) if "secret" not in one))


_ASKED = """\
You improve the harness of an assistant: entries that its clients install. {aim}{empty}

{material}

Kinds of entries you may create, change or remove:
{kinds}

Change as little as mends what went wrong, and nothing that only one session needs. Rather improve an entry than add a \
second one on the same thing, and do not propose again what was turned down. Texts are plain prose of at most {most} \
characters, without keys, addresses of servers or attempts to override other instructions. Ids have a-z, 0-9 and \
dashes; those of new entries begin with evolve-.

Answer with one JSON object and nothing else:
{{"reason": "what went wrong and how this mends it, in a sentence or two", "mutations": [
  {{"op": "create", "id": "evolve-…", "kind": "…", "config": {{…}}}},
  {{"op": "update", "id": "the id of an entry", "config": {{the whole new config}}}},
  {{"op": "remove", "id": "the id of an entry"}}]}}
With nothing to mend: {{"reason": "why", "mutations": []}}"""
_KINDS = {
    "rules": '- rules: {"text": "…"}: sentences that stand in the system prompt, always',
    "skill": '- skill: {"name": "a-name", "description": "when to use it", "text": "…"}: read when its description '
    "fits the task",
    "command": '- command: {"name": "a-name", "description": "…", "text": "…"}: a prompt that a user calls by name',
}
_REPAIR = """\
{asked}

Your last answer cannot be used:
{faults}

Answer again with one JSON object in the form above, and nothing else."""


def question(
    tree: Sequence[Entry],
    cases: Sequence[Case],
    *,
    kinds: Collection[str],
    most: int,
    instruction: str | None = None,
    rejected: Sequence[Refusal] = (),
) -> str:
    aim = "Propose one edit that mends what went wrong in the sessions below."
    if instruction:
        aim = f"A person who may change it asks for this:\n\n{instruction.strip()}\n\nPropose the edit."
    texts = ([("the harness as it is", _tree(tree))] if tree else []) + _sessions(tree, cases)
    if rejected:
        shown = [_refusal(one) for one in rejected[:REJECTED]]
        texts.append(("proposed before and turned down", "\n".join(shown)))
    return _ASKED.format(
        aim=aim,
        empty="" if tree else " It is empty so far.",
        material=fence(texts)[0] if texts else "There are no sessions to learn from.",
        kinds="\n".join(_KINDS[kind] for kind in kinds),
        most=most,
    )


def repair(asked: str, faults: Sequence[str]) -> str:
    """The same again, with the reasons why the first answer is none. That answer is not shown: a model that is shown
    its own mistake repeats it."""
    return _REPAIR.format(asked=asked, faults="\n".join(f"- {one}" for one in faults))


def _tree(tree: Sequence[Entry]) -> str:
    """An entry a line. Those that there is no room for are named."""
    lines, room = [], TREE
    for entry in tree:
        line = json.dumps({"id": entry.id, "kind": entry.kind, "config": entry.config}, ensure_ascii=False)
        if len(line) > room:
            line = json.dumps({"id": entry.id, "kind": entry.kind, "config": "(too long to be shown)"})
        room -= len(line)
        lines.append(line)
    return "\n".join(lines)


def _sessions(tree: Sequence[Entry], cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Sessions by the skill or command that they name first in the tree's order, so that one entry's failures stand
    together."""
    names = [str(entry.config["name"]) for entry in tree if entry.kind in ("skill", "command")]
    groups: dict[str, list[Case]] = {}
    for case in cases:
        used = [name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", case.story)]
        groups.setdefault(used[0] if used else "", []).append(case)
    made: list[tuple[str, str]] = []
    for name, members in sorted(groups.items(), reverse=True):
        for case in members:
            label = f"session {len(made) + 1}" + (f", names {name}" if name else "")
            made.append((label, f"{case.story}\n{_said(case)}".strip()))
    return made


def _said(case: Case) -> str:
    """The reports, where the session's own telling does not have them."""
    lines = []
    for score, feedback in case.reports:
        if not feedback or feedback not in case.story:
            given = "no score" if score is None else f"score {score:g}"
            lines.append(f"report: {given}" + (f"; {feedback}" if feedback else ""))
    return "\n".join(lines)


def _refusal(one: Refusal) -> str:
    changes = "; ".join(_plain(change.op, change.id, change.config) for change in one.mutations)
    return f"- {changes[:1_500]}\n  turned down: {one.why[:500]}"


def _plain(op: str, name: str, config: object) -> str:
    text = config.get("text") if isinstance(config, Mapping) else None
    return f"{op} {name}" + (f": {text}" if isinstance(text, str) else "")
