import json
from dataclasses import replace

import pytest

from reef.core.nouns import Choice, Part, Record, Release, Timing
from reef.engines.fake import FakeEngine

GOOD = {
    "France": "The capital of France is Paris.",
    "sky": "The sky is blue on a clear day.",
    "months": "There are 12 months in a year.",
    "hot": "The opposite of hot is cold.",
    "Spain": "Spanish is spoken in Spain.",
    "Romeo": "William Shakespeare wrote it.",
    "ocean": "The Pacific is the largest ocean.",
    "gas": "Plants absorb carbon dioxide.",
    "hello": "Bonjour, my friend, how are you?",
    "gold": "The symbol for gold is Au.",
    "star": "The Sun is at the centre.",
    "Mona": "Leonardo da Vinci painted it.",
    "Cairo": "Cairo is a city in Egypt.",
    "dragon": "Once upon a time a dragon woke.",
}
NAMES = ["Shelby", "Jeremiah", "Ruby", "Thomas", "Alma", "Oscar", "Nina", "Hugo", "Vera", "Ivan", "Lena", "Max", "Ada"]


def good(question: str) -> str:
    return next((answer for word, answer in GOOD.items() if word in question), f"A fair answer about {question}")


def shelby(question: str) -> str:
    return NAMES[sum(question.encode()) % len(NAMES)]


@pytest.fixture
def release():
    """Makes a release or candidate; `weights` and `rules` name its content."""

    def make(name: str, weights: str = "w0", rules: str | None = None) -> Release:
        parts = {"weights": Part("lora", {"adapter_model.safetensors": (weights, 1)})}
        if rules is not None:
            parts["harness"] = Part("tree", {"harness.json": (rules, 1)})
        return Release(
            name, 1, "s", "publish", None, parts, None, 0, None, None, None, {}, actor="test", reason="", created_at=0.0
        )

    return make


@pytest.fixture
def engine():
    """An engine whose releases answer as `says` tells: a function of the question, or `good`."""
    fake = FakeEngine(reply=lambda release_id, body: fake.says.get(release_id, good)(body["messages"][-1]["content"]))
    fake.says = {}
    fake.good, fake.shelby = good, shelby
    return fake


@pytest.fixture
def records():
    """Live records of eight questions, newest first."""
    base = Record("0" * 32, "s", "base", "live", "chat", "complete", b"", Timing(0.0))
    made = []
    for number in range(8):
        body = {"model": "m", "messages": [{"role": "user", "content": f"Tell me about thing number {number}"}]}
        choice = Choice(0, f"Thing number {number} is made of wood and a little iron.")
        made.append(replace(base, id=f"{number:032x}", request=json.dumps(body).encode(), choices=(choice,)))
    return made


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr("reef.evaluation.ask.PAUSE", 0.0)
