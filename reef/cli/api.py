"""A small client of a running server, for the commands.

Knows: where a server is likely to be (flags, REEF_URL and REEF_TOKEN, the configuration, the state folder), and how its
errors read. Does not know: any command.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reef.cli import options, state
from reef.config import Settings
from reef.core.errors import AuthError, ConflictError, InputError, MissingError, ReefError, RightError, WireError
from reef.core.ids import SCENARIO_RULE, is_scenario

if TYPE_CHECKING:
    import httpx

_ERRORS: dict[int, type[ReefError]] = {
    400: InputError,
    401: AuthError,
    403: RightError,
    404: MissingError,
    409: ConflictError,
}

T = TypeVar("T")

WAYS = "give the token with --token or REEF_TOKEN, or name the server's file with -c FILE, or cd to its folder"


@dataclass(frozen=True, slots=True)
class Found:
    """Where the server is (or would be), its token, and the scenario meant."""

    url: str
    token: str | None
    scenario: str
    state_dir: Path
    named: bool = False  # the address was given, by --url or REEF_URL, so no state folder here belongs to it
    apart: bool = False  # the state folder was named, and no server runs on it: who answers there is another's


def find(args: argparse.Namespace) -> Found:
    """From flags, environment, configuration and state folder, in that order."""
    settings = options.load(args).settings
    given = getattr(args, "url", None) or os.environ.get("REEF_URL")
    url = given or address(settings)
    token = (
        getattr(args, "token", None)
        or os.environ.get("REEF_TOKEN")
        or settings.reef.token
        or state.read_token(settings.reef.state_dir)
    )
    scenario = getattr(args, "scenario", None) or settings.reef.default_scenario
    if not is_scenario(scenario):  # it goes into a header
        raise InputError(SCENARIO_RULE, param="scenario")
    folder = settings.reef.state_dir
    named = any(key == "reef.state_dir" for key, _ in getattr(args, "overrides", ()))
    apart = named and not given and not state.held(folder)
    return Found(url.rstrip("/").removesuffix("/v1"), token, scenario, folder, bool(given), apart)


def either(place: Found, asked: Callable[[], T], here: Callable[[], T]) -> T:
    """What a server answers; where none does, and none was named, what the state folder gives."""
    try:
        return asked()
    except WireError:
        if place.named:
            raise
        return here()


def address(settings: Settings) -> str:
    """What the server that holds this state folder wrote down, else what the configuration says."""
    folder = settings.reef.state_dir
    try:
        written = (folder / "run" / "address").read_text().strip()
    except OSError:
        written = ""
    return written if written and state.held(folder) else _configured(settings)


def _configured(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.reef.host, settings.reef.host)  # noqa: S104
    return f"http://{host}:{settings.reef.port}"


class Api:
    """Requests with the token; failures are raised as Reef's errors, with a next step."""

    def __init__(self, found: Found) -> None:
        import httpx

        self.found = found
        headers = {"authorization": f"Bearer {found.token}"} if found.token else {}
        self.client: httpx.Client = httpx.Client(
            base_url=found.url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0)
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str, **parameters: Any) -> Any:
        return self._send("GET", path, params={k: v for k, v in parameters.items() if v is not None})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("POST", path, json=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("PATCH", path, json=body)

    def delete(self, path: str, **parameters: Any) -> Any:
        return self._send("DELETE", path, params={k: v for k, v in parameters.items() if v is not None})

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """POST a body that is JSON already."""
        return self._send("POST", path, content=body, headers=dict(headers))

    def _send(self, method: str, path: str, **more: Any) -> Any:
        import httpx

        if self.found.apart:
            raise WireError(silent(self.found))
        try:
            answer = self.client.request(method, path, **more)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise WireError(silent(self.found)) from None
        except httpx.HTTPError as error:
            raise WireError(f"{self.found.url} did not answer: {type(error).__name__}; see the server's logs") from None
        if answer.is_success:
            return answer.json()
        raise refusal(self.found, answer)


def connect(args: argparse.Namespace) -> Api:
    """A client of the server that the arguments mean; nothing is sent yet."""
    return Api(find(args))


def silent(found: Found) -> str:
    """The sentence for an address where nothing answers, or a server of another folder would."""
    if found.apart:
        return (
            f"no server runs on the state folder {found.state_dir}; start one with `reef serve` there, or name a "
            "running one by its own folder, or with --url and --token"
        )
    if found.named:
        return f"no server answers on {found.url}; check --url (or REEF_URL), or start one with `reef serve`"
    return f"no server answers on {found.url}; start one with `reef serve`, or name one with --url"


def refusal(found: Found, answer: httpx.Response) -> ReefError:
    """The error that a refused request is; it says where a token would come from when that is what was wrong."""
    message = _message(answer)
    if answer.status_code == 401:
        if found.token and not found.named and not state.held(found.state_dir):
            message = f"the server on {found.url} is not that of the state folder {found.state_dir}: {message}"
        message = f"{found.url} wants its token: {message}; {WAYS}"
    return _ERRORS.get(answer.status_code, ReefError)(message)


def _message(answer: httpx.Response) -> str:
    try:
        said = answer.json()
        return str(said["error"]["message"] if "error" in said else said["reason"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code}: {answer.text[:200]}"
