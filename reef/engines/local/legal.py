"""Which tokens a form leaves legal, one answer's token at a time: for the sampler, and again for the trainer.

Knows: forms (`form.py`), the library that compiles them, its limits, and where a grammar lets an answer end.
Does not know: torch, requests, or how a token is drawn.

- `masks` walks the same guide over recorded tokens that the sampler walked when it drew them, so the sets are the same.
- A form is compiled once and kept; each answer goes on from a copy. A refusal is kept as well.
- Nothing a client writes may hold up the process. A new form is first compiled by a child (`proof`) that is killed when
  it takes too long or falls over; what a single token may cost is bounded by LIMITS.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from reef.core.errors import InputError
from reef.engines.local.layout import Layout, read_layout
from reef.engines.local.proof import Proof

KEPT = 64  # compiled forms, and as many refusals
TOLD = 300  # characters of the library's own words in a refusal
SPACE = r"\n? {0,16}"  # between the parts of JSON: a model that likes white space must not fill its answer with it
STUCK = "the form cannot be followed any further"
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,  # about 7 ms of one token
    step_max_items=20_000,  # about 5 ms of one token
    max_lexer_states=10_000,  # about 20 MB an answer
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)

Bits = NDArray[np.uint8]
"""[(V + 7) // 8]: token i is legal when bit i % 8 of byte i // 8 is set."""


class Guide:
    """Where one answer stands in its grammar. `bits` are the tokens that are legal now, the end of the turn among them
    exactly where the grammar may end."""

    __slots__ = ("_ends", "_matcher", "bits", "vocab")

    def __init__(self, matcher: LLMatcher, vocab: int, ends: tuple[int, ...], bits: Bits | None = None) -> None:
        self._matcher, self._ends, self.vocab = matcher, ends, vocab
        self.bits: Bits = np.empty(0, np.uint8) if bits is None else bits

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self.vocab, self._ends, self.bits)

    def take(self, token: int) -> bool:
        """Go on by a legal token that does not end the answer. True: the grammar is at its end, nothing can follow.

        Before the next token is drawn, `look`."""
        if not self._matcher.consume_token(token):
            raise InputError(f"{STUCK} after token {token}: {_told(self._matcher)}")
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def look(self) -> None:
        """Find the tokens that are legal now. InputError when the form is too complex here, or leaves none."""
        words = np.zeros((self.vocab + 31) // 32, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        open_ = self._matcher.is_accepting()
        bits = words.view(np.uint8)[: (self.vocab + 7) // 8]
        for end in self._ends:  # a grammar may name special tokens; where the answer ends is not its to say
            bits[end >> 3] &= ~np.uint8(1 << (end & 7))
            bits[end >> 3] |= np.uint8(open_ << (end & 7))
        if self._matcher.is_error() and not open_:
            raise InputError(f"{STUCK}: {_told(self._matcher)}")
        if not bits.any():
            raise InputError(f"{STUCK}: it leaves no token that could come next")
        self.bits = bits


class Grammars:
    """Compiles forms for one model. Methods may be called from any thread; they block for as long as compiling takes.

    `proof`: whether each new form is tried out in a child process first, as it must be where clients write them.
    """

    def __init__(self, folder: Path, layout: Layout, *, proof: bool = True) -> None:
        self._folder, self._vocab, self._ends = folder, layout.vocab, layout.ends
        self._proof = Proof(folder) if proof else None
        self._kept: OrderedDict[str, Guide | str] = OrderedDict()
        self._lock = threading.Lock()
        self._one = threading.Lock()  # compiling, one at a time
        self._tokenizer: LLTokenizer | None = None

    def close(self) -> None:
        if self._proof is not None:
            self._proof.close()

    def known(self, legal: str) -> Guide | None:
        """A fresh guide at once, when the form was compiled before. InputError when it was refused before."""
        with self._lock:
            found = self._kept.get(legal)
            if found is not None:
                self._kept.move_to_end(legal)
        if isinstance(found, str):
            raise InputError(found)
        return None if found is None else found.copy()

    def guide(self, legal: str) -> Guide:
        """A guide at the beginning of an answer. InputError when the form cannot be compiled."""
        with self._one:
            found = self.known(legal)
            if found is not None:
                return found
            made = self._make(legal)
            with self._lock:
                self._kept[legal] = made
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        if isinstance(made, str):
            raise InputError(made)
        return made.copy()

    def _make(self, legal: str) -> Guide | str:
        if self._proof is not None:
            refusal = self._proof.check(legal)
            if refusal:
                return refusal
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._folder, self._vocab, self._ends)
        return make(legal, self._tokenizer, self._vocab, self._ends)


def read_tokenizer(folder: Path, vocab: int, ends: tuple[int, ...]) -> LLTokenizer:
    try:
        return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=vocab, eos_token=list(ends))
    except Exception as error:  # the library raises what its own tokenizer library raised
        raise InputError(f"answers of this model cannot be limited: its tokenizer cannot be read ({error})") from None


def make(legal: str, tokenizer: LLTokenizer, vocab: int, ends: tuple[int, ...]) -> Guide | str:
    """A guide at the beginning, its first legal tokens known; or why there is none."""
    try:
        grammar = write(orjson.loads(legal))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return str(error)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return _told(matcher)
    guide = Guide(matcher, vocab, ends)
    try:
        guide.look()
    except InputError as error:
        return error.message
    return guide


def write(form: dict[str, Any]) -> str:
    """A form in the library's own notation. ValueError for one that it cannot hold."""
    if not isinstance(form, dict) or len(form) != 1:
        raise ValueError("a form is a JSON object with one entry")
    ((kind, value),) = form.items()
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(value)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        # As one expression: alternatives of a rule would each be looked at for every token.
        return LLMatcher.grammar_from_regex("|".join("".join(map(_plain, each)) for each in value))
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_pattern": SPACE})
    raise ValueError(f"no form is called {kind!r}")


def masks(legal: str, ids: Sequence[int], grammars: Grammars) -> NDArray[np.uint8]:
    """[T, (V + 7) // 8]: what was legal before each of an answer's T tokens, packed as `Bits`; see `unpack`.

    InputError for a form that cannot be compiled, and for tokens that are not an answer in it.
    """
    guide = grammars.guide(legal)
    found = np.empty((len(ids), len(guide.bits)), np.uint8)
    for place, token in enumerate(ids):
        found[place] = guide.bits
        if not found[place, token >> 3] >> (token & 7) & 1:
            raise InputError(f"token {place} of the answer ({token}) is not legal in the form it was recorded with")
        if place + 1 < len(ids):
            try:
                guide.take(token)
                guide.look()
            except InputError as error:
                raise InputError(f"after token {place}: {error.message}") from None
    return found


def unpack(bits: NDArray[np.uint8], vocab: int) -> NDArray[np.bool_]:
    """[..., V] of [..., (V + 7) // 8]."""
    return np.unpackbits(bits, axis=-1, count=vocab, bitorder="little").view(np.bool_)


def open_grammars(folder: Path) -> Grammars:
    """For a trainer: the forms it sees were compiled by an engine before they were recorded."""
    return Grammars(folder, read_layout(folder), proof=False)


def _plain(letter: str) -> str:
    """A regular expression of this letter alone."""
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def _told(matcher: LLMatcher) -> str:
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return said[:TOLD] or "it cannot be compiled"
