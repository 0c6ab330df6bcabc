"""Fixtures of remote engines' tests; what they are made of is in `kit.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.remote.kit import KINDS, Kind, World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "engines" / "gpu"
