"""A toy language model for stub servers: every log-prob follows from weights, tokens and nothing else.

A context is a chain: each token's state is a digest of the state before it, the token, and the weights that read it.
So a state that was computed with other weights (a stale prefix cache, a swap in the middle of an answer) changes all
that follows, and `Read.origin` says whose weights went into it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reef.engines.local.layout import read_layout
from reef.engines.local.text import BROKEN, Text

WIDE = 12  # tokens that are likely after any context
FLOOR = -14.0  # the logit of every other token
WORDS = 4096  # tokens that can be likely; the first ones of the vocabulary that say something


@dataclass(frozen=True, slots=True)
class Read:
    """What a model knows after some tokens: a digest, and the weights that read them."""

    state: bytes
    origin: frozenset[str]


@dataclass(frozen=True, slots=True)
class Odds:
    """The distribution of the next token, in logits: a few tokens of its own, all others alike."""

    logits: dict[int, float]
    others: int

    def logprob(self, token: int, heat: float = 1.0) -> float:
        heat = heat or 1.0
        total = sum(math.exp(value / heat) for value in self.logits.values()) + self.others * math.exp(FLOOR / heat)
        return self.logits.get(token, FLOOR) / heat - math.log(total)

    def top(self, count: int) -> list[int]:
        return sorted(self.logits, key=lambda token: -self.logits[token])[:count]


class Brain:
    """The model of one folder: tokenizer, context and vocabulary are its own, what it says is not.

    `ending` is the logit of the token that ends an answer; the likely ones lie between -1 and 1.
    """

    def __init__(self, folder: Path, *, ending: float = -0.5) -> None:
        self.text = Text(folder)
        layout = read_layout(folder)
        self.vocab, self.context, self.ends = layout.vocab, layout.context, layout.ends
        self.ending = ending
        self._words = self._speakable()

    def _speakable(self) -> list[int]:
        found = []
        for token in range(self.vocab):
            piece = self.text.piece(token) if token not in self.ends else ""
            if piece and BROKEN not in piece and piece.isprintable():
                found.append(token)
            if len(found) == WORDS:
                break
        return found

    def begin(self) -> Read:
        return Read(b"", frozenset())

    def read(self, before: Read, token: int, weights: str) -> Read:
        mixed = b"%b|%d|%b" % (before.state, token, weights.encode())
        return Read(hashlib.blake2b(mixed, digest_size=16).digest(), before.origin | {weights})

    def odds(self, after: Read, weights: str) -> Odds:
        numbers = random.Random(b"%b|%b" % (after.state, weights.encode()))
        logits = {self._words[numbers.randrange(len(self._words))]: numbers.uniform(-1, 1) for _ in range(WIDE)}
        logits |= dict.fromkeys(self.ends[:1], self.ending)
        return Odds(logits, self.vocab - len(logits))

    def draw(self, odds: Odds, number: float, *, heat: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> int:
        """The token at `number` (0 to 1) of what may be drawn."""
        ranked = odds.top(len(odds.logits))
        if heat <= 0:
            return ranked[0]
        if top_k > 0:
            ranked = ranked[:top_k]
        shares = [math.exp(odds.logprob(token, heat)) for token in ranked]
        reach = list(itertools.accumulate(shares))
        if top_p < 1.0:
            keep = bisect.bisect_left(reach, top_p) + 1
            ranked, reach = ranked[:keep], reach[:keep]
        if top_k == 0 and top_p >= 1.0:
            if number >= reach[-1]:  # the long tail
                return self._words[int(number * 1e9) % len(self._words)]
            return ranked[bisect.bisect_right(reach, number)]
        return ranked[min(bisect.bisect_right(reach, number * reach[-1]), len(ranked) - 1)]

    def rate(self, tokens: Sequence[int], weights: str) -> list[float | None]:
        """Log-probs of every token but the first, with these weights and no cache: the truth."""
        found: list[float | None] = [None]
        read = self.begin()
        for before, token in itertools.pairwise(tokens):
            read = self.read(read, before, weights)
            found.append(self.odds(read, weights).logprob(token))
        return found


class Prefixes:
    """A prefix cache as the servers have it: blocks of tokens under a key (a LoRA's name, a salt), oldest out first.

    It knows nothing of weights. Whoever changes them has to clear it, or answers go on from what the old ones read.
    """

    def __init__(self, block: int = 16, size: int = 4096) -> None:
        self._block, self._size = block, size
        self._held: OrderedDict[tuple[str, bytes], Read] = OrderedDict()

    def find(self, key: str, tokens: Sequence[int], limit: int) -> tuple[int, Read | None]:
        """How many of the tokens are there (never the last, at most `limit`), and what was read by then."""
        count, found = 0, None
        chain = hashlib.blake2b(digest_size=16)
        for end in range(self._block, min(limit, len(tokens) - 1) + 1, self._block):
            chain.update(repr(list(tokens[end - self._block : end])).encode())
            held = self._held.get((key, chain.digest()))
            if held is None:
                break
            self._held.move_to_end((key, chain.digest()))
            count, found = end, held
        return count, found

    def keep(self, key: str, tokens: Sequence[int], reads: Sequence[Read]) -> None:
        """`reads[i]` is what was known after `tokens[i]`."""
        chain = hashlib.blake2b(digest_size=16)
        for end in range(self._block, len(tokens) + 1, self._block):
            chain.update(repr(list(tokens[end - self._block : end])).encode())
            self._held.setdefault((key, chain.digest()), reads[end - 1])
        while len(self._held) > self._size:
            self._held.popitem(last=False)

    def clear(self) -> None:
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


def digest(folder: Path) -> str:
    """Of the weights in a folder: a model's or a LoRA's. FileNotFoundError when it has none."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("adapter_config.json")])
    if not any(path.suffix == ".safetensors" for path in files):
        raise FileNotFoundError(f"no weights in {folder}")
    whole = hashlib.blake2b(digest_size=16)
    for path in files:
        whole.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                whole.update(data)
    return whole.hexdigest()
