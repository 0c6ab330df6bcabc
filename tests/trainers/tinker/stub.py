"""The Tinker client's documented interface over a folder: a tiny model, really trained, and failures on demand.

It is what `Options.package` names in tests. `base_url` is the service's folder: `model` (the base, in Hugging Face's
layout), `runs/` (saved states), `calls.jsonl` (what was called), `faults.json` (what is to fail). Two clients of one
folder are two sessions of one service, so a service outlives the trainer that is killed.

`interface.py` compares the signatures with those of the real package, where that is installed.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save, save_file

from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora, pack

__version__ = "0.0-stub"
ALPHA = 32.0
"""The service's own."""


class TinkerError(Exception):
    pass


class APIError(TinkerError):
    pass


class APIStatusError(APIError):
    pass


class APIConnectionError(APIError):
    pass


class APITimeoutError(APIConnectionError):
    pass


class BadRequestError(APIStatusError):
    pass


class AuthenticationError(APIStatusError):
    pass


class PermissionDeniedError(APIStatusError):
    pass


class NotFoundError(APIStatusError):
    pass


class RateLimitError(APIStatusError):
    pass


class InternalServerError(APIStatusError):
    pass


class RequestFailedError(TinkerError):
    pass


# --- types ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInput:
    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(tuple(tokens))


class TensorData:
    def __init__(
        self,
        data: Any = None,
        dtype: Literal["float32", "int64"] | None = None,
        shape: list[int] | None = None,
        sparse_crow_indices: list[int] | None = None,
        sparse_col_indices: list[int] | None = None,
    ) -> None:
        assert dtype in ("float32", "int64")
        assert shape is None or shape == [len(data)]
        self.dtype, self.shape = dtype, shape
        self.data = torch.tensor(data, dtype=getattr(torch, dtype)).tolist()


INPUTS = ("target_tokens", "weights", "advantages", "logprobs")


@dataclass(frozen=True)
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.loss_fn_inputs.items():
            assert name in INPUTS
            assert len(value.data) == len(self.model_input.tokens), name


@dataclass(frozen=True)
class AdamParams:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class ForwardBackwardOutput:
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    path: str


@dataclass(frozen=True)
class Urls:
    urls: dict[str, str]


# --- clients ----------------------------------------------------------------------------------------------------------


