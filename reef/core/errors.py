"""One error tree. HTTP status codes live in the gateway only; ordinary outcomes are values, never exceptions.

    ReefError
    ├── InputError            the caller sent something wrong; `param` names the field
    │   ├── ConfigError       a configuration file or key is wrong; carries the place (file, line, nearest key)
    │   └── ContextError      the prompt is longer than the model's context
    ├── AuthError             no token, or an unknown one
    ├── RightError            the token lacks the right
    ├── MissingError          no such scenario, record, release or route
    │   ├── ModelError        no engine has a model of that name; the message lists the names there are
    │   └── PrunedError       a release whose large files were removed to bound the disk
    ├── ConflictError         same id with other content, or somebody else moved first
    │   └── StaleHead         compare-and-swap lost; `head` is the chain's present head
    ├── LimitError            too large, or too many
    │   └── BusyError         too many now; the same again may pass later
    ├── StoreError            the record store cannot write or read now (locked, read-only, full)
    ├── ChainError            the release chain is damaged or refused a write
    │   └── DigestError       bytes do not match their recorded digest
    ├── EngineError           the engine failed or is not ready
    │   └── UpstreamError     a provider failed; carries its status and body
    ├── TrainError            a training step failed
    │   └── TeacherError      the teacher that a method names cannot be used; no batch is at fault
    └── WireError             another Reef process is gone or answered nonsense

To add one: subclass the nearest, give it a `code`, add it to the drawing, and map it in `gateway/errors.py` if it can
reach a client. A message says what is wrong and what to do about it, and never contains a token or key.
"""

from __future__ import annotations


class ReefError(Exception):
    """Root of every error Reef raises knowingly. `param` names the offending field, when there is one."""

    code = "reef_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InputError(ReefError):
    code = "invalid_request"


class ConfigError(InputError):
    code = "invalid_config"


class ContextError(InputError):
    code = "context_length_exceeded"


class AuthError(ReefError):
    code = "invalid_api_key"


class RightError(ReefError):
    code = "missing_right"


class MissingError(ReefError):
    code = "not_found"


class ModelError(MissingError):
    code = "model_not_found"


class PrunedError(MissingError):
    code = "release_pruned"


class ConflictError(ReefError):
    code = "conflict"


class StaleHead(ConflictError):
    """A publish expected another head. `head` is the release id the chain has now (None: no chain yet)."""

    code = "stale_head"

    def __init__(self, message: str, *, param: str | None = None, head: str | None = None) -> None:
        super().__init__(message, param=param)
        self.head = head


class LimitError(ReefError):
    code = "limit_exceeded"


class BusyError(LimitError):
    code = "too_many_requests"


class StoreError(ReefError):
    code = "store_unavailable"


class ChainError(ReefError):
    code = "chain_error"


class DigestError(ChainError):
    code = "digest_mismatch"


class EngineError(ReefError):
    code = "engine_error"


class UpstreamError(EngineError):
    """A provider answered with an error. `status` and `body` are what it sent."""

    code = "upstream_error"

    def __init__(self, message: str, *, param: str | None = None, status: int = 502, body: bytes = b"") -> None:
        super().__init__(message, param=param)
        self.status = status
        self.body = body


class TrainError(ReefError):
    code = "training_failed"


class TeacherError(TrainError):
    code = "teacher_unusable"


class WireError(ReefError):
    code = "process_unreachable"


def _tree(root: type[ReefError]) -> dict[str, type[ReefError]]:
    found = {root.__name__: root}
    for leaf in root.__subclasses__():
        found |= _tree(leaf)
    return found


BY_NAME: dict[str, type[ReefError]] = _tree(ReefError)
"""Every error class by name, so that one process can raise again what another sent over the wire."""
