"""`reef serve` on a state folder of its own, with a configuration."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


@contextlib.contextmanager
def served(state: Path, config: str) -> Iterator[tuple[str, str]]:
    """Address and token. `config` has the places {port} and {state}; braces of its own are doubled."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state.parent.mkdir(parents=True, exist_ok=True)
    file = state.parent / "serve.yaml"
    file.write_text(config.format(port=port, state=state))
    with (state.parent / "serve.log").open("wb") as log:
        command = [sys.executable, "-m", "reef", "serve", "-c", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit((state.parent / "serve.log").read_text())
                time.sleep(0.1)
            yield url, (state / "token").read_text().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)  # a gateway drains, and a training step may be on its way
