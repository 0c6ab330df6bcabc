"""vLLM as an engine: its HTTP API, answers with token ids and log-probs, adapters by name, full weights reloaded.

Knows: vLLM's OpenAI server and its development calls (`collective_rpc`, `pause`, `weight_info`), as of 0.32.
Does not know: which server is asked for what (`pool`), how vLLM is started (docs/vllm.md).

- Every sampling field that changes the distribution is pinned in the body: a model's generation_config has no say.
- Log-probs are vLLM's own. They are exact where the whole distribution was drawn from: with a temperature other than 1
  only if vLLM was started with `--logprobs-mode processed_logprobs`, which is found out by asking.
- Given tokens are rated one by one, as next tokens: vLLM's prompt_logprobs do it in one pass, but end a server on CPUs
  that has adapters (the option `prompt_logprobs`).
- Full weights need the development calls, and take their prefixes along: the cache is emptied, and each set has a salt
  of its own. The server itself is told the name of the set that it holds
  (`update_weight_version`), and forgets it when it is started anew.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import orjson

from reef.core.errors import EngineError, InputError, UpstreamError
from reef.core.nouns import Json, Sampling
from reef.engines import Ask
from reef.engines.local.chat import check_stream, read_sampling
from reef.engines.local.client import why_not
from reef.engines.remote import BASE, Away, Common, Look, Request, Taken
from reef.engines.remote.door import Door
from reef.engines.remote.engine import RemoteEngine
from reef.engines.remote.untie import tied

HEALTH = 30.0  # seconds that a server may take to say that it is well
STEPS = 64  # tokens that are rated by one call
MARK = "reef:"  # begins the version that vLLM is told of full weights
LOADING = f"{MARK}?"  # while they are being loaded
_BASE = f"{MARK}base"
_DEV = (
    "full weights need vLLM's development calls: start it with VLLM_SERVER_DEV_MODE=1 (on a network of your own only), "
    "or train a LoRA"
)
_CUTS = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "logits_processors": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "structural_tag": None,
    "thinking_token_budget": None,
    "use_beam_search": False,
    "ignore_eos": False,
    "echo": False,
}
"""Fields after which log-probs are not those of the model's own distribution, and what each is without effect."""
_PLAIN = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}  # whatever the model's generation_config says
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Options(Common):
    """How vLLM servers are used. See docs/vllm.md."""

    priority: bool = False  # live requests before evaluation (vLLM: --scheduling-policy priority)
    prompt_logprobs: bool = (
        False  # rate a text in one pass; vLLM 0.32 on CPUs dies of it when it runs with --enable-lora
    )


class VllmEngine(RemoteEngine):
    """Engine over vLLM servers. `options` are those of `Options`."""

    def __init__(self, away: Away, **options: Any) -> None:
        given = Options(**options)
        shared = asdict(given)
        own = {name: shared.pop(name) for name in ("priority", "max_tokens", "prompt_logprobs")}
        super().__init__(away, lambda door: Vllm(door, patience=given.patience, **own), **shared)


