"""Swaps under load with the real engine: no request fails or is cut, and new releases answer."""

import pytest

from bench.swap import measure, server

pytestmark = pytest.mark.model


async def test_swaps_under_load_fail_no_request(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    with server(state) as (url, token):
        swapped, control = await measure(state, url, token, swaps=20, pause=0.1)
    assert swapped.failed == []
    assert control.failed == []
    assert swapped.answers >= 5
    assert len(swapped.releases) >= 3
