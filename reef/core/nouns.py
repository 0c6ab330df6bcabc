"""The nouns, one meaning per word. Frozen and slotted; tuples and mappings are never changed after construction.

Record  one inference exchange          Report  feedback that quotes receipts
Event   an entry of the append-only log Unit    one thing a recipe can learn from
Batch   the units one step learns from  Candidate  a proposed new part, not served
Evaluation  a verdict and its evidence  Release an entry of the chain
Act     an entry of the journal of what was done to releases
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = Any
"""Opaque JSON that a provider or client sent: str, number, bool, None, list or dict."""

Purpose = Literal["live", "evaluation", "probe", "self"]
Status = Literal["open", "complete", "interrupted", "aborted", "failed", "rejected"]
PartName = Literal["weights", "harness"]
Verdict = Literal["accept", "reject", "undecided"]


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens [start, end) of one choice were sampled by this release."""

    release_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One assembled answer. Token fields are None when the engine gave none; otherwise all three have equal length."""

    index: int
    text: str
    finish_reason: str | None = None
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # natural log, at the sampling temperature
    spans: tuple[Span, ...] = ()
    message: Json = None  # the assistant message as answered, when it is more than text (tool calls)


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    legal: str | None = None  # JSON of the grammar that limited every token; log-probs are over what it allowed

    @property
    def plain(self) -> bool:
        """Whether samples are draws from the model's own (tempered) distribution, so that log-probs are exact. With a
        grammar they are: whoever knows it can tell what was legal at each token."""
        return self.temperature > 0 and self.top_p >= 1.0 and self.top_k == 0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Unix seconds of arrival; then seconds from arrival. None: not measured.

    queued: the engine was asked. first: its first byte came. last: its answer was whole (or broke off).
    """

    received_at: float
    queued: float | None = None
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One inference exchange. `request` is the client's body, byte for byte; `rendered` what the engine got instead.

    `choices` are in chat terms in every dialect. `reply` is the answer as a JSON object of its own dialect, where that
    tells more than the choices do (responses, messages). `answer_id` is the id inside a provider's answer.
    """

    id: str
    scenario: str
    release_id: str
    purpose: Purpose
    dialect: str
    status: Status
    request: bytes
    timing: Timing
    rendered: bytes | None = None
    reply: bytes | None = None
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    model_asked: str | None = None
    model_answered: str | None = None
    session: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    client: str | None = None
    upstream_id: str | None = None
    answer_id: str | None = None
    error: str | None = None
    untrainable: str | None = None  # why no choice of this record can train on policy; None: it can
    owner: str | None = None  # the process incarnation that opened it

    @property
    def caller(self) -> str:
        """Who asked, as far as one can tell: the token's name (tag `token`) and the client program."""
        return f"{self.tags.get('token', '')}/{self.client or ''}"


@dataclass(frozen=True, slots=True)
class Report:
    """Feedback that quotes receipts. A missing score is None, never zero."""

    id: str
    scenario: str
    references: tuple[str, ...]
    created_at: float
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_receipt: Mapping[str, float] = field(default_factory=dict)
    feedback: Json = None
    choice: int | None = None
    demonstration: Json = None
    metadata: Json = None

    def score_of(self, receipt: str) -> float | None:
        """The score this report gives one receipt: its own in `per_receipt`, else the report's."""
        return self.per_receipt.get(receipt, self.score)


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the append-only log. Order is `seq`, never time."""

    seq: int
    kind: Literal["opened", "closed", "report", "instruction"]
    ref: str  # a receipt, a report id, or an instruction id
    scenario: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What a trainer sees of one answer: the recorded ids, never re-tokenised text.

    `tokens` is prompt plus response; `mask` and `logprobs` cover the response (mask 1: trained; 0: observation).
    A demonstration has no sampled tokens: `tokens`, `mask` and `logprobs` are empty and `chat` holds the whole
    exchange, which the trainer renders and tokenises once. Chats are JSON texts of `{"messages": […], "tools": […]}`.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float | None
    record_id: str
    choice: int = 0
    temperature: float = 1.0
    lag: int = 0  # optimizer steps between the release that answered and the working weights
    group: str | None = None  # samples of one group are compared with each other (GRPO, a grid's parent state)
    contexts: tuple[str, ...] = ()  # chats that a teacher reads in place of the prompt; the response stays as it is
    chat: str | None = None  # a demonstration: a chat whose last message, the assistant's, is what is learnt
    legal: str | None = None  # the grammar that limited the response (`Sampling.legal`)


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing a recipe can learn from: a record's choice and the report on it. `id` is `<receipt>:<choice>`.

    Where the signal is the next message, `report` is made from it (see `experience.next`): its id is the receipt of the
    request that brought the message, `feedback` the text, `metadata` `{"role": "user" | "tool"}`.
    """

    id: str
    record: Record
    choice: int
    report: Report
    score: float | None
    sample: Sample | None  # None: not trainable on policy; `why` says why
    why: str | None = None
    lag: int | None = None
    seq: int = 0  # the report's place in the event log
    turns: tuple[str, ...] = ()  # ids of the units of earlier turns that `sample` holds too; they share its fate
    assessment: Json = None  # what the recipe's `assess` made of it


