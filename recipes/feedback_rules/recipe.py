"""Feedback rules: what people write in their reports becomes a rule in the system message.

Knows: feedback text, how to clean and screen it, and the rules it made earlier (their ids begin with `feedback-`).
Does not know: weights, or what a rule means. It is the smallest harness method there is: no proposer model, no search.

- A report's text becomes a rule only when it is a string, passes `cordis.screen`, and reads like a sentence.
- The same text, in other case or punctuation, never becomes a second rule.
- Of two of its rules that say another thing of the same ("My name is A", "My name is B") the newer stands.
- At most `max_rules` of its rules stand at once; the oldest leave first. Rules of other origin are never touched.
- Deterministic: the same batch and tree give the same mutations, so a retry makes the same candidate.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef.cordis.screen import screen
from reef.core.errors import ConfigError
from reef.core.nouns import Batch, Json, PartName, Unit
from reef.harness.tree import Entry, Mutation
from reef.recipe import Objective

PREFIX = "feedback-"
_IS = re.compile(r"(?:my|our|the) (?:\w+ ){1,4}?(?:is|are) (?!not\b)(?=(?:\w+ ?){1,3}$)")
"""Who or what something is, in few words: two such sentences of one beginning contradict each other."""


@dataclass(frozen=True, slots=True)
class FeedbackRules:
    """`batch_size` reports make one proposal; a rule has at most `max_length` characters."""

    part: ClassVar[PartName | None] = "harness"
    applies: ClassVar[bool] = True  # people who write to an application want its next answers to be better
    batch_size: int = 1
    max_rules: int = 8
    max_length: int = 200
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_rules", 1), ("max_length", 20)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", param=name)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        written = [unit for unit in units if isinstance(unit.report.feedback, str) and unit.report.feedback.strip()]
        reports = list(dict.fromkeys(unit.report.id for unit in written))[: self.batch_size]
        if len(reports) < self.batch_size:
            return None
        chosen = tuple(unit for unit in written if unit.report.id in reports)
        named = json.dumps(["harness", *(unit.id for unit in chosen)])
        return Batch(hashlib.sha256(named.encode()).hexdigest(), "harness", chosen, {"reports": float(len(reports))})

    def objective(self) -> Objective:
        raise ConfigError("feedback_rules edits the harness and has no objective; name a weights recipe to train")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        known = {_key(entry.config["text"]) for entry in tree if entry.kind == "rules"}
        mutations = []
        for unit in sorted(batch.units, key=lambda unit: (unit.seq, unit.id)):
            text = clean(unit.report.feedback, self.max_length)
            if text is not None and _key(text) not in known:
                known.add(_key(text))
                mark = hashlib.sha256(_key(text).encode()).hexdigest()[:8]
                mutations.append(Mutation("create", f"{PREFIX}{unit.seq:012d}-{mark}", "rules", {"text": text}))
        mutations = list({_about(one.config["text"]): one for one in mutations}.values())[-self.max_rules :]
        about = {_about(one.config["text"]) for one in mutations}
        mine = sorted((entry for entry in tree if entry.id.startswith(PREFIX)), key=lambda entry: entry.id)
        old = [entry.id for entry in mine if _about(entry.config["text"]) in about]
        rest = [entry.id for entry in mine if entry.id not in old]
        gone = old + rest[: max(0, len(rest) + len(mutations) - self.max_rules)]
        return [Mutation("remove", name) for name in sorted(gone)] + mutations


def clean(feedback: Json, max_length: int) -> str | None:
    """A report's feedback as the text of a rule, or None when it must not or need not become one.

    One line, no invisible characters, ending in a full stop; of a long text the whole sentences that fit. Screening
    sees the whole text, so nothing hides behind the cut. Two words ("wrong answer") tell a model nothing.
    """
    if not isinstance(feedback, str) or screen(feedback) is not None:
        return None
    visible = "".join(letter for letter in feedback if unicodedata.category(letter) not in ("Cf", "Co", "Cs", "Cn"))
    text = " ".join(visible.split())
    if len(text) > max_length:
        ends = [
            found.end() for found in re.finditer(r"[.!?。！？](?=\s|$)|[。！？]", text) if found.end() <= max_length
        ]
        text = text[: ends[-1]] if ends else ""
    if not any(letter.isalpha() for letter in text) or (text.isascii() and len(text.split()) < 3):
        return None
    return text if text[-1] in ".!?。！？" or len(text) >= max_length else text + "."


def _about(text: str) -> str:
    """What a rule is about: of "My name is Anna" and the like, what stands up to the verb; else the rule itself."""
    key = _key(text)
    found = _IS.match(key)
    return found[0] if found else key


def _key(text: str) -> str:
    """What two wordings of one rule have in common: letters and digits, lower case, single spaces."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))
