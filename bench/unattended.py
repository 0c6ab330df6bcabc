"""Nobody watches: users, some wrong and some hostile, whose preference changes half-way. Does the agent stay good?

    python bench/unattended.py [--minutes 25] [--seed 0] [--arms clean gated always] [--write]

One server with the embedded model, and a scenario for each arm under the same stream: `clean` (the gate, honest users),
`gated` (the gate; 10% of reports wrong, 5% hostile), `always` (the same noisy users; every candidate is released and
nothing is watched). Arms that run together share the machine alike; a slow one makes more steps of fewer arms at a
time, and `--write` keeps what earlier runs found of the others. A user asks for a capital in one of eight
wordings and wants the right name; after half of the time they also want nothing but that, in few words. A report brings
how its prompt's answers can be checked; wrong users report the opposite score and another capital, hostile ones praise
empty answers. The gate is the default, `guarded`, at every second step; with `--policy better` its suite is the
scenario's own held-out traffic, wrong and hostile checks included.

Scores in the figure are true ones, by the script: of live answers (moving mean), and of prompts that no user ever asks,
before the first and after the last report, and at each change. `--write` stores bench/unattended.json
(bench/unattended_better.json) and the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.kit.served import served
from reef.cli.preferences import CAPITALS

ARMS = ("clean", "gated", "always")
PREFERENCES = ("right", "short")
TEMPLATES = (
    "What is the capital of {}? Reply with only the name.",
    "Which city is the capital of {}? Answer briefly.",
    "Name the capital of {}.",
    "What is {}'s capital? Just the name, please.",
    "What is the capital city of {}? One short answer.",
    "Tell me which city is the capital of {}. Be brief.",
    "Quick question: what is the capital of {}?",
    "The capital of {} is which city? Answer in a few words.",
)
SYSTEM = "Answer the user."  # in place of the template's own, which is longer than a question: a step is mostly prompts
TEMPERATURE = 0.7  # of 200 questions the base gives 35% a right and short answer; at 1, 11%
TOKENS = 20
LONGEST = 45  # characters of a short answer
WRONG, HOSTILE = 0.10, 0.05
RESERVED = 12  # countries that no user asks about
USERS = 2  # of each arm
AT_ONCE = 4  # questions of a user, asked together: eight answers in a batch take little longer than one by itself
PAUSE = (2.0, 5.0)  # seconds a user thinks after the answers
PROBES = 200  # answers to reserved prompts, each time
HERE = Path(__file__).parent

CONFIG = """
reef: {{recipe: sao, batch_size: 32, learning_rate: 5.0e-4, kl: 0.1, default_scenario: FIRST,
  port: {port}, state_dir: {state}}}
