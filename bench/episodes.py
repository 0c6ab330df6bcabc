"""What an agent's episode costs, and how many a machine does: `python bench/episodes.py [--write] [--rounds N]`.

Real pi (of `make clients`) works on one small task, answered at once by a scripted provider behind a real `reef serve`:
what is measured is the client and all that is around it, not a model. Each round runs the same job twice, side by side:
in a room, and bare (the same files in a temporary home, the client started directly, the same check), whose difference
is what the room costs, 0.3 s of which is the wait until every gateway knows the token; `seconds_empty` is a room in
which /bin/true runs, without token and Reef. Then `--count` episodes at widths 1, 2 and 4.

Figures are median, smallest and largest over the rounds. `busy` is how much of the machine others used before.
`--write` stores the figures beside this file as the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import httpx  # noqa: E402
from kit.served import served  # noqa: E402
from kit.server import busy  # noqa: E402
from kit.table import differences, spread  # noqa: E402

from reef.harness import agents, episode  # noqa: E402
from reef.harness.clients import Clients  # noqa: E402
from reef.harness.episode import Job, Rooms  # noqa: E402
from reef.harness.room import Limits, Room  # noqa: E402
from reef.harness.tree import Entry  # noqa: E402
from reef.records.board import Board  # noqa: E402
from reef.records.tokens import TokenTable  # noqa: E402
from tests.clients.upstream import KEY, WORD, Upstream  # noqa: E402

CONFIG = """
reef: {{{{port: {{port}}, state_dir: "{{state}}", engine: up, recipe: record}}}}
engines: {{{{up: {{{{kind: upstream, url: "{url}", key_env: UPSTREAM_KEY, model: up-1}}}}}}}}
"""
NODE = ROOT / ".clients" / "node"
CHECK = f"grep -qx '{WORD}' hello.txt"
TREE = (Entry("kind", "rules", {"text": "Be kind to everybody."}),)
WIDTHS = (1, 2, 4)


def job(work: str) -> Job:
    return Job("pi", f"Write a greeting into {work}/hello.txt and tell me what came of it.", check=CHECK)


async def roomed(rooms: Rooms, release: str) -> float:
    """Seconds of one episode."""
    began = time.monotonic()
    outcome = await rooms.of("default").run(job("/room/work"), TREE, release)
    if outcome.score != 1.0:
        raise SystemExit(f"the episode failed: {outcome}")
    return time.monotonic() - began


async def empty() -> float:
    """Seconds of a room in which nothing happens."""
    began = time.monotonic()
    async with Room.open((), Limits()) as room:
        ran = await room.run(["/bin/true"], {}, {}, "home", 10.0)
        assert ran.status == 0
    return time.monotonic() - began


async def bare(url: str, token: str) -> float:
    """Seconds of the same without a room."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        home, work = Path(name, "home"), Path(name, "work")
        work.mkdir()
        pi = agents.agent("pi")
        for path, text in agents.render(pi, TREE, agents.Door(url, "default")).items():
            place = home / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        launch = pi.launch(home, job(str(work)).prompt)
        environment = {
            **launch.environment,
            "PATH": f"{NODE}/node_modules/.bin:{os.environ['PATH']}",
            "HOME": str(home),
        }
        environment |= {agents.TOKEN: token, agents.SESSION: "0" * 32, "LANG": "C.UTF-8"}
        for command in ([f"{NODE}/node_modules/.bin/pi", *launch.arguments], ["/bin/sh", "-c", CHECK]):
            child = await asyncio.create_subprocess_exec(
                *command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await child.communicate()
            if child.returncode:
                raise SystemExit(f"{command[0]} failed: {said.decode()}")
        assert pi.read(home) is not None
    return time.monotonic() - began


async def measure(url: str, token: str, state: Path, folder: Path, rounds: int, count: int) -> dict[str, object]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
        found = (await client.get(f"{url}/reef/status")).json()
    release = found["scenarios"]["default"]["release_id"]
    board = Board(state / "records.db")

    def rooms(width: int) -> Rooms:
        return Rooms(url, TokenTable(board).episode, folder, Clients(NODE), width)

    one = rooms(1)
    await roomed(one, release)
    await bare(url, token)
    inside, outside, nothing = [], [], []
    for number in range(rounds):  # in turns, so that both see the same machine
        for kind in (0, 1) if number % 2 else (1, 0):
            (inside if kind else outside).append(await (roomed(one, release) if kind else bare(url, token)))
        nothing.append(await empty())
    figures: dict[str, object] = {"seconds_room": spread(inside), "seconds_bare": spread(outside)}
    figures["seconds_empty"] = spread(nothing)
    figures["seconds_more"] = differences(inside, outside)
    rates: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(max(1, rounds // 2)):
        for width in WIDTHS:
            many, began = rooms(width), time.monotonic()
            await asyncio.gather(*(roomed(many, release) for _ in range(count)))
            rates[width].append(60 * count / (time.monotonic() - began))
    for width, measured in rates.items():
        figures[f"episodes_a_minute_{width}"] = spread(measured)
    board.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures as the baseline")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--count", type=int, default=4, help="episodes at each width, each time")
    options = parser.parse_args()
    os.environ["UPSTREAM_KEY"] = KEY
    shown: dict[str, object] = {"pi": agents.agent("pi").client.version, "cpus": os.cpu_count()}
    shown |= {"rounds": options.rounds, "count": options.count, "settle": episode.SETTLE}
    shown["busy"] = round(statistics.median(busy(0.5) for _ in range(5)), 2)
    with tempfile.TemporaryDirectory() as name, Upstream({"chat"}) as upstream:
        state = Path(name, "state")
        with served(state, CONFIG.format(url=upstream.url)) as (url, token):
            shown |= asyncio.run(measure(url, token, state, Path(name, "rooms"), options.rounds, options.count))
    print(json.dumps(shown, indent=2))
    if options.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(shown, indent=2) + "\n")


if __name__ == "__main__":
    main()