class Folder:
    """A service's memory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def model(self) -> Llama:
        return Llama.load(self.root / "model", torch.float32)

    def begin(self, call: str, **said: Any) -> None:
        """Write the call down, and fail as `faults.json` ({call: [fault, …]}, "" for none) says."""
        with (self.root / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"call": call, **said}) + "\n")
        place = self.root / "faults.json"
        faults = json.loads(place.read_text()) if place.exists() else {}
        if not faults.get(call):
            return
        fault = faults[call].pop(0)
        place.write_text(json.dumps(faults))
        if fault == "hang":
            time.sleep(30)
        elif fault == "die":
            os._exit(9)
        elif fault:
            raise globals()[fault](f"told to fail, with the key {os.environ.get('REEF_TEST_TINKER_KEY')}")

    def place(self, path: str) -> Path:
        place = self.root / "runs" / path.removeprefix("tinker://")
        if not place.is_dir():
            raise NotFoundError(f"no {path}")
        return place


def later(made: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(made())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class ServiceClient:
    def __init__(self, user_metadata: dict[str, str] | None = None, project_id: str | None = None, **kwargs: Any):
        if not kwargs.get("api_key", "").startswith("tml-"):
            raise AuthenticationError(f"no such key: {kwargs.get('api_key')}")
        self._folder = Folder(Path(kwargs["base_url"]))
        self._folder.begin("connect")

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        self._folder.begin("create", base_model=base_model, rank=rank)
        if base_model != "tiny/base":
            raise BadRequestError(f"no model {base_model}")
        lora = Lora.fresh(self._folder.model, rank, ALPHA, seed or 0)
        return TrainingClient(self._folder, lora, Adam(lora.parameters(), 0.0))

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        self._folder.begin("open", path=path)
        place = self._folder.place(path)
        held = load_file(place / "state.safetensors")
        rank = json.loads((place / "adapter_config.json").read_text())["r"]
        adapter = load_file(place / "adapter_model.safetensors")
        lora = Lora.load(self._folder.model, adapter, rank, ALPHA)
        adam = Adam(lora.parameters(), 0.0)
        adam.restore(held)
        return TrainingClient(self._folder, lora, adam)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None, retry_config: Any = None
    ) -> SamplingClient:
        self._folder.begin("sampler", path=model_path)
        if model_path is None:
            return SamplingClient(self._folder, None)
        place = self._folder.place(model_path)
        rank = json.loads((place / "adapter_config.json").read_text())["r"]
        adapter = load_file(place / "adapter_model.safetensors")
        return SamplingClient(self._folder, Lora.load(self._folder.model, adapter, rank, ALPHA))

    def create_rest_client(self) -> RestClient:
        return RestClient(self._folder)


def logprobs_of(model: Llama, lora: Lora | None, tokens: list[int], targets: list[int]) -> torch.Tensor:
    hidden = model.hidden(pack([tokens]), lora)
    return model.logprobs(hidden, torch.tensor(targets), torch.ones(len(targets)))


class TrainingClient:
    def __init__(self, folder: Folder, lora: Lora, adam: Adam) -> None:
        self._folder, self._lora, self._adam = folder, lora, adam

    def _logprobs(self, data: list[Datum]) -> list[torch.Tensor]:
        return [
            logprobs_of(
                self._folder.model,
                self._lora,
                list(datum.model_input.tokens),
                datum.loss_fn_inputs["target_tokens"].data,
            )
            for datum in data
        ]

    def forward(self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None) -> Future[Any]:
        def run() -> ForwardBackwardOutput:
            self._folder.begin("forward", samples=len(data))
            with torch.no_grad():
                return _output(self._logprobs(data))

        return later(run)

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[Any]:
        def run() -> ForwardBackwardOutput:
            self._folder.begin("forward_backward", loss=loss_fn, config=loss_fn_config, samples=len(data))
            found = self._logprobs(data)
            whole = torch.zeros(())
            for datum, logprobs in zip(data, found, strict=True):
                whole = whole + loss_of(loss_fn, datum, logprobs, loss_fn_config or {})
            whole.backward()
            return _output([one.detach() for one in found])

        return later(run)

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: Any, *, loss_type_input: Literal["logprobs"] = "logprobs"
    ) -> Future[Any]:
        for datum in data:
            assert set(datum.loss_fn_inputs) <= {"target_tokens", "weights"}
        self._folder.begin("custom", samples=len(data))
        with torch.no_grad():
            leaves = self._logprobs(data)
        leaves = [one.clone().requires_grad_() for one in leaves]
        loss, _ = loss_fn(data, leaves)
        loss.backward()
        for one in leaves:
            if one.grad is None:
                raise ValueError("No gradient computed for logprob tensor")
        linear = [
            Datum(
                datum.model_input,
                {
                    "target_tokens": datum.loss_fn_inputs["target_tokens"],
                    "weights": TensorData((-one.grad).tolist(), "float32"),
                },
            )
            for datum, one in zip(data, leaves, strict=True)
        ]
        return self.forward_backward(linear, "cross_entropy")

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[Any]:
        def run() -> None:
            adam_params = optim_params
            assert adam_params is not None
            self._folder.begin("optim_step", rate=adam_params.learning_rate)
            adam = self._adam
            adam.rate, adam.clip = adam_params.learning_rate, adam_params.grad_clip_norm or float("inf")
            adam.betas, adam.weight_decay = (adam_params.beta1, adam_params.beta2), adam_params.weight_decay
            adam.step("policy")

        return later(run)

    def _save(self, kind: str, name: str) -> Saved:
        path = f"run/{kind}/{name}"
        place = self._folder.root / "runs" / path
        place.mkdir(parents=True)
        tensors = {name: one.detach().clone() for name, one in self._lora.parameters().items()}
        save_file(tensors, place / "adapter_model.safetensors")
        save_file(self._adam.state(), place / "state.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({"r": self._lora.rank, "lora_alpha": ALPHA}))
        return Saved(f"tinker://{path}")

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Future[Any]:
        def run() -> Saved:
            self._folder.begin("save_state", name=name, ttl=ttl_seconds)
            return self._save("weights", name)

        return later(run)

    def save_weights_external(self, name: str, ttl_seconds: int | None = None) -> Future[Any]:
        def run() -> Saved:
            self._folder.begin("save_weights", name=name, ttl=ttl_seconds)
            return self._save("external_weights", name)

        return later(run)


class SamplingClient:
    def __init__(self, folder: Folder, lora: Lora | None) -> None:
        self._folder, self._lora = folder, lora

    def compute_logprobs(self, prompt: ModelInput) -> Future[Any]:
        def run() -> list[float | None]:
            self._folder.begin("compute_logprobs")
            tokens = list(prompt.tokens)
            with torch.no_grad():
                found = logprobs_of(self._folder.model, self._lora, tokens[:-1], tokens[1:])
            return [None, *found.tolist()]

        return later(run)


class RestClient:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def get_external_weights_urls(self, tinker_path: str) -> Future[Any]:
        def run() -> Urls:
            self._folder.begin("urls", path=tinker_path)
            assert "/external_weights/" in tinker_path
            return Urls(_serve(self._folder, tinker_path))

        return later(run)


def loss_of(name: str, datum: Datum, logprobs: torch.Tensor, config: dict[str, float]) -> torch.Tensor:
    """The documented losses, each a sum over tokens."""
    given = {key: torch.tensor(value.data) for key, value in datum.loss_fn_inputs.items()}
    if name == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    ratio, advantages = (logprobs - given["logprobs"]).exp(), given["advantages"]
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    bounded = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    if name == "ppo":
        return -torch.minimum(ratio * advantages, bounded * advantages).sum()
    if name == "cispo":
        return -(bounded.detach() * logprobs * advantages).sum()
    raise BadRequestError(f"no loss {name}")


def _output(logprobs: list[torch.Tensor]) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData(one.tolist(), "float32", [len(one)])} for one in logprobs]
    return ForwardBackwardOutput("TorchLossReturn", outputs)


def _serve(folder: Folder, path: str) -> dict[str, str]:
    """Signed addresses, good for one fetch each, on a server of this process. What they give can be spoilt by a file
    `spoil.json` of the service's folder: {"config": …}, {"drop": n}, {"nan": 1}, {"wide": 1} or {"cut": bytes}."""
    place = folder.place(path)
    config = json.loads((place / "adapter_config.json").read_text())
    tensors = load_file(place / "adapter_model.safetensors")
    spoil = json.loads((folder.root / "spoil.json").read_text()) if (folder.root / "spoil.json").exists() else {}
    config |= spoil.get("config", {})
    if "drop" in spoil:
        tensors.pop(sorted(tensors)[spoil["drop"]])
    if "nan" in spoil:
        tensors[sorted(tensors)[0]][0, 0] = float("nan")
    if "wide" in spoil:
        tensors[sorted(tensors)[0]] = torch.zeros(3, 3)
    if "cut" in spoil:
        (folder.root / "spoil.json").unlink()
    bodies = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}
    secrets = {f"/{uuid.uuid4().hex}": name for name in bodies}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(secrets.get(self.path, ""), b"")
            self.send_response(200 if body else 403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: spoil.get("cut", len(body))])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)

    def serve() -> None:
        for _ in bodies:
            server.handle_request()
        server.server_close()

    threading.Thread(target=serve, daemon=True).start()
    return {name: f"http://127.0.0.1:{server.server_port}{secret}" for secret, name in secrets.items()}
