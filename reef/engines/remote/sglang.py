"""SGLang as an engine: its native API, prompts rendered here and sent as token ids, answers read back as chat.

Knows: SGLang's `/generate` and what manages its weights and LoRAs, as documented for 0.5.
Does not know: which server is asked for what (`pool`), how SGLang is started (docs/sglang.md).

`/generate` and not `/v1/chat/completions`: only the native call takes token ids and gives them back beside their
log-probs, so a prompt is exactly what is recorded. Calls of tools are taken out of the text as in the embedded engine.

- Every sampling field that changes the distribution is pinned: a model's generation_config has no say.
- The server's weight version is a label of ours. Each answer carries it; one with another label is an error.
- The adapter is asked for by name, and names are release ids, so nothing is ever loaded over another.
- NOT VERIFIED on a GPU: `tests/engines/remote/test_sglang.py -m sglang` does that, with a server of yours.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import orjson

from reef.core.errors import ContextError, EngineError, InputError, UpstreamError
from reef.core.nouns import Json, Sampling
from reef.engines import Ask
from reef.engines.local.chat import Chat, parse
from reef.engines.local.client import why_not
from reef.engines.local.text import Stream, Text
from reef.engines.local.tools import Sieve
from reef.engines.remote import BASE, Away, Common, Look, Request, Taken
from reef.engines.remote.door import Door
from reef.engines.remote.engine import RemoteEngine
from reef.engines.remote.native import UNKNOWN, Native, Part

HEALTH = 10.0  # seconds that a server may take to say what it is
MARK = "reef:"  # begins the weight version of weights that we gave
_BASE = f"{MARK}base"
UNVERIFIED = (
    "engine %s: kind sglang follows SGLang's documentation and was not run against a real server yet. Before you rely "
    "on it: REEF_SGLANG_URL=… REEF_SGLANG_MODEL=… pytest tests/engines/remote/test_sglang.py -m sglang (docs/sglang.md)"
)
_CUTS = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": None,
    "ignore_eos": False,
}
"""Fields that pass to the server and after which log-probs are not the model's own; each without effect."""
_NAMES = {"min_tokens": "min_new_tokens"}
_FORMS = {"json": "json_schema", "regex": "regex"}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options(Common):
    """How SGLang servers are used. See docs/sglang.md."""

    loras: int = 8
    base: str | None = None  # the base model's folder as the servers see it; by default that of their tokenizer
    priority: bool = False  # live requests before evaluation (SGLang: --enable-priority-scheduling)


class SglangEngine(RemoteEngine):
    """Engine over SGLang servers. `options` are those of `Options`."""

    def __init__(self, away: Away, **options: Any) -> None:
        given = Options(**options)
        shared = asdict(given)
        own = {name: shared.pop(name) for name in ("base", "priority", "max_tokens")}
        text = Text(away.folder)
        make = partial(Sglang, text=text, model=away.model, patience=given.patience, **own)
        super().__init__(away, make, **shared)
        log.warning(UNVERIFIED, away.name)


