"""LiteLLM's proxy: one worker, one model that goes to the upstream, a master key, no database, nothing logged."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "litellm"
READY = "/health/liveliness"
HEADERS: dict[str, str] = {}


def program(peers: Path) -> Path:
    return peers.absolute() / NAME / "bin" / "litellm"


def command(peers: Path, folder: Path, port: int, upstream: int, token: str) -> tuple[list[str], dict[str, str]]:
    """Its command line and environment; everything it writes is in `folder`."""
    config = {
        "model_list": [
            {
                "model_name": "m",
                "litellm_params": {
                    "model": "openai/m",
                    "api_base": f"http://127.0.0.1:{upstream}/v1",
                    "api_key": "none",
                },
            }
        ],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": token},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    arguments = ["--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    environment = {
        "HOME": str(folder),
        "PYTHONPATH": "",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network at every start
        "LITELLM_LOG": "ERROR",
    }
    return [str(program(peers)), *arguments], environment
