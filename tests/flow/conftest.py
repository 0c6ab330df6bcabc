"""A provider that says what a test scripts, and gateways in front of it."""

import pytest

from reef.engines.upstream import UpstreamEngine
from tests.flow.kit_wire import DIALECTS, Provider
from tests.gateway.conftest import running


@pytest.fixture
async def provider():
    async with Provider() as made:
        yield made


@pytest.fixture
async def native(provider, tmp_path):
    """A gateway before a provider that speaks all three dialects."""
    engine = UpstreamEngine(provider.url, key="sk-theirs", speaks=DIALECTS, idle=5.0, pause=0.001)
    async with running(tmp_path / "native", engine) as made:
        yield made


@pytest.fixture
async def chatty(provider, tmp_path):
    """A gateway before one that speaks chat only: the other dialects are translated."""
    engine = UpstreamEngine(provider.url, key="sk-theirs", speaks=["chat"], idle=5.0, pause=0.001)
    async with running(tmp_path / "chatty", engine) as made:
        yield made


@pytest.fixture(params=["native", "translated"])
async def either(request, provider, tmp_path):
    speaks = DIALECTS if request.param == "native" else ["chat"]
    engine = UpstreamEngine(provider.url, key="sk-theirs", speaks=speaks, idle=5.0, pause=0.001)
    async with running(tmp_path / "either", engine) as made:
        made.native = request.param == "native"
        yield made
