"""Errors to HTTP: the status of each class in core's tree, and the body in the dialect of the route.

Knows: statuses, OpenAI's and Anthropic's error objects, `retry-after`, `x-should-retry`.
Does not know: who raised the error. A message is sent as it is, so it must never hold a secret; errors that Reef did
not raise knowingly, and those of store and chain (which name files), are answered with a plain sentence and logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reef.core import errors
from reef.core.errors import ReefError

STATUS: dict[type[ReefError], int] = {
    errors.InputError: 400,
    errors.AuthError: 401,
    errors.RightError: 403,
    errors.MissingError: 404,
    errors.ConflictError: 409,
    errors.LimitError: 413,
    errors.BusyError: 429,
    errors.StoreError: 503,
    errors.EngineError: 503,
    errors.UpstreamError: 502,
    errors.WireError: 503,
    errors.ChainError: 503,
    errors.TrainError: 500,
    ReefError: 500,
}
"""Status by class; a subclass has its nearest ancestor's."""

_PLAIN: dict[type[ReefError], str] = {
    errors.StoreError: "the record store cannot be used now; try again (the server's log says why)",
    errors.ChainError: "the release chain cannot be read or written now; try again (the server's log says why)",
}
"""What a client is told instead of a message that names the server's files; subclasses included."""


def nowhere(name: str, param: str = "x-reef-scenario") -> errors.MissingError:
    """There is no such scenario, and what to do."""
    return errors.MissingError(
        f"no scenario {name!r}; `reef scenarios` lists them, POST /reef/scenarios makes one", param=param
    )


_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
_OPENAI |= {429: "rate_limit_error"}
_ANTHROPIC = _OPENAI | {413: "request_too_large", 503: "overloaded_error"}


class Refusal(ReefError):
    """A refusal that only HTTP knows: a wrong method, a header too large, a body too slow. `status` is its own."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


def status_of(error: BaseException) -> int:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, errors.UpstreamError) and error.status == 504 and not error.body:
        return 504  # it did not answer in time; with a body it is the provider's own 504, which is its failure
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def message_of(error: BaseException) -> str:
    """What a client may read of an error. Where that is not the whole of it, the rest belongs in the log."""
    if not isinstance(error, ReefError):
        return "Reef failed inside; its log says why"
    return next((text for kind, text in _PLAIN.items() if isinstance(error, kind)), error.message)


def headers_of(error: BaseException, status: int) -> dict[str, str]:
    """Headers an error's answer carries beside its content type."""
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status == 409:
        headers["x-should-retry"] = "false"  # both SDK families try a 409 again otherwise
    elif status in (429, 503):
        headers.setdefault("retry-after", "1")
    return headers


def body_of(error: BaseException, dialect: str, receipt: str | None = None) -> dict[str, Any]:
    """The error as an object of its dialect: `anthropic`, or OpenAI's for everything else."""
    status = status_of(error)
    message = message_of(error)
    if dialect == "anthropic":
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        return body | {"request_id": receipt} if receipt else body
    detail: dict[str, Any] = {
        "message": message,
        "type": _OPENAI.get(status, "invalid_request_error" if status < 500 else "api_error"),
        "code": error.code if isinstance(error, ReefError) else "internal_error",
        "param": error.param if isinstance(error, ReefError) else None,
    }
    if isinstance(error, errors.StaleHead):
        detail["head"] = error.head
    return {"error": detail}
