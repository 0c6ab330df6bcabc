"""What a release has forgotten beside another one: how far it went, what it makes of ordinary text, easy questions.

Knows: an engine that rates given tokens, prompts and a text of general topics, questions that no study is about.
Does not know: studies, recipes, the gate (its guards ask other prompts and questions).

- KL is estimated on sampled answers, for each token: mean of ln p - ln q over tokens of p (k1), and with r = q / p the
  mean of r - 1 - ln r (k3; Schulman 2020), which is never negative and varies less.
- Perplexity is of the text's tokens as the assistant's message of a chat.
- Questions are answered greedily; a score is the share of right ones.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from contextlib import aclosing

from reef.core.errors import EngineError
from reef.core.ids import new_receipt
from reef.engines import Answer, Ask, Engine

PROMPTS = (
    "Describe a quiet morning in a small town.",
    "Why do leaves change colour in autumn?",
    "Give me a tip for learning to cook.",
    "What makes a good friend?",
    "Explain how a bicycle stays upright.",
    "Write a short note to thank a neighbour.",
    "What should I pack for a trip to the mountains?",
    "Tell me something about the history of paper.",
    "How does a library lend books?",
    "What happens when water boils?",
    "Name a musical instrument and say how it is played.",
    "Suggest a game for a rainy afternoon.",
)
ANSWER = 20  # tokens of an answer that is sampled

TEXT = (
    "The ferry leaves the harbour every morning at six, when the lamps along the pier are still lit. Most of its "
    "passengers are people who work on the other side of the bay, and they drink their coffee standing up, looking at "
    "the dark water. In winter the crossing takes twenty minutes longer, because the captain goes around the sandbanks "
    "instead of between them.",
    "A compiler reads a program and translates it into instructions that a processor can carry out. It first breaks "
    "the text into words, then finds out how those words belong together, and finally chooses the instructions. Along "
    "the way it removes work that would have no effect, such as a value that is computed and never used.",
    "Bread needs only flour, water, salt and time. The dough rises because yeast eats the sugar in the flour and gives "
    "off gas, which is held back by long elastic threads of protein. If the kitchen is cold, the dough can rest "
    "overnight; slow bread often tastes better than bread that was made in a hurry.",
    "When the city council voted on the new park, the hall was full. Some families wanted a playground, others asked "
    "for more trees, and the owner of the corner shop worried about parking. After two hours the members agreed on a "
    "plan that left the old chestnut trees standing and moved the road a few metres to the west.",
)
"""About 240 words, written for this."""

TASKS = (
    ("What is the capital of Japan?", r"\btokyo\b"),
    ("What is the capital of Germany?", r"\bberlin\b"),
    ("How many days are there in a week?", r"\b(?:7|seven)\b"),
    ("What is the opposite of up?", r"\bdown"),
    ("What is the opposite of big?", r"\b(?:small|little|tiny)\b"),
    ("What is the opposite of day?", r"\bnight"),
    ("What is the chemical formula of water?", r"\bh2o\b|h₂o"),
    ("What language is spoken in France?", r"\bfrench\b"),
    ("What language do people speak in Germany?", r"\bgerman\b"),
    ("Which animal says meow?", r"\bcats?\b"),
    ("What is the name of our planet?", r"\bearth\b"),
    ("Who wrote Hamlet?", r"\bshakespeare\b"),
)
"""The embedded base model answers all of them right when it answers greedily (measured)."""
TASK = 20  # tokens of an answer to a question


async def measure(engine: Engine, before: str, after: str) -> dict[str, float]:
    """`kl`, `kl_k3`: of `after` to `before`, nats a token of what `after` says; `kl_back_k3`: of `before` to `after` on
    what `before` says; `perplexity_before`, `perplexity_after`; `guard_before`, `guard_after`.

    EngineError when the engine gives no tokens or cannot rate them.
    """
    prompts = [_body(text, ANSWER, 1.0, number) for number, text in enumerate(PROMPTS)]
    tasks = [_body(text, TASK, 0.0, 0) for text, _ in TASKS]
    said, known = _split(await _all(engine, after, [*prompts, *tasks]))
    back, before_known = _split(await _all(engine, before, [*prompts, *tasks]))
    texts, starts = await _text(engine, before)
    at_after = await _rate(engine, after, [*map(_tokens, said), *map(_tokens, back), *texts], said, back, starts)
    at_before = await _rate(engine, before, [*map(_tokens, said), *map(_tokens, back), *texts], said, back, starts)
    count = len(PROMPTS)
    k1, k3 = estimates(at_after[:count], at_before[:count])
    _, back_k3 = estimates(at_before[count : 2 * count], at_after[count : 2 * count])
    return {
        "kl": k1,
        "kl_k3": k3,
        "kl_back_k3": back_k3,
        "perplexity_before": perplexity(at_before[2 * count :]),
        "perplexity_after": perplexity(at_after[2 * count :]),
        "guard_before": score(before_known),
        "guard_after": score(known),
    }


def estimates(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(k1, k3) of KL(own || other), nats a token: log-probs of tokens that `own` sampled, a row an answer."""
    gaps = [a - b for mine, theirs in zip(own, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
    if not gaps:
        raise EngineError("there is no token to measure the drift on: every answer was empty")
    return math.fsum(gaps) / len(gaps), math.fsum(math.expm1(-gap) + gap for gap in gaps) / len(gaps)


def perplexity(rows: Sequence[Sequence[float]]) -> float:
    values = [value for row in rows for value in row]
    return math.exp(-math.fsum(values) / len(values))


def score(texts: Sequence[str]) -> float:
    """The share of TASKS that these answers, one each, get right."""
    right = [re.search(pattern, text, re.IGNORECASE) for (_, pattern), text in zip(TASKS, texts, strict=True)]
    return sum(found is not None for found in right) / len(TASKS)


# --- the engine -------------------------------------------------------------------------------------------------------


def _body(text: str, tokens: int, temperature: float, seed: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, "max_tokens": tokens, "temperature": temperature, "seed": seed}).encode()


async def _all(engine: Engine, release: str, bodies: Sequence[bytes]) -> list[Answer]:
    return await asyncio.gather(*(_answer(engine, release, body) for body in bodies))


async def _answer(engine: Engine, release: str, body: bytes) -> Answer:
    ask = Ask(new_receipt(), release, "chat", body, stream=False, priority=2)
    async with aclosing(engine.answer(ask)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Answer):
                if item.prompt_ids is None or not item.choices or item.choices[0].output_ids is None:
                    raise EngineError("the engine gives no tokens, so drift cannot be measured on it")
                return item
    raise EngineError("the engine ended without an answer")


def _split(answers: Sequence[Answer]) -> tuple[list[Answer], list[str]]:
    """(answers to PROMPTS, texts of those to TASKS)."""
    count = len(PROMPTS)
    return list(answers[:count]), [answer.choices[0].text for answer in answers[count:] if answer.choices]


def _tokens(answer: Answer) -> list[int]:
    assert answer.prompt_ids is not None
    assert answer.choices is not None
    return [*answer.prompt_ids, *(answer.choices[0].output_ids or ())]


async def _rate(
    engine: Engine,
    release: str,
    sequences: Sequence[list[int]],
    said: Sequence[Answer],
    back: Sequence[Answer],
    starts: Sequence[int],
) -> list[list[float]]:
    """One row a sequence; an empty answer has an empty row."""
    begins = [len(answer.prompt_ids or ()) for answer in [*said, *back]] + list(starts)
    asked = [n for n, (sequence, start) in enumerate(zip(sequences, begins, strict=True)) if start < len(sequence)]
    found = await engine.rate(release, [sequences[n] for n in asked], [begins[n] for n in asked])
    rows: list[list[float]] = [[] for _ in sequences]
    for number, row in zip(asked, found, strict=True):
        rows[number] = row
    return rows


async def _text(engine: Engine, release: str) -> tuple[list[list[int]], list[int]]:
    """TEXT's paragraphs as assistant messages: tokens up to each paragraph's end, and where it starts. Read off the
    prompts that the engine makes of two chats that differ in that message alone."""

    async def prompt(*messages: tuple[str, str]) -> list[int]:
        said = [{"role": role, "content": text} for role, text in messages]
        body = json.dumps({"messages": said, "max_tokens": 1}).encode()
        return list((await _answer(engine, release, body)).prompt_ids or ())

    ask, on = ("user", "Tell me something."), ("user", "Go on.")
    opening, short, *whole = await asyncio.gather(
        prompt(ask), prompt(ask, ("assistant", "A"), on), *(prompt(ask, ("assistant", text), on) for text in TEXT)
    )
    sequences, starts = [], []
    for tokens in whole:
        start = _shared(opening, tokens)
        end = _shared(short[start:][::-1], tokens[start:][::-1])
        sequences.append(tokens[: len(tokens) - end])
        starts.append(max(1, start))
    return sequences, starts


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


__all__ = ["estimates", "measure", "perplexity", "score"]
