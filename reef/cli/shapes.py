"""Records as trainers read them: conversations, pairs of a better and a worse answer, prompts with rewards.

Knows: the three shapes, prompts of any dialect as chat messages, which report scores which choice.
Does not know: files, or how records are found (`records.export`).

    sft         {"messages": […, assistant]}
    preference  {"prompt": […], "chosen": message, "rejected": message}
    prompts     {"prompt": […], "completion": text or message, "reward": number}

`tools` comes along where the request had some. A choice's score is that of the newest report which gives it one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from reef.core.errors import InputError
from reef.core.nouns import Choice, Json, Record, Report
from reef.engines import Ask
from reef.engines.dialect import translate
from reef.records import Query, raw
from reef.records.export import Reader, Scores, Tally

SHAPES = ("raw", "sft", "preference", "prompts")


def lines(shape: str, reader: Reader, query: Query, tally: Tally) -> Iterator[bytes]:
    """The lines of an export, each with its line break."""
    if shape == "raw":
        for entry in reader.entries(query, tally, reports=True):
            yield raw.line(entry)
    elif shape == "sft":
        yield from _sft(reader, query, tally)
    elif shape == "prompts":
        yield from _prompts(reader, query, tally)
    else:
        yield from _preference(reader, query, tally)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in chat terms."""

    messages: list[Json]
    tools: Json = None

    def beside(self, **more: Json) -> bytes:
        return raw.dump(more | ({"tools": self.tools} if self.tools else {}))

    @property
    def key(self) -> bytes:
        """Equal for prompts that say the same."""
        said = [_normal(message) for message in self.messages]
        return hashlib.blake2b(raw.dump({"m": said, "t": self.tools}), digest_size=16).digest()


def prompt(record: Record) -> Prompt:
    """The request as chat messages. InputError says why it cannot be one."""
    try:
        body = orjson.loads(record.request)
    except orjson.JSONDecodeError:
        raise InputError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise InputError("the request is not an object")
    if record.dialect not in ("chat", "responses", "messages"):
        raise InputError(f"the dialect {record.dialect} has no conversation")
    if record.dialect != "chat":
        if body.get("previous_response_id"):
            raise InputError("the request goes on from another response")
        ask = Ask(record.id, record.release_id, record.dialect, record.request, stream=False)
        body = orjson.loads(translate(ask).ask.body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InputError("the request has no messages")
    return Prompt(messages, body.get("tools"))


def _sft(reader: Reader, query: Query, tally: Tally) -> Iterator[bytes]:
    wanted = query.low is not None or query.high is not None
    for record, asked in _asked(reader, query, tally):
        scores = scored(record, reader.on(record.id)) if wanted else {}
        for choice in record.choices:
            if not wanted or _within(scores.get(choice.index), query):
                yield asked.beside(messages=[*asked.messages, message(choice)])


def _prompts(reader: Reader, query: Query, tally: Tally) -> Iterator[bytes]:
    for record, asked in _asked(reader, query, tally):
        scores = scored(record, reader.on(record.id))
        if not scores:
            tally.skip("no report gives it a score")
        for choice in record.choices:
            if (score := scores.get(choice.index)) is not None and _within(score, query):
                said = choice.text if choice.message is None else choice.message
                yield asked.beside(prompt=asked.messages, completion=said, reward=score)


def _preference(reader: Reader, query: Query, tally: Tally) -> Iterator[bytes]:
    """Each demonstration against the answer it corrects; then, for each prompt, the best answer against the rest."""
    with Scores() as scores:
        for record, asked in _asked(reader, query, tally):
            reports = reader.on(record.id)
            for report in reports:
                yield from _corrected(record, asked, report)
            key = asked.key
            for index, score in scored(record, reports).items():
                if _within(score, query):
                    scores.add(key, record.id, index, score)
        for group in scores.groups():
            (receipt, index, high), *rest = group
            if (best := _answer(reader, receipt, index)) is None:
                continue
            for receipt, index, score in rest:
                if score < high and (other := _answer(reader, receipt, index)) is not None and other[1] != best[1]:
                    yield best[0].beside(prompt=best[0].messages, chosen=best[1], rejected=other[1])


def _answer(reader: Reader, receipt: str, index: int) -> tuple[Prompt, Json] | None:
    """An answer seen before; None when it was removed meanwhile."""
    record = reader.record(receipt)
    choice = next((each for each in record.choices if each.index == index), None) if record else None
    return (prompt(record), message(choice)) if record and choice else None


def _corrected(record: Record, asked: Prompt, report: Report) -> Iterator[bytes]:
    shown = report.demonstration
    if shown is None:
        return
    better = {"role": "assistant", "content": shown} if isinstance(shown, str) else {"role": "assistant", **shown}
    for choice in record.choices:
        if report.choice in (None, choice.index) and _normal(message(choice)) != _normal(better):
            yield asked.beside(prompt=asked.messages, chosen=better, rejected=message(choice))


def _asked(reader: Reader, query: Query, tally: Tally) -> Iterator[tuple[Record, Prompt]]:
    """The records with a whole answer and a prompt; the others are counted."""
    for record in reader.entries(query, tally, reports=False):
        assert isinstance(record, Record)
        if record.status != "complete" or not record.choices:
            tally.skip(f"the answer is {record.status}" if record.status != "complete" else "there is no answer")
            continue
        try:
            yield record, prompt(record)
        except InputError as error:
            tally.skip(error.message)


def scored(record: Record, reports: list[Report]) -> dict[int, float]:
    """Each choice's score, by the newest report that gives it one."""
    found: dict[int, float] = {}
    for report in reports:
        if (score := report.score_of(record.id)) is not None:
            known = [choice.index for choice in record.choices if report.choice in (None, choice.index)]
            found |= dict.fromkeys(known, score)
    return found


def message(choice: Choice) -> Json:
    return {"role": "assistant", "content": choice.text} if choice.message is None else choice.message


def _within(score: float | None, query: Query) -> bool:
    if score is None:
        return False
    return (query.low is None or score >= query.low) and (query.high is None or score <= query.high)


def _normal(said: Mapping[str, Any]) -> dict[str, Json]:
    """A message without what does not change its meaning: cache marks, and text as the only block of a list."""
    made = {name: value for name, value in said.items() if name != "cache_control" and value is not None}
    content = made.get("content")
    if isinstance(content, list):
        blocks = [
            {name: value for name, value in block.items() if name != "cache_control"}
            if isinstance(block, dict)
            else block
            for block in content
        ]
        only = blocks[0] if len(blocks) == 1 else None
        text = only.get("text") if isinstance(only, dict) and only.get("type") == "text" else None
        made["content"] = text if isinstance(text, str) else blocks
    return dict(sorted(made.items()))
