"""Builders of records and reports, and a started store in a folder of its own."""

import dataclasses

import pytest
import pytest_asyncio

from reef.core.ids import new_receipt, new_report
from reef.core.nouns import Choice, Record, Report, Sampling, Span, Timing, Usage
from reef.records.sqlite import SqliteStore

RELEASE = "c0ffee" * 6 + "abcd"


def build_record(status="complete", **fields):
    answer = Choice(0, "It is 4.", "stop", (101, 7, 2), (-0.5, -1.25, -0.0625), (Span(RELEASE, 0, 3),))
    whole = Record(
        id=new_receipt(),
        scenario="default",
        release_id=RELEASE,
        purpose="live",
        dialect="chat",
        status=status,
        request=b'{"model":"m","messages":[{"role":"user","content":"What is 2+2? Reply with the number."}]}',
        timing=Timing(1_700_000_000.5, 0.01, 0.2, 0.9),
        choices=(answer,),
        usage=Usage(12, 3),
        prompt_ids=tuple(range(50, 62)),
        sampling=Sampling(max_tokens=12, seed=3),
        model_asked="m",
        model_answered="smollm2-135m",
        tags={"team": "blue"},
    )
    if status == "open":
        whole = dataclasses.replace(whole, choices=(), usage=None, prompt_ids=None, sampling=None)
    return dataclasses.replace(whole, **fields)


def build_report(*references, **fields):
    fields = {"score": 1.0, **fields}
    return Report(**{"id": new_report(), "scenario": "default", "created_at": 1.0, "references": references} | fields)


@pytest.fixture(scope="session")
def record():
    return build_record


@pytest.fixture(scope="session")
def report():
    return build_report


@pytest_asyncio.fixture
async def store(tmp_path):
    store = SqliteStore(tmp_path / "records.db", owner="gateway-1-test", busy=0.3)
    await store.start()
    yield store
    await store.close()
