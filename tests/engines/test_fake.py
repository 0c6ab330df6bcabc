"""The fake engine refuses what the embedded one refuses."""

from __future__ import annotations

from typing import Any

import pytest

from reef.core.errors import InputError
from reef.engines.fake import FakeEngine
from tests.engines.kit import ask


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"n": "x"}, "n"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_wrong_fields_are_refused(fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(InputError) as caught:
        _ = [each async for each in FakeEngine().answer(ask("one two", stream=stream, **fields))]
    assert caught.value.param == param
