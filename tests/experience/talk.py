"""Conversations as records: requests of each dialect, answered, in a real store, at times that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reef.core.ids import new_receipt
from reef.core.nouns import Choice, Json, Record, Timing
from reef.engines.dialect import read as read_answer
from reef.experience.sessions import Pair, Place, Sessions
from reef.records.sqlite import SqliteStore

SCENARIO = "default"
START = 1_700_000_000.0
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def chat(*said: str | Mapping[str, Json], system: str | None = None, **more: Json) -> dict[str, Json]:
    """A chat body; texts are the user's and the assistant's in turn."""
    messages: list[Any] = [{"role": "system", "content": system}] if system is not None else []
    speaker = 0
    for each in said:
        if isinstance(each, str):
            messages.append({"role": ("user", "assistant")[speaker % 2], "content": each})
        else:
            messages.append(dict(each))
        speaker = 1 if messages[-1]["role"] in ("user", "tool") else 0
    return {"model": "m", "messages": messages, **more}


def calling(*calls: tuple[str, str, Json], text: str | None = None) -> dict[str, Json]:
    """An assistant's chat message that calls tools: id, name, arguments (a text as it is)."""
    made = [
        {"id": known, "type": "function", "function": {"name": name, "arguments": given}}
        for known, name, arguments in calls
        for given in [arguments if isinstance(arguments, str) else json.dumps(arguments)]
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def result(call: str, text: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def answered(said: str | Mapping[str, Json], dialect: str = "chat") -> tuple[Choice, ...]:
    """An answer as the gateway records it: a text, a chat message, or the whole answer of the dialect."""
    if isinstance(said, str):
        return (Choice(0, said, "stop"),)
    if dialect == "chat":
        return (Choice(0, str(said.get("content") or ""), "tool_calls", message=dict(said)),)
    return read_answer(dialect, json.dumps(said).encode(), stream=False).choices()


class World:
    def __init__(self, store: SqliteStore, sessions: Sessions) -> None:
        self.store, self.sessions, self.now = store, sessions, START
        self.records: dict[str, Record] = {}

    async def ask(
        self,
        body: Mapping[str, Json] | bytes,
        said: str | Mapping[str, Json] = "",
        *,
        at: float | None = None,
        took: float = 1.0,
        dialect: str = "chat",
        choices: Sequence[Choice] | None = None,
        **fields: Any,
    ) -> str:
        """Store an exchange that begins `at` seconds from the start (else ten seconds after the last one)."""
        begun = START + at if at is not None else self.now + 10
        self.now = max(self.now, begun)
        request = body if isinstance(body, bytes) else json.dumps(body).encode()
        record = Record(
            id=new_receipt(),
            scenario=fields.pop("scenario", SCENARIO),
            release_id="c0ffee" * 6 + "abcd",
            purpose=fields.pop("purpose", "live"),
            dialect=dialect,
            status=fields.pop("status", "complete"),
            request=request,
            timing=Timing(begun, last=took),
            choices=tuple(choices) if choices is not None else answered(said, dialect),
            client=fields.pop("client", "app/1"),
            **fields,
        )
        self.records[record.id] = record
        await self.store.append(record)
        return record.id

    async def read(self) -> None:
        for name in sorted({record.scenario for record in self.records.values()}):
            await self.sessions.read(name, self.store)

    async def place(self, receipt: str) -> Place:
        await self.read()
        found = self.sessions.place(receipt)
        assert found is not None
        return found

    async def pair(self, receipt: str) -> Pair | None:
        await self.read()
        return await self.sessions.pair(receipt, self.store)

    def dump(self) -> list[tuple[Any, ...]]:
        """Every row, to compare two of them."""
        return self.sessions._read("SELECT * FROM turns ORDER BY seq") + self.sessions._read("SELECT * FROM answers")
