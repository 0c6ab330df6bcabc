"""Fixtures of the engines' tests; what they are made of is in `kit.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from reef.engines.local.layout import Layout, read_layout
from tests.engines.kit import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def layout(tiny: Path) -> Layout:
    return read_layout(tiny)