class Vllm:
    """One vLLM server; see `remote.Server`."""

    def __init__(
        self,
        door: Door,
        *,
        priority: bool = False,
        max_tokens: int | None = None,
        prompt_logprobs: bool = False,
        patience: float = 300.0,
    ) -> None:
        self.door, self.url = door, door.url
        self._whole = prompt_logprobs
        self._priority, self._max_tokens, self._patience = priority, max_tokens, patience
        self._base = ""  # the name of its own weights
        self._root = ""  # where the weights that it was started with are, as it sees them
        self._device: str | None = None
        self._held: str | None = None  # the set of full weights that it said it holds when it was last looked at
        self._processed: bool | None = None  # whether log-probs are those of the tempered distribution; None: not asked

    async def look(self) -> Look:
        await self.door.call("GET", "/health", seconds=HEALTH)
        listed = await self.door.call("GET", "/v1/models", seconds=HEALTH)
        cards = [card for card in listed.get("data", ()) if isinstance(card, dict)] if isinstance(listed, dict) else []
        cards.sort(key=lambda card: card.get("parent") is not None)  # the base first
        self._held = await self._version()
        # While somebody loads weights, or died over it, it may be paused for good: it is not asked for answers.
        if self._processed is None and cards and self._held != LOADING.removeprefix(MARK):
            self._processed = await self._asked_mode(str(cards[0].get("id")))
        context = cards[0].get("max_model_len") if cards else None
        self._base = str(cards[0].get("id")) if cards else ""
        self._root = str(cards[0].get("root") or "") if cards else ""
        return Look(
            models=tuple(str(card.get("id")) for card in cards),
            holds=self._held,
            context=context if isinstance(context, int) else None,
        )

    async def put(self, kind: str, name: str, folder: str | None) -> None:
        if kind == "lora":
            await self._load(name, folder)
        else:
            await self._swap(name, folder)

    async def drop(self, name: str) -> None:
        try:
            await self.door.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, seconds=self._patience)
        except UpstreamError as error:
            if error.status != 404:
                raise

    async def rate(
        self, name: str, sequences: Sequence[Sequence[int]], starts: Sequence[int], priority: int = 1
    ) -> list[list[float]]:
        body: dict[str, Any] = {"model": name, "max_tokens": 1, "temperature": 1} | _PLAIN
        if self._priority:
            body["priority"] = priority
        if self._whole:
            return await self._rate_whole(body, sequences, starts)
        body["cache_salt"] = f"rate {uuid.uuid4().hex}"  # nothing that was cached before
        body |= {"return_tokens_as_token_ids": True, "logprobs": 1}
        rated: list[list[float]] = [[] for _ in sequences]
        places = [
            (number, place)
            for number, (sequence, start) in enumerate(zip(sequences, starts, strict=True))
            for place in range(start, len(sequence))
        ]
        for at in range(0, len(places), STEPS):
            some = places[at : at + STEPS]
            body["prompt"] = [list(sequences[number][:place]) for number, place in some]
            body["logprob_token_ids"] = sorted({sequences[number][place] for number, place in some})
            found = await self.door.call("POST", "/v1/completions", body, seconds=self._patience)
            for (number, place), choice in zip(some, _choices(found, len(some), self.url), strict=True):
                rated[number].append(_next(choice, sequences[number][place], self.url))
        return rated

    async def draw(self, name: str, tokens: Sequence[int]) -> tuple[int, float]:
        body = {"model": name, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "logprobs": 0}
        body |= {"return_token_ids": True} | _PLAIN | self._salt(name, None)
        found = await self.door.call("POST", "/v1/completions", body, seconds=self._patience)
        choice = _choices(found, 1, self.url)[0]
        try:
            return int(choice["token_ids"][0]), float(choice["logprobs"]["token_logprobs"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(f"{self.url} gave no token ids and log-probs; is it vLLM 0.10.2 or newer?") from None

    async def count(self, body: Mapping[str, Any]) -> int:
        fields = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        asked = {name: body[name] for name in fields if body.get(name) is not None}
        found = await self.door.call("POST", "/tokenize", asked)
        count = found.get("count") if isinstance(found, dict) else None
        if not isinstance(count, int):
            raise EngineError(f"{self.url} did not count the tokens; look at its version")
        return count

    async def encode(self, text: str) -> Sequence[int]:
        found = await self.door.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list):
            raise EngineError(f"{self.url} did not make tokens of a text; look at its version")
        return tokens

    def request(self, ask: Ask, name: str) -> Request:
        try:
            raw = _fields.decode(ask.body)
            given = {key: orjson.loads(bytes(value)) for key, value in raw.items() if key not in ("messages", "tools")}
        except (msgspec.DecodeError, orjson.JSONDecodeError):
            raise InputError("the body must be a JSON object with `messages`") from None
        if given.get("logprobs") is not None and not isinstance(given["logprobs"], bool):
            raise InputError("logprobs must be true or false", param="logprobs")
        check_stream(given)
        sampling = read_sampling(given)
        if sampling.max_tokens is None and self._max_tokens is not None:
            sampling = replace(sampling, max_tokens=self._max_tokens)
        pinned: dict[str, Json] = {
            "model": name,
            "stream": ask.stream,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "logprobs": True,
            "return_token_ids": True,
        }
        for key in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            if given.get(key) is None:
                pinned[key] = _CUTS[key]
        if given.get("top_logprobs") is None:
            pinned["top_logprobs"] = 0
        if sampling.max_tokens is not None:
            pinned["max_completion_tokens"] = sampling.max_tokens
            raw.pop("max_tokens", None)
        pinned |= self._salt(name, given.get("cache_salt"))
        raw.pop("priority", None)
        if self._priority:
            pinned["priority"] = ask.priority
        body = raw | {key: msgspec.Raw(orjson.dumps(value)) for key, value in pinned.items()}
        return Request(
            path="/v1/chat/completions",
            body=msgspec.json.encode(body),
            sampling=sampling,
            logprobs=given.get("logprobs") is True,
            untrainable=why_not(sampling) or self._cut(given, sampling),
            state=given.get("return_token_ids") is True,
        )

    def read(self, request: Request, chunk: Any) -> Taken:
        if not isinstance(chunk, dict):
            raise EngineError(f"{self.url} answered with something that is no answer; look at its log")
        keep = request.state
        prompt = chunk.get("prompt_token_ids") if keep else chunk.pop("prompt_token_ids", None)
        drawn, flaws = [], []
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            ids = (choice.get("token_ids") if keep else choice.pop("token_ids", None)) or []
            scored = choice.get("logprobs")
            content = (scored.get("content") if isinstance(scored, dict) else None) or []
            if not request.logprobs and "logprobs" in choice:
                choice["logprobs"] = None
            try:
                drawn.append((int(choice.get("index") or 0), [*map(int, ids)], [float(x["logprob"]) for x in content]))
            except (KeyError, TypeError, ValueError):
                flaws.append("the server gave log-probs in a form that is not known; look at its version")
        return Taken(chunk, prompt if isinstance(prompt, list) else None, drawn, flaws)

    # --- what it is asked beside answers ------------------------------------------------------------------------------

    async def _rate_whole(
        self, body: dict[str, Any], sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[float]]:
        """Whole sequences in one pass each."""
        asked = body | {"prompt": [list(sequence) for sequence in sequences], "prompt_logprobs": 0}
        found = await self.door.call("POST", "/v1/completions", asked, seconds=self._patience)
        choices = _choices(found, len(sequences), self.url)
        return [
            _rated(choice.get("prompt_logprobs"), sequence, start, self.url)
            for choice, sequence, start in zip(choices, sequences, starts, strict=True)
        ]

    async def _load(self, name: str, folder: str | None) -> None:
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self.door.call("POST", "/v1/load_lora_adapter", body, seconds=self._patience)
        except UpstreamError as error:
            if error.status == 400 and "already been loaded" in error.message:
                # Somebody else's, or ours of before: with it goes what was cached by its name.
                await self.drop(name)
                await self.door.call("POST", "/v1/load_lora_adapter", body, seconds=self._patience)
                with contextlib.suppress(UpstreamError):
                    await self.door.call("POST", "/reset_prefix_cache", seconds=self._patience)
            elif error.status in (404, 405) and b"adapter" not in (error.body or b""):
                raise EngineError(
                    f"{self.url} takes no adapters while it runs: start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                ) from None
            else:
                raise

    async def _swap(self, name: str, folder: str | None) -> None:
        """Other weights under the base's name. Requests that are not ours wait meanwhile."""
        await self._untied()
        try:
            await self._mark(LOADING)
        except UpstreamError as error:
            if error.status in (404, 405):
                raise EngineError(f"{self.url}: {_DEV}") from None
            raise
        await self.door.call("POST", "/pause?mode=wait", seconds=self._patience)
        try:
            # By name also for the base: without one it reads again what it read last.
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder or self._root}}
            await self.door.call("POST", "/collective_rpc", body, seconds=self._patience)
            await self.door.call("POST", "/reset_prefix_cache", seconds=self._patience)
        finally:
            await self.door.call("POST", "/resume", seconds=self._patience)
        await self._mark(f"{MARK}{name}" if name != BASE else _BASE)

    async def _untied(self) -> None:
        """EngineError for a server that would keep its old output layer, whatever it is given."""
        root = Path(self._root)
        try:
            if self._device not in (None, "cpu") or not tied(root):
                return
        except InputError:
            return  # not a folder that is seen here
        if self._device is None:
            try:
                found = await self.door.call("GET", "/server_info?config_format=json", seconds=self._patience)
                self._device = str(found["vllm_config"]["device_config"]["device"])
            except (UpstreamError, KeyError, TypeError):
                return
        if self._device == "cpu":
            raise EngineError(
                f"{self.url} runs on CPUs, where vLLM keeps the output layer that is tied to the embeddings: new full "
                f"weights would not reach it. Start it with a copy of its model (python -m reef.engines.remote.untie "
                f"{root} TARGET), or train a LoRA"
            )

    async def _mark(self, version: str) -> None:
        await self.door.call("POST", "/update_weight_version", {"new_version": version})

    async def _version(self) -> str | None:
        """The set of full weights that it was told it holds; None when it was told none, or cannot be."""
        try:
            found = await self.door.call("GET", "/weight_info", seconds=HEALTH)
        except UpstreamError as error:
            if error.status in (404, 405):
                return None
            raise
        version = found.get("weight_version") if isinstance(found, dict) else None
        if not isinstance(version, str) or not version.startswith(MARK):
            return None
        return BASE if version == _BASE else version.removeprefix(MARK)

    async def _asked_mode(self, name: str) -> bool:
        """Whether its log-probs are of the distribution as drawn from: a colder draw of a token has another one."""
        body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 20, "seed": 0} | _PLAIN
        tops = []
        for temperature in (1.0, 0.5):
            asked = body | {"temperature": temperature}
            found = await self.door.call("POST", "/v1/completions", asked, seconds=self._patience)
            try:
                (top,) = _choices(found, 1, self.url)[0]["logprobs"]["top_logprobs"]
            except (KeyError, TypeError, ValueError):
                return False
            tops.append(top)
        one, half = tops
        shared = [abs(one[token] - half[token]) for token in one if token in half and one[token] > -50]
        return bool(shared) and max(shared) > 0.05

    def _salt(self, name: str, given: Json) -> dict[str, Json]:
        """What keeps cached prefixes of one set of weights from answers of another, beside their removal: also of an
        adapter that somebody else once loaded by the same name."""
        salt = name if name != self._base else self._held
        if salt in (None, BASE):
            return {}
        return {"cache_salt": f"{salt} {given}" if isinstance(given, str) else salt}

    def _cut(self, given: Mapping[str, Any], sampling: Sampling) -> str | None:
        """Why log-probs of such a request are not exact."""
        if sampling.temperature != 1.0 and not self._processed:
            return (
                f"temperature {sampling.temperature:g}: vLLM's log-probs are those at temperature 1; start it with "
                "--logprobs-mode processed_logprobs"
            )
        for name, plain in _CUTS.items():
            value = given.get(name)
            if value not in (None, plain, [], {}):
                return f"{name}: the distribution was changed, and what was left of it was not stored"
        form = given.get("response_format")
        if isinstance(form, dict) and form.get("type") != "text":
            return "response_format: the distribution was cut to a form, and what was left of it was not stored"
        choice = given.get("tool_choice")
        if choice == "required" or isinstance(choice, dict):
            return "tool_choice: the distribution was cut to a call, and what was left of it was not stored"
        return None


def _choices(found: Json, count: int, url: str) -> list[dict[str, Any]]:
    listed = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(each, dict) for each in listed):
        raise EngineError(f"{url} answered with something that is no completion; look at its version")
    return sorted(listed, key=lambda each: each.get("index") or 0)


def _next(choice: Mapping[str, Any], token: int, url: str) -> float:
    """The log-prob of one token after a prompt."""
    try:
        return float(choice["logprobs"]["top_logprobs"][0][f"token_id:{token}"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise EngineError(
            f"{url} gave no log-prob of a token that it was asked for; is it vLLM 0.32 or newer?"
        ) from None


def _rated(given: Json, sequence: Sequence[int], start: int, url: str) -> list[float]:
    """The log-probs of a sequence's own tokens out of vLLM's table of each."""
    if not isinstance(given, list) or len(given) != len(sequence):
        raise EngineError(f"{url} did not rate the tokens it was given; look at its version")
    try:
        return [float(given[at][str(sequence[at])]["logprob"]) for at in range(start, len(sequence))]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{url} rated other tokens than it was given; look at its version") from None
