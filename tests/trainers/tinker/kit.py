"""A service of its own in a folder, and the options that lead to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from reef.trainers.tinker import Options

KEY = "tml-secret-of-the-tests"


def options(service: Path, model: Path, **changes: Any) -> Options:
    service.mkdir(parents=True, exist_ok=True)
    if not (service / "model").exists():
        (service / "model").symlink_to(model)
    os.environ["REEF_TEST_TINKER_KEY"] = KEY
    given: dict[str, Any] = {
        "base_model": "tiny/base",
        "key_env": "REEF_TEST_TINKER_KEY",
        "base_url": str(service),
        "package": "tests.trainers.tinker.stub",
        "wait": 0.01,
        "seconds": 20.0,
    }
    return Options(**(given | changes))


def calls(service: Path, name: str | None = None) -> list[dict[str, Any]]:
    """What was called, in order."""
    place = service / "calls.jsonl"
    found = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    return [one for one in found if name in (None, one["call"])]


def faults(service: Path, **given: list[str]) -> None:
    service.mkdir(parents=True, exist_ok=True)
    (service / "faults.json").write_text(json.dumps(given))
