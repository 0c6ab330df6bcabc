"""Draw the next token from logits, one request's settings and random numbers at a time.

Knows: temperature, top-k, top-p, and the log-probability a token had when it was drawn.
Does not know: the model, text, or other requests. Row i of a batch depends on row i only: each request brings its own
random numbers, so a seed gives the same tokens whoever shares the batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn. `top` asks for that many of the likeliest tokens beside the drawn one."""

    temperature: float
    top_p: float
    top_k: int
    numbers: random.Random
    top: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """`logprob` is natural, under the tempered distribution over the legal tokens, before any truncation (temperature 1
    when greedy)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw], legal: Mapping[int, Tensor] | None = None) -> list[Drawn]:
    """One token for each row of logits [rows, vocab]. `legal`: by row, [vocab] bool of what may be drawn; else all."""
    values = logits.float()
    heat = [draw.temperature or 1.0 for draw in draws]
    if any(each != 1.0 for each in heat):
        values = values / torch.tensor(heat)[:, None]
    if legal:
        values = values.clone() if values is logits else values
        for row, allowed in legal.items():
            values[row].masked_fill_(~allowed, -math.inf)
    chances = torch.softmax(values, -1)
    left = chances
    cut = [row for row, draw in enumerate(draws) if draw.temperature and (draw.top_k or draw.top_p < 1)]
    if cut:
        left = chances.clone()
        for row in cut:
            left[row] = truncate(chances[row], draws[row].top_k, draws[row].top_p)
    numbers = [draw.numbers.random() if draw.temperature else 0.0 for draw in draws]
    tokens = pick(left, torch.tensor(numbers, dtype=torch.float64))
    if any(not draw.temperature for draw in draws):
        greedy = torch.tensor([not draw.temperature for draw in draws])
        tokens = torch.where(greedy, values.argmax(-1), tokens)
    chosen = chances.gather(1, tokens[:, None])[:, 0].log()
    found = []
    for row, (draw, token, logprob) in enumerate(zip(draws, tokens.tolist(), chosen.tolist(), strict=True)):
        top = top_of(torch.log_softmax(values[row], -1), draw.top) if draw.top else []
        found.append(Drawn(token, logprob, top))
    return found


def pick(chances: Tensor, points: Tensor) -> Tensor:
    """For each row, the token whose stretch of the cumulative distribution holds the point, a number in [0, 1).

    Found in two steps, first among blocks of tokens, then inside one: adding up a whole vocabulary in sequence would
    take longer than the model's last layer.
    """
    rows, size = chances.shape
    padded = F.pad(chances, (0, -size % _BLOCK)) if size % _BLOCK else chances
    blocks = padded.view(rows, -1, _BLOCK)
    heights = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = (points * (1 - 1e-12) * heights[:, -1])[:, None]  # never the very end, where nothing is left
    block = torch.searchsorted(heights, targets, right=True).clamp_(max=heights.shape[1] - 1)
    below = F.pad(heights, (1, 0)).gather(1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    inside = torch.minimum(targets - below, inner[:, -1:] * (1 - 1e-12))
    return (block * _BLOCK + torch.searchsorted(inner, inside, right=True))[:, 0].clamp_(max=size - 1)


_BLOCK = 128
_HEAD = 1024  # a cut distribution nearly always fits into so many tokens; sorting all of them takes ten times longer


def truncate(chances: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the `top_k` likeliest, then all outside the smallest set whose share is `top_p`; one stays."""
    size = chances.shape[0]
    ranked, order = chances.topk(min(_HEAD, size))
    if not (0 < top_k <= _HEAD or ranked.sum() >= top_p * chances.sum()):
        ranked, order = chances.sort(descending=True, stable=True)
    total = chances.sum()
    if top_k:
        ranked[top_k:] = 0
        total = ranked.sum()
    if top_p < 1:
        share = ranked / total
        outside = share.cumsum(0) - share >= top_p
        outside[0] = False
        ranked[outside] = 0
    return torch.zeros_like(chances).scatter_(0, order, ranked)


def top_of(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -math.inf]  # the others are not legal
