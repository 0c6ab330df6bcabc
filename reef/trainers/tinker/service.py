"""The service as this backend uses it: every call with a time limit, its failures as Reef's errors, weights fetched.

Knows: the documented interface of the client package, which of its errors pass by themselves, where the key is.
Does not know: objectives, steps, folders.

- A call waits in a thread of its own, so that it ends in time and a caller who left is noticed.
- `Transient` may pass; whoever made the call does not know whether the service has done it.
- The key is read from the environment, handed to the client, and taken out of whatever an error says.
"""

from __future__ import annotations

import http.client
import importlib
import json
import logging
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from safetensors.torch import load
from torch import Tensor

from reef.core.errors import ConfigError, ReefError, TrainError, UpstreamError
from reef.trainers.tinker import Options

LARGEST = 8 << 30
"""Bytes of a file, at most."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
PASSING = ("APIConnectionError", "APITimeoutError", "RateLimitError", "InternalServerError", "RequestFailedError")
OURS = {
    "AuthenticationError": "refused the key; set it in {key_env}",
    "PermissionDeniedError": "does not let this key do that; use another, in {key_env}",
    "BillingError": "has a question about the account; look at its console",
    "NotFoundError": "does not have what was asked for (a state that expired, or another account's); roll back to the "
    "base (reef rollback 0), or use the account that made it",
}
TOLD = 300  # characters of another's words

T = TypeVar("T")
log = logging.getLogger(__name__)


class Transient(Exception):
    """The service failed in a way that may pass."""


class Service:
    """One client. `package` is the client's module, of which types of data are made."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._key = os.environ.get(options.key_env, "")
        if not self._key:
            raise ConfigError(
                f"the key of the Tinker service is read from {options.key_env}, which is not set; export it where the "
                "server runs"
            )
        try:
            self.package = importlib.import_module(options.package)
        except ImportError as error:
            raise ConfigError(
                f"the client package {options.package} cannot be imported ({error}); install reef with the extra "
                "`tinker` (pip install 'reef-learn[tinker]') where the server runs"
            ) from None
        self._client: Any = None

    @property
    def version(self) -> str:
        return str(getattr(self.package, "__version__", "unknown"))

    def client(self, tick: Callable[[], None]) -> Any:
        if self._client is None:
            given: dict[str, Any] = {"api_key": self._key}
            if self._options.base_url:
                given["base_url"] = self._options.base_url
            self._client = self.call("connect", lambda: self.package.ServiceClient(**given), tick)
        return self._client

    def forget(self) -> None:
        """The next call connects anew."""
        self._client = None

    def call(self, what: str, made: Callable[[], Any], tick: Callable[[], None]) -> Any:
        """What a call gives; of a future, its result. `tick` is called while it waits and may raise to leave.

        Transient when it may pass; TrainError when the request was refused; UpstreamError for what a person must do.
        """
        end = time.monotonic() + self._options.seconds
        box: Future[Any] = Future()

        def run() -> None:
            try:
                found = made()
                result = getattr(found, "result", None)
                box.set_result(result(timeout=self._options.seconds) if callable(result) else found)
            except BaseException as error:
                box.set_exception(error)

        threading.Thread(target=run, name=f"tinker-{what}", daemon=True).start()
        while True:
            try:
                return box.result(timeout=min(0.5, max(0.01, end - time.monotonic())))
            except TimeoutError:
                if box.done():  # the client's own
                    raise Transient(f"{what}: no answer within {self._options.seconds:g} s") from None
                if time.monotonic() >= end:
                    raise Transient(f"{what}: no answer within {self._options.seconds:g} s") from None
                tick()
            except ReefError:
                raise
            except Exception as error:
                raise self._as_ours(what, error) from error

    def _as_ours(self, what: str, error: Exception) -> Exception:
        said = f"{what}: {type(error).__name__}: {self._clean(str(error))[:TOLD]}"
        for name, advice in OURS.items():
            if self._is(error, name):
                return UpstreamError(f"the Tinker service {advice.format(key_env=self._options.key_env)} ({said})")
        if any(self._is(error, name) for name in PASSING) or isinstance(error, OSError):
            return Transient(said)
        if self._is(error, "TinkerError"):
            return TrainError(f"the Tinker service refused the step ({said})")
        return error

    def _is(self, error: Exception, name: str) -> bool:
        kind = getattr(self.package, name, None)
        return isinstance(kind, type) and isinstance(error, kind)

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "[key]")

    def adapter(self, path: str, tick: Callable[[], None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The LoRA that the service exported to `path`, in PEFT's files: its tensors, and its adapter_config.json."""
        client = self.client(tick)
        rest = self.call("fetch", lambda: client.create_rest_client(), tick)
        urls = self.call("fetch", lambda: rest.get_external_weights_urls(path), tick).urls
        if missing := [file for file in FILES if file not in urls]:
            raise TrainError(f"what the Tinker service exported has no {missing[0]}; it is no LoRA in PEFT's layout")
        config, tensors = (self.call("fetch", partial(self._download, str(urls[file])), tick) for file in FILES)
        return unpack(tensors, config)

    def _download(self, url: str) -> bytes:
        """The file behind a signed address, which is a secret like a key: errors do not tell it."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise TrainError("the Tinker service named a file at an address that is no http address")
        try:
            with urllib.request.urlopen(url, timeout=min(60.0, self._options.seconds)) as answer:  # noqa: S310
                raw: bytes = answer.read(LARGEST + 1)
                whole = answer.headers.get("content-length")
        except urllib.error.HTTPError as error:
            raise Transient(f"fetch: the server of the weights answered {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Transient(f"fetch: the weights did not come whole ({type(error).__name__})") from None
        if whole is not None and len(raw) < min(int(whole), LARGEST):
            raise Transient("fetch: the weights did not come whole")
        if len(raw) > LARGEST:
            raise TrainError(f"the LoRA is larger than {LARGEST >> 30} GiB")
        return raw


def unpack(raw: bytes, said: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A LoRA's tensors and its configuration, which says at least its rank and alpha."""
    try:
        config, tensors = json.loads(said), load(raw)
        rank, alpha = config["r"], config["lora_alpha"]
    except Exception as error:  # safetensors has a class of its own
        raise TrainError(f"the LoRA that the Tinker service gave cannot be read ({error!r})") from None
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise TrainError("the LoRA that the Tinker service gave does not say its rank (r) and lora_alpha")
    return tensors, config
