"""Answers the engine's messages: Generate, Count, Load, Rate, Ping. Between the socket's loop and the model's thread.

Knows: wire messages, chat bodies, releases on the shelf, jobs for the scheduler.
Does not know: HTTP, receipts, or the answer's JSON (the client writes that).

- A refused request (bad field, prompt too long, unknown release) is refused before anything ran.
- Closing a stream early takes its jobs out before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reef.core import rpc, wire
from reef.core.errors import BusyError, ContextError, EngineError, InputError
from reef.engines import Resolver
from reef.engines.local.broadcast import Following
from reef.engines.local.chat import Chat, parse
from reef.engines.local.halves import halves
from reef.engines.local.layout import check, weight_files
from reef.engines.local.legal import Grammars, Guide
from reef.engines.local.lora import Resident, Shelf
from reef.engines.local.model import DTYPES, Model, Pack, load_weights, native
from reef.engines.local.quantised import packer
from reef.engines.local.sample import Draw
from reef.engines.local.scheduler import Ended, Event, Failed, Job, Sampled, Scheduler, Scored
from reef.engines.local.server import Options
from reef.engines.local.text import LONG, Stream, Text

if TYPE_CHECKING:
    from reef.engines.local.broadcast.receive import Receiver

ENCODERS = 2  # long prompts that are made into tokens at once; others wait, and are not begun once their client left
FORMS = 64  # new forms of answers that wait to be compiled; a queue of hostile ones must not be long
PROBE = 60.0  # seconds in which a release that was loaded must give a token
COUNTED = 1 << 18  # characters of a prompt that are made into tokens only to be counted
log = logging.getLogger(__name__)


def kept(options: Options) -> tuple[torch.dtype, Pack | None]:
    """What is computed in, and how linears are kept when not in that."""
    dtype = native() if options.dtype == "auto" else DTYPES[options.dtype]
    if options.quantised:
        return dtype, packer(options.quantised, dtype)
    return dtype, halves if options.dtype == "auto" and dtype == torch.float32 else None


class Service:
    """The engine without its socket. `start` and `close` belong to one event loop."""

    def __init__(self, folder: Path, resolve: Resolver, options: Options, following: Following | None = None) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        layout = check(folder)
        dtype, pack = kept(options)
        self._options = options
        self._name = options.model or folder.name
        self._context = min(options.context, layout.context)
        self._vocab = layout.vocab
        self._text = Text(folder)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="tokens")
        self._grammars = Grammars(folder, layout)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._compiling = 0
        base = load_weights(weight_files(folder), layout, dtype, pack=pack)
        self._model = Model(layout, options.slots, self._context, dtype)
        self._receiver = _receiver(following, options)
        self._shelf = Shelf(
            base, layout, dtype, resolve, loras=options.loras, full=options.full, digest=options.digest,
            arrivals=self._receiver.arrivals if self._receiver else None,
            recorded=following.recorded if following else None,
            pack=pack,
        )  # fmt: skip
        self._scheduler = Scheduler(self._model, self._text, self._deliver, share=options.share)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()
        if self._receiver is not None:
            self._receiver.start()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._scheduler.stop()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    def handle(self, message: wire.Message) -> Awaitable[wire.Message] | AsyncIterator[wire.Message]:
        if isinstance(message, wire.Generate):
            return self._generate(message)
        if isinstance(message, wire.Count):
            return self._count(message)
        if isinstance(message, wire.Load):
            return self._load(message)
        if isinstance(message, wire.Rate):
            return self._rate(message)
        if isinstance(message, wire.Ping):
            return self._ping()
        raise InputError(f"the engine does not answer {type(message).__name__}")

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        """Called by the model's thread: one crossing into the event loop per step, not per token."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(_hand_out, events)

    async def _generate(self, message: wire.Generate) -> AsyncIterator[wire.Message]:
        if len(message.body) < LONG:
            chat, prompt = self._read(message.body)
        else:
            loop = asyncio.get_running_loop()
            chat, prompt = await loop.run_in_executor(self._encoders, self._read, message.body)
        limit = self._limit(chat, len(prompt))
        if self._scheduler.waiting + chat.choices > self._options.queue:
            raise BusyError(f"{self._options.queue} answers are waiting for the engine; try again later")
        guide = await self._guide(chat)
        resident = await self._shelf.take(message.release_id)
        jobs: list[Job] = []
        try:
            sampling = dataclasses.replace(chat.sampling, max_tokens=limit)
            yield wire.Begun(
                prompt_ids=prompt,
                sampling=dataclasses.asdict(sampling),
                model=self._name,
                context_length=self._context,
                quantised=self._options.quantised,
            )
            events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
            for choice in range(chat.choices):
                jobs.append(
                    Job(
                        prompt=prompt,
                        resident=resident,
                        priority=message.priority,
                        sink=lambda event, choice=choice: events.put_nowait((choice, event)),  # type: ignore[misc]
                        draw=_draw(chat, choice),
                        limit=limit,
                        stream=Stream(self._text, chat.sampling.stop),
                        pieces=chat.logprobs,
                        guide=None if guide is None else guide.copy(),
                        after=jobs[0] if jobs else None,
                    )
                )
            self._scheduler.submit(jobs)
            left = chat.choices
            while left:
                choice, event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Sampled):
                    yield self._delta(choice, event, resident.release_id, chat)
                elif isinstance(event, Ended):
                    left -= 1
                    yield wire.Finished(choice=choice, finish_reason=event.reason, cached=jobs[choice].cached)
        finally:
            for job in jobs:
                self._scheduler.cancel(job)
            self._shelf.give(resident)

    async def _guide(self, chat: Chat) -> Guide | None:
        """The beginning of a limited answer, compiled beside the model's thread. InputError: its form is refused."""
        if chat.form is None:
            return None
        try:
            found = self._grammars.known(chat.form.text)
            if found is not None:
                return found
            if self._compiling >= FORMS:
                raise BusyError(f"{FORMS} new forms of answers wait to be compiled; try again later")
            self._compiling += 1
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._compiler, self._grammars.guide, chat.form.text)
            finally:
                self._compiling -= 1
        except InputError as error:
            field = chat.form.field
            raise InputError(f"{field} cannot be used: {error.message}", param=field) from None

    def _delta(self, choice: int, event: Sampled, release_id: str, chat: Chat) -> wire.Delta:
        return wire.Delta(
            choice=choice,
            text=event.text,
            ids=[event.token],
            logprobs=[event.logprob],
            release_id=release_id,
            top=[event.top] if chat.top_logprobs else None,
            pieces=None if event.piece is None else [event.piece],
            top_pieces=[[self._text.piece(token) for token, _ in event.top]] if chat.top_logprobs else None,
        )

    def _read(self, body: bytes) -> tuple[Chat, list[int]]:
        """A request and its prompt's tokens. Refuses what cannot fit before it costs much."""
        chat = parse(body)
        if len(chat.messages) > self._context:
            raise ContextError(
                f"this model's context is {self._context} tokens; these are {len(chat.messages)} messages. Send fewer",
                param="messages",
            )
        prompt = self._text.fit(self._text.render(chat.messages, chat.tools), self._context)
        if not prompt:
            raise InputError("the model's chat template makes no tokens of these messages", param="messages")
        if max(prompt) >= self._vocab:  # a token that was added to the tokenizer and not to the weights
            raise InputError(
                f"a message makes token {max(prompt)}, which the tokenizer has and the model has not; leave it out",
                param="messages",
            )
        return chat, prompt

    async def _count(self, message: wire.Count) -> wire.Message:
        if len(message.body) < LONG:
            return wire.Counted(tokens=self._measure(message.body))
        loop = asyncio.get_running_loop()
        return wire.Counted(tokens=await loop.run_in_executor(self._encoders, self._measure, message.body))

    def _measure(self, body: bytes) -> int:
        """Tokens of a request's prompt. Past COUNTED characters by its beginning: far beyond any context here."""
        chat = parse(body)
        text = self._text.render(chat.messages, chat.tools)
        tokens = len(self._text.encode(text[:COUNTED]))
        return tokens if len(text) <= COUNTED else tokens * len(text) // COUNTED

    def _limit(self, chat: Chat, length: int) -> int:
        """Most tokens of the answer: as asked, or a bound; never past the context. ContextError when none is left."""
        if length >= self._context:
            raise ContextError(
                f"this model's context is {self._context} tokens; the messages (with tools) are {length} tokens. "
                "Send less, or use a model with a larger context",
                param="messages",
            )
        return min(chat.sampling.max_tokens or self._options.max_tokens, self._context - length)

    async def _load(self, message: wire.Load) -> wire.Message:
        started = asyncio.get_running_loop().time()
        resident = await self._shelf.take(message.release_id)
        try:
            await self._probe(resident)
        finally:
            self._shelf.give(resident)
        seconds = asyncio.get_running_loop().time() - started
        return wire.Loaded(release_id=message.release_id, seconds=seconds, resident=self._shelf.ids())

    async def _probe(self, resident: Resident) -> None:
        """One token through the weights, ahead of all that waits: what is loaded answers. EngineError when it does
        not; BusyError when long answers left it no slot."""
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = Job([0, 1], resident, -1, _into(future), start=1)
        try:
            self._scheduler.submit([job])
            async with asyncio.timeout(PROBE):
                found = await future
            if not math.isfinite(sum(found)):
                raise EngineError(f"release {resident.release_id} gives values that are not finite")
        except TimeoutError:
            if job.slot < 0:
                raise BusyError(
                    f"no answer ended within {PROBE:g} s, so all slots are taken; try again later"
                ) from None
            raise EngineError(f"release {resident.release_id} gave no token within {PROBE:g} s") from None
        finally:
            self._scheduler.cancel(job)

    async def _rate(self, message: wire.Rate) -> wire.Message:
        self._check_rate(message)
        resident = await self._shelf.take(message.release_id)
        jobs: list[Job] = []
        try:
            answers: list[asyncio.Future[list[float]]] = []
            for sequence, start in zip(message.sequences, message.starts, strict=True):
                future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
                answers.append(future)
                jobs.append(Job(list(sequence), resident, 1, _into(future), start=start))
            self._scheduler.submit(jobs)
            return wire.Rated(logprobs=list(await asyncio.gather(*answers)))
        finally:
            for job in jobs:
                self._scheduler.cancel(job)
            self._shelf.give(resident)

    def _check_rate(self, message: wire.Rate) -> None:
        if len(message.sequences) != len(message.starts):
            raise InputError("rate needs one start for each sequence", param="starts")
        for sequence, start in zip(message.sequences, message.starts, strict=True):
            if not 1 <= start < len(sequence):
                raise InputError(f"start {start} must be at least 1 and inside its sequence", param="starts")
            if len(sequence) > self._context:
                raise ContextError(f"a sequence of {len(sequence)} tokens; the context is {self._context}")
            if not all(0 <= token < self._vocab for token in sequence):
                raise InputError("a sequence holds a token that this model does not have", param="sequences")

    async def _ping(self) -> wire.Message:
        detail = {
            "model": self._name,
            "digest": self._options.digest,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "quantised": self._options.quantised,
            "slots": self._options.slots,
            "context": self._context,
            "running": self._scheduler.running,
            "waiting": self._scheduler.waiting,
            "resident": self._shelf.ids(),
            **({"arrivals": self._receiver.shown()} if self._receiver is not None else {}),
        }
        return wire.Pong(pid=os.getpid(), kind="engine", detail=detail)


