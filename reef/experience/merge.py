"""The turns of one session as one sequence of tokens, exactly as they were sampled.

Knows: prompts and answers as token ids, and what is lost when a template writes the history anew.
Does not know: records, reports, sessions; whoever asks sees to it that the turns follow one another.

Turn k has the prompt ids P_k and the sampled ids O_k. The sequence begins as P_1 O_1; for each later turn, with c the
length of what it and P_k have in common from the start:

- c is all of the sequence: the turn *extends* it; what P_k adds is an observation (mask 0, log-prob 0), then comes O_k.
- c reaches the newest answer (less `tolerance` tokens) and at most `threshold` tokens are cut: the turn *realigns* it.
  The newest answer was rendered anew, so its tokens are observations from now on, and their signal is lost.
- else the history was changed: a *fork*, and the turns are no one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reef.core.nouns import Sample

Apart = Literal["fork", "temperature", "grammar", "signal"]
"""Why turns are no one sequence: the history was changed, they were sampled at several temperatures, a grammar limited
one of them (it counts from the start of an answer), or no sampled token would be left."""


@dataclass(frozen=True, slots=True)
class Merged:
    sample: Sample
    realigned: int  # sampled tokens whose signal was lost


def merge(samples: Sequence[Sample], tolerance: int = 0, threshold: int = 1024) -> Merged | Apart:
    """One sample of these turns, in order, or why there is none. All of them have sampled tokens.

    The result keeps the record, choice, reward and group of the last turn; its prompt is as long as the first turn's.
    """
    last = samples[-1]
    if any(sample.temperature != last.temperature for sample in samples):
        return "temperature"
    if len(samples) > 1 and any(sample.legal is not None for sample in samples):
        return "grammar"
    first = start = samples[0].prompt_length  # `start`: where the newest answer begins
    tokens, mask = [*samples[0].tokens], [0] * first + [*samples[0].mask]  # of all tokens, until the end
    logprobs = [0.0] * first + [*samples[0].logprobs]
    realigned = 0
    for sample in samples[1:]:
        prompt = sample.tokens[: sample.prompt_length]
        common = _common(tokens, prompt)
        if common < len(tokens):
            if common < start - tolerance or len(tokens) - common > threshold:
                return "fork"
            cut = min(start, common)
            realigned += sum(mask[cut:])
            del tokens[cut:], mask[cut:], logprobs[cut:]
        added = len(prompt) - len(tokens)
        tokens += sample.tokens[len(tokens) :]
        mask += [0] * added + [*sample.mask]
        logprobs += [0.0] * added + [*sample.logprobs]
        start = sample.prompt_length
        first = min(first, start)
    if not any(mask[first:]):
        return "signal"
    merged = replace(
        last, tokens=tuple(tokens), prompt_length=first, mask=tuple(mask[first:]), logprobs=tuple(logprobs[first:])
    )
    return Merged(merged, realigned)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
