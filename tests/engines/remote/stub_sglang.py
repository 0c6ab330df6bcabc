"""A server with SGLang's HTTP interface over a toy model: its native `/generate` and what manages weights and LoRAs.

After the documentation and sources of SGLang 0.5 (native API, LoRA serving, SGLang for RL systems). What it keeps of
the real server's manners:

- `weight_version` is a label: what the server was told last, read when an answer's piece goes out.
- Weights change under a lock that waits until every answer is done and lets none begin, unless the server is paused.
  New weights flush the cache unless told otherwise; a flush is refused (400) while anything runs.
- LoRAs above `max_loaded` are unloaded, the least recently used first; one that was ever loaded is loaded again, from
  the path that it had, when a request names it. Names are never loaded over another.
- A stream's pieces hold all of the answer so far, or with `incremental` what is new. `n` above 1 makes a list.
- Log-probs of an answer are at its temperature, those of a prompt at 1. Seeds count only with `deterministic`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.engines.remote.brain import digest
from tests.engines.remote.stub import DONE, Drawn, Refused, Reply, Said, Seen, Stub, Wish

KNOWN = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias", "custom_params"),
    *("json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
    *("spaces_between_special_tokens", "stream_interval", "sampling_seed"),
}


@dataclass(slots=True)
class Lora:
    name: str
    path: str
    weights: str
    serial: int  # a new one each time that it is loaded


class SglangStub(Stub):
    """`lora`: --enable-lora. `max_loaded`: --max-loaded-loras. `incremental`: --incremental-streaming-output.
    `deterministic`: --enable-deterministic-inference. `late_errors`: a stream that is refused is 200 and an error
    event, as in older versions."""

    def __init__(
        self,
        folder: Path,
        *,
        lora: bool = True,
        max_loaded: int | None = None,
        max_rank: int = 64,
        incremental: bool = False,
        deterministic: bool = True,
        late_errors: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.late_errors = late_errors
        self.lora, self.max_loaded, self.max_rank = lora, max_loaded, max_rank
        self.incremental, self.deterministic = incremental, deterministic
        self.routes = {
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/v1/models"): self._models,
            ("POST", "/generate"): self._generate,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/tokenize"): self._tokenize,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/load_lora_adapter"): self._load_lora,
            ("POST", "/unload_lora_adapter"): self._unload_lora,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/update_weight_version"): self._update_version,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/flush_cache"): self._flush,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/abort_request"): self._abort,
        }

    def fresh(self) -> None:
        super().fresh()
        self.version = "default"
        self.model_path = str(self.folder)
        self.loras: dict[str, Lora] = {}
        self.known: dict[str, str] = {}  # paths of LoRAs that were ever loaded
        self._serial = 0
        self._updating = asyncio.Lock()
        self._inside = 0  # requests that hold the weights as they are
        self._empty = asyncio.Event()
        self._empty.set()

    def guard(self, seen: Seen) -> Reply | None:
        return None if seen.path in ("/health", "/health_generate", "/metrics") else super().guard(seen)

    def weights_of(self, lora: str | None) -> str:
        found = self.loras.get(lora or "")
        return f"{self.base}+{found.weights}" if found is not None and found.weights else self.base

    def cache_key(self, lora: str | None, salt: str | None) -> str:
        found = self.loras.get(lora or "")
        return f"{found.serial if found is not None else ''}|{salt or ''}"

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def _health(self, seen: Seen) -> Reply:
        return Reply(kind="text/plain")

    async def _model_info(self, seen: Seen) -> Reply:
        info = {"model_path": self.model_path, "tokenizer_path": str(self.folder), "is_generation": True}
        return Reply({**info, "preferred_sampling_params": None, "weight_version": self.version})

    async def _server_info(self, seen: Seen) -> Reply:
        args = {"model_path": self.model_path, "served_model_name": self.name, "enable_lora": self.lora}
        args |= {"max_loaded_loras": self.max_loaded, "context_length": self.brain.context, "version": "0.5.23"}
        return Reply({**args, "internal_states": [{}], "max_req_input_len": self.brain.context - 6})

    async def _models(self, seen: Seen) -> Reply:
        common = {"object": "model", "created": 1, "owned_by": "sglang"}
        base = {"id": self.name, "root": self.name, "parent": None, "max_model_len": self.brain.context}
        cards = [
            {"id": each.name, "root": each.path, "parent": self.name, "max_model_len": None}
            for each in self.loras.values()
        ]
        return Reply({"object": "list", "data": [common | card for card in [base, *cards]]})

    # --- weights ------------------------------------------------------------------------------------------------------

    def _loaded(self, error: str = "") -> Reply:
        names = {each.name: each.path for each in self.loras.values()}
        body = {"rid": None, "success": not error, "error_message": error or None, "loaded_adapters": names}
        return Reply(body, 400 if error else 200)

    async def _load_lora(self, seen: Seen) -> Reply:
        body = fields(seen)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not self.lora:
            return self._loaded("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if not isinstance(name, str) or not isinstance(path, str):
            raise wrong("2 validation errors: lora_name and lora_path are required")
        if name in self.loras:
            return self._loaded(f"Failed to load LoRA adapter {name}: LoRA adapter with name {name} already loaded.")
        await asyncio.sleep(self.slow)
        if error := self._take(name, path):
            return self._loaded(error)
        return self._loaded()

    def _take(self, name: str, path: str) -> str | None:
        """Loads a LoRA; what is wrong with it."""
        try:
            weights = digest(Path(path))
        except OSError as error:
            return f"Failed to load LoRA adapter {name}: {error}"
        self._serial += 1
        self.loras[name] = Lora(name, path, weights, self._serial)
        self.known[name] = path
        while self.max_loaded is not None and len(self.loras) > self.max_loaded:
            del self.loras[next(iter(self.loras))]
        return None

    async def _unload_lora(self, seen: Seen) -> Reply:
        name = fields(seen).get("lora_name")
        if name not in self.loras:
            return self._loaded(f"LoRA adapter with name {name} does not exist. Loaded LoRA adapters: {[*self.loras]}")
        del self.loras[name]
        return self._loaded()

    async def _update(self, seen: Seen) -> Reply:
        body = fields(seen)
        if not isinstance(body.get("model_path"), str):
            raise wrong("1 validation error: model_path is required")
        if body.get("abort_all_requests"):
            self.stop_all()
        async with self._updating:
            if not self.paused:
                await self._empty.wait()
            await asyncio.sleep(self.slow)
            folder = Path(body["model_path"])
            try:
                found = digest(folder)
            except OSError as error:
                return updated(False, f"Failed to get model config or weights: {error}. Roll back to original weights.")
            flush = body.get("flush_cache", True) is not False
            if flush and self.running and self.paused:
                return updated(False, "Cache flush failed after updating weights")
            self.base, self.model_path, self.name = found, body["model_path"], body["model_path"]
            if flush:
                self.prefixes.clear()
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.version = str(body["weight_version"])
            message += f" Weight version updated to {self.version}."
        return updated(True, message)

    async def _update_version(self, seen: Seen) -> Reply:
        body = fields(seen)
        if body.get("abort_all_requests", True):
            self.stop_all()
        self.version = str(body["new_version"])
        message = f"Weight version updated to {self.version}"
        return Reply({"success": True, "message": message, "new_version": self.version})

    async def _pause(self, seen: Seen) -> Reply:
        mode = (seen.body if isinstance(seen.body, dict) else {}).get("mode", "abort")
        self.going.clear()
        if mode == "abort":
            self.stop_all()
        return Reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, seen: Seen) -> Reply:
        self.going.set()
        return Reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, seen: Seen) -> Reply:
        if self.running:
            return Reply("Flush cache failed.\n", 400, "text/plain")
        self.prefixes.clear()
        return Reply("Cache flushed.\n", kind="text/plain")

    async def _abort(self, seen: Seen) -> Reply:
        self.stop_all()
        return Reply(kind="text/plain")

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        """Hold the weights as they are; wait while they change or the server is paused."""
        while self.paused:
            await self.going.wait()
        async with self._updating:
            self._inside += 1
            self._empty.clear()

    def _leave(self) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._empty.set()

    def _lora_of(self, body: dict[str, Any]) -> str | None:
        name = body.get("lora_path")
        if name is None:
            return None
        if not self.lora:
            raise wrong("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name not in self.loras:
            if name not in self.known:
                raise wrong(f"The following requested LoRA adapters have never been loaded: {{{name!r}}}.")
            if error := self._take(name, self.known[name]):
                raise wrong(error)
        self.loras[name] = self.loras.pop(name)  # the latest used
        return str(name)

    def _wish(self, params: dict[str, Any], prompt: list[int]) -> Wish:
        if strange := params.keys() - KNOWN:
            raise wrong(f"SamplingParams.__init__() got an unexpected keyword argument '{sorted(strange)[0]}'")
        if any(not 0 <= token < self.brain.vocab for token in prompt):
            raise wrong(f"The input_ids {prompt} contains values greater than the vocab size ({self.brain.vocab}).")
        if len(prompt) >= self.brain.context:
            raise wrong(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({self.brain.context} "
                "tokens)."
            )
        limit = params.get("max_new_tokens", 128)
        if len(prompt) + limit > self.brain.context:
            raise wrong(
                f"Requested token count exceeds the model's maximum context length of {self.brain.context} tokens. You "
                f"requested a total of {len(prompt) + limit} tokens: {len(prompt)} tokens from the input messages and "
                f"{limit} tokens for the completion."
            )
        heat = float(params.get("temperature", 1.0))
        if heat < 0:
            raise wrong(f"temperature must be non-negative, got {heat}.")
        top_k = params.get("top_k", -1)
        if top_k < -1 or top_k == 0:
            raise wrong(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        stops = params.get("stop") or []
        return Wish(
            heat=0.0 if heat < 1e-6 else heat,
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, top_k),
            limit=limit,
            least=params.get("min_new_tokens", 0),
            seed=params.get("sampling_seed", 42) if self.deterministic else None,
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            endless=params.get("ignore_eos") is True,
        )

    async def _generate(self, seen: Seen) -> Reply:
        body = fields(seen)
        try:
            return await self._begin(body)
        except Refused as refused:
            if not body.get("stream") or not self.late_errors:
                raise
            said = refused.reply.body

            async def told() -> AsyncIterator[Any]:
                yield said
                yield DONE

            return Reply(events=told())

    async def _begin(self, body: dict[str, Any]) -> Reply:
        params = body.get("sampling_params") or {}
        each = params if isinstance(params, list) else [params]
        given = body.get("input_ids")
        if given is None and isinstance(body.get("text"), str):
            given = self.brain.text.encode(body["text"])
        if not given:
            raise wrong("Either text, input_ids or input_embeds should be provided.")
        count = each[0].get("n", 1)
        alone = count == 1 and isinstance(given[0], int)
        prompts = [given] if isinstance(given[0], int) else given
        prompts = [prompt for prompt in prompts for _ in range(count)]
        each = [one for one in each for _ in range(count)] if isinstance(params, list) else each * len(prompts)
        wishes = [self._wish(one, prompt) for one, prompt in zip(each, prompts, strict=True)]
        lora = self._lora_of(body)
        starts = body.get("logprob_start_len")
        starts = starts if isinstance(starts, list) else [starts] * len(prompts)
        rid = str(body.get("rid") or f"rid-{self.life}-{len(self.seen)}")
        rows = [
            Row(index, rid if alone else f"{rid}_{index}", Said(prompt, lora), wish, -1 if start is None else start)
            for index, (prompt, wish, start) in enumerate(zip(prompts, wishes, starts, strict=True))
        ]
        if body.get("stream"):
            return Reply(events=self._stream(body, rows, alone))

        async def whole(row: Row) -> None:
            async for _ in self._make(body, row):
                pass

        await asyncio.gather(*map(whole, rows))
        found = [row.piece(self, body) for row in rows]
        return Reply(found[0] if alone else found)

    async def _make(self, body: dict[str, Any], row: Row) -> AsyncIterator[Drawn]:
        """The tokens of one sequence, the prompt read first."""
        await self._enter()
        try:
            start = len(row.said.prompt) - 1 if row.start < 0 else row.start
            key = self.cache_key(row.said.lora, body.get("extra_key"))
            reads = await self.prefill(row.said, key, start if body.get("return_logprob") else None)
            self.prefixes.keep(key, row.said.prompt, reads)
            self.said.append(row.said)
            row.version = self.version
            if body.get("return_logprob") and row.start >= 0:
                scores = self.scores(reads, row.said, row.start)
                row.input = [
                    [score if place else None, token, None]  # the first one that is told has no log-prob
                    for place, (token, (score, _)) in enumerate(zip(row.said.prompt[row.start :], scores, strict=True))
                ]
            if row.wish.limit == 0:
                row.finish = {"type": "length", "length": 0}
                return
            async for drawn in self.draw(
                row.said, row.wish, key, reads=reads, scaled=True, tops=body.get("top_logprobs_num") or 0
            ):
                row.take(drawn, self.version)
                yield drawn
        finally:
            self._leave()

    async def _stream(self, body: dict[str, Any], rows: list[Row], alone: bool) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Row | Refused] = asyncio.Queue()

        async def one(row: Row) -> None:
            async for _ in self._make(body, row):
                queue.put_nowait(row.copy() if self.incremental else row)
            if row.wish.limit == 0:
                queue.put_nowait(row)

        tasks = [asyncio.create_task(one(row)) for row in rows]
        sent = dict.fromkeys(range(len(rows)), (0, 0))
        try:
            left = len(rows)
            while left:
                row = await queue.get()
                if isinstance(row, Refused):
                    yield row.reply.body
                    break
                piece = row.piece(self, body)
                if self.incremental:
                    ids, text = sent[row.index]
                    sent[row.index] = (len(piece["output_ids"]), len(piece["text"]))
                    piece["output_ids"], piece["text"] = piece["output_ids"][ids:], piece["text"][text:]
                    if "output_token_logprobs" in piece["meta_info"]:
                        for name in ("output_token_logprobs", "output_top_logprobs"):
                            if name in piece["meta_info"]:
                                piece["meta_info"][name] = piece["meta_info"][name][ids:]
                elif row.finish is None and not queue.empty():
                    continue  # only the latest counts
                left -= row.finish is not None
                yield piece if alone else {**piece, "index": row.index}
                if not self.incremental and row.finish is not None:  # its earlier places in the queue say the same
                    pending = [queue.get_nowait() for _ in range(queue.qsize())]
                    for each in pending:
                        if isinstance(each, Refused) or each.index != row.index:
                            queue.put_nowait(each)
            yield DONE
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tokenize(self, seen: Seen) -> Reply:
        tokens = self.brain.text.encode(str(fields(seen).get("prompt", "")))
        return Reply({"tokens": tokens, "count": len(tokens), "max_model_len": self.brain.context})

    async def _chat(self, seen: Seen) -> Reply:
        """OpenAI's form, as far as Reef could ask for it: no token ids."""
        body = fields(seen)
        messages = [{**each, "content": each.get("content") or ""} for each in body.get("messages") or []]
        if not messages:
            raise wrong("messages must not be empty")
        prompt = self.brain.text.encode(self.brain.text.render(messages))
        params = {"max_new_tokens": body.get("max_tokens") or 128, "temperature": body.get("temperature", 1.0)}
        name = str(body.get("model") or "")
        lora = name.partition(":")[2] or body.get("lora_path")
        row = Row(0, "chat", Said(prompt, self._lora_of({"lora_path": lora})), self._wish(params, prompt), -1)
        async for _ in self._make(body, row):
            pass
        message = {"role": "assistant", "content": row.text}
        choice = {"index": 0, "message": message, "finish_reason": (row.finish or {}).get("type"), "logprobs": None}
        used = {"prompt_tokens": len(prompt), "completion_tokens": len(row.said.ids)}
        frame = {"id": "chat", "object": "chat.completion", "created": 1, "model": name, "choices": [choice]}
        return Reply({**frame, "usage": used, "metadata": {"weight_version": row.version}})