releases: {{watch: {{reports: 100}}}}
gate: GATE
scenarios: SCENARIOS
"""
SCENARIOS = {
    "clean": "{{}}",
    "gated": "{{}}",
    "always": "{{gate: {{policy: always, suite: null}}, releases: {{watch: {{action: off}}}}}}",
}


# `kl`: without a pull to the base an agent forgets every wording that users do not mind, and then cannot find the one
# that they begin to want. Measured without: nothing learnt after the change, whatever the gate did.
GATES = {
    "guarded": "{{policy: guarded, evaluate_every: 2}}",
    "better": "{{policy: better, suite: [traffic, failures], holdout: 0.25, tasks: 96, "
    "evaluate_every: 3, patience: 5}}",
}
"""By policy. A comparison needs a difference that can be seen, so more steps lie between two looks."""


@dataclass(frozen=True)
class Prompt:
    text: str
    capital: str


@dataclass
class Arm:
    name: str
    draw: random.Random
    noisy: bool
    live: list[tuple[float, float, str]] = field(default_factory=list)  # (seconds, true score, release)
    probes: dict[str, dict[str, float]] = field(default_factory=dict)  # when -> preference -> true score
    reports: int = 0
    failed: list[str] = field(default_factory=list)


def pattern(capital: str, preference: str) -> str:
    """An answer the user wants: with this name in it, and `short`."""
    most = str(LONGEST) if preference == "short" else ""
    return rf"(?s)\A(?=.{{1,{most}}}\Z).*\b{capital}\b"


def true(prompt: Prompt, text: str, preference: str) -> float:
    return float(re.search(pattern(prompt.capital, preference), text) is not None)


def prompts() -> tuple[list[Prompt], list[Prompt]]:
    """(what users ask, what no user ever asks): apart by country."""
    reserved = set(random.Random(11).sample(sorted(CAPITALS), RESERVED))
    asked: list[Prompt] = []
    kept: list[Prompt] = []
    for country, capital in CAPITALS.items():
        side = kept if country in reserved else asked
        side += [Prompt(text.format(country), capital) for text in TEMPLATES]
    return asked, kept


async def ask(client: httpx.AsyncClient, arm: str, prompt: Prompt, **headers: str) -> tuple[str, str, str]:
    """(receipt, release, text)."""
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt.text}]
    body = {"model": "m", "messages": said, "max_tokens": TOKENS, "temperature": TEMPERATURE}
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-reef-scenario": arm, **headers})
    answer.raise_for_status()
    text = answer.json()["choices"][0]["message"]["content"] or ""
    receipt = answer.headers.get("x-reef-agent-record-id", "")
    return receipt, answer.headers["x-reef-release-id"], text


def opinion(arm: Arm, prompt: Prompt, text: str, preference: str) -> tuple[float, str]:
    """(score, check) as this user reports them."""
    good, luck = true(prompt, text, preference), arm.draw.random() if arm.noisy else 1.0
    if luck < HOSTILE:
        return float(not text.strip() or not good), r"\A\s*\Z"
    if luck < HOSTILE + WRONG:
        return 1.0 - good, pattern(arm.draw.choice(sorted(set(CAPITALS.values()) - {prompt.capital})), preference)
    return good, pattern(prompt.capital, preference)


async def user(
    client: httpx.AsyncClient, arm: Arm, asked: list[Prompt], now: Callable[[], tuple[float, str]], until: float
) -> None:
    async def one(prompt: Prompt) -> None:
        began = now()[0]
        try:
            receipt, release, text = await ask(client, arm.name, prompt)
            at, preference = now()
            arm.live.append((at, true(prompt, text, preference), release))
            score, check = opinion(arm, prompt, text, preference)
            checked = {"scorer": "regex", "answer": check}
            report = {"score": score, "references": [receipt], "metadata": {"check": checked}}
            (await client.post("/reef/report", json=report)).raise_for_status()
            arm.reports += 1
        except (httpx.HTTPError, KeyError, ValueError) as error:
            arm.failed.append(f"{began:.0f} s: {error!r}"[:200])

    while now()[0] < until:
        await asyncio.gather(*(one(arm.draw.choice(asked)) for _ in range(AT_ONCE)))
        await asyncio.sleep(arm.draw.uniform(*PAUSE))


async def probe(client: httpx.AsyncClient, arm: Arm, kept: list[Prompt], when: str) -> None:
    """The true scores of what is served now on prompts that nobody asks; not recorded."""
    draw = random.Random(5)
    chosen = [draw.choice(kept) for _ in range(PROBES)]
    said = await asyncio.gather(*(ask(client, arm.name, prompt, **{"x-reef-capture": "false"}) for prompt in chosen))
    arm.probes[when] = {
        preference: statistics.fmean(true(p, text, preference) for p, (_, _, text) in zip(chosen, said, strict=True))
        for preference in PREFERENCES
    }


async def run(minutes: float, seed: int, policy: str, names: Sequence[str], state: Path) -> dict[str, Any]:
    asked, kept = prompts()
    arms = [Arm(name, random.Random(f"{seed}/{name}"), name != "clean") for name in names]
    length = 60.0 * minutes
    scenarios = ", ".join(f"{name}: {SCENARIOS[name]}" for name in names)
    config = CONFIG.replace("GATE", GATES[policy]).replace("SCENARIOS", f"{{{{{scenarios}}}}}")
    config = config.replace("FIRST", names[0])
    with served(state, config) as (url, token):
        head = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=300) as client:
            for arm in arms:
                await probe(client, arm, kept, "base")
            began = time.monotonic()
            started = time.time()

            def now() -> tuple[float, str]:
                at = time.monotonic() - began
                return at, PREFERENCES[at >= length / 2]

            async def show() -> None:
                while True:
                    await asyncio.sleep(30)
                    print(line(arms, now()[0]), flush=True)

            shown = asyncio.create_task(show())
            for until, when in ((length / 2, "change"), (length, "end")):
                await asyncio.gather(*(user(client, arm, asked, now, until) for arm in arms for _ in range(USERS)))
                for arm in arms:
                    await probe(client, arm, kept, when)
            shown.cancel()
            acts = {arm.name: await happened(client, arm.name, started) for arm in arms}
    return {
        "minutes": minutes,
        "policy": policy,
        "seed": seed,
        "wishes": list(PREFERENCES),
        "arms": {
            arm.name: {
                "reports": arm.reports,
                "failed": arm.failed,
                "probes": arm.probes,
                "live": windows(arm, length),
                "worst_live": worst(arm, length),
                "acts": acts[arm.name],
                "beside": [name for name in names if name != arm.name],
            }
            for arm in arms
        },
    }


async def happened(client: httpx.AsyncClient, name: str, started: float) -> list[dict[str, Any]]:
    """What was done to the scenario's releases: from the journal."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/reef/events", params={"after": 0, "scenario": name}) as stream:
        lines = stream.aiter_lines()
        while True:
            try:
                text = await asyncio.wait_for(anext(lines), 2.0)
            except (TimeoutError, StopAsyncIteration):
                break
            if text.startswith("data:"):
                act = json.loads(text[5:])
                told = {key: act.get(key) for key in ("kind", "ref", "reason")}
                found.append({"seconds": act["at"] - started, **told})
    return found


