"""The built-in preferences that `reef teach` can teach: prompts, a split, and a check that a script can do.

Knows: what is asked, which prompts are never trained on, and when an answer is what the user wanted.
Does not know: HTTP, recipes' insides, models. A preference of your own is any object of this shape, by dotted path.

- The split is by what varies (the unordered pair of addends, the subject), so a held-out prompt is really new.
- A check is a pure function and cannot be satisfied by an empty answer, one fixed word, an echo of the prompt, or the
  same answer to everything.
- Scores alone teach only what the base already does now and then (5 to 50% of the time at temperature 1): each
  preference states the rate measured on the embedded model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reef.core.nouns import Json


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    text: str
    data: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Preference:
    """`check(prompt, text, finish_reason)` is 1.0 for an answer the user wanted, 0.0 for any other."""

    name: str
    title: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    max_tokens: int
    check: Callable[[Prompt, str, str | None], float]
    base_rate: float  # measured on the embedded model, temperature 1
    settings: Mapping[str, Json] = field(default_factory=dict)  # the scenario's


def _split(prompts: list[tuple[str, Prompt]], held_out: int, seed: int = 7) -> tuple[tuple[Prompt, ...], ...]:
    """(train, held-out), with `held_out` whole groups on the second side."""
    groups = sorted({group for group, _ in prompts})
    chosen = set(random.Random(seed).sample(groups, held_out))
    return tuple(prompt for group, prompt in prompts if group not in chosen), tuple(
        prompt for group, prompt in prompts if group in chosen
    )


# --- addition ---------------------------------------------------------------------------------------------------------


def _addition() -> list[tuple[str, Prompt]]:
    return [
        (
            f"{min(a, b)}+{max(a, b)}",
            Prompt(f"{a}+{b}", f"What is {a}+{b}? Reply with only the number.", {"sum": a + b}),
        )
        for a in range(1, 10)
        for b in range(1, 10)
    ]


def check_addition(prompt: Prompt, text: str, finish_reason: str | None) -> float:
    """The answer has ended, and the last integer in it is the sum."""
    numbers = re.findall(r"\d+", text)
    return float(finish_reason == "stop" and bool(numbers) and int(numbers[-1][:6]) == prompt.data["sum"])


# --- sentence ---------------------------------------------------------------------------------------------------------

SUBJECTS = (
    "cats dogs bees trees rivers clocks whales horses books bridges mountains flowers birds spiders computers trains "
    "boats stars clouds apples eggs shoes hats lamps pencils doctors teachers farmers lions elephants frogs snakes "
    "rabbits carrots tomatoes potatoes deserts islands volcanoes windows"
)
GLUE = "a an and are as at because by can for from has have in is of on that the their they to with you"
"""Words of which a sentence has at least one and a list of nouns has none."""
QUESTIONS = ("What are {}?", "Why do people like {}?", "Where can you find {}?", "What do {} look like?")


def _sentence() -> list[tuple[str, Prompt]]:
    return [
        (
            subject,
            Prompt(
                f"{subject}/{number}", f"{question.format(subject)} Answer in one short sentence.", {"subject": subject}
            ),
        )
        for subject in SUBJECTS.split()
        for number, question in enumerate(QUESTIONS)
    ]


def check_sentence(prompt: Prompt, text: str, finish_reason: str | None) -> float:
    """One statement of 4 to 14 words that has ended, names the subject, and adds two words or more of its own."""
    text = text.strip()
    words = _words(text)
    named = [subject for subject in SUBJECTS.split() if not {subject, _singular(subject)}.isdisjoint(words)]
    own = set(words).difference(_words(prompt.text), GLUE.split(), *({one, _singular(one)} for one in named))
    return float(
        finish_reason == "stop"
        and 4 <= len(words) <= 14
        and re.fullmatch(r"(?!What|Why|Where|How)[A-Z\"“][^.!?\n]*[.!]?", text) is not None
        and prompt.data["subject"] in named
        and len(named) <= 2
        and not set(GLUE.split()).isdisjoint(words)
        and len(own) >= 2
        and max(words.count(word) for word in words) <= 2
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)*", re.sub(r"['’]s\b", "", text.lower()))


def _singular(plural: str) -> str:
    return plural.removesuffix("es") if plural.endswith("oes") else plural.removesuffix("s")


# --- capital ----------------------------------------------------------------------------------------------------------

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Malaysia": "Kuala Lumpur",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Philippines": "Manila",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "Scotland": "Edinburgh",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Vietnam": "Hanoi",
}


def _capital() -> list[tuple[str, Prompt]]:
    return [
        (country, Prompt(country, f"What is the capital of {country}? Reply with only the name.", {"capital": capital}))
        for country, capital in CAPITALS.items()
    ]


def check_capital(prompt: Prompt, text: str, finish_reason: str | None) -> float:
    """The answer has ended after at most 8 words and names the right capital and no other."""
    named = {capital for capital in CAPITALS.values() if re.search(rf"\b{capital}\b", text, re.IGNORECASE)}
    return float(finish_reason == "stop" and len(text.split()) <= 8 and named == {prompt.data["capital"]})


def _preference(
    name: str,
    title: str,
    prompts: list[tuple[str, Prompt]],
    held_out: int,
    max_tokens: int,
    check: Callable[[Prompt, str, str | None], float],
    base_rate: float,
    settings: Mapping[str, Json],
) -> Preference:
    train, unseen = _split(prompts, held_out)
    return Preference(name, title, train, unseen, max_tokens, check, base_rate, settings)


SETTINGS: Mapping[str, Json] = {"recipe": "sao", "batch_size": 32, "learning_rate": 1e-3}
"""What these are taught with. Twice the recipe's default rate: the drift it costs stays small over a dozen updates."""

PREFERENCES: Mapping[str, Preference] = {
    one.name: one
    for one in (
        _preference(
            "addition",
            "one-digit addition: the right number, then stop",
            _addition(),
            15,
            12,
            check_addition,
            0.09,
            SETTINGS,
        ),
        _preference(
            "sentence", "one short sentence about the subject", _sentence(), 12, 24, check_sentence, 0.17, SETTINGS
        ),
        _preference("capital", "name the capital, then stop", _capital(), 12, 16, check_capital, 0.29, SETTINGS),
    )
}