@dataclass(slots=True)
class Row:
    """One sequence of a request."""

    index: int
    rid: str
    said: Said
    wish: Wish
    start: int  # from where on the prompt's log-probs are wanted; -1: none
    text: str = ""
    version: str = ""
    finish: dict[str, Any] | None = None
    input: list[Any] | None = None
    output: list[Any] | None = None
    top: list[Any] | None = None
    count: int = 0

    def take(self, drawn: Drawn, version: str) -> None:
        self.output, self.top = self.output or [], self.top or []
        self.version = version
        self.text += drawn.text
        if drawn.token is not None:
            self.output.append([drawn.logprob, drawn.token, None])
            self.top.append([[value, token, None] for token, value in drawn.top])
            self.count += 1
        if drawn.finish == "stop":
            self.finish = {"type": "stop", "matched": drawn.matched}
        elif drawn.finish == "length":
            self.finish = {"type": "length", "length": self.wish.limit}
        elif drawn.finish == "abort":
            self.finish = {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}

    def copy(self) -> Row:
        return replace(self, output=[*(self.output or [])], top=[*(self.top or [])])

    def piece(self, stub: SglangStub, body: dict[str, Any]) -> dict[str, Any]:
        output = self.output or []
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.said.prompt),
            "weight_version": self.version,
            "total_retractions": 0,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = self.input or []
            meta["output_token_logprobs"] = [*output]
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [*(self.top or [])]
        meta |= {"completion_tokens": self.count, "cached_tokens": self.said.cached, "e2e_latency": 0.01}
        return {"text": self.text, "output_ids": [token for _, token, _ in output], "meta_info": meta}


def fields(seen: Seen) -> dict[str, Any]:
    if not isinstance(seen.body, dict):
        raise wrong("1 validation error: Input should be a valid dictionary or object to extract fields from")
    return seen.body


def wrong(message: str, status: int = 400) -> Refused:
    return Refused(Reply({"error": {"message": message}}, status))


def updated(success: bool, message: str) -> Reply:
    return Reply({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)
