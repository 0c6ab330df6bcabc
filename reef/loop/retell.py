"""A session told again as plain text, for a proposer: what was asked, done and answered, and what the report says.

Knows: where a record stands in its session, how a request of any dialect reads, and how long a telling may be.
Does not know: who reads it. All of it is untrusted text: whoever shows it to a model fences it.

- The last record of each segment (a client may compact its history) holds the whole of it, so few records are read.
- Where nothing was joined, the record's own request is its history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from reef.core.nouns import Json, Record, Unit
from reef.loop.binding import Tools
from reef.recipe.chats import shown, spoken
from reef.records import Query
from reef.records.present import present

MOST: Final = 24_000  # characters of a telling
EACH: Final = 2_000  # of one message in it
SYSTEM: Final = 400  # of a system prompt, which an agent's client fills with pages
SEGMENTS: Final = 4  # of a session, the newest
LONGEST: Final = 200  # turns that are followed


async def retell(tools: Tools, unit: Unit) -> str:
    """The session that a unit is of, with its report at the end."""
    lines: list[str] = []
    for record in await _records(tools, unit.record):
        lines += _turns(record, unit.choice if record.id == unit.record.id else 0)
    return cut("\n".join(lines), MOST - 2 * EACH) + "\n" + "\n".join(_report(unit))


async def newest(tools: Tools, scenario: str, session: str) -> Record | None:
    """The last finished live record of a session that a client named, or of one that is named after its first."""
    query = Query(scenario, session=session, status="complete", purpose="live", limit=1)
    found = [entry for _, entry in await tools.store.find(query) if isinstance(entry, Record)]
    if found or tools.sessions is None:
        return found[0] if found else None
    members = [receipt for _, receipt in tools.sessions.members(scenario, session, 0, LONGEST)]
    records = [one for one in await present(tools.store.get, members[-1:]) if isinstance(one, Record)]
    return records[0] if records and records[0].scenario == scenario else None


def prompts(units: Sequence[Unit], besides: Sequence[str] = ()) -> list[str]:
    """What the clients of these units tell their models by themselves: their system prompts, without the texts
    `besides`, which a client may have from the harness."""
    found: dict[str, None] = {}
    for unit in units:
        for message in spoken(unit.record)["messages"]:
            if message.get("role") in ("system", "developer") and (text := shown(message)):
                for known in besides:
                    text = text.replace(known.strip(), " ") if known.strip() else text
                found[text] = None
    return list(found)


async def _records(tools: Tools, record: Record) -> Sequence[Record]:
    """The last record of each segment of the record's session, the oldest first."""
    sessions = tools.sessions
    if sessions is None or (place := sessions.place(record.id)) is None:
        return [record]
    last = record.id
    for _ in range(LONGEST):
        later = sessions.children(last)
        if not later:
            break
        last = later[-1]
    chosen, at = [last], sessions.place(last) or place
    for _ in range(LONGEST):
        if at.parent is None or len(chosen) == SEGMENTS or (before := sessions.place(at.parent)) is None:
            break
        if before.segment != at.segment:
            chosen.append(before.record)
        at = before
    found = [one for one in await present(tools.store.get, chosen[::-1]) if isinstance(one, Record)]
    return found or [record]


def _turns(record: Record, index: int) -> list[str]:
    lines: list[str] = []
    for message in spoken(record)["messages"]:
        lines += _message(message)
    choice = next((one for one in record.choices if one.index == index), None)
    if choice is None:
        lines.append(f"assistant: (no answer: {record.error or record.status})")
    else:
        lines += _message(choice.message if isinstance(choice.message, dict) else {"content": choice.text})
    return lines


def _message(message: Json) -> list[str]:
    role = str(message.get("role") or "assistant")
    text, most = shown(message), SYSTEM if role in ("system", "developer") else EACH
    lines = [f"{role}: {cut(text, most)}"] if text else []
    calls: Any = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            lines.append(f"assistant calls {function.get('name')}: {cut(str(function.get('arguments') or ''), EACH)}")
    return lines


def _report(unit: Unit) -> list[str]:
    report = unit.report
    lines = [f"score: {unit.score:g}"] if unit.score is not None else []
    if report.feedback is not None:
        text = report.feedback if isinstance(report.feedback, str) else json.dumps(report.feedback, ensure_ascii=False)
        lines.append(f"feedback: {cut(text, EACH)}")
    if (better := shown(report.demonstration) if report.demonstration is not None else None) is not None:
        lines.append(f"it should have been: {cut(better, EACH)}")
    return lines


def cut(text: str, most: int) -> str:
    """A text of at most so many characters: a third of its beginning, the rest of its end."""
    if len(text) <= most:
        return text
    gap = f" […{len(text) - most} characters left out…] "
    first = most // 3
    return text[:first] + gap + text[len(text) - (most - first - len(gap)) :]
