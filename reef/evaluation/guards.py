"""Guards: is this still a usable model? Measured without a scorer, on fixed prompts and on recent live prompts.

Knows: what a broken policy looks like (silent, always the same, looping, refusing, wrong about easy things, far from
the base), how each is measured, and the limits (measured on the embedded model: docs/decisions/0003-guards.md).
Does not know: whether the candidate is *better*; what follows from a guard that does not hold.

- Shape is compared with the untouched base, so that many small steps cannot slide where one large step may not.
- `drift` is k3 (Schulman 2020), E_base[r - 1 - ln r] with r = p_candidate / p_base, over tokens the base sampled: how
  much of the base was lost. `surprise` is E_candidate[ln p_candidate - ln p_base] over the candidate's own answers to
  live prompts, each answer counting once: how strange the base finds what the candidate says now.
- `relevance` is E[ln p_base(answer | its prompt) - ln p_base(answer | another prompt)] a token: whether an answer has
  to do with its question, whatever its form or language. It is asked of varied answers only; a scenario whose answers
  are few (yes, no) is judged by `sameness`.
- What cannot be measured is missing (value None, a note why), never zero, and holds nothing up.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from reef.core.errors import ConfigError
from reef.core.nouns import Guard, Record
from reef.evaluation.ask import Question, Reply
from reef.evaluation.suite import General

ANSWER_TOKENS = 20
LEAST_FIT = 0.1  # nats a token: below it, prompts cannot be told apart by their answers
LIVE_BYTES = 32 * 1024  # of live prompts asked again in one look: a look must stay cheap


@dataclass(frozen=True, slots=True)
class Limits:
    """What a candidate may show, and how much is asked. Shares are of answers; drift and surprise in nats a token."""

    empty: float = 0.15  # share of answers without a letter, digit or symbol
    repetition: float = 0.25  # share of answers that loop
    refusal: float = 0.25  # share of answers that decline
    sameness: float = 0.4  # share of the commonest answer to the fixed prompts
    live_sameness: float = 0.8  # the same for live prompts, which may be of one kind
    length: float = 0.15  # mean words, at least this part of the base's
    live_length: float = 0.04  # mean words, at least this part of the recorded answers'
    suite: float = 0.5  # right answers to the general questions, at least this part of the base's
    drift: float = 1.0  # nats a token
    surprise: float = 8.0  # nats a token
    relevance: float = 0.5  # at least this part of the base's own
    live: int = 12  # live prompts asked
    least: int = 4  # live prompts without which nothing is said about them
    missing: float = 0.1  # share of asks that may fail before nothing is decided

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Sequence[str] = ()) -> Limits:
        """From the configuration's `gate.options`. ConfigError names what is unknown or not a number. `others` are the
        policy's own options, which are read elsewhere."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                names = (*others, *known)
                close = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
                raise ConfigError(f"unknown gate option {name!r}; {hint}", param=f"gate.options.{name}")
            whole = known[name] == "int"
            kinds = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < 0:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"gate option {name} must be {kind} of at least 0", param=f"gate.options.{name}")
        return cls(**options)


# --- one answer -------------------------------------------------------------------------------------------------------

_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am)? (?:sorry|apologi[sz]e)|i (?:can(?:no|')t|am (?:not able|unable)|won't|will not)"
    r"|i do(?: not|n't) have|as an ai\b|unable to (?:help|assist|answer|provide))",
    re.IGNORECASE,
)


def is_empty(text: str) -> bool:
    """Nothing to read: no letter, digit or symbol (an emoji is one)."""
    return not any(unicodedata.category(letter)[0] in "LNS" for letter in text)


def is_loop(text: str) -> bool:
    """At least eight words that go in circles: of the neighbouring pairs three in ten or more came before."""
    words = text.casefold().split()
    pairs = list(pairwise(words))
    return len(words) >= 8 and len(set(pairs)) <= 0.7 * len(pairs)


def is_refusal(text: str) -> bool:
    return _REFUSAL.search(text.replace("’", "'")) is not None