class Sglang:
    """One SGLang server; see `remote.Server`. `text` is the base model's; `base` its folder as the server sees it."""

    def __init__(
        self,
        door: Door,
        *,
        text: Text,
        model: str | None = None,
        base: str | None = None,
        priority: bool = False,
        max_tokens: int | None = None,
        patience: float = 300.0,
    ) -> None:
        self.door, self.url = door, door.url
        self._text, self._model, self._own = text, model, base
        self._priority, self._max_tokens, self._patience = priority, max_tokens, patience
        self._name = ""  # the base model's; a server that was given weights calls itself by their folder
        self._holds = BASE  # the set of full weights, when it was last asked or told
        self._first = "default"  # the version that it was started with
        self._context: int | None = None
        self._about = "/model_info"

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def look(self) -> Look:
        about = await self._info()
        listed = await self.door.call("GET", "/v1/models", seconds=HEALTH)
        cards = [card for card in listed.get("data", ()) if isinstance(card, dict)] if isinstance(listed, dict) else []
        cards.sort(key=lambda card: card.get("parent") is not None)  # the base first
        if not cards:
            return Look(models=())
        version, served = str(about.get("weight_version")), str(cards[0].get("id"))
        ours = version.startswith(MARK)
        if not self._name and not ours:
            self._first = version
        self._name = self._name or self._model or served
        # A version that is neither ours nor the one it was started with is of weights that somebody else gave it.
        self._holds = _set(version) if ours else BASE if version == self._first else f"?{version}"
        context = cards[0].get("max_model_len")
        self._context = context if isinstance(context, int) else None
        # Given weights, a server calls itself by their folder: its own name is gone.
        fresh = not ours and self._holds == BASE
        name = served if fresh and self._model is not None else self._name
        adapters = [str(card.get("id")) for card in cards[1:]]
        return Look((name, *adapters), None if fresh else self._holds, self._context)

    async def _info(self) -> dict[str, Any]:
        """What it says of its model. The call has another name in older versions."""
        try:
            found = await self.door.call("GET", self._about, seconds=HEALTH)
        except UpstreamError as error:
            if error.status != 404 or self._about != "/model_info":
                raise
            self._about = "/get_model_info"
            found = await self.door.call("GET", self._about, seconds=HEALTH)
        if not isinstance(found, dict) or "weight_version" not in found:
            raise EngineError(f"{self.url} does not say which weights it holds; it must be SGLang 0.5 or newer")
        return found

    async def encode(self, text: str) -> Sequence[int]:
        try:
            found = await self.door.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        except UpstreamError as error:
            if error.status not in (404, 405):
                raise
            raise EngineError(f"{self.url} has no /tokenize; it must be SGLang 0.5.4 or newer") from None
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list):
            raise EngineError(f"{self.url} did not make tokens of a text; look at its version")
        return tokens

    async def count(self, body: Mapping[str, Any]) -> int:
        return len(self._render(parse(orjson.dumps(body))))

    # --- weights ------------------------------------------------------------------------------------------------------

    async def put(self, kind: str, name: str, folder: str | None) -> None:
        if kind == "lora":
            assert folder is not None
            await self._load(name, folder)
        else:
            await self._swap(name, folder)

    async def drop(self, name: str) -> None:
        try:
            await self.door.call("POST", "/unload_lora_adapter", {"lora_name": name}, seconds=self._patience)
        except UpstreamError as error:
            if error.status != 400 or not UNKNOWN.search(error.message):
                raise

    async def _load(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self.door.call("POST", "/load_lora_adapter", body, seconds=self._patience)
        except UpstreamError as error:
            if error.status != 400 or "already loaded" not in error.message:
                raise self._unloaded(error, folder) from None
            # It may be somebody else's of that name, or ours from a folder that was elsewhere: ours, from now on.
            await self.drop(name)
            await self.door.call("POST", "/load_lora_adapter", body, seconds=self._patience)

    def _unloaded(self, error: UpstreamError, folder: str) -> EngineError:
        if "not enabled" in error.message:
            return EngineError(
                f"{self.url} takes no adapters: start it with --enable-lora --max-lora-rank 64 "
                "--lora-target-modules all"
            )
        return EngineError(f"{error.message}. Does it see {folder}? If by another name, set the option seen_as")

    async def _swap(self, name: str, folder: str | None) -> None:
        """Other weights under the base's name. The server itself waits until nothing runs, and lets nothing begin: no
        pause of ours, that could outlast us."""
        version = f"{MARK}{name}" if name != BASE else _BASE
        if folder is None:
            folder = self._own or (await self._info()).get("tokenizer_path")
        if not folder:
            raise EngineError(f"{self.url} does not say where its base model is; set the option base")
        body = {"model_path": folder, "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        try:
            found = await self.door.call("POST", "/update_weights_from_disk", body, seconds=self._patience)
        except UpstreamError as error:
            raise EngineError(
                f"{error.message}. Does it see {folder}? If by another name, set the option seen_as"
            ) from None
        if not isinstance(found, dict) or found.get("success") is not True:
            told = found.get("message") if isinstance(found, dict) else found
            raise EngineError(f"{self.url} did not take weights from {folder}: {str(told)[:300]}")
        about = await self._info()
        if about.get("weight_version") != version:
            raise EngineError(
                f"{self.url} took weights as {version!r}, and calls them {about.get('weight_version')!r}; "
                "look at its log"
            )
        self._holds = name

    # --- tokens -------------------------------------------------------------------------------------------------------

    async def rate(
        self, name: str, sequences: Sequence[Sequence[int]], starts: Sequence[int], priority: int = 1
    ) -> list[list[float]]:
        body: dict[str, Any] = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,  # also: what comes before this may be from the cache
            **self._adapter(name),
            **self._ranked(priority),
        }
        found = await self.door.call("POST", "/generate", body, seconds=self._patience)
        answers = _answers(found, len(sequences), self.url)
        return [
            _rated(answer["meta_info"].get("input_token_logprobs"), sequence, start, self.url)
            for answer, sequence, start in zip(answers, sequences, starts, strict=True)
        ]

    async def draw(self, name: str, tokens: Sequence[int]) -> tuple[int, float]:
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **self._adapter(name),
            **self._keyed(),
        }
        found = await self.door.call("POST", "/generate", body, seconds=self._patience)
        (answer,) = _answers(found, 1, self.url)
        try:
            ((value, token, *_),) = answer["meta_info"]["output_token_logprobs"]
            return int(token), float(value)
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self.url} gave no token ids and log-probs; look at its version") from None

    def _adapter(self, name: str) -> dict[str, Json]:
        return {} if name == self._name else {"lora_path": name}

    def _keyed(self) -> dict[str, Json]:
        """Prefixes are cached for each set of full weights on its own, should a flush be missed."""
        return {} if self._holds == BASE else {"extra_key": self._holds}

    def _ranked(self, priority: int) -> dict[str, Json]:
        # SGLang's higher numbers go first, unless it was started with --schedule-low-priority-values-first.
        return {"priority": -priority} if self._priority else {}

    # --- answers ------------------------------------------------------------------------------------------------------

    def request(self, ask: Ask, name: str) -> Request:
        chat = parse(ask.body)
        given = orjson.loads(ask.body)
        prompt = self._render(chat)
        sampling = replace(chat.sampling, max_tokens=self._limit(chat, len(prompt)))
        params, changed = self._params(given, chat, sampling)
        seed = random.getrandbits(31) if sampling.seed is None else sampling.seed
        many = chat.choices > 1
        # Each choice has a seed of its own, also where none was asked for: a server that is deterministic would
        # otherwise give the same answer to the same prompt every time.
        drawn = [params | {"sampling_seed": (seed + at) % (1 << 63)} for at in range(chat.choices)]
        body: dict[str, Json] = {
            "input_ids": [prompt] * chat.choices if many else prompt,
            "sampling_params": drawn if many else drawn[0],
            "return_logprob": True,
            "top_logprobs_num": chat.top_logprobs,
            "stream": ask.stream,
            **self._adapter(name),
            **self._keyed(),
            **self._ranked(ask.priority),
        }
        options = given.get("stream_options")
        answer = Native(
            self.url,
            self._text,
            receipt=ask.receipt,
            model=name,
            versions=(_BASE, self._first) if self._holds == BASE else (f"{MARK}{self._holds}",),
            prompt=prompt,
            streamed=ask.stream,
            usage=isinstance(options, dict) and options.get("include_usage") is True,
            logprobs=chat.logprobs,
            parts=[Part(Sieve(chat.tools), Stream(self._text, sampling.stop)) for _ in range(chat.choices)],
        )
        return Request(
            path="/generate",
            body=orjson.dumps(body),
            sampling=sampling,
            logprobs=chat.logprobs,
            untrainable=why_not(sampling) or changed,
            state=answer,
        )

    def read(self, request: Request, chunk: Json) -> Taken:
        answer: Native = request.state
        return answer.take(chunk)

    def _render(self, chat: Chat) -> list[int]:
        text = self._text.render(chat.messages, chat.tools)
        return self._text.encode(text) if self._context is None else self._text.fit(text, self._context)

    def _limit(self, chat: Chat, length: int) -> int | None:
        """Most tokens of the answer: as asked, or what there is room for. ContextError when there is none."""
        wanted = chat.sampling.max_tokens or self._max_tokens
        if self._context is None:
            return wanted
        if (room := self._context - length - 1) < 1:
            raise ContextError(
                f"this model's context is {self._context} tokens; the messages (with tools) are {length} tokens. Send "
                "less, or use a model with a larger context",
                param="messages",
            )
        return room if wanted is None else min(wanted, room)

    def _params(self, given: Mapping[str, Any], chat: Chat, sampling: Sampling) -> tuple[dict[str, Json], str | None]:
        """How an answer is drawn, every field of it; and why its log-probs are not exact, if so."""
        changed: str | None = None
        params: dict[str, Json] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": False,
        }
        if sampling.max_tokens is not None:
            params["max_new_tokens"] = sampling.max_tokens
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        for name, plain in _CUTS.items():
            value = given.get(name)
            if value not in (None, plain, {}):
                params[_NAMES.get(name, name)] = value
                changed = changed or f"{name}: the distribution was changed, and what was left of it was not stored"
            elif plain is not None:
                params[_NAMES.get(name, name)] = plain
        if sampling.temperature != 1.0:
            changed = changed or (
                f"temperature {sampling.temperature:g}: whether SGLang's log-probs are those at this temperature "
                "depends on how it was started"
            )
        if chat.form is not None:
            params |= _form(chat.form.text, chat.form.field)
            changed = changed or f"{chat.form.field}: the distribution was cut to a form by the server's own grammar"
        return params, changed


