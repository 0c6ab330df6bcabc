"""Every message that travels between Reef's own processes, and how it is put into bytes (msgpack).

    gateway, learner -> engine    Generate -> Begun, Delta*, Finished* ; Count -> Counted ; Load -> Loaded ;
                                  Rate -> Rated ; Ping -> Pong
    learner -> trainer            Step -> Progress*, Stepped ; Ping -> Pong
    gateway, cli -> learner       Wake -> Done ; Look -> Looked

A stream is any number of items and an end. Errors travel as (class name, message, param) and are raised again as the
same class of `core.errors`. Transport is in `core/rpc.py`; nothing here opens a socket.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every message; the class name is its tag on the wire."""


# --- engine -----------------------------------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Answer one chat request with the weights of one release. Streams Begun, then Deltas, then one Finished a choice.

    `body` is the chat-completions JSON (already rendered); sampling is read from it by the engine. `priority` 0 is
    live traffic; higher numbers wait for lower ones (evaluation, probe).
    """

    release_id: str
    body: bytes
    priority: int = 0


class Begun(Message, frozen=True):
    """The prompt was accepted. Nothing ran before this, so a refusal costs nothing."""

    prompt_ids: list[int]
    sampling: dict[str, Any]  # the fields of nouns.Sampling, as used
    model: str
    context_length: int
    quantised: str | None = None  # the engine's weights are kept in so few bits that answers of theirs do not train


class Delta(Message, frozen=True):
    """New text of one choice; `ids` and `logprobs` are the sampled tokens it came from (text may lag behind ids)."""

    choice: int
    text: str
    ids: list[int]
    logprobs: list[float]
    release_id: str  # the weights that sampled these tokens
    top: list[list[tuple[int, float]]] | None = None  # top log-probs per token, when asked for
    pieces: list[str] | None = None  # each token's own text, when log-probs were asked for
    top_pieces: list[list[str]] | None = None  # the texts of `top`


class Finished(Message, frozen=True):
    choice: int
    finish_reason: str  # stop | length
    cached: int = 0  # tokens of the prompt that were not computed for this choice: the cache had them


class Count(Message, frozen=True):
    """How many tokens the prompt of a chat request has. Every release has the same tokenizer and template."""

    body: bytes


class Counted(Message, frozen=True):
    """May be more than the context. A prompt of many megabytes is measured by its beginning."""

    tokens: int


class Load(Message, frozen=True):
    """Make a release resident before it is served."""

    release_id: str


class Loaded(Message, frozen=True):
    release_id: str
    seconds: float
    resident: list[str]


class Rate(Message, frozen=True):
    """Log-probabilities (natural log, temperature 1) of given tokens under one release, for drift guards.

    `sequences` are whole token sequences; the answer has, for each, one value per token from `starts[i]` on.
    """

    release_id: str
    sequences: list[list[int]]
    starts: list[int]


class Rated(Message, frozen=True):
    logprobs: list[list[float]]


# --- trainer ----------------------------------------------------------------------------------------------------------


class Datum(Message, frozen=True):
    """`nouns.Sample` on the wire."""

    tokens: list[int]
    prompt_length: int
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    record_id: str
    choice: int
    temperature: float
    lag: int
    group: str | None = None
    contexts: list[str] = []
    chat: str | None = None
    legal: str | None = None


class Step(Message, frozen=True):
    """Advance a line by one optimizer step. Idempotent: the same `batch_id` at the same step is answered from disk."""

    scenario: str
    part: str
    line: str
    step: int  # the step this makes: the working copy is at step - 1
    base_release: str  # the release the line started from
    base_step: int  # that release's step; step == base_step + 1 starts the line
    objective: str  # dotted path of a trainers.Objective
    options: dict[str, Any]  # its arguments (learning rate, epsilon, rank …)
    batch_id: str
    unit_ids: list[str]
    cursor: int  # the event log's place this batch was taken at
    data: list[Datum]


class Progress(Message, frozen=True):
    stage: str
    done: int
    total: int


class Stepped(Message, frozen=True):
    """The step is durable: `folder` holds state.json and the part's files."""

    step: int
    folder: str
    metrics: dict[str, float]
    reused: bool  # it was already there


# --- learner ----------------------------------------------------------------------------------------------------------


class Wake(Message, frozen=True):
    """Something changed for a scenario (a report came, a rollback was made): look now rather than at the next tick."""

    scenario: str


class Look(Message, frozen=True):
    """What the learner of a scenario is doing."""

    scenario: str | None = None


class Looked(Message, frozen=True):
    scenarios: dict[str, dict[str, Any]]
    webhook: dict[str, Any] | None = None  # None: there is none


# --- any --------------------------------------------------------------------------------------------------------------


class Ping(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    pid: int
    kind: str
    detail: dict[str, Any] = {}


class Done(Message, frozen=True):
    pass


Every = (
    Generate
    | Begun
    | Delta
    | Finished
    | Count
    | Counted
    | Load
    | Loaded
    | Rate
    | Rated
    | Step
    | Progress
    | Stepped
    | Wake
    | Look
    | Looked
    | Ping
    | Pong
    | Done
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame: the request's number, what it is, and a message, or an error's (class, message, param)."""

    number: int
    kind: str  # call | stream | cancel | item | end | reply | error
    message: Every | None = None
    error: tuple[str, str, str | None] | None = None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