def count_words(text: str) -> int:
    return len(text.split())


# --- many answers -----------------------------------------------------------------------------------------------------


def shape(texts: Sequence[str], reference: Sequence[str], limits: Limits, *, live: bool) -> list[Guard]:
    """Empty, looping, declining, equal and short answers among `texts`, one per distinct prompt.

    `reference` are answers of the base to the same prompts, or for live prompts the recorded ones. Where the reference
    itself shows more than the limit, it is the limit: a scenario that always answered yes or no may go on doing so.
    """
    where, prefix = ("recent live prompts", "live_") if live else ("fixed prompts", "")
    total = len(texts)

    def share(name: str, found: int, before: int, limit: float, what: str) -> Guard:
        allowed = max(limit, before / len(reference)) if reference else limit
        note = f"{found} of {total} answers to {where} {what}; at most {math.floor(allowed * total + 1e-9)} may"
        return Guard(prefix + name, found <= allowed * total + 1e-9, found / total, allowed, note)

    sameness = limits.live_sameness if live else limits.sameness
    length = limits.live_length if live else limits.length
    ours = sum(map(count_words, texts)) / total
    theirs = sum(min(count_words(text), ANSWER_TOKENS) for text in reference) / max(1, len(reference))
    return [
        share("empty", sum(map(is_empty, texts)), sum(map(is_empty, reference)), limits.empty, "are empty"),
        share("sameness", _commonest(texts), _commonest(reference), sameness, "are one and the same"),
        share(
            "repetition", sum(map(is_loop, texts)), sum(map(is_loop, reference)), limits.repetition, "repeat themselves"
        ),
        share(
            "refusal", sum(map(is_refusal, texts)), sum(map(is_refusal, reference)), limits.refusal, "decline to answer"
        ),
        Guard(
            prefix + "length",
            ours >= length * theirs,
            ours,
            length * theirs,
            f"answers to {where} have {ours:.1f} words on average; {length * theirs:.1f} are needed "
            f"({'recorded answers have' if live else 'the base has'} {theirs:.1f})",
        ),
    ]


def _commonest(texts: Sequence[str]) -> int:
    """How many answers are the commonest one (letters and digits, any case). Fewer than four texts have none."""
    if len(texts) < 4:
        return 0
    return max(Counter(map(_plain, texts)).values())


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def suite(tasks: Sequence[General], ours: Sequence[Reply], base: Sequence[Reply], limits: Limits) -> Guard:
    """Right answers among the general questions that the base gets right: what it knew must mostly still be known."""
    known = [(task, reply) for task, reply, before in zip(tasks, ours, base, strict=True) if task.right(before.text)]
    if not known:
        return missing("suite", limits.suite, "the base answers none of the general questions")
    right = sum(task.right(reply.text) for task, reply in known)
    needed = math.ceil(limits.suite * len(known) - 1e-9)
    note = f"{right} of {len(known)} easy questions that the base answers right are still right; {needed} are needed"
    return Guard("suite", right >= needed, right / len(known), limits.suite, note)


def finite(values: Sequence[Sequence[float]]) -> Guard:
    """Every log-prob the engine gave is a number."""
    flat = [value for row in values for value in row]
    if not flat:
        return missing("finite", None, "the engine gives no log-probabilities")
    bad = sum(not math.isfinite(value) for value in flat)
    note = f"{bad} of {len(flat)} log-probabilities are not numbers; none may be"
    return Guard("finite", bad == 0, bad / len(flat), 0.0, note)


def drift(candidate: Sequence[Sequence[float]], base: Sequence[Sequence[float]], limits: Limits) -> Guard:
    """k3 over base-sampled tokens: `candidate` and `base` are log-probs of the same tokens, one row an answer."""
    ratios = [
        _safe(ours) - _safe(theirs)
        for a, b in zip(candidate, base, strict=True)
        for ours, theirs in zip(a, b, strict=True)
    ]
    if not ratios:
        return missing("drift", limits.drift, "the base's answers have no tokens")
    value = sum(math.exp(min(ratio, 20.0)) - 1 - ratio for ratio in ratios) / len(ratios)
    note = f"the candidate is {value:.2f} nats a token away from the base on fixed prompts; at most {limits.drift:.2f}"
    return Guard("drift", value <= limits.drift, value, limits.drift, note)


