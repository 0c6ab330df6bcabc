"""What the gateway costs, everything side by side in one run: `bench/gateway.py [--quick] [--write]`, Linux only.

An nginx answers a canned completion. In front of it, each with one worker, on this machine: nothing (direct), another
nginx, the whole product (`reef serve`, recording off and durable: committed with a disk sync before the answer), and
the peers LiteLLM and reef-infra once `--setup-peers` has installed them. Every request is a new one.

- closed: requests a second, p50, p99, CPU time of the servers, at 1, 16 and 64 connections
- sizes: the same at 16 connections for bodies of 0.2, 17 and 400 KB · open: latency over direct at fixed rates
- stream: 200 chunks at 5 ms, what is added · memory: growth over 20,000 requests, and row parity

Figures are medians of repeats (smallest to largest), lines interleaved. Client and servers share the machine: compare
within one run only. `--write` writes bench/gateway.json. Needs nginx and wrk (or `--client python`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
from kit import closed, growth, stream
from kit.ask import request
from kit.lines import DIRECT, DURABLE, OFF, ROOT, Field, Line, running
from kit.pace import pace
from kit.server import Trouble, busy, tool
from kit.table import differences, quantile, ratios, shown, spread

CONNECTIONS, SIZES, RATES, STREAMS = (1, 16, 64), (0.2, 17, 400), (50, 200, 500), (1, 16)
QUIET = 0.1  # of all CPU time
HEADS = f"{'requests/s':28}{'p50 ms':27}p99 ms     CPU us/request"
Rows = dict[str, Any]
Columns = dict[str, dict[str, list[float]]]
"""Name of a row, name of a column, one value for each round."""


def say(text: str) -> None:
    print(text, flush=True)


def measure_closed(field: Field, options: argparse.Namespace, folder: Path) -> Rows:
    for line in field.lines:
        closed.warm(line, request(line.headers))
    say(
        "closed loop, connections".ljust(30) + "requests/s".ljust(28) + "p50 ms".ljust(27) + "p99 ms     CPU us/request"
    )
    found: Columns = defaultdict(lambda: defaultdict(list))
    for connections in CONNECTIONS:
        for _ in range(options.repeat):
            for line in field.lines:
                add(found[f"{line.name}, {connections}"], line, connections, 0.2, options, folder)
        show(found, f", {connections}")
    return rows(found) | {"ratios at 16": compare(field, found)}


def add(
    row: dict[str, list[float]], line: Line, connections: int, size: float, options: argparse.Namespace, folder: Path
) -> None:
    asked = request(line.headers, size)
    run = closed.load(line, asked, connections, options.seconds, options.client, folder)
    for name, value in (("per_second", run.rate), ("p50_ms", run.p50), ("p99_ms", run.p99), ("cpu_us", run.cpu)):
        row[name].append(value)


def show(found: Columns, end: str) -> None:
    for name, row in found.items():
        if name.endswith(end):
            rate, p50, p99, cpu = (spread(row[column]) for column in ("per_second", "p50_ms", "p99_ms", "cpu_us"))
            say(f"  {name:24}{shown(rate)}{shown(p50, 7, 2)}{p99[0]:7.2f}    {cpu[0]:7.0f}")


def rows(found: Columns) -> Rows:
    return {name: {column: spread(values) for column, values in row.items()} for name, row in found.items()}


def compare(field: Field, found: Columns) -> Rows:
    """Each Reef line's rate over every other line's, round by round."""
    result: Rows = {}
    say("requests/s at 16 connections, as a multiple of")
    for ours in (OFF, DURABLE):
        for line in field.lines:
            if line.name not in (OFF, DURABLE):
                pair = [found[f"{name}, 16"]["per_second"] for name in (ours, line.name)]
                result[f"{ours} / {line.name}"] = ratios(*pair)
                say(f"  {ours + ' / ' + line.name:32}{shown(result[f'{ours} / {line.name}'], 7, 3)}")
    added = differences(found[f"{DURABLE}, 1"]["p50_ms"], found[f"{DIRECT}, 1"]["p50_ms"])
    result["added p50_ms at 1"] = added
    say(f"  durable over direct, p50 at 1 connection: {added[0]:.3f} ms")
    return result


def measure_sizes(field: Field, options: argparse.Namespace, folder: Path) -> Rows:
    found: Columns = defaultdict(lambda: defaultdict(list))
    say(
        "body of KB, 16 connections".ljust(30)
        + "requests/s".ljust(28)
        + "p50 ms".ljust(27)
        + "p99 ms     CPU us/request"
    )
    for size in SIZES:
        for _ in range(options.repeat):
            for line in field.named(DIRECT, OFF, DURABLE):
                add(found[f"{line.name}, {size:g} KB"], line, 16, size, options, folder)
        show(found, f", {size:g} KB")
    return rows(found)


def measure_open(field: Field, options: argparse.Namespace, folder: Path) -> Rows:
    say("open loop, requests/s".ljust(32) + "p50 ms".ljust(27) + "p99 ms")
    lines = field.named(DIRECT, OFF, DURABLE)
    result: Rows = {}
    for rate in RATES:
        found: Columns = {line.name: {"p50_ms": [], "p99_ms": []} for line in lines}
        for _ in range(options.repeat):
            for line in lines:
                times = pace(line, request(line.headers), rate, options.seconds * 1.5)
                found[line.name]["p50_ms"].append(quantile(times, 0.5))
                found[line.name]["p99_ms"].append(quantile(times, 0.99))
        for name, row in found.items():
            p50, p99 = spread(row["p50_ms"]), spread(row["p99_ms"])
            result[f"{name}, {rate}/s"] = {"p50_ms": p50, "p99_ms": p99}
            if name != DIRECT:
                over = [differences(row[column], found[DIRECT][column]) for column in ("p50_ms", "p99_ms")]
                result[f"{name}, {rate}/s"] |= {"added_p50_ms": over[0], "added_p99_ms": over[1]}
                extra = f"  over direct {over[0][0]:6.3f} and {over[1][0]:6.3f}"
            else:
                extra = ""
            say(f"  {f'{name}, {rate}/s':26}{shown(p50, 7, 3)}{shown(p99, 7, 3)}{extra}")
    return result


def measure_stream(field: Field, options: argparse.Namespace, folder: Path) -> Rows:
    direct, off, durable = field.named(DIRECT, OFF, DURABLE)
    ways = {
        DIRECT: (field.streams, direct.headers),
        OFF: (off.server.port, off.headers | {"x-reef-scenario": "streams"}),
        DURABLE: (durable.server.port, durable.headers | {"x-reef-scenario": "streams"}),
    }
    columns = ("first_ms", "chunk_p50_ms", "chunk_p99_ms", "gap_p99_ms")
    say("streams of 200 chunks at 5 ms".ljust(32) + "first byte ms, a chunk's delay p50 and p99 ms, gap p99 ms; added")
    result: Rows = {}
    for streams in STREAMS:
        found: Columns = {name: {column: [] for column in columns} for name in ways}
        for port, headers in ways.values():
            stream.warm(port, headers, streams)
        for _ in range(options.repeat):
            for name, (port, headers) in ways.items():
                heard = stream.listen(port, headers, streams)
                delays, gaps = sorted(heard.delays), sorted(heard.gaps)
                values = (
                    quantile(sorted(heard.first), 0.5),
                    quantile(delays, 0.5),
                    quantile(delays, 0.99),
                    quantile(gaps, 0.99),
                )
                for column, value in zip(columns, values, strict=True):
                    found[name][column].append(value)
        for name, row in found.items():
            key = f"{name}, {streams}"
            result[key] = {column: spread(values) for column, values in row.items()}
            added = {column: differences(row[column], found[DIRECT][column]) for column in columns}
            if name != DIRECT:
                result[key] |= {f"added_{column}": values for column, values in added.items()}
            shown_row = "  ".join(f"{result[key][column][0]:6.3f}" for column in columns)
            shown_added = "  ".join(f"{added[column][0]:6.3f}" for column in columns) if name != DIRECT else ""
            say(f"  {key:26}{shown_row}    {shown_added}")
    return result


def measure_memory(field: Field, options: argparse.Namespace, folder: Path) -> Rows:
    (durable,) = field.named(DURABLE)
    grown = growth.grow(durable, request(durable.headers), field.state, options.requests)
    say(
        f"memory over {options.requests:,} durable requests: {grown.before:.1f} to {grown.after:.1f} MB,"
        f" {grown.slope:.1f} KB per 1,000"
    )
    agree = grown.answers == grown.rows == grown.receipts and grown.resolved == grown.sampled
    say(
        f"row parity: {grown.answers} answers 200, {grown.rows} complete rows, {grown.receipts} receipts,"
        f" {grown.resolved} of {grown.sampled} asked for resolve: {'agree' if agree else 'DISAGREE'}"
    )
    return {
        "before_mb": round(grown.before, 1),
        "after_mb": round(grown.after, 1),
        "slope_kb_per_1000": round(grown.slope, 1),
        "answers": grown.answers,
        "rows": grown.rows,
        "receipts": grown.receipts,
        "resolved": f"{grown.resolved} of {grown.sampled}",
    }


# Memory before the large bodies: what they leave behind would hide a slow growth.
MEASURES: dict[str, Callable[[Field, argparse.Namespace, Path], Rows]] = {
    "closed": measure_closed,
    "memory": measure_memory,
    "sizes": measure_sizes,
    "open": measure_open,
    "stream": measure_stream,
}


def judge(found: Rows) -> None:
    """The product's own floors and goals, against what was measured."""
    checks: list[tuple[str, float, float, float, bool]] = []
    multiples = found.get("closed", {}).get("ratios at 16", {})
    for peer, floor, goal in (("reef-infra", 4.0, 8.0), ("litellm", 25.0, 50.0)):
        if f"{DURABLE} / {peer}" in multiples:
            checks.append((f"durable / {peer} at 16", multiples[f"{DURABLE} / {peer}"][0], floor, goal, True))
    if multiples:
        checks.append(("added p50 at 1, ms", multiples["added p50_ms at 1"][0], 1.0, 0.45, False))
    if "open" in found:
        checks.append(("added p99 at 200/s, ms", found["open"][f"{DURABLE}, 200/s"]["added_p99_ms"][0], 3, 3, False))
    if "stream" in found:
        added = found["stream"][f"{DURABLE}, 1"]["added_chunk_p99_ms"][0]
        checks.append(("added to a chunk at p99, ms", added, 0.3, 0.3, False))
    for what, value, floor, goal, more in checks:
        met = "goal" if (value >= goal if more else value <= goal) else None
        met = met or ("floor" if (value >= floor if more else value <= floor) else "BELOW THE FLOOR")
        say(f"  {what:32}{value:9.3f}   floor {floor:g}, goal {goal:g}: {met}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The gateway beside direct access and its peers.")
    parser.add_argument("--seconds", type=int, default=2, help="of each closed-loop run (default 2)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of every measurement (default 3)")
    parser.add_argument("--requests", type=int, default=20_000, help="of the memory measurement (default 20,000)")
    parser.add_argument("--quick", action="store_true", help="one round of one second, 4,000 requests")
    parser.add_argument("--only", help=f"some of {', '.join(MEASURES)}, with commas")
    parser.add_argument("--client", choices=("wrk", "python"), default="wrk", help="closed loop's client (default wrk)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that is measured (default: this one)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".bench-peers", help="where the peers are installed")
    parser.add_argument("--setup-peers", action="store_true", help="install the peers (about 1 GB), then end")
    parser.add_argument("--write", action="store_true", help="write bench/gateway.json")
    found = parser.parse_args()
    if found.quick:
        found.seconds, found.repeat, found.requests = 1, 1, 4_000
    found.only = found.only.split(",") if found.only else list(MEASURES)
    if unknown := set(found.only) - set(MEASURES):
        parser.error(f"--only takes {', '.join(MEASURES)}, not {', '.join(unknown)}")
    return found


def main() -> None:
    chosen = options()
    if chosen.setup_peers:
        peers.install(chosen.peers)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every `with` ends what it started
    begun, found = time.monotonic(), dict[str, Any]()
    if (used := busy()) > QUIET:
        say(f"the machine is not quiet: others use {used:.0%} of it, so these figures show only that all of this works")
    try:
        for name in ("nginx", "wrk") if chosen.client == "wrk" else ("nginx",):
            tool(name)
        # On the repository's own disk: a commit must sync a real one.
        with (
            tempfile.TemporaryDirectory(prefix=".bench-run-", dir=ROOT) as place,
            running(Path(place), chosen.peers, chosen.tree.absolute(), alone="closed" not in chosen.only) as field,
        ):
            for name in chosen.only:
                found[name] = MEASURES[name](field, chosen, Path(place))
    except Trouble as trouble:
        raise SystemExit(f"bench/gateway.py: {trouble}") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; every server of this run was ended") from None
    say("what the product promises")
    judge(found)
    say(f"{time.monotonic() - begun:.0f} s, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} threads")
    if chosen.write:
        result = {
            "what": "median, smallest, largest",
            "seconds": chosen.seconds,
            "repeat": chosen.repeat,
            "client": chosen.client,
            "cpus": os.cpu_count(),
            "busy_before": round(used, 2),
            "load_after": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "peers": {name: peers.version(chosen.peers, name) for name in peers.PACKAGES},
            **found,
        }
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
