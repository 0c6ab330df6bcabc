"""The study of `openclawrl`: a user who only chats, and likes one short sentence.

Knows: how the chats go, what is measured beside the score, the arms, and what must hold of them.
Does not know: the server's insides; what is asked and said is in `task`.

Sixteen users chat at once. Each asks something, reads the answer, and says thanks or complains as the next message of
the same session; nobody sends a report. When all have, the learner has sixteen judged turns: one step. The answer to a
user's last word is short and never trains, as no message follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from reef.study import Arm, Demand, Results, Study
from reef.study.run import Run

from . import task
from .task import Question

USERS = 16  # at once; so many judged turns are one step
WAVES = 10  # 160 judged turns
EVERY = 5  # waves between two measurements
SAMPLES = 2  # of each held-out question, always with the same seeds
LAST = 4  # tokens of the answer to a user's last word, which nobody reads

GUARDED: dict[str, Any] = {"policy": "guarded", "evaluate_every": 1, "options": {"relevance": 0.25}}
"""The default gate but for one limit. Half of the live prompts end in a thank-you or a complaint, and what one says to
those fits any chat: with the usual limit, half of the base's own relevance, honest steps were refused at 0.46 of it."""


def arm(name: str, note: str, gate: Mapping[str, Any] = GUARDED, **fields: Any) -> Arm:
    driver = {key: fields.pop(key) for key in ("wish", "easy") if key in fields}
    reef = {"recipe": "recipes.openclawrl.recipe:OpenClawRecipe", "batch_size": USERS, "judge": "rules", **fields}
    seeds = (0, 1, 2) if name == "hint" else (0,)
    return Arm(name, {"reef": reef, "gate": dict(gate)}, {"wish": "short", "easy": False} | driver, seeds, note)


BOTH: dict[str, Any] = {"w_rl": 0.5}
WORDS: dict[str, Any] = {"w_rl": 0.0, "anchor": 0.0}  # what the message says is all that can teach
BINARY: dict[str, Any] = {"w_rl": 1.0, "w_opd": 0.0, "easy": True}
ARMS = (
    arm("hint", "the verdict, and what the complaint asks for", **BOTH),
    arm("verdict", "the verdict alone: what the complaint asks for is not used", hints=0, **BOTH),
    arm("words", "what the complaint asks for alone, no verdict", **WORDS),
    arm(
        "irrelevant",
        "the same, but the complaint asks for something else: mention the weather",
        wish="weather",
        **WORDS,
    ),
    arm("no-hint", "the same, but what the complaint asks for is not used", hints=0, **WORDS),
    arm("binary", "verdicts alone, and a user content with whatever ends", {"policy": "guarded"}, **BINARY),
    arm("binary-ungated", "the same where every candidate is served", {"policy": "always"}, **BINARY),
)


async def drive(run: Run) -> dict[str, Any]:
    """All waves of one arm, measured before, on the way, and after."""
    chats, held = task.split()
    base = (await run.releases())[0]["release_id"]
    before = run.kept.get("base") or await measure(run, base, held)
    run.keep(base=before)
    curve: list[list[float]] = run.kept.get("curve") or [[0, before["score"]]]
    looks: list[dict[str, Any]] = run.kept.get("looks") or []
    after: dict[str, float] = run.kept.get("after") or before
    for wave in range(run.kept.get("waves", 0) + 1, WAVES + 1):
        accepted = await asyncio.gather(
            *(chat(run, wave, user, asked) for user, asked in enumerate(questions(run, wave, chats)))
        )
        said = await run.learnt()
        last = said.get("last")
        new = [last] if last and last not in looks[-1:] else []  # a step that changed nothing is not looked at
        looks = [*looks, *new]
        figures: dict[str, Any] = {"turns": wave * USERS, "accepted": sum(accepted) / USERS}
        figures["verdict"] = new[0]["verdict"] if new else "none"
        if wave % EVERY == 0 or wave == WAVES:
            after = await measure(run, await run.head(), held)
            curve = [*curve, [wave * USERS, after["score"]]]
            figures |= after
        run.point(**figures)
        run.keep(waves=wave, curve=curve, looks=looks, after=after)
    head = await run.head()
    forgotten = await run.drift(base, head) if head != base else {}
    reasons = [str(look["reason"]) for look in looks if look["verdict"] == "reject"]
    return {
        "base": before["score"],
        "end": after["score"],
        "curve": curve,
        **{f"base_{name}": value for name, value in before.items() if name != "score"},
        **{name: value for name, value in after.items() if name != "score"},
        "accepts": sum(look["verdict"] == "accept" for look in looks),
        "rejects": len(reasons),
        "rejected_empty": sum("empty" in reason for reason in reasons),
        "last_rejection": reasons[-1] if reasons else "",
        "drift": forgotten,
    }