def surprise(candidate: Sequence[Sequence[float]], base: Sequence[Sequence[float]], limits: Limits) -> Guard:
    """Mean log ratio over the candidate's own live answers, first within each answer, then over answers."""
    means = [
        sum(_safe(ours) - _safe(theirs) for ours, theirs in zip(a, b, strict=True)) / len(a)
        for a, b in zip(candidate, base, strict=True)
        if a
    ]
    if len(means) < limits.least:
        return missing("surprise", limits.surprise, f"only {len(means)} answers to live prompts have tokens")
    value = sum(means) / len(means)
    note = f"live answers are {value:.2f} nats a token stranger to the base than usual; at most {limits.surprise:.2f}"
    return Guard("surprise", value <= limits.surprise, value, limits.surprise, note)


def fit(own: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """How much better answers fit their own prompts than others', mean nats a token. `own` has the base's log-probs of
    each answer's tokens after its own prompt, `others` the same after another prompt of the scenario."""
    gains = [
        (sum(map(_safe, here)) - sum(map(_safe, elsewhere))) / len(here)
        for here, elsewhere in zip(own, others, strict=True)
    ]
    return sum(gains) / len(gains)


def relevance(
    texts: Sequence[str],
    own: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    usual: float | None,
    limits: Limits,
) -> Guard:
    """Whether live answers belong to their prompts, beside `usual`, the `fit` of the base's own answers: prompts that
    look alike ("What is 2+3?") tell even a good answer's prompt less clearly than prompts that do not."""
    if usual is None or usual < LEAST_FIT:
        return missing("relevance", None, "the scenario's prompts look too much alike to tell")
    limit = limits.relevance * usual
    if len(texts) < limits.least:
        return missing("relevance", limit, f"only {len(texts)} answers to live prompts have tokens")
    if len({_plain(text) for text in texts}) <= len(texts) / 2:
        return missing("relevance", limit, "the scenario's answers are few")
    value = fit(own, others)
    note = f"live answers fit their own prompts {value:.2f} nats a token better than others; {limit:.2f} are needed"
    return Guard("relevance", value >= limit, value, limit, note)


def missing(name: str, limit: float | None, why: str) -> Guard:
    return Guard(name, True, None, limit, f"not measured: {why}")


def _safe(logprob: float) -> float:
    """A log-prob that arithmetic can use: what is not a number counts as impossible."""
    return max(logprob, -50.0) if math.isfinite(logprob) else -50.0


# --- live prompts -----------------------------------------------------------------------------------------------------


def sampled(records: Sequence[Record], limit: int) -> list[tuple[Question, str]]:
    """Distinct prompts of finished live chat records, in the order given, each with the answer that was recorded.

    At most `limit`, and LIVE_BYTES together: what does not fit is passed over.

    Only the messages are asked again, sampled at temperature 1 as the embedded engine serves by default. What was
    answered in a prescribed form is passed over: a free answer to it is one that nobody asks for.
    """
    found: dict[str, str] = {}
    room = LIVE_BYTES
    for record in records:
        if record.purpose != "live" or record.dialect != "chat" or record.status != "complete" or not record.choices:
            continue
        if record.sampling is not None and record.sampling.legal is not None:
            continue
        try:
            messages = json.loads(record.request)["messages"]
        except (ValueError, KeyError, TypeError):
            continue
        text = json.dumps(messages, ensure_ascii=False)
        if isinstance(messages, list) and messages and text not in found and len(text) <= room:
            room -= len(text)
            found[text] = record.choices[0].text
        if len(found) >= limit:
            break
    return [
        (Question(text, ANSWER_TOKENS, temperature=1.0, seed=seed), answer)
        for seed, (text, answer) in enumerate(found.items())
    ]