def _receiver(following: Following | None, options: Options) -> Receiver | None:
    if following is None:
        return None
    from reef.engines.local.broadcast.arrivals import Arrivals
    from reef.engines.local.broadcast.receive import Receiver as Made

    return Made(following.place, Arrivals(options.arrival_bytes))


def _draw(chat: Chat, choice: int) -> Draw:
    """A choice's own random numbers: from the seed and its index alone, so neighbours in the batch change nothing."""
    sampling = chat.sampling
    numbers = random.Random() if sampling.seed is None else random.Random(f"{sampling.seed}/{choice}")
    return Draw(sampling.temperature, sampling.top_p, sampling.top_k, numbers, chat.top_logprobs)


def _hand_out(events: Sequence[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.sink(event)


def _into(future: asyncio.Future[list[float]]) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        if future.done():
            return
        if isinstance(event, Scored):
            future.set_result(event.logprobs)
        elif isinstance(event, Failed):
            future.set_exception(event.error)

    return sink


async def serve(listener: socket.socket, service: Service) -> asyncio.Server:
    """Answer on a listening unix socket. Closing: the server first, then the service."""
    service.start()
    return await rpc.serve(listener, service.handle)


def main(
    listener: socket.socket, folder: Path, resolve: Resolver, options: Options, following: Following | None = None
) -> None:
    """Load the model and serve until SIGTERM or SIGINT."""
    service = Service(folder, resolve, options, following)

    async def until_told() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = await serve(listener, service)
        log.info("the engine answers with %s", options.model or folder.name)
        await stop.wait()
        server.close()
        service.close()

    try:
        import uvloop
    except ImportError:
        asyncio.run(until_told())
    else:
        uvloop.run(until_told())