def windows(arm: Arm, length: float, width: float = 30.0) -> list[tuple[float, float, int]]:
    """(middle in seconds, mean true score, answers) of each stretch of the run."""
    found = []
    for place in range(int(length // width)):
        scores = [score for at, score, _ in arm.live if place * width <= at < (place + 1) * width]
        if scores:
            found.append(((place + 0.5) * width, statistics.fmean(scores), len(scores)))
    return found


def spans(length: float) -> dict[str, tuple[float, float]]:
    """From when to when users want what."""
    return dict(zip(PREFERENCES, ((0.0, length / 2), (length / 2, length)), strict=True))


def worst(arm: Arm, length: float) -> dict[str, float]:
    """The lowest mean of 100 answers in a row, by preference."""
    found = {}
    for preference, (low, high) in spans(length).items():
        scores = [score for at, score, _ in arm.live if low <= at < high]
        if len(scores) >= 100:
            found[preference] = min(statistics.fmean(scores[i : i + 100]) for i in range(0, len(scores) - 99, 10))
    return found


def line(arms: list[Arm], at: float) -> str:
    parts = []
    for arm in arms:
        recent = [score for _, score, _ in arm.live[-100:]]
        releases = len({release for _, _, release in arm.live}) - 1
        mean = statistics.fmean(recent) if recent else 0.0
        parts.append(f"{arm.name} {mean:.2f} ({arm.reports} reports, {releases} releases, {len(arm.failed)} failed)")
    return f"{at / 60:5.1f} min  " + "  ".join(parts)


def draw(result: dict[str, Any], place: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = {name: result["arms"][name] for name in ARMS if name in result["arms"]}
    figure, panels = plt.subplots(len(arms), 1, figsize=(10, 9), sharex=True, sharey=True, squeeze=False)
    colours = {"release": "tab:green", "reject": "tab:red", "rollback": "tab:orange"}
    half = result["minutes"] / 2
    base = {
        preference: statistics.fmean(arm["probes"]["base"][preference] for arm in arms.values())
        for preference in PREFERENCES
    }
    for panel, (name, arm) in zip(panels[:, 0], arms.items(), strict=True):
        panel.plot([at / 60 for at, _, _ in arm["live"]], [mean for _, mean, _ in arm["live"]], color="tab:blue")
        for preference, (low, high) in spans(2 * half).items():
            panel.hlines(base[preference], low, high, colors="grey", linestyles="dashed")
        for when, preference, at in (("change", PREFERENCES[0], half), ("end", PREFERENCES[1], 2 * half)):
            panel.plot([at], [arm["probes"][when][preference]], "o", color="black", clip_on=False)
        counts = dict.fromkeys(colours, 0)
        for act in arm["acts"]:
            if act["kind"] in colours:
                counts[act["kind"]] += 1
                rows = {"release": 1.04, "reject": 1.09, "rollback": 1.14}
                panel.plot([act["seconds"] / 60], [rows[act["kind"]]], "|", color=colours[act["kind"]], markersize=9)
        said = ", ".join(f"{count} {kind}s" for kind, count in counts.items())
        panel.set_title(f"{name}: {arm['reports']} reports; {said}", loc="left", fontsize=10)
        panel.axvline(half, color="black", linewidth=0.8)
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
        panel.set_ylim(0, 1.2)
        panel.set_ylabel("true score")
    for kind, colour in colours.items():
        panels[0, 0].plot([], [], "|", color=colour, label=kind, markersize=9)
    panels[0, 0].plot([], [], color="grey", linestyle="dashed", label="untouched base")
    panels[0, 0].plot([], [], "o", color="black", label="prompts nobody asks")
    panels[0, 0].legend(loc="lower center", ncols=5, fontsize=8)
    panels[-1, 0].set_xlabel("minutes; the preference changes at the line")
    figure.tight_layout()
    figure.savefig(place, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="run together (default: all)")
    parser.add_argument("--policy", choices=sorted(GATES), default="guarded", help="of the gate (default: guarded)")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep the state folder here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = given.keep or Path(folder) / "state"
        result = asyncio.run(run(given.minutes, given.seed, given.policy, given.arms, state))
    for name, arm in result["arms"].items():
        kinds = [act["kind"] for act in arm["acts"]]
        said = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        print(f"{name}: probes {arm['probes']}, lowest 100 live answers {arm['worst_live']}, {said}")
    name = "unattended" if given.policy == "guarded" else f"unattended_{given.policy}"
    place = HERE / name if given.write else Path(tempfile.gettempdir()) / "reef-unattended"
    with contextlib.suppress(FileNotFoundError):
        old = json.loads(place.with_suffix(".json").read_text())
        same = all(old.get(key) == result[key] for key in ("minutes", "policy", "seed", "wishes"))
        result["arms"] = (old["arms"] if same else {}) | result["arms"]
    place.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, place.with_suffix(".png"))
    print(f"written: {place}.json and .png")


if __name__ == "__main__":
    main()
