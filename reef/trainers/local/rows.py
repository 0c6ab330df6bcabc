"""From wire data to tensors: check every sample, split the batch into micro-batches, pack each.

Knows: what a trainable sample must look like, how a demonstration and a context become tokens, and how many tokens fit
at once. Does not know: losses or weights.

- The tokens of an answer are the recorded ids. Only what never was sampled is tokenised here, once: a demonstration
  (`Datum.chat`) and the prompts of contexts.
- A sample that cannot be trained is left out, with a sentence that says why; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from reef.core.errors import InputError, TrainError
from reef.core.wire import Datum
from reef.engines.local.chat import COLDEST, parse
from reef.engines.local.layout import Layout
from reef.engines.local.text import Text
from reef.trainers.local.llama import Packed, pack
from reef.trainers.local.objective import Rows, Total

MICRO_TOKENS = 2048
"""Packed tokens of one micro-batch: less than 1 MB of activations each on the embedded model."""
MICRO_TARGETS = 1024
"""Response tokens of one micro-batch: each costs rows of logits where a loss wants more than their log-probs."""
SHARED = 128
"""Prompt tokens that must be saved for answers to one prompt to have micro-batches of their own."""

LOWEST = -1e4
"""Log-prob. No sampler draws what is less likely than this; its ratio would leave float32, and the batch with it."""
HOTTEST = 1e4
GREATEST = 1e15
"""Reward, either way: its square must stay a float32."""

Legal = Callable[[str, Sequence[int]], Tensor]
"""(a grammar's JSON, n response ids) to [n, V] bool: what it allowed at each. InputError when it cannot tell."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What the base model's folder tells beyond its weights."""

    layout: Layout
    text: Callable[[], Text] | None = None  # chat template and tokenizer; only demonstrations and contexts ask for it
    legal: Legal | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """One sample, ready: its own tokens, and the ids of each context's prompt."""

    datum: Datum
    contexts: tuple[list[int], ...]
    legal: Tensor | None

    @property
    def prompt(self) -> list[int]:
        return self.datum.tokens[: self.datum.prompt_length]

    @property
    def response(self) -> list[int]:
        return self.datum.tokens[self.datum.prompt_length :]

    def behind(self, number: int) -> list[int]:
        """The prompt that stands before the response in context `number`."""
        return self.contexts[number] if number < len(self.contexts) else self.prompt

    @property
    def size(self) -> int:
        return max(map(len, (self.prompt, *self.contexts))) + len(self.response)


def build(
    data: Sequence[Datum], known: Layout | Known, *, tokens: int = MICRO_TOKENS, left_out: list[str] | None = None
) -> list[Rows]:
    """The batch as micro-batches, longest samples first. `left_out` is given a sentence for each sample that cannot be
    trained; TrainError, with the first of them, when no sample is left."""
    known = known if isinstance(known, Known) else Known(known)
    items, refused = [], []
    for datum in data:
        try:
            items.append(_item(datum, known))
        except InputError as error:
            refused.append(f"sample {datum.record_id}:{datum.choice} cannot be trained: {error.message}")
            log.warning("left out of the step: %s", refused[-1])
    if refused and not items:
        raise TrainError(refused[0])
    if left_out is not None:
        left_out += refused
    total = Total(len(items), sum(sum(item.datum.mask) for item in items))
    if total.tokens == 0:
        raise TrainError("the batch holds no trainable token; a step needs at least one")
    groups: list[list[_Item]] = []
    for kin in _kin(items):
        groups.append([])
        for item in kin:
            full = (
                sum(other.size for other in groups[-1]) + item.size > tokens
                or sum(len(other.response) for other in groups[-1]) + len(item.response) > MICRO_TARGETS
            )
            if full and groups[-1]:
                groups.append([])
            groups[-1].append(item)
    return [_rows(group, total, known.layout) for group in groups]


def _kin(items: Sequence[_Item]) -> list[list[_Item]]:
    """The samples, longest first, in lots that are packed by themselves: answers to one prompt, where computing it once
    for all of them saves enough, and then all others together."""
    lots: dict[tuple[int, ...], list[_Item]] = {}
    for item in sorted(items, key=lambda item: -item.size):
        lots.setdefault(tuple(item.prompt), []).append(item)
    apart = [lot for prompt, lot in lots.items() if len(prompt) * (len(lot) - 1) >= SHARED]
    known = {id(item) for lot in apart for item in lot}
    rest = sorted((item for item in items if id(item) not in known), key=lambda item: -item.size)
    return [*apart, *([rest] if rest else [])]


# --- one sample -------------------------------------------------------------------------------------------------------


def _item(datum: Datum, known: Known) -> _Item:
    """InputError, which says why, when the sample cannot be trained."""
    if datum.chat is not None:
        if datum.tokens:
            raise InputError("it has sampled tokens and a demonstration; it must have one of them")
        prompt, response = demonstration(datum.chat, _text(known), known.layout.ends)
        datum = msgspec.structs.replace(
            datum,
            tokens=prompt + response,
            prompt_length=len(prompt),
            mask=[1] * len(response),
            logprobs=[0.0] * len(response),
        )
    _check(datum, known.layout)
    response = datum.tokens[datum.prompt_length :]
    contexts = tuple(context(chat, _text(known)) for chat in datum.contexts)
    longest = max(map(len, contexts), default=0) + len(response)
    if longest > known.layout.context:
        raise InputError(f"it is {longest} tokens long behind a context; the model's limit is {known.layout.context}")
    return _Item(datum, contexts, _legal(datum, response, known))


def demonstration(chat: str, text: Text, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids) of a chat whose last message is the assistant's: the response is that message as the
    template writes it, up to and with the token that ends it. InputError when there is no such thing."""
    given = parse(chat.encode())
    *before, last = given.messages
    if last["role"] != "assistant" or not before:
        raise InputError("it is a demonstration whose last message is not the assistant's answer to another message")
    prompt = text.render(before, given.tools)
    whole = text.render(given.messages, given.tools, generate=False)
    if not whole.startswith(prompt):
        raise InputError("it is a demonstration, and the chat template writes an answer otherwise than it asks for one")
    response = text.encode(whole[len(prompt) :])
    found = [at for at, token in enumerate(response) if token in ends]
    if not found:
        raise InputError("it is a demonstration, and the chat template ends an answer with no end token of the model")
    if len(found) > 1:
        raise InputError("it is a demonstration with an end token inside its answer")
    return text.encode(prompt), response[: found[0] + 1]


def context(chat: str, text: Text) -> list[int]:
    """The prompt ids of a chat: all its messages, and the template's beginning of an answer."""
    given = parse(chat.encode())
    return text.encode(text.render(given.messages, given.tools))


def _text(known: Known) -> Text:
    if known.text is None:
        raise InputError("it needs the model's chat template, which this trainer was not given")
    return known.text()


def _legal(datum: Datum, response: list[int], known: Known) -> Tensor | None:
    """[n, V] bool. Each run of trained tokens is an answer of its own; what is observed is nobody's choice."""
    if datum.legal is None:
        return None
    if known.legal is None:
        raise InputError("it was sampled under a grammar, which this trainer cannot read")
    found = torch.ones(len(response), known.layout.vocab, dtype=torch.bool)
    at = 0
    for trained, run in groupby(datum.mask):
        end = at + len(list(run))
        if trained:
            found[at:end] = known.legal(datum.legal, response[at:end])
        at = end
    if not bool(found.gather(1, torch.tensor(response)[:, None]).all()):
        raise InputError("it holds a token that its grammar does not allow")
    return found


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
    elif not all(LOWEST <= one <= 1e-3 for one in datum.logprobs):
        wrong = f"has a log-prob that is not a number between {LOWEST:.0f} and 0"
    elif not COLDEST <= datum.temperature <= HOTTEST:
        wrong = f"was not sampled at a temperature between {COLDEST} and {HOTTEST:.0f}"
    elif datum.reward is not None and not abs(datum.reward) <= GREATEST:
        wrong = f"has a reward that is not a number between -{GREATEST:.0e} and {GREATEST:.0e}"
    if wrong:
        raise InputError(f"it {wrong}")


# --- one micro-batch --------------------------------------------------------------------------------------------------


def _rows(group: list[_Item], total: Total, layout: Layout) -> Rows:
    packed, predicts = _pack(group, [item.prompt for item in group])
    rows = Rows(
        packed=packed,
        predicts=predicts,
        targets=torch.tensor([token for item in group for token in item.response]),
        mask=torch.tensor([float(one) for item in group for one in item.datum.mask]),
        logprobs=torch.tensor([one for item in group for one in item.datum.logprobs], dtype=torch.float32),
        temperatures=torch.tensor([item.datum.temperature for item in group for _ in item.response]),
        lengths=tuple(len(item.response) for item in group),
        rewards=tuple(item.datum.reward for item in group),
        lags=tuple(item.datum.lag for item in group),
        total=total,
        groups=tuple(item.datum.group for item in group),
        legal=_allowed(group, layout),
    )
    contexts, taught = [], []
    for number in range(max(len(item.contexts) for item in group)):
        packed, predicts = _pack(group, [item.behind(number) for item in group])
        contexts.append(replace(rows, packed=packed, predicts=predicts, extra={}, passes={}))
        taught.append(torch.tensor([float(number < len(item.contexts)) for item in group for _ in item.response]))
    return replace(rows, contexts=tuple(contexts), taught=tuple(taught))


def _pack(group: list[_Item], prompts: list[list[int]]) -> tuple[Packed, Tensor]:
    """The samples behind these prompts, and where the states are that predict the response tokens."""
    sequences = [prompt + item.response for prompt, item in zip(prompts, group, strict=True)]
    packed = pack(sequences, share=min(map(len, prompts)) - 1)
    predicts: list[int] = []
    for start, prompt, item in zip(packed.starts, prompts, group, strict=True):
        # The state before token t predicts it; the last prompt token, never shared, predicts the first of the response.
        first = start + len(prompt) - packed.prefix - 1
        predicts.extend(range(first, first + len(item.response)))
    return packed, torch.tensor(predicts)


def _allowed(group: list[_Item], layout: Layout) -> Tensor | None:
    if all(item.legal is None for item in group):
        return None
    free = [torch.ones(len(item.response), layout.vocab, dtype=torch.bool) for item in group]
    return torch.cat([one if item.legal is None else item.legal for item, one in zip(group, free, strict=True)])
