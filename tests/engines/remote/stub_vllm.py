"""A server with vLLM's HTTP interface over a toy model: what its OpenAI server and its development mode answer.

After the documentation of vLLM 0.32: chat and text completions with token ids and log-probs, LoRAs at run time, pause
and resume, weights read again from a folder, prefix caching. What it keeps of the real server's manners:

- A LoRA's cached prefixes are found by its name, so loading another one in place under the same name leaves stale ones.
- New base weights leave the prefix cache as it is; `/reset_prefix_cache` says 200 and does nothing while requests run,
  unless it may start them anew.
- LoRAs beyond `loras` are dropped quietly and read again from their path when they are asked for.
- Log-probs are those before the temperature (`--logprobs-mode raw_logprobs`, its default).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.engines.remote.brain import digest
from tests.engines.remote.stub import DONE, Drawn, Refused, Reply, Said, Seen, Stub, Wish


@dataclass(slots=True)
class Lora:
    """A LoRA as the server knows it; `weights` is None once it was dropped from memory."""

    name: str
    path: str
    weights: str | None


class VllmStub(Stub):
    """`runtime_lora`: VLLM_ALLOW_RUNTIME_LORA_UPDATING. `dev`: VLLM_SERVER_DEV_MODE. `priorities`: whether requests may
    have one. `raw`: log-probs before the temperature."""

    def __init__(
        self,
        folder: Path,
        *,
        runtime_lora: bool = True,
        dev: bool = True,
        loras: int = 8,
        max_rank: int = 16,
        priorities: bool = False,
        raw: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.max_loras, self.max_rank, self.priorities, self.raw = loras, max_rank, priorities, raw
        self.routes = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/load"): self._load,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }
        if runtime_lora:
            self.routes |= {
                ("POST", "/v1/load_lora_adapter"): self._load_lora,
                ("POST", "/v1/unload_lora_adapter"): self._unload_lora,
            }
        if dev:
            self.routes |= {
                ("POST", "/pause"): self._pause,
                ("POST", "/resume"): self._resume,
                ("GET", "/is_paused"): self._is_paused,
                ("GET", "/is_sleeping"): self._is_sleeping,
                ("POST", "/collective_rpc"): self._rpc,
                ("POST", "/reset_prefix_cache"): self._reset,
                ("GET", "/server_info"): self._server_info,
                ("GET", "/weight_info"): self._weight_info,
                ("POST", "/update_weight_version"): self._update_version,
            }

    def fresh(self) -> None:
        super().fresh()
        self.loras: dict[str, Lora] = {}
        self.version = "default"

    def guard(self, seen: Seen) -> Reply | None:
        return super().guard(seen) if seen.path.startswith("/v1") else None

    # --- models -------------------------------------------------------------------------------------------------------

    def weights_of(self, lora: str | None) -> str:
        found = self.loras.get(lora or "")
        return f"{self.base}+{found.weights}" if found is not None and found.weights else self.base

    def cache_key(self, lora: str | None, salt: str | None) -> str:
        return f"{lora or ''}|{salt or ''}"

    async def _health(self, seen: Seen) -> Reply:
        return Reply(kind="text/plain")

    async def _version(self, seen: Seen) -> Reply:
        return Reply({"version": "0.32.0"})

    async def _load(self, seen: Seen) -> Reply:
        return Reply({"server_load": self.running})

    async def _models(self, seen: Seen) -> Reply:
        base = {"id": self.name, "root": str(self.folder), "parent": None, "max_model_len": self.brain.context}
        cards = [base, *({"id": each.name, "root": each.path, "parent": self.name} for each in self.loras.values())]
        common = {"object": "model", "created": 1, "owned_by": "vllm", "max_model_len": None, "permission": []}
        return Reply({"object": "list", "data": [common | card for card in cards]})

    async def _server_info(self, seen: Seen) -> Reply:
        return Reply({"vllm_config": f"model={str(self.folder)!r}, max_model_len={self.brain.context}"})

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _load_lora(self, seen: Seen) -> Reply:
        body = fields(seen)
        name, path, again = body.get("lora_name"), body.get("lora_path"), body.get("load_inplace") is True
        if not name or not path:
            raise wrong("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if name in self.loras and not again:
            raise wrong(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind="InvalidUserInput",
            )
        await asyncio.sleep(self.slow)
        self.loras[name] = Lora(name, path, self._read(name, path))
        self._drop()
        return Reply(f"Success: LoRA adapter '{name}' added successfully.", kind="text/plain")

    def _read(self, name: str, path: str) -> str:
        folder = Path(path)
        if not (folder / "adapter_config.json").is_file():
            raise wrong(f"Loading lora {name} failed: No adapter found for {path}", 404, "NotFoundError")
        rank = json.loads((folder / "adapter_config.json").read_bytes()).get("r", 0)
        if rank > self.max_rank:
            raise wrong(f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.", 500, "InternalServerError")
        try:
            return digest(folder)
        except OSError as error:
            raise wrong(str(error), 500, "InternalServerError") from None

    def _drop(self) -> None:
        """The oldest LoRAs leave memory; they stay listed."""
        held = [each for each in self.loras.values() if each.weights is not None]
        for each in held[: max(0, len(held) - self.max_loras)]:
            each.weights = None

    async def _unload_lora(self, seen: Seen) -> Reply:
        name = fields(seen).get("lora_name")
        if not name:
            raise wrong("'lora_name' needs to be provided to unload a LoRA adapter.", kind="InvalidUserInput")
        if name not in self.loras:
            raise wrong(f"The lora adapter '{name}' cannot be found.", 404, "NotFoundError")
        del self.loras[name]
        return Reply(f"Success: LoRA adapter '{name}' removed successfully.", kind="text/plain")

    async def _pause(self, seen: Seen) -> Reply:
        mode = seen.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return Reply(
                {"detail": [{"loc": ["query", "mode"], "msg": "Input should be 'abort', 'wait' or 'keep'"}]}, 422
            )
        if mode == "wait":
            await self.idle()
        self.going.clear()
        if mode == "abort":
            self.stop_all()
        if mode != "keep" and seen.query.get("clear_cache", "true") != "false":
            self.prefixes.clear()
        return Reply({"status": "paused"})

    async def _resume(self, seen: Seen) -> Reply:
        self.going.set()
        return Reply({"status": "resumed"})

    async def _is_paused(self, seen: Seen) -> Reply:
        return Reply({"is_paused": self.paused})

    async def _is_sleeping(self, seen: Seen) -> Reply:
        return Reply({"is_sleeping": False})

    async def _rpc(self, seen: Seen) -> Reply:
        body = fields(seen)
        if body.get("method") != "reload_weights":
            return Reply({"detail": "Missing 'method' in request body"}, 400)
        folder = Path(body.get("kwargs", {}).get("weights_path") or self.folder)
        await asyncio.sleep(self.slow)
        try:
            self.base = digest(folder)
        except OSError as error:
            raise wrong(
                f"Cannot find any model weights with `{folder}` ({error})", 500, "InternalServerError"
            ) from None
        return Reply({"results": [None]})

    async def _weight_info(self, seen: Seen) -> Reply:
        return Reply({"weight_version": self.version})

    async def _update_version(self, seen: Seen) -> Reply:
        self.version = str(fields(seen)["new_version"])
        return Reply({"success": True, "new_version": self.version})

    async def _reset(self, seen: Seen) -> Reply:
        if not self.running or seen.query.get("reset_running_requests") == "true":
            self.prefixes.clear()
        return Reply(kind="text/plain")

    # --- answers ------------------------------------------------------------------------------------------------------

    def _model(self, body: dict[str, Any]) -> str | None:
        """The LoRA that a request names; None for the base."""
        name = body.get("model")
        if not name or name == self.name:
            return None
        if name not in self.loras:
            raise wrong(f"The model `{name}` does not exist.", 404, "NotFoundError", "model")
        found = self.loras[name]
        if found.weights is None:
            found.weights = self._read(name, found.path)
        self.loras[name] = self.loras.pop(name)  # the latest used
        self._drop()
        return str(name)

    def _wish(self, body: dict[str, Any], prompt: list[int], limit: int | None) -> Wish:
        for token in prompt:
            if not 0 <= token < self.brain.vocab:
                raise wrong(f"Token id {token} is out of vocabulary", param="prompt")
        room = self.brain.context - len(prompt)
        if room < 1 or (limit is not None and limit > room):
            raise wrong(
                f"This model's maximum context length is {self.brain.context} tokens. However, you requested "
                f"{limit or 0} output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
                f"{len(prompt) + (limit or 0)} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                param="input_tokens",
            )
        if limit is not None and limit < 1:
            raise wrong(f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
        if body.get("priority") and not self.priorities:
            raise wrong(f"Got priority {body['priority']} but Priority scheduling is not enabled.")
        stops = body.get("stop") or []
        heat = 1.0 if body.get("temperature") is None else float(body["temperature"])
        if not 0 <= heat <= 2:
            raise wrong(f"temperature must be non-negative, got {heat}.", param="temperature")
        return Wish(
            heat=heat,
            top_p=1.0 if body.get("top_p") is None else float(body["top_p"]),
            top_k=max(0, body.get("top_k") or 0),
            limit=room if limit is None else limit,
            least=body.get("min_tokens") or 0,
            seed=body.get("seed"),
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            endless=body.get("ignore_eos") is True,
        )

    async def _prompt(self, body: dict[str, Any], lora: str | None, prompt: list[int]) -> tuple[Said, str, list[Any]]:
        """A prompt that was read. Requests for its log-probs read all of it anew."""
        while not self.going.is_set():
            await self.going.wait()
        said = Said(prompt, lora)
        key = self.cache_key(lora, body.get("cache_salt"))
        reads = await self.prefill(said, key, 0 if body.get("prompt_logprobs") is not None else None)
        self.prefixes.keep(key, prompt, reads)
        return said, key, reads

    def _prompt_scores(self, body: dict[str, Any], said: Said, reads: list[Any]) -> list[Any] | None:
        if body.get("prompt_logprobs") is None:
            return None
        found: list[Any] = []
        for token, (score, top) in zip(said.prompt, self.scores(reads, said, 0), strict=True):
            if score is None:
                found.append(None)
                continue
            pairs = {token: score, **dict(top[: body["prompt_logprobs"]])}
            found.append(
                {
                    str(each): {"logprob": value, "rank": rank + 1, "decoded_token": self.brain.text.piece(each)}
                    for rank, (each, value) in enumerate(pairs.items())
                }
            )
        return found

    async def _chat(self, seen: Seen) -> Reply:
        body = fields(seen)
        if not isinstance(body.get("messages"), list):
            raise wrong("1 validation error: {'type': 'missing', 'loc': ('body', 'messages')}")
        if body.get("stream") and body.get("prompt_logprobs") is not None:
            raise wrong("`prompt_logprobs` are not available when `stream=True`.")
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise wrong("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
        lora = self._model(body)
        prompt = self._render(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        wish = self._wish(body, prompt, limit)
        frame = {
            "id": f"chatcmpl-{seen.headers.get('X-Request-Id') or self.life}",
            "created": 1,
            "model": lora or self.name,
        }
        if body.get("stream"):
            return Reply(events=self._chat_stream(body, lora, prompt, wish, frame))
        said, choices, reads = await self._sequences(body, lora, prompt, wish)
        answers = []
        for index, (one, drawn) in enumerate(zip(said, choices, strict=True)):
            message = {"role": "assistant", "content": "".join(each.text for each in drawn), "refusal": None}
            answers.append(
                {
                    "index": index,
                    "message": message | {"annotations": None, "audio": None, "function_call": None, "reasoning": None},
                    "logprobs": self._public(body, drawn),
                    "finish_reason": drawn[-1].finish,
                    "stop_reason": drawn[-1].matched if isinstance(drawn[-1].matched, str) else None,
                    "token_ids": one.ids if body.get("return_token_ids") else None,
                }
            )
        whole = {**frame, "object": "chat.completion", "choices": answers, "usage": usage(said)}
        whole |= {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        whole |= {"prompt_logprobs": self._prompt_scores(body, said[0], reads)}
        return Reply(whole | {"prompt_token_ids": prompt if body.get("return_token_ids") else None})

    def _render(self, body: dict[str, Any]) -> list[int]:
        messages = []
        for message in body["messages"]:
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            messages.append({**message, "content": content or ""})
        text = self.brain.text.render(messages, None, generate=body.get("add_generation_prompt") is not False)
        return self.brain.text.encode(text)

    async def _sequences(
        self, body: dict[str, Any], lora: str | None, prompt: list[int], wish: Wish
    ) -> tuple[list[Said], list[list[Drawn]], list[Any]]:
        made = [await self._prompt(body, lora, prompt) for _ in range(body.get("n") or 1)]

        async def one(number: int) -> list[Drawn]:
            said, key, reads = made[number]
            self.said.append(said)
            lucky = seeded(wish, number)
            return [
                each
                async for each in self.draw(
                    said,
                    lucky,
                    key,
                    reads=reads,
                    scaled=not self.raw,
                    tops=tops(body),
                    of=body.get("logprob_token_ids") or (),
                )
            ]

        choices = await asyncio.gather(*(one(number) for number in range(len(made))))
        return [said for said, _, _ in made], [*choices], made[0][2]

    async def _chat_stream(
        self, body: dict[str, Any], lora: str | None, prompt: list[int], wish: Wish, frame: dict[str, Any]
    ) -> AsyncIterator[Any]:
        options, count = body.get("stream_options") or {}, body.get("n") or 1
        frame = {**frame, "object": "chat.completion.chunk"}
        made = [await self._prompt(body, lora, prompt) for _ in range(count)]
        for index in range(count):
            start = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            first = {**frame, "choices": [start]}
            yield first | ({"prompt_token_ids": prompt} if body.get("return_token_ids") else {})
        queue: asyncio.Queue[tuple[int, Drawn]] = asyncio.Queue()

        async def one(index: int) -> None:
            said, key, reads = made[index]
            self.said.append(said)
            lucky = seeded(wish, index)
            async for each in self.draw(
                said,
                lucky,
                key,
                reads=reads,
                scaled=not self.raw,
                tops=tops(body),
                of=body.get("logprob_token_ids") or (),
            ):
                queue.put_nowait((index, each))

        tasks = [asyncio.create_task(one(index)) for index in range(count)]
        try:
            left = count
            while left:
                index, drawn = await queue.get()
                left -= drawn.finish is not None
                choice = {"index": index, "delta": {"content": drawn.text}, "logprobs": self._public(body, [drawn])}
                choice |= {"finish_reason": drawn.finish}
                if drawn.finish is not None:
                    choice["stop_reason"] = drawn.matched if isinstance(drawn.matched, str) else None
                ids = [] if drawn.token is None else [drawn.token]
                yield {**frame, "choices": [choice | {"token_ids": ids if body.get("return_token_ids") else None}]}
            if options.get("include_usage"):
                yield {**frame, "choices": [], "usage": usage([said for said, _, _ in made])}
            yield DONE
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _public(self, body: dict[str, Any], drawn: list[Drawn]) -> Any:
        if not body.get("logprobs"):
            return None

        def scored(token: int, value: float) -> dict[str, Any]:
            piece = self.brain.text.tokenizer.decode([token], skip_special_tokens=False)
            return {"token": self._called(body, token), "logprob": value, "bytes": [*piece.encode()]}

        content = []
        for each in drawn:
            if each.token is not None:
                top = [scored(token, value) for token, value in each.top[: body.get("top_logprobs") or 0]]
                content.append({**scored(each.token, each.logprob), "top_logprobs": top})
        return {"content": content}

    async def _completions(self, seen: Seen) -> Reply:
        body = fields(seen)
        lora = self._model(body)
        given = body.get("prompt")
        if given is None:
            raise wrong("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        many = isinstance(given, list) and given and isinstance(given[0], list | str)
        prompts = [
            each if isinstance(each, list) else self.brain.text.encode(each) for each in (given if many else [given])
        ]
        if not all(prompts):
            raise wrong("The decoder prompt cannot be empty", param="prompt")
        limit = 16 if body.get("max_tokens") is None else body["max_tokens"]
        wishes = [self._wish(body, prompt, limit) for prompt in prompts]
        if body.get("stream"):
            raise wrong("this stub streams chats only")
        choices, everyone = [], list[Said]()
        for prompt, wish in zip(prompts, wishes, strict=True):
            said, drawn, reads = await self._sequences(body, lora, prompt, wish)
            everyone += said
            for one, tokens in zip(said, drawn, strict=True):
                choices.append(self._completed(body, len(choices), one, tokens, self._prompt_scores(body, one, reads)))
        frame = {"id": f"cmpl-{self.life}", "object": "text_completion", "created": 1, "model": lora or self.name}
        return Reply({**frame, "choices": choices, "usage": usage(everyone)})

    def _called(self, body: dict[str, Any], token: int) -> str:
        if body.get("return_tokens_as_token_ids") is True:
            return f"token_id:{token}"
        piece: str = self.brain.text.tokenizer.decode([token], skip_special_tokens=False)
        return piece

    def _completed(
        self, body: dict[str, Any], index: int, said: Said, drawn: list[Drawn], scores: list[Any] | None
    ) -> dict[str, Any]:
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = {
                "tokens": [self._called(body, each.token) for each in drawn if each.token is not None],
                "token_logprobs": [each.logprob for each in drawn if each.token is not None],
                "top_logprobs": [
                    {self._called(body, token): value for token, value in [*each.top, (each.token, each.logprob)]}
                    for each in drawn
                    if each.token is not None
                ],
                "text_offset": None,
            }
        return {
            "index": index,
            "text": "".join(each.text for each in drawn),
            "logprobs": logprobs,
            "finish_reason": drawn[-1].finish,
            "stop_reason": drawn[-1].matched if isinstance(drawn[-1].matched, str) else None,
            "token_ids": said.ids if body.get("return_token_ids") else None,
            "prompt_logprobs": scores,
            "prompt_token_ids": said.prompt if body.get("return_token_ids") else None,
        }

    async def _tokenize(self, seen: Seen) -> Reply:
        body = fields(seen)
        self._model(body)
        tokens = self._render(body) if "messages" in body else self.brain.text.encode(str(body.get("prompt", "")))
        return Reply({"count": len(tokens), "max_model_len": self.brain.context, "tokens": tokens, "token_strs": None})

    async def _detokenize(self, seen: Seen) -> Reply:
        ids = fields(seen).get("tokens") or []
        return Reply({"prompt": self.brain.text.tokenizer.decode(ids, skip_special_tokens=False)})


def fields(seen: Seen) -> dict[str, Any]:
    if not isinstance(seen.body, dict):
        raise wrong("[{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error'}]")
    return seen.body


def wrong(message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> Refused:
    return Refused(Reply({"error": {"message": message, "type": kind, "param": param, "code": status}}, status))


def usage(said: list[Said]) -> dict[str, Any]:
    prompt, made = len(said[0].prompt), sum(len(each.ids) for each in said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": said[0].cached},
    }


def seeded(wish: Wish, number: int) -> Wish:
    """Each of several answers has its own luck."""
    return wish if wish.seed is None else replace(wish, seed=wish.seed * 1000 + number)


def tops(body: dict[str, Any]) -> int:
    """How many likely tokens are told beside each that was drawn."""
    wanted = body.get("logprobs")
    return int(body.get("top_logprobs") or 0) if wanted is True else int(wanted or 0)
