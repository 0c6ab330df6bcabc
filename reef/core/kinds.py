"""Kinds of engines, by whose weights they answer with: a matter of the configuration as much as of the engines."""

from __future__ import annotations

from typing import Final

REMOTE: Final = frozenset({"vllm", "sglang"})
"""Servers of their own, which are given our weights over HTTP."""

OWN: Final = frozenset({"local"}) | REMOTE
"""They answer with weights of the chain, on the base model that the server's trainer trains."""
