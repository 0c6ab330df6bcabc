"""One real vLLM server for all of these tests (`make vllm` installs it); what they are made of is in `kit.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reef.engines.local.folder import prepare
from reef.engines.remote.untie import untie
from tests.vllm.kit import PYTHON, Vllm, World, started


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(prepare("smollm2-135m"), tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    if not PYTHON.exists():
        pytest.fail("there is no vLLM here; run: make vllm")
    if port := os.environ.get("VLLM_PORT"):  # one that runs already, started with the flags of `kit.py`
        running = Vllm(prepare("smollm2-135m").path, tmp_path_factory.mktemp("vllm"))
        running.port, running.url = int(port), f"http://127.0.0.1:{port}"
        yield running
        return
    folder = tmp_path_factory.mktemp("vllm")
    untie(prepare("smollm2-135m").path, folder / "model")
    with started(folder / "model", folder) as server:
        yield server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "engines" / "gpu"
