"""A user's machine (a home, a shell, a client that tells what it was given) and a server that serves bundles."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from reef.harness import install
from reef.harness.agents import Client, Door, Placed
from reef.harness.tree import Entry

TOKEN = "t-install-canary-0123456789"
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo 9.9.9; exit 0; }
printf 'client %s\\n' "$0"
for word; do printf 'word:%s\\n' "$word"; done
printf 'root:%s\\nsession:%s\\ntoken:%s\\n' "$FAKE_ROOT" "$REEF_SESSION" "$FAKE_TOKEN"
printf 'notice:%s\\nplain:%s\\n' "${REEF_NOTICE-}" "$FAKE_PLAIN"
cat "$FAKE_ROOT/RULES.md"
[ -z "${FAKE_RUN-}" ] || sh -c "$FAKE_RUN"
exit "${FAKE_EXIT:-0}"
"""


class Fake:
    """An agent whose client is FAKE: rules in a file of sections, settings in JSON, skills in files of their own."""

    def __init__(self, name: str = "pi", environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.client = Client("fake-agent", "1.2.3", "fake", node="18.0", root="FAKE_ROOT")
        self._environment = environment or {}

    def place(self, entry: Entry) -> Sequence[Placed]:
        if entry.kind == "rules":
            return [Placed("RULES.md", "section", entry.config["text"])]
        if entry.kind == "skill":
            return [Placed(f"skills/{entry.config['name']}/SKILL.md", text=entry.config["text"])]
        if entry.kind == "config":
            return [Placed("settings.json", "values", values=entry.config["values"])]
        return []

    def base(self, door: Door) -> Sequence[Placed]:
        return [Placed("RULES.md", "section", "# Rules"), Placed("settings.json", "values", values={"model": "reef"})]

    def environment(self, root: Path) -> Mapping[str, str]:
        own = {"FAKE_ROOT": str(root), "FAKE_TOKEN": "Bearer $REEF_TOKEN", "FAKE_PLAIN": "it's $HOME `id`"}
        return own | dict(self._environment)


def rule(id_: str, text: str) -> Entry:
    return Entry(id_, "rules", {"text": text})


def skill(name: str, text: str) -> Entry:
    return Entry(name, "skill", {"name": name, "description": "d", "text": text})


class Shop:
    """A server with one release at a time, on a real socket. `asked` are the requests it got."""

    def __init__(self) -> None:
        shop = self
        self.entries: list[Entry] = [rule("one", "Be brief.")]
        self.seq, self.reason = 1, "the first"
        self.keyless = False
        self.changes: dict[str, Any] = {}  # what is told of them instead
        self.answers: bytes | None = None  # to everything, when it is something else than Reef
        self.asked: list[tuple[str, str, Mapping[str, str], Any]] = []
        self.sleep = threading.Event()  # set while the server is to be slow
        self.wake = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shop.answer(self, None)

            def do_POST(self) -> None:
                shop.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.wake.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def release(self) -> str:
        return hashlib.sha1(f"{self.seq}".encode()).hexdigest()

    def publish(self, *entries: Entry, reason: str) -> None:
        self.entries, self.seq, self.reason = list(entries), self.seq + 1, reason

    def bundle(self, adapter: str = "pi", **more: Any) -> dict[str, Any]:
        origin = install.Origin(self.release, self.seq, self.reason, self.keyless)
        return install.bundle(Fake(adapter), self.entries, Door(self.url, "demo"), origin) | more

    def answer(self, call: BaseHTTPRequestHandler, body: Any) -> None:
        if self.sleep.is_set():
            self.wake.wait(20)
        url = urlsplit(call.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append((call.command, url.path, dict(call.headers), body))
        data, headers = b"{}", {}
        if url.path == "/reef/harness/install":
            data = install.write(self.bundle(query["adapter"]))
            headers["x-reef-digest"] = hashlib.sha256(data).hexdigest()
        elif url.path == "/reef/harness":
            changes = {"added": [{"id": "two", "kind": "skill"}], "changed": [], "removed": []}
            changes["releases"] = [{"reason": self.reason}]
            changes |= self.changes
            shown = {"release_id": self.release, "seq": self.seq, "reason": self.reason, "changes": changes}
            data = json.dumps(shown).encode()
        elif url.path == "/reef/report":
            data = json.dumps({"agent_record_id": "rep_1", "records": 2}).encode()
        good = self.keyless or call.headers.get("authorization") == f"Bearer {TOKEN}" or url.path == "/healthz"
        if not good:
            data = json.dumps({"error": {"message": "no token: send one"}}).encode()
        data = data if self.answers is None else self.answers
        call.send_response(200 if good else 401)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            call.send_header(name, value)
        call.end_headers()
        call.wfile.write(data)

    @property
    def reports(self) -> list[Any]:
        return [body for method, path, _, body in self.asked if (method, path) == ("POST", "/reef/report")]


class Machine:
    """A home and what runs in it."""

    def __init__(self, folder: Path, home: str = "home") -> None:
        self.home = folder / home
        self.home.mkdir(parents=True)
        self.bin = self.home / ".local/bin"
        self.client = folder / "fake"
        self.client.write_text(FAKE)
        self.client.chmod(0o755)
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TMPDIR": str(folder),
            "REEF_TOKEN": TOKEN,
            "REEF_CLIENT": str(self.client),
        }

    def base(self, adapter: str = "pi") -> Path:
        return self.home / ".local/share/reef" / adapter

    @property
    def root(self) -> Path:
        return self.base() / "root"

    def shell(self, script: bytes, *words: str, shell: str = "sh", **more: str | None) -> Ran:
        """A script piped into a shell, as `curl | sh` does."""
        return self._run([shell, "-s", "--", *words] if words else [shell], script, more)

    def install(self, bundle: Mapping[str, Any], *words: str, shell: str = "sh", **more: str | None) -> Ran:
        return self.shell(install.script(bundle), *words, shell=shell, **more)

    def wrapper(self, *words: str, adapter: str = "pi", stdin: bytes = b"", **more: str | None) -> Ran:
        return self._run([str(self.bin / f"reef-{adapter}"), *words], stdin, more)

    def _run(self, command: Sequence[str], stdin: bytes, more: Mapping[str, str | None]) -> Ran:
        env = {name: value for name, value in (self.environment | dict(more)).items() if value is not None}
        done = subprocess.run(command, input=stdin, env=env, cwd=self.home, capture_output=True, timeout=120)
        return Ran(done)

    def files(self, *, stamps: bool = False) -> dict[str, Any]:
        """Everything below the home: contents, or what shows that somebody wrote."""
        found: dict[str, Any] = {}
        for path in sorted(self.home.rglob("*")):
            at = path.lstat()
            name = str(path.relative_to(self.home))
            if stamps:
                found[name] = (at.st_ino, at.st_mtime_ns, at.st_ctime_ns, at.st_size)
            elif path.is_file():
                found[name] = path.read_bytes()
        return found


class Ran:
    """What came of a run."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.code = done.returncode
        self.out, self.err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"

    def good(self) -> Ran:
        assert self.code == 0, self
        return self

    def told(self, name: str) -> str:
        """What FAKE said about one thing."""
        (line,) = [line for line in self.out.splitlines() if line.startswith(f"{name}:")]
        return line.partition(":")[2]