@dataclass(frozen=True, slots=True)
class Batch:
    """The units one step learns from. `id` is a digest of part and unit ids, so that a retry is recognised."""

    id: str
    part: PartName
    units: tuple[Unit, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guard:
    """One measured check: passed when `value` is within `limit`. `note` is a sentence for a person."""

    name: str
    passed: bool
    value: float | None
    limit: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What was asked to measure something. `money` is in the price table's currency; None: a price is not known."""

    calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0  # of waiting for answers, summed over the calls
    money: float | None = 0.0

    def __add__(self, other: Cost) -> Cost:
        money = None if self.money is None or other.money is None else self.money + other.money
        return Cost(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.seconds + other.seconds,
            money,
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    policy: str
    verdict: Verdict
    reason: str  # one sentence a person understands
    candidate_id: str
    incumbent_id: str
    guards: tuple[Guard, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    looks: int = 1
    seconds: float = 0.0
    suite: str | None = None  # what it was measured on: the suite's name and digest; None: no suite
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a release's line has learnt from: every event up to `cursor` was seen, and these units trained."""

    cursor: int = 0
    units: tuple[str, ...] = ()  # the units since the base release


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a release: a kind and files by name, each with its sha256 (hex) and size in bytes."""

    kind: str  # weights: base | lora | full; harness: tree
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    meta: Mapping[str, Json] = field(default_factory=dict)  # rank, alpha, base name and digest


Operation = Literal["create", "publish", "promote", "rollback", "candidate"]


@dataclass(frozen=True, slots=True)
class Release:
    """An entry of the chain; `id` is the git commit id, `seq` its number (0: the base). Candidates look alike."""

    id: str
    seq: int
    scenario: str
    operation: Operation
    parent: str | None
    parts: Mapping[PartName, Part]
    base: str | None  # the release the change started from; for a rollback, the release whose parts came back
    step: int  # optimizer steps along the ancestry, for the weights part
    line: str | None
    evaluation: Evaluation | None
    recipe: str | None
    consumed: Mapping[PartName, Consumed]
    actor: str
    reason: str
    created_at: float


Candidate = Release
"""A proposed release that is not served: a commit under its own ref, changing exactly one part of its base."""


ActKind = Literal[
    "release", "reject", "hold", "promote", "rollback", "pin", "unpin", "create", "archive", "restore",
    "measure", "alarm", "push", "prune", "budget", "trouble",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Act:
    """An entry of the journal: something that was done to a scenario's releases, by whom, and why.

    `ref` is the release or candidate it concerns. The chain and the audit rows are the truth; the journal tells people.
    """

    seq: int
    scenario: str
    kind: ActKind
    ref: str
    actor: str
    reason: str
    at: float  # unix seconds
    detail: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Serving:
    """What a scenario serves now. `epoch` grows by one with each flip."""

    scenario: str
    release_id: str
    epoch: int
