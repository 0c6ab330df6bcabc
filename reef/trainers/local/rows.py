"""From wire data to tensors: check every sample, split the batch into micro-batches, pack each.

Knows: what a trainable sample must look like, and how many tokens fit at once.
Does not know: losses or weights. Tokens are the recorded ids; nothing here can tokenise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from reef.core.errors import TrainError
from reef.core.wire import Datum
from reef.engines.local.layout import Layout
from reef.trainers.local.llama import pack
from reef.trainers.local.objective import Rows, Total

MICRO_TOKENS = 2048
"""Packed tokens of one micro-batch: about 1 MB of activations each on the embedded model."""
MICRO_TARGETS = 1024
"""Response tokens of one micro-batch: each costs a row of logits, three times."""


def build(data: Sequence[Datum], layout: Layout, *, tokens: int = MICRO_TOKENS) -> list[Rows]:
    """The batch as micro-batches, longest samples first. TrainError names the first sample that cannot be trained."""
    for datum in data:
        _check(datum, layout)
    total = Total(len(data), sum(sum(datum.mask) for datum in data))
    if not data or total.tokens == 0:
        raise TrainError("the batch holds no trainable token; a step needs at least one")
    groups: list[list[Datum]] = []
    for datum in sorted(data, key=lambda datum: -len(datum.tokens)):
        full = groups and (
            sum(len(other.tokens) for other in groups[-1]) + len(datum.tokens) > tokens
            or sum(len(other.mask) for other in groups[-1]) + len(datum.mask) > MICRO_TARGETS
        )
        if full or not groups:
            groups.append([])
        groups[-1].append(datum)
    return [_rows(group, total) for group in groups]


def _rows(group: list[Datum], total: Total) -> Rows:
    packed = pack([datum.tokens for datum in group], share=min(datum.prompt_length for datum in group) - 1)
    predicts: list[int] = []
    for start, datum in zip(packed.starts, group, strict=True):
        # The state before token t predicts it; the last prompt token, never shared, predicts the first of the response.
        first = start + datum.prompt_length - packed.prefix - 1
        predicts.extend(range(first, first + len(datum.mask)))
    return Rows(
        packed=packed,
        predicts=torch.tensor(predicts),
        targets=torch.tensor([token for datum in group for token in datum.tokens[datum.prompt_length :]]),
        mask=torch.tensor([float(one) for datum in group for one in datum.mask]),
        logprobs=torch.tensor([one for datum in group for one in datum.logprobs], dtype=torch.float32),
        temperatures=torch.tensor([datum.temperature for datum in group for _ in datum.mask], dtype=torch.float32),
        lengths=tuple(len(datum.mask) for datum in group),
        rewards=tuple(datum.reward for datum in group),
        lags=tuple(datum.lag for datum in group),
        total=total,
    )


def _check(datum: Datum, layout: Layout) -> None:
    response = len(datum.tokens) - datum.prompt_length
    wrong = None
    if datum.prompt_length < 1 or response < 1:
        wrong = "needs a prompt and a response of at least one token each"
    elif len(datum.mask) != response or len(datum.logprobs) != response:
        wrong = f"has {response} response tokens, {len(datum.mask)} mask and {len(datum.logprobs)} log-prob values"
    elif len(datum.tokens) > layout.context:
        wrong = f"is {len(datum.tokens)} tokens long; the model's context is {layout.context}"
    elif not all(0 <= token < layout.vocab for token in datum.tokens):
        wrong = f"holds a token id outside the vocabulary of {layout.vocab}"
    elif not all(one in (0, 1) for one in datum.mask):
        wrong = "has a mask value other than 0 and 1"
    elif not all(math.isfinite(one) and one <= 1e-3 for one in datum.logprobs):
        wrong = "has a log-prob that is not a finite number of at most 0"
    elif not (math.isfinite(datum.temperature) and datum.temperature > 0):
        wrong = "was not sampled at a temperature above 0"
    elif datum.reward is not None and not math.isfinite(datum.reward):
        wrong = "has a reward that is not finite"
    if wrong:
        raise TrainError(f"sample {datum.record_id}:{datum.choice} {wrong}; it must not be in a batch")
