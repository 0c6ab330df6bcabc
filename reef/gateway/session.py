"""Which session a request belongs to, as far as the request itself says, and its tags.

Knows: the headers and body fields agent clients use for it, and which of them counts first.
Does not know: transcripts. A request that names no session is joined by its transcript later, by `experience`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import orjson

_HEADERS = (
    "x-reef-session",
    "x-reef-tag-session",
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
)
_BRANCH = {"x-claude-code-agent-id": "agent-id", "x-parent-session-id": "parent-session-id", "thread-id": "thread-id"}
_TURN = "x-codex-turn-metadata"  # JSON
_TURN_TAGS = {"turn_id": "turn-id", "root_turn_id": "root-turn-id", "agent_name": "agent-name"}
_TURN_TAGS |= {"request_kind": "request-kind"}
_TAG = "x-reef-tag-"
_IN_USER_ID = re.compile(r"session_([A-Za-z0-9-]{8,})$")
MOST = 512  # characters of a session's name; a longer one ends in a digest, so that no two become one


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The first of: a session header, `metadata.user_id`'s session, `prompt_cache_key`; None when there is none."""
    for name in _HEADERS:
        if value := headers.get(name):
            return fit(value)
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and (session := _in_user_id(metadata.get("user_id"))):
        return fit(session)
    key = body.get("prompt_cache_key")
    return fit(key) if isinstance(key, str) and key else None


def fit(name: str) -> str:
    """A session's name as records keep it."""
    if len(name) <= MOST:
        return name
    made = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[: MOST - len(made) - 1]}-{made}"


def tags_of(headers: Mapping[str, str]) -> dict[str, str]:
    """`x-reef-tag-<name>` headers by name, and the headers by which clients tell branches of a session apart."""
    tags = {name[len(_TAG) :]: value for name, value in headers.items() if name.startswith(_TAG)}
    for header, name in _BRANCH.items():
        if header in headers:
            tags.setdefault(name, headers[header])
    if (turn := headers.get(_TURN)) is not None:
        for name, value in _strings(turn).items():
            if name in _TURN_TAGS:
                tags.setdefault(_TURN_TAGS[name], value[:MOST])
    return tags


def _strings(text: str) -> dict[str, str]:
    """The text fields of a JSON object; none when it is no object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: item for name, item in value.items() if isinstance(item, str) and item}


def _in_user_id(value: Any) -> str | None:
    """The session id in a client's `metadata.user_id`: a JSON object's `session_id`, or a `…session_<id>` ending."""
    if not isinstance(value, str):
        return None
    if value.startswith("{"):
        return _strings(value).get("session_id")
    found = _IN_USER_ID.search(value)
    return found.group(1) if found else None
