"""reef-infra: its record-only recipe in front of the upstream, one service process, SQLite as it comes (WAL, FULL)."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "reef-infra"
READY = "/healthz"
HEADERS = {"x-reef-scenario": "bench"}


def program(peers: Path) -> Path:
    return peers.absolute() / NAME / "bin" / "python"


def command(peers: Path, folder: Path, port: int, upstream: int, token: str) -> tuple[list[str], dict[str, str]]:
    """Its command line and environment; everything it writes is in `folder`."""
    python = str(program(peers))
    config = {
        "run_dir": str(folder / "run"),
        "reef": {
            "host": "127.0.0.1",
            "port": port,
            "token": token,
            "recipe": "recipe",
            "upstream_url": f"http://127.0.0.1:{upstream}",
            "upstream_api_key": "none",
            "upstream_model": "m",
            "artifact_repository": str(folder / "artifacts.git"),
            "artifact_work_dir": str(folder / "work"),
            "artifact_cache_dir": str(folder / "cache"),
            "agent_record_dir": str(folder / "records"),
        },
        "services": [{"name": "reef", "command": f"{python} -m reef.service", "cwd": str(folder)}],
    }
    file = folder / "serve.yaml"  # JSON is YAML
    file.write_text(json.dumps(config))
    return [python, "-m", "reef", "serve", "-c", str(file)], {"HOME": str(folder), "PYTHONPATH": ""}