def _set(version: str) -> str:
    """The set of full weights that a version of ours names."""
    return BASE if version == _BASE else version.removeprefix(MARK)


def _form(text: str, field: str) -> dict[str, Json]:
    """A form of answers as SGLang takes it."""
    ((kind, form),) = orjson.loads(text).items()
    if kind == "choice":
        return {"regex": "|".join(f"({re.escape(each)})" for each in form)}
    if kind not in _FORMS:
        raise InputError(f"{field}.{kind} is not taken by SGLang; send json, regex or choice", param=field)
    return {_FORMS[kind]: orjson.dumps(form).decode() if kind == "json" else form}


def _answers(found: Json, count: int, url: str) -> list[dict[str, Any]]:
    listed = found if isinstance(found, list) else [found]
    if len(listed) != count or not all(
        isinstance(one, dict) and isinstance(one.get("meta_info"), dict) for one in listed
    ):
        raise EngineError(f"{url} answered with something that is no answer; look at its version")
    return listed


def _rated(given: Json, sequence: Sequence[int], start: int, url: str) -> list[float]:
    """The log-probs of a sequence's own tokens."""
    if not isinstance(given, list) or len(given) != len(sequence):
        raise EngineError(f"{url} did not rate the tokens it was given; look at its version")
    try:
        if [entry[1] for entry in given] != list(sequence):
            raise EngineError(f"{url} rated other tokens than it was given; look at its version")
        return [float(entry[0]) for entry in given[start:]]
    except (IndexError, TypeError, ValueError):
        raise EngineError(f"{url} rated tokens in a form that is not known; look at its version") from None
