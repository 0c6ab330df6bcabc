"""Records read without their tokens say what they say whole, whatever was read before and removed meanwhile."""

import dataclasses
import json
import random

from reef.core.ids import new_receipt
from reef.records import bodies, keep


def bare(record):
    choices = tuple(
        dataclasses.replace(
            choice,
            output_ids=None if choice.output_ids is None else (),
            logprobs=None if choice.logprobs is None else (),
        )
        for choice in record.choices
    )
    prompt = None if record.prompt_ids is None else ()
    return dataclasses.replace(record, rendered=None, reply=None, owner=None, prompt_ids=prompt, choices=choices)


def grown(draw, said, marks):
    """A body that resends what was said, with or without what only its client knows."""
    messages = [{"role": "user", "content": text} for text in said]
    if messages and marks:
        messages[-1] = {**messages[-1], "cache_control": {"type": "ephemeral"}}
    return json.dumps({"model": "m", "messages": messages, "n": draw.randrange(3)}).encode()


async def test_the_same_as_the_whole_record(store, record, monkeypatch):
    monkeypatch.setattr(bodies, "MEMORY", 60_000)
    draw, told = random.Random(4), [[f"session {n} " + "x" * 60] for n in range(5)]
    ids = []
    for _ in range(150):
        said = draw.choice(told)
        said.append(f"{draw.random()} " + "word " * draw.randrange(400))
        del said[draw.randrange(12, 20) :]
        made = record(id=new_receipt(), request=grown(draw, said, draw.random() < 0.5), session="s", rendered=b"{}")
        await store.append(made)
        ids.append(made.id)
        if draw.random() < 0.5:
            chosen = [*draw.sample(ids, min(len(ids), 5)), made.id]
            assert await store.exchanges(chosen) == [bare(each) for each in await store.get(chosen)]
    lookups = await store._read(lambda lookup: lookup)
    known = lookups._bodies._known
    assert known.size == sum(len(each.body) for each, _ in known.kept.values())


async def test_keys_that_come_back_after_a_removal(store, record, tmp_path):
    def of(letter):
        messages = [{"role": "user", "content": letter * 100 + str(n)} for n in range(12)]
        return record(id=new_receipt(), request=json.dumps({"messages": messages}).encode())

    first, second = of("a"), of("b")
    await store.append(first)
    assert await store.exchanges([first.id, "f" * 32]) == [bare(first)]
    keep.forget(tmp_path / "records.db", [first.id])
    assert await store.exchanges([first.id]) == []
    await store.append(second)  # its blobs may have the keys of the first one's
    assert await store.exchanges([second.id]) == [bare(second)]
