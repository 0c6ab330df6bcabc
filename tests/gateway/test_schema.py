"""Requests made from the OpenAPI document, right and wrong ones: every answer is one that the document allows."""

import asyncio
import contextlib
import threading

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from reef.gateway.openapi import document
from tests.gateway.conftest import TOKEN, running

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
EXAMPLES = 16
SCHEMA = schemathesis.openapi.from_dict(document())
ENDLESS = {"GET /reef/events"}  # see test_events
OPERATIONS = [made for found in SCHEMA.get_all_operations() if (made := found.ok()).label not in ENDLESS]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A gateway in a thread with its own event loop: the requests are made by a blocking client."""
    ready, stop, found = threading.Event(), asyncio.Event(), {}

    async def serve():
        async with running(tmp_path_factory.mktemp("schema")) as gateway:
            found.update(url=gateway.url, loop=asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    yield found["url"]
    with contextlib.suppress(RuntimeError):
        found["loop"].call_soon_threadsafe(stop.set)
    thread.join(20)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_answers_are_as_described(url, operation, mode):
    headers = {"authorization": f"Bearer {TOKEN}"}

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(base_url=url, headers=headers, checks=list(CHECKS))

    try:
        check()
    except Unsatisfiable:  # nothing about this operation can be got wrong
        assert mode is schemathesis.GenerationMode.NEGATIVE
        assert not operation.body
        assert not list(operation.iter_parameters())