def questions(run: Run, wave: int, chats: Sequence[Question]) -> list[Question]:
    """What the users ask in this wave: every question once, in an order of the seed's, before any comes again."""
    asked: list[Question] = []
    for place in range((wave - 1) * USERS, wave * USERS):
        deck = list(chats)
        run.at("deck", place // len(chats)).shuffle(deck)
        asked.append(deck[place % len(chats)])
    return asked


async def chat(run: Run, wave: int, user: int, asked: Question) -> bool:
    """One user's chat: a question, and what they say to its answer. Whether they liked it."""
    session = f"seed {run.seed} wave {wave} user {user}"
    seed = (run.seed * 1000 + wave) * 1000 + user
    opening = {"role": "user", "content": asked.text}
    answer = await run.ask([opening], seed=seed, max_tokens=task.LIMIT, session=session)
    wish, easy = run.arm.options["wish"], run.arm.options["easy"]
    said = task.reaction(answer.text, answer.finish_reason, wish, easy=easy)
    turns = [opening, {"role": "assistant", "content": answer.text}, {"role": "user", "content": said}]
    await run.ask(turns, seed=seed, max_tokens=LAST, session=session)
    return said == task.THANKS


async def measure(run: Run, release: str, held: Sequence[Question]) -> dict[str, float]:
    """Held-out questions, asked of one release without being recorded."""
    places = [(number, asked, sample) for number, asked in enumerate(held) for sample in range(SAMPLES)]
    answers = await asyncio.gather(
        *(
            run.ask(
                asked.text, seed=1_000_003 * (number + 1) + sample, max_tokens=task.LIMIT, release=release, record=False
            )
            for number, asked, sample in places
        )
    )
    count = len(places)
    return {
        "score": sum(task.good(answer.text, answer.finish_reason) for answer in answers) / count,
        "ended": sum(answer.finish_reason == "stop" for answer in answers) / count,
        "subject": sum(task.names(asked, answer.text) for (_, asked, _), answer in zip(places, answers, strict=True))
        / count,
        "words": sum(task.words(answer.text) for answer in answers) / count,
        "empty": sum(task.words(answer.text) == 0 for answer in answers) / count,
        "distinct": len({answer.text for answer in answers}) / count,
    }


def demands(results: Results) -> list[Demand]:
    """What was asked of the method, and of its controls."""
    main = results.get("hint") or {}
    ends, bases = [one["end"] for one in main.values()], [one["base"] for one in main.values()]
    seeds = len(main)
    told = [one["subject"] / one["base_subject"] for one in main.values() if one["base_subject"]]
    words = [one["words"] for one in main.values()]
    made = [
        demand("the base scores at most 0.05", bases, lambda: max(bases) <= 0.05),
        demand("median of three seeds at least 0.6", ends if seeds >= 3 else [], lambda: middle(ends) >= 0.6),
        demand("each of three seeds at least 0.5", ends if seeds >= 3 else [], lambda: min(ends) >= 0.5),
        demand("the subject is named at least 0.8 times as often as by the base", told, lambda: min(told) >= 0.8),
        demand("answers have at least three words on average", words, lambda: min(words) >= task.LEAST),
    ]
    for name in ("irrelevant", "no-hint"):
        low = [one["end"] for one in (results.get(name) or {}).values()]
        made.append(demand(f"{name}: at most 0.15", low, lambda low=low: max(low) <= 0.15))
    gated = list((results.get("binary") or {}).values())
    free = list((results.get("binary-ungated") or {}).values())
    made.append(
        demand(
            "binary: the gate rejects candidates",
            [float(one["rejects"]) for one in gated],
            lambda: all(one["rejects"] for one in gated),
        )
    )
    made.append(
        demand(
            "binary: without the gate what is served ends up worthless (mostly empty, or naming the subject less than "
            "half as often as the base), with it not; figures: share that names it with, without",
            [one["subject"] for one in [*gated, *free]] if gated and free else [],
            lambda: all(map(worthless, free)) and not any(map(worthless, gated)),
        )
    )
    return made


def worthless(one: Mapping[str, Any]) -> bool:
    return bool(one["empty"] > 0.5 or one["subject"] < 0.5 * one["base_subject"])


def demand(text: str, figures: Sequence[float], holds: Any) -> Demand:
    """Undecided without figures."""
    said = ", ".join(f"{figure:.2f}" for figure in figures) or "not run"
    return Demand(text, bool(holds()) if figures else None, said)


def middle(figures: Sequence[float]) -> float:
    ordered = sorted(figures)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


STUDY = Study(
    name="openclawrl",
    title="OpenClaw-RL: a user who only chats",
    score="held-out answers of three words or more that end within 24 tokens",
    progress="judged turns",
    arms=ARMS,
    drive=drive,
    demands=demands,
    folder="recipes/openclawrl",
)
