"""Embeddings: relayed to an upstream that has them; nothing of an answer is worth keeping but its usage."""

from __future__ import annotations

from collections.abc import Sequence

from reef.core.errors import MissingError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Ask
from reef.engines.dialect.value import count_of, load, name_of
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
        body = load(data)
        if not isinstance(body, dict):
            return
        usage = body.get("usage")
        if isinstance(usage, dict) and (count := count_of(usage.get("prompt_tokens"))) is not None:
            self.usage = Usage(count, 0)
        self.model = name_of(body.get("model"))
        self.finished = isinstance(body.get("data"), list)

    def choices(self) -> tuple[Choice, ...]:
        return ()


class Translation:
    """Chat has no embeddings."""

    def __init__(self, ask: Ask, earlier: Sequence[Json] = ()) -> None:
        raise MissingError("this engine has no embeddings; name a model of an engine that has them", param="model")
