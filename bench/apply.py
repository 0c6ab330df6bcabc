"""What rules and skills in requests cost the gateway: `bench/apply.py [--write]`, Linux only; needs nginx and wrk.

One `reef serve` with one worker, recording durably, in front of an nginx that answers a canned completion. Four lines,
interleaved in each round, closed loop: no harness; a tree of 300 entries (100 rules, 200 skills) with the requests'
header `x-reef-harness: off`; its rules; its rules and three matching skills. Figures are medians (smallest to
largest); client and servers share the machine, so compare within one run only. `--write` writes bench/apply.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kit import closed
from kit.ask import request
from kit.lines import ANSWER, ROOT, TOKEN, Line, nginx
from kit.server import Server, busy, free_port, started
from kit.table import ratios, shown, spread

sys.path.insert(0, str(ROOT))
from reef.harness.tree import FILE, Entry, write
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import ensure

PLAIN, OFF, RULES, SKILLS = "no harness", "300 entries, off", "300 entries, rules", "300 entries, rules and skills"
LINES = {
    PLAIN: ("plain", {}),
    OFF: ("full", {"x-reef-harness": "off"}),
    RULES: ("rules", {}),
    SKILLS: ("full", {}),
}
SETTINGS = {"plain": {}, "rules": {"apply": True, "skills": 0}, "full": {"apply": True}}


def tree() -> bytes:
    """100 rules that fit the default budget, 200 skills of which some match what is asked."""
    rules = [Entry(f"rule-{n:03}", "rules", {"text": f"Keep rule {n}."}) for n in range(100)]
    skills = [
        Entry(
            f"skill-{n:03}",
            "skill",
            {
                "name": f"topic-{n}",
                "description": f"What to know of {'the capital of France' if n % 20 == 0 else f'subject {n}'}.",
                "text": f"Say it in one word, number {n}. " * 8,
            },
        )
        for n in range(200)
    ]
    return write([*rules, *skills])


def publish(state: Path) -> None:
    base = NewPart("base", {"weights.json": b'{"base":{"name":"canned","digest":""},"kind":"base","rank":0,"alpha":0}'})
    chain, board = GitChain(state / "releases.git"), Board(state / "records.db")
    chain.open()
    for name in SETTINGS:
        board.create_scenario(name, {})
        head = ensure(name, chain, board, base, None).release_id
        if name != "plain":
            release = chain.publish(name, Draft("publish", {"harness": NewPart("tree", {FILE: tree()})}), head)
            board.flip(name, release.id)
    board.close()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    state = folder / "state"
    state.mkdir()
    publish(state)
    with ExitStack() as stack:
        upstream = stack.enter_context(nginx(folder, "upstream", f"return 200 '{json.dumps(ANSWER)}';"))
        port = free_port()
        config = {
            "reef": {"port": port, "token": TOKEN, "workers": 1, "engine": "canned", "recipe": "record"},
            "engines": {"canned": {"kind": "upstream", "url": f"http://127.0.0.1:{upstream.port}/v1"}},
            "scenarios": {name: {"harness": harness} for name, harness in SETTINGS.items()},
        }
        config["reef"]["state_dir"] = str(state)
        file = folder / "reef.yaml"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "reef", "serve", "-c", str(file)]
        yield stack.enter_context(
            started("reef", command, port, folder, environment={"PYTHONPATH": str(ROOT)}, ready="/readyz")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    others = busy()
    with tempfile.TemporaryDirectory(prefix="reef-bench-") as place, running(Path(place)) as server:
        lines = [
            Line(name, server, {"authorization": f"Bearer {TOKEN}", "x-reef-scenario": scenario} | headers)
            for name, (scenario, headers) in LINES.items()
        ]
        for line in lines:
            closed.warm(line, request(line.headers))
        for _ in range(options.repeat):
            for line in lines:
                run = closed.load(line, request(line.headers), options.connections, options.seconds, "wrk", Path(place))
                found[line.name]["per_second"].append(run.rate)
                found[line.name]["p50_ms"].append(run.p50)
                found[line.name]["cpu_us"].append(run.cpu)
    print(f"{options.connections} connections; others use {others:.0%} of the machine")
    result = {}
    for name, row in found.items():
        result[name] = {column: spread(values) for column, values in row.items()}
        result[name]["of no harness"] = ratios(row["per_second"], found[PLAIN]["per_second"])
        shares = shown(result[name]["of no harness"], 7, 3)
        print(f"  {name:32}{shown(result[name]['per_second'])}{shown(result[name]['p50_ms'], 7, 2)}{shares}")
        print(f"  {'':32}CPU us/request {shown(result[name]['cpu_us'])}")
    if options.write:
        made = {"machine": platform.platform(), "busy before": round(others, 2), "lines": result}
        (ROOT / "bench" / "apply.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
