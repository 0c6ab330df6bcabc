"""Embeddings: relayed to an upstream that has them; nothing of an answer is worth keeping but its usage."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from reef.core.errors import MissingError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Ask
from reef.engines.sse import Event


class Reader:
    """See `dialect.Reader`. A whole answer has `data`; there are no streams."""

    id: str | None = None
    reply: bytes | None = None

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.model: str | None = None
        self.error: str | None = None
        self.finished = False

    def event(self, event: Event) -> bool:
        return False

    def whole(self, data: bytes) -> None:
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(body, dict):
            return
        usage = body.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
            self.usage = Usage(usage["prompt_tokens"], 0)
        self.model = body["model"] if isinstance(body.get("model"), str) else None
        self.finished = isinstance(body.get("data"), list)

    def choices(self) -> tuple[Choice, ...]:
        return ()


class Translation:
    """Chat has no embeddings."""

    def __init__(self, ask: Ask, earlier: Sequence[Json] = ()) -> None:
        raise MissingError("this engine has no embeddings; name a model of an engine that has them", param="model")
