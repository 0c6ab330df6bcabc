"""The built-in preferences: a real split, and checks that nonsense cannot satisfy."""

from __future__ import annotations

import pytest

from reef.cli.preferences import CAPITALS, PREFERENCES, Preference, Prompt

EACH = pytest.mark.parametrize("preference", PREFERENCES.values(), ids=PREFERENCES)
FIXED = (
    "",
    " ",
    "red",
    "Red.",
    "7",
    "10",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
    "yes",
    "I don't know.",
    "The answer is 10.",
    "London",
    "The capital is Paris.",
    " ".join(sorted(CAPITALS.values())),
    "They are good and nice.",
    "Cats are small furry animals.",
    "Cats dogs bees trees rivers clocks whales horses books bridges mountains.",
    "One short sentence.",
    "Answer in one short sentence.",
    "<|im_end|>",
)


def good(preference: Preference, prompt: Prompt) -> list[str]:
    """Answers a user who holds the preference would be glad of."""
    if preference.name == "addition":
        a, b = prompt.id.split("+")
        return [str(prompt.data["sum"]), f"{a} + {b} = {prompt.data['sum']}", f"The answer is {prompt.data['sum']}."]
    if preference.name == "sentence":
        subject = str(prompt.data["subject"])
        return [
            f"{subject.title()} are loved by many people around the world.",
            f"You can see {subject} in many places.",
        ]
    capital = prompt.data["capital"]
    return [f"{capital}", f"{capital}.", f"The capital of {prompt.id} is {capital}."]


@EACH
def test_what_the_user_wanted_passes_only_when_it_has_ended(preference: Preference) -> None:
    for prompt in (*preference.train, *preference.held_out):
        for text in good(preference, prompt):
            assert preference.check(prompt, text, "stop") == 1.0, (prompt.text, text)
            assert preference.check(prompt, text, "length") == 0.0
            assert preference.check(prompt, text, None) == 0.0


@EACH
@pytest.mark.parametrize("text", FIXED)
def test_the_same_answer_to_everything_fails(preference: Preference, text: str) -> None:
    for prompts in (preference.train, preference.held_out):
        scores = [preference.check(prompt, text, "stop") for prompt in prompts]
        assert sum(scores) / len(scores) <= 0.2


@EACH
def test_nothing_and_echoes_fail(preference: Preference) -> None:
    for prompt in (*preference.train, *preference.held_out):
        for text in (
            "",
            "red",
            prompt.text,
            prompt.text.split("?")[0] + "?",
            prompt.text * 2,
            prompt.text.rstrip(".?"),
        ):
            assert preference.check(prompt, text, "stop") == 0.0, (prompt.text, text)


def test_a_sentence_is_one_short_statement_about_the_subject() -> None:
    preference = PREFERENCES["sentence"]
    prompt = next(one for one in (*preference.train, *preference.held_out) if one.data["subject"] == "horses")
    for text in (
        "Horses.",
        "Horses horses horses horses horses.",
        "Horses are animals. They run fast in fields.",
        "What are horses really like for people?",
        "Cows are big animals that live on farms.",
        "Horses are large strong animals that people have ridden across the world for many years.",
        "horses are large strong animals",
        "Horses are\nlarge strong animals.",
        "What are horses answer in one short sentence.",
        "A horse is a big horse.",
        "A horse is a horse.",
        "Where can you find horses is in a place with grass.",
    ):
        assert preference.check(prompt, text, "stop") == 0.0, text


@EACH
def test_the_split_is_by_what_varies(preference: Preference) -> None:
    def key(prompt: Prompt) -> object:
        return tuple(sorted(prompt.id.split("+"))) if preference.name == "addition" else prompt.id.split("/")[0]

    train, unseen = ({key(prompt) for prompt in side} for side in (preference.train, preference.held_out))
    assert train
    assert not train & unseen
    assert len(preference.held_out) >= 12
    assert len({prompt.id for prompt in (*preference.train, *preference.held_out)}) == len(preference.train) + len(
        preference.held_out
    )


@EACH
def test_scores_alone_can_teach_it(preference: Preference) -> None:
    assert 0.05 <= preference.base_rate <= 0.5
    assert preference.max_tokens <= 64
    assert preference.title
