"""The document at /openapi.json says what the routes are, and the routes do what it says."""

import re

import pytest

from reef.gateway import app as routes
from reef.gateway.openapi import ANSWERS, BODIES, CREATED, OPEN, ROUTES, document


def tables():
    """(method, path) → whether it takes a token, of every route there is."""
    found = {}
    for path, methods in (*routes.PLAIN.items(), *routes.SHAPED):
        for method, route in methods.items():
            if method != "HEAD":
                found[method, path.replace("*", "{id}")] = route.right is not None
    return found


def test_every_route_is_described_and_no_other():
    assert set(ROUTES) == set(tables())


def test_open_routes_are_said_to_be_open():
    assert {path for (_, path), closed in tables().items() if not closed} == OPEN


def test_names_in_the_document_exist():
    for body, answer in ((described[1], described[2]) for described in ROUTES.values()):
        assert body is None or body in BODIES
        assert answer == "text" or answer in ANSWERS
    assert set(ROUTES) >= CREATED
    wanted = set(re.findall(r"#/components/schemas/(\w+)", str(document())))
    assert wanted <= set(document()["components"]["schemas"])


async def test_the_document_needs_no_token(gateway):
    async with gateway.client(token=None) as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    assert response.json()["openapi"].startswith("3.")


@pytest.mark.parametrize("path", sorted(OPEN - {"/openapi.json"}))
async def test_open_routes_answer_head(gateway, path):
    async with gateway.client(token=None) as client:
        response = await client.head(path)
    assert response.status_code == 200
    assert response.content == b""
