"""An agent whose client is Python: its prompt is the program that it runs. And a gateway that remembers."""

import asyncio
import contextlib
import json
import os
import sys

from reef.harness.agents import Client, Launch, Placed, dump
from reef.harness.clients import Clients
from reef.harness.episode import Job, Rooms
from reef.harness.room import Limits
from reef.harness.trajectory import Move, Trajectory

AGENT = "tests.harness.fakes:Fake"
PYTHON = os.path.realpath(sys._base_executable)  # the one that each room has
PROGRAM = f"#!{PYTHON} -I\nimport sys\nexec(sys.argv[1])\n"
SMALL = Limits(memory=256, disk=16, entries=2000, processes=32, output=1 << 20, copied=1 << 20, check=5.0, calls=5)
RECEIPT = "0123456789abcdef0123456789abcdef"


class Fake:
    name = "fake"
    client = Client("fake", "1.0.0", "fake")

    def place(self, entry):
        if entry.kind == "rules":
            return [Placed("RULES.md", "section", entry.config["text"])]
        if entry.kind == "command":
            return [Placed("../out", text=entry.config["text"])]
        return []

    def base(self, door):
        return [Placed("door.json", text=dump({"url": door.url, "scenario": door.scenario, "model": door.model}))]

    def launch(self, root, prompt):
        return Launch((prompt,), {"ROOT": str(root)})

    def environment(self, root):
        return {}

    def read(self, root):
        said = root / "said"
        if not said.is_file():
            return None
        return Trajectory("fake", "s", (Move("assistant", said.read_text(errors="replace")),))


class Broken(Fake):
    """An adapter with a fault of its own."""

    def place(self, entry):
        raise KeyError(entry.id)

    def read(self, root):
        raise LookupError("nothing fits")


def installed(folder):
    """Where the fake client is installed."""
    place = folder / "node_modules" / ".bin"
    place.mkdir(parents=True)
    (place / "fake").write_text(PROGRAM)
    (place / "fake").chmod(0o755)
    return Clients(folder)


class Gateway:
    """Answers each request with `status` and the request's path; `seen` are heads and bodies as they arrived."""

    def __init__(self, status=200, broken=False):
        self.status, self.broken, self.seen = status, broken, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _answer(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(lines.get("content-length", 0)))
                self.seen.append((head, body))
                data = json.dumps({"path": head.split(" ")[1]}).encode()
                size = len(data) + (100 if self.broken else 0)
                writer.write(
                    f"HTTP/1.1 {self.status} X\r\ncontent-length: {size}\r\nx-reef-agent-record-id: {RECEIPT}\r\n"
                    "connection: close\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
                if "connection: close" in head.lower():
                    break
        writer.close()


def rooms(tmp_path, address="http://127.0.0.1:9", **rest):
    made = {"token": lambda *of: "reef_secret", "limits": SMALL, "clients": installed(tmp_path / "clients")} | rest
    return Rooms(address, folder=tmp_path / "rooms", **made)


def job(program, seconds=10.0, **rest):
    """PYTHON in the program and the check is Python as the room has it."""
    if rest.get("check"):
        rest["check"] = rest["check"].replace("PYTHON", PYTHON)
    return Job(AGENT, program.replace("PYTHON", PYTHON), seconds=seconds, **rest)
