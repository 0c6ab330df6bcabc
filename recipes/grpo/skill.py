"""A skill with length held constant: which of four tools is right for a request?

Knows: tools, requests, the split, the arms, what must hold. Does not know: HTTP, servers, recipes' insides.

An answer is `{"tool": "email"}` or the same with another of the four names that are shown: `structured_outputs` leaves
the model nothing else. Each name is one token of the embedded model's, and an answer ends where its form does. So
nothing is gained by being short, by stopping or by a format; only the choice is learnt. (The model may spell a name in
several tokens, so the lengths of right and wrong answers are measured.) It begins with a bias for the first tool.

- A request is a sentence about a word. Tools share their words (a person can be written to, paid, or met), and each is
  right in every place of the list equally often, so neither word nor place tells the tool.
- Held out: words that no trained request has, in sentences that no trained request has (the score), and such words in
  sentences that were trained with other words (`known`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Answer, Run

BATCH, UPDATES, SHOWN = 32, 10, 4
TOKENS = 24  # as many as the longest answer has letters: none is cut off
WORDS, SENTENCES = 5, 2  # of each list: the first WORDS and the last SENTENCES are held out
HELD_OUT, KNOWN, MIDDLE = 160, 64, 64  # requests asked at the start and the end, and in the middle

CITIES = "Lima Oslo Cairo Rome Paris Delhi Quito Tokyo Berlin Madrid Dublin Athens Seoul Vienna Boston Lisbon"
PEOPLE = "Anna Peter Tom Maria Paul Julia Simon Clara Oscar Nina David Laura Felix Emma Victor Sarah"
DISHES = "soup bread pizza rice pancakes curry salad noodles omelette lasagna dumplings pie stew risotto tacos cake"
SONGS = "jazz Mozart rock reggae Chopin blues opera tango Bach disco flamenco techno Vivaldi soul folk swing"
THINGS = "dog garden sunset bridge house flower cat boat tree lake horse castle bicycle statue river baby"

TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weather": (
        CITIES,
        (
            "Will it rain in {} tomorrow?",
            "How cold is it in {} today?",
            "Is it sunny in {}?",
            "Do I need an umbrella in {}?",
            "Is there snow in {} now?",
            "How strong is the wind in {}?",
        ),
    ),
    "calendar": (
        PEOPLE,
        (
            "Plan lunch with {} on Friday.",
            "When do I meet {}?",
            "Move my visit to {} to Monday.",
            "Add the birthday of {} in May.",
            "Cancel my meeting with {}.",
            "What day do I see {} again?",
        ),
    ),
    "music": (
        SONGS,
        (
            "Play some {}.",
            "I want to hear {}.",
            "Put on {} for the party.",
            "Let me listen to {}.",
            "Turn up the {}.",
            "Start my {} playlist.",
        ),
    ),
    "email": (
        PEOPLE,
        (
            "Write to {} that I am late.",
            "Send {} the report.",
            "Tell {} in writing that I agree.",
            "Reply to {} politely.",
            "Forward this letter to {}.",
            "Let {} know by post that I won.",
        ),
    ),
    "photo": (
        THINGS,
        (
            "Take a shot of the {}.",
            "Snap that {} for me.",
            "I want a portrait of the {}.",
            "Film the {}.",
            "Zoom in on the {}.",
            "Shoot the {} in black and white.",
        ),
    ),
    "recipe": (
        DISHES,
        (
            "How do I make {}?",
            "What goes into {}?",
            "How long do I cook {}?",
            "Show me how to prepare {}.",
            "I want to bake {}.",
            "Which spices belong in {}?",
        ),
    ),
    "bank": (
        PEOPLE,
        (
            "Pay {} twenty dollars.",
            "Transfer my rent to {}.",
            "How much money do I owe {}?",
            "Lend {} fifty euros.",
            "Give {} the wages.",
            "Did {} send the money?",
        ),
    ),
    "flight": (
        CITIES,
        (
            "I need a plane to {} tonight.",
            "Find me a seat to {}.",
            "How do I fly to {}?",
            "Get me two tickets to {}.",
            "When does the next plane leave for {}?",
            "We want to land in {} by noon.",
        ),
    ),
}
"""The tools, and for each its words and its sentences."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A request, the tools that are shown for it, and the place of the right one among them."""

    request: str
    shown: tuple[str, ...]
    place: int

    @property
    def prompt(self) -> str:
        asked = "Reply with the right tool for the request, as JSON with the key tool."
        return f"Tools: {', '.join(self.shown)}\nRequest: {self.request}\n{asked}"

    @property
    def answers(self) -> list[str]:
        """What can be said, in the order of the tools."""
        return [json.dumps({"tool": name}) for name in self.shown]

    def right(self, text: str) -> bool:
        return text == self.answers[self.place]


