"""Who writes what a method tries: the scenario's own model, another engine of the configuration, or code.

Knows: how each of them is asked for a text, and which failures are their answer's own.
Does not know: what is asked, or whether what comes back is any good.

A refused or failed answer is a value with its reason. Only what says nothing of the prompt is raised (an engine that is
away): the loop rests and asks again.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import Any, Final

from reef.core.errors import ConfigError, InputError, ReefError, UpstreamError
from reef.core.load import load
from reef.core.nouns import Json
from reef.recipe import fields
from reef.recipe.bench import Bench

REFUSED: Final = frozenset({400, 404, 405, 413, 415, 422})
"""What a provider answers to a request that is wrong by itself, such as one that is too long: nobody is away."""
LONGEST: Final = 64_000  # characters of an answer that are read: its end, where models put what counts
WAITED: Final = 1800.0  # seconds that code may take: meanwhile nobody else's edit of the scenario gets its turn


@dataclass(frozen=True, slots=True)
class Written:
    """An answer; or none (`text` empty), and why."""

    text: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Writer:
    """`name`: None is the scenario's own engine, `package.module:name` a callable (plain or async) from a prompt to an
    answer, anything else an engine's name. `tokens` of an answer, at most; what a model thinks is among them."""

    name: str | None = None
    tokens: int = 4096
    temperature: float = 0.7

    @property
    def coded(self) -> bool:
        return self.name is not None and ":" in self.name

    async def write(self, bench: Bench, prompt: str) -> Written:
        """The answer to this prompt. EngineError or WireError: nobody is there now."""
        try:
            text = await (self._call(prompt) if self.coded else self._ask(bench, prompt))
        except ConfigError:
            raise
        except InputError as error:
            return Written("", f"the prompt was refused: {error.message}")
        except UpstreamError as error:
            if error.status not in REFUSED:
                raise
            return Written("", f"the prompt was refused: {error.message}")
        except ReefError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # code that ends itself must not end the learner
            if not self.coded:
                raise
            return Written("", f"{self.name} failed: {type(error).__name__}: {error}")
        if not isinstance(text, str) or not text.strip():
            return Written("", "the answer is empty" if isinstance(text, str) else f"{self.name} gave no text")
        return Written(text[-LONGEST:])

    async def _ask(self, bench: Bench, prompt: str) -> str:
        body: dict[str, Json] = {"messages": [{"role": "user", "content": prompt}]}
        return await bench.ask(self.name, body | {"max_tokens": self.tokens, "temperature": self.temperature})

    async def _call(self, prompt: str) -> Any:
        made = load(str(self.name), what="writer")
        try:
            async with asyncio.timeout(WAITED) as limit:
                answer = made(prompt) if inspect.iscoroutinefunction(made) else await asyncio.to_thread(made, prompt)
                return await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no answer within {WAITED:g} s") from None
            raise


def check(recipe: Any, name: str) -> None:
    """The field names somebody who writes: null, an engine, or a callable that is there."""
    value = getattr(recipe, name)
    words = "null (the scenario's own engine), an engine's name, or package.module:name of a callable"
    fields.need(value is None or (isinstance(value, str) and bool(value.strip())), name, words, value)
    if value is not None and ":" in value:
        try:
            found = load(value, what=name)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error.message}", param=name) from None
        fields.need(callable(found), name, words, value)


def engines(name: str | None) -> tuple[str, ...]:
    """The engine that must be in the configuration for this writer, if it is one."""
    return () if name is None or ":" in name else (name,)
