"""The lines that are measured side by side, each a way from the client to the same canned answer.

direct: nginx answers · nginx proxy: nginx passes on to it · recording off and durable: one Reef gateway, started as
`reef serve` · peers: LiteLLM and reef-infra, from the virtual environments that `--setup-peers` makes.
Knows: how each server is configured, one worker each. Does not know: how it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from peers import infra, litellm

from kit.server import Server, free_port, started, tool

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "sk-bench"
DIRECT, PROXY, OFF, DURABLE = "direct", "nginx proxy", "recording off", "durable"
ANSWER = {
    "id": "chatcmpl-bench",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 24, "completion_tokens": 3, "total_tokens": 27},
}

_NGINX = """
daemon off;
worker_processes 1;
%(user)s
pid %(folder)s/nginx-%(name)s.pid;
error_log stderr warn;
events { worker_connections 4096; }
http {
    access_log off;
    default_type application/json;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    keepalive_requests 1000000000;
    client_body_temp_path %(folder)s/temp; proxy_temp_path %(folder)s/temp; fastcgi_temp_path %(folder)s/temp;
    uwsgi_temp_path %(folder)s/temp; scgi_temp_path %(folder)s/temp;
    upstream canned { server 127.0.0.1:%(target)d; keepalive 256; keepalive_requests 1000000000; }
    server {
        listen 127.0.0.1:%(port)d backlog=4096;
        location / { %(action)s }
    }
}
"""
_PASS = 'proxy_pass http://canned; proxy_http_version 1.1; proxy_set_header Connection "";'


@dataclass(frozen=True, slots=True)
class Line:
    """One way to the answer. `headers` go with every request."""

    name: str
    server: Server
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Field:
    """Everything that runs. `state` is the gateway's folder; `streams` the port of the streaming upstream."""

    lines: tuple[Line, ...]
    state: Path
    streams: int

    def named(self, *names: str) -> tuple[Line, ...]:
        return tuple(line for name in names for line in self.lines if line.name == name)


@contextlib.contextmanager
def running(folder: Path, peers: Path, tree: Path, *, alone: bool) -> Iterator[Field]:
    """Every server, started; `tree` holds the product; `alone` leaves out the peers and the nginx proxy."""
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(nginx(folder, "upstream", f"return 200 '{json.dumps(ANSWER)}';"))
        streams = free_port()
        source = [sys.executable, "-m", "kit.source", str(streams)]
        place = {"PYTHONPATH": str(ROOT / "bench")}
        stack.enter_context(started("streaming-upstream", source, streams, folder, environment=place))
        state = folder / "state"
        gateway = stack.enter_context(reef(tree, folder, state, upstream.port, streams))
        key = {"authorization": f"Bearer {TOKEN}"}
        lines = [
            Line(DIRECT, upstream, key),
            Line(OFF, gateway, key | {"x-reef-capture": "false"}),
            Line(DURABLE, gateway, key),
        ]
        if not alone:
            proxy = stack.enter_context(nginx(folder, "proxy", _PASS, upstream.port))
            lines.insert(1, Line(PROXY, proxy, key))
            for peer in (litellm, infra):
                lines += _peer(stack, peer, folder, peers, upstream.port)
        yield Field(tuple(lines), state, streams)


def _peer(stack: contextlib.ExitStack, peer: ModuleType, folder: Path, peers: Path, upstream: int) -> list[Line]:
    name: str = peer.NAME
    if not peer.program(peers).exists():
        print(f"{name}: left out, as it is not in {peers}; bench/gateway.py --setup-peers installs it", flush=True)
        return []
    print(f"{name}: starting …", flush=True)
    own, port = folder / name, free_port()
    own.mkdir()
    command, environment = peer.command(peers, own, port, upstream, TOKEN)
    server = stack.enter_context(
        started(name, command, port, own, environment=environment, ready=peer.READY, patience=120.0)
    )
    return [Line(name, server, {"authorization": f"Bearer {TOKEN}"} | peer.HEADERS)]


@contextlib.contextmanager
def nginx(folder: Path, name: str, action: str, target: int = 9) -> Iterator[Server]:
    """One nginx with one worker, its configuration, process id and temporary files in `folder`."""
    port = free_port()
    user = "user root;" if os.getuid() == 0 else ""
    text = _NGINX % {
        "user": user,
        "folder": folder,
        "name": name,
        "port": port,
        "target": target,
        "action": action,
    }
    file = folder / f"nginx-{name}.conf"
    file.write_text(text)
    (folder / "temp").mkdir(exist_ok=True)
    command = [tool("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(file)]
    with started(f"nginx-{name}", command, port, folder) as server:
        yield server


@contextlib.contextmanager
def reef(tree: Path, folder: Path, state: Path, upstream: int, streams: int) -> Iterator[Server]:
    """`reef serve` with one worker; its scenario `streams` goes to the streaming upstream."""
    port = free_port()
    config = {
        "reef": {
            "port": port,
            "token": TOKEN,
            "workers": 1,
            "engine": "canned",
            "recipe": "record",
            "state_dir": str(state),
        },
        "engines": {
            "canned": {"kind": "upstream", "url": f"http://127.0.0.1:{upstream}/v1"},
            "streams": {"kind": "upstream", "url": f"http://127.0.0.1:{streams}/v1"},
        },
        "scenarios": {"streams": {"engine": "streams"}},
    }
    file = folder / "reef.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "reef", "serve", "-c", str(file)]
    with started("reef", command, port, folder, environment={"PYTHONPATH": str(tree)}, ready="/readyz") as server:
        yield server