def draw(numbers: random.Random, count: int, *, words: bool, sentences: bool) -> list[Choice]:
    """`count` choices: held-out words or trained ones, held-out sentences or trained ones. Every tool is right equally
    often, and in every place equally often, as nearly as `count` lets it; the order is mixed."""
    found = []
    for number in range(count):
        name = list(TOOLS)[number % len(TOOLS)]
        listed, said = TOOLS[name]
        word = numbers.choice(listed.split()[:WORDS] if words else listed.split()[WORDS:])
        sentence = numbers.choice(said[-SENTENCES:] if sentences else said[:-SENTENCES])
        shown = numbers.sample([other for other in TOOLS if other != name], SHOWN - 1)
        place = number // len(TOOLS) % SHOWN
        shown.insert(place, name)
        found.append(Choice(sentence.format(word), tuple(shown), place))
    numbers.shuffle(found)
    return found


# --- one run ----------------------------------------------------------------------------------------------------------


async def drive(run: Run) -> dict[str, Any]:
    """UPDATES batches of answers to requests that are all different; measured before, in the middle and after."""
    if "base" not in run.kept:
        base = await measure(run, HELD_OUT, KNOWN)
        run.point(answers=0, **base)
        run.keep(base=base, first=await run.head(), steps=[], curve=[[0, base["score"]]])
    while len(run.kept["steps"]) < UPDATES:
        steps, curve = list(run.kept["steps"]), list(run.kept["curve"])
        steps.append(await step(run, len(steps)))
        answers = len(steps) * BATCH
        if len(steps) == UPDATES // 2:
            middle = await measure(run, MIDDLE)
            run.point(answers=answers, **middle)
            curve.append([answers, middle["score"]])
        run.keep(steps=steps, curve=curve)
    end = await measure(run, HELD_OUT, KNOWN)
    run.point(answers=UPDATES * BATCH, **end)
    base, steps = run.kept["base"], run.kept["steps"]
    verdicts = [one["verdict"] for one in steps]
    return {
        "base": base["score"],
        "end": end["score"],
        **{f"{name}_base": value for name, value in base.items() if name != "score"},
        **{f"{name}_end": value for name, value in end.items() if name != "score"},
        "accepted": verdicts.count("accept"),
        "rejected": verdicts.count("reject"),
        "curve": [*run.kept["curve"], [UPDATES * BATCH, end["score"]]],
        "training": [[(number + 0.5) * BATCH, one["reward"]] for number, one in enumerate(steps)],
        "steps": steps,
        "drift": await run.drift(run.kept["first"], await run.head()),
    }


async def step(run: Run, number: int) -> dict[str, Any]:
    """One batch: answers, scores, and what was made of them."""
    numbers = run.at("step", number)
    asked = [(one, numbers.randrange(2**31)) for one in draw(numbers, BATCH, words=False, sentences=False)]
    said = await asyncio.gather(*(answer(run, one, seed, record=True) for one, seed in asked))
    scores = [float(one.right(made.text)) for (one, _), made in zip(asked, said, strict=True)]
    reward = statistics.fmean(scores)
    if run.arm.options["shuffled"]:
        run.at("shuffle", number).shuffle(scores)
    await asyncio.gather(*(run.report(made.receipt, score) for made, score in zip(said, scores, strict=True)))
    last = (await run.learnt()).get("last") or {}
    run.point(answers=(number + 1) * BATCH, reward=reward, verdict=last.get("verdict"))
    return {"reward": reward, "verdict": last.get("verdict"), "reason": last.get("reason")}


async def measure(run: Run, count: int, known: int = 0) -> dict[str, float | None]:
    """Held-out requests, the same ones with the same seeds each time, from what is served; not recorded."""
    unseen = draw(random.Random(99), count, words=True, sentences=True)
    half = draw(random.Random(98), known, words=True, sentences=False)
    said = await asyncio.gather(*(answer(run, one, seed, record=False) for seed, one in enumerate([*unseen, *half])))
    right = [one.right(made.text) for one, made in zip([*unseen, *half], said, strict=True)]
    found: dict[str, float | None] = {"score": statistics.fmean(right[:count])}
    for place in range(SHOWN):
        found[f"place_{place + 1}"] = statistics.fmean(
            fits for one, fits in zip(unseen, right, strict=False) if one.place == place
        )
    if known:
        found["known"] = statistics.fmean(right[count:])
    first = [made.text == one.answers[0] for one, made in zip(unseen, said, strict=False)]
    lengths = {
        kind: [made.tokens for made, fits in zip(said, right, strict=True) if fits == kind] for kind in (True, False)
    }
    return found | {
        "said_first": statistics.fmean(first),  # how often the first tool of the list was chosen
        "valid": statistics.fmean(made.text in one.answers for one, made in zip([*unseen, *half], said, strict=True)),
        "tokens": statistics.fmean(made.tokens for made in said),
        "tokens_right": statistics.fmean(lengths[True]) if lengths[True] else None,
        "tokens_wrong": statistics.fmean(lengths[False]) if lengths[False] else None,
    }


async def answer(run: Run, one: Choice, seed: int, *, record: bool) -> Answer:
    form = {"choice": one.answers}
    return await run.ask(one.prompt, seed=seed, max_tokens=TOKENS, record=record, structured_outputs=form)


# --- what must hold ---------------------------------------------------------------------------------------------------


def demands(results: Results) -> Iterator[Demand]:
    main, shuffled = (list(results.get(name, {}).values()) for name in ("main", "shuffled"))
    whole = len(main) >= 3
    lifts = [one["end"] - one["base"] for one in main]

    def told(runs: Sequence[Any]) -> str:
        return ", ".join(f"{one['base']:.3f} to {one['end']:.3f}" for one in runs) or "not run"

    met = all(0.05 <= one["base"] <= 0.5 for one in main) if main else None
    yield Demand("the base is between 0.05 and 0.5", met, told(main))
    met = statistics.median(lifts) >= 0.25 and min(lifts) >= 0.15 if whole else None
    yield Demand("main: median lift 0.25, minimum 0.15, 3 seeds", met, told(main))
    places = [min(one[f"place_{place + 1}_end"] for place in range(SHOWN)) for one in main]
    met = all(place > 1 / SHOWN for place in places) if main else None
    yield Demand(
        "main: better than chance wherever the right tool stands",
        met,
        "worst places " + ", ".join(f"{place:.3f}" for place in places) if main else "not run",
    )
    runs = [*main, *shuffled]
    met = all(one[f"valid_{when}"] == 1 for one in runs for when in ("base", "end")) if runs else None
    yield Demand("every answer has the form, before and after", met, f"{len(runs)} runs")
    apart = [_apart(one, "tokens_right_base", "tokens_wrong_base") for one in runs]
    grown = [_apart(one, "tokens_end", "tokens_base") for one in runs]
    known = bool(runs) and not any(math.isnan(one) for one in (*apart, *grown))
    met = all(abs(one) <= 0.25 for one in apart) and all(abs(one) <= 0.5 for one in grown) if known else None
    said = [" ".join(f"{one:+.2f}" for one in each) for each in (apart, grown)]
    yield Demand(
        "length is no help: the base's right and wrong answers are within 0.25 tokens of each other, and all answers "
        "after within 0.5 of those before",
        met,
        f"{said[0]}; {said[1]}" if runs else "not run",
    )
    met = all(abs(one["end"] - one["base"]) <= 0.08 for one in shuffled) if shuffled else None
    yield Demand("shuffled scores: within 0.08 of the base", met, told(shuffled))


def _apart(run: Mapping[str, Any], one: str, other: str) -> float:
    """The difference of two figures; NaN where one was not measured."""
    first, second = run.get(one), run.get(other)
    return math.nan if first is None or second is None else float(first) - float(second)


SERVER = {
    "reef": {"recipe": "sao", "batch_size": BATCH, "learning_rate": 1e-3, "seed": "{seed}"},
    "gate": {"policy": "guarded", "evaluate_every": 1},
}

SKILL = Study(
    name="skill",
    title="A skill with length held constant: the right one of four tools",
    score="held-out requests for which the right tool is chosen",
    progress="answers",
    arms=(
        Arm("main", SERVER, {"shuffled": False}, (0, 1, 2), "SAO on answers to 32 different requests a step"),
        Arm("shuffled", SERVER, {"shuffled": True}, (0,), "placebo: scores shuffled inside each batch"),
    ),
    drive=drive,
    demands=lambda results: list(demands(results)),
    folder="recipes/grpo",
)
