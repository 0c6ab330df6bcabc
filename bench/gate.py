"""What the gate lets through and what it finds, by simulation with the gate's own decision code.

    python bench/gate.py [--quick | --stored] [--write] [--png FILE]

Simulated candidates of known quality go through `reef.evaluation.claims` and `shield`, chunk by chunk, as in a look.
(a) Each policy: false releases and power against tasks and candidate number. (b) Other rules on the same answers. (c)
Lives of 300 candidates, of which none, 10% or 30% are better: the share of releases that are false, and what was found.
Takes 500 CPU seconds on two processes, 25 with `--quick`. The full run stores bench/gate.json, which `--stored` takes
instead of simulating; `--write` puts the tables into docs/gate.md. Needs nothing but Python; `--png` needs matplotlib.

Two worlds: `alike`, where every task is passed with chance 0.3 (the hardest case: nothing but noise), and `mixed`,
where tasks differ (chances from Beta(0.5, 0.5), mean 0.5: most are nearly always passed or failed). A candidate that is
equal is the same model, or one that changed: 3 tasks in 10 have another chance of the same mean. Within a generation
(until a release, at most 50 candidates) all candidates meet the same answers of the incumbent. After a release the next
incumbent has the same chances again, so that a life stays comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reef.evaluation.book import ROTATE
from reef.evaluation.budget import left, share
from reef.evaluation.claims import Above, Claim, Higher, Look, NoLower
from reef.evaluation.evidence import Evidence, Row, averaged, chance, differences, mcnemar, msprt, tail
from reef.evaluation.shield import Shield

ALPHA, CHUNK, LEAST, REPEATS, TASKS = 0.05, 16, 16, 3, 192
TURNS = (1, 3, 10, 30, 100, 300)
SIZES = (48, 96, 192)
LIFE = 300
HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "gate.md"

World = Literal["alike", "mixed"]
Kind = Literal["same", "changed"]


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass
class Generation:
    """The incumbent on one draw of tasks: its chances and its answers, which all candidates meet."""

    world: World
    rng: random.Random
    tasks: int = TASKS
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        self.chances = [0.3 if self.world == "alike" else self._chance() for _ in range(self.tasks)]
        self.answers = [tuple(self._answer(p) for _ in range(self.repeats)) for p in self.chances]

    def rows(self, lift: float = 0.0, kind: Kind = "same") -> list[Row]:
        """A candidate's answers beside the incumbent's. `lift`: how much higher its mean chance is."""
        mean = 0.3 if self.world == "alike" else 0.5
        ours = [p + lift * (1 - p) / (1 - mean) for p in self.chances]
        if kind == "changed":
            spread = (lambda: self.rng.choice((0.0, 0.6))) if self.world == "alike" else self._chance
            ours = [spread() if self.rng.random() < 0.3 else p for p in ours]
        return [(self._answer(p), theirs) for p, theirs in zip(ours, self.answers, strict=True)]

    def _chance(self) -> float:
        return self.rng.betavariate(0.5, 0.5)

    def _answer(self, p: float) -> float:
        return float(self.rng.random() < p)


# --- rules ------------------------------------------------------------------------------------------------------------

Claims = Callable[[float, int], list[Claim]]
CLAIMS: dict[str, Claims] = {
    "better": lambda limit, planned: [Higher(limit, planned)],
    "no_worse": lambda limit, planned: [NoLower(limit, planned, 0.05)],
    "floor": lambda limit, planned: [Above(limit, planned, 0.3)],
    "all_of": lambda limit, planned: [Higher(limit, planned), NoLower(limit, planned, 0.05)],
}


def look(claims: Sequence[Claim], rows: Sequence[Row]) -> tuple[bool, int]:
    """(accepted, tasks asked): the policy's loop over chunks, with what it uses to decide."""
    taken = Look(claims, LEAST)
    if len(rows) < taken.needs:
        return False, 0
    for start in range(0, len(rows), CHUNK):
        end = start + CHUNK
        verdict = taken.take(rows[start:end], final=end >= len(rows))
        if verdict is not None:
            return verdict == "accept", min(end, len(rows))
    raise AssertionError("a final look has a verdict")


def product(limit: float, rows: Sequence[Row]) -> bool:
    return look([Higher(limit, len(rows))], rows)[0]


def luckier(limit: float, rows: Sequence[Row]) -> bool:
    """More tasks won than lost; what "it scored higher" amounts to."""
    return math.fsum(differences(rows)) > 0


def paired(limit: float, rows: Sequence[Row]) -> bool:
    """McNemar's test of one answer a side."""
    first = [(ours, theirs[0]) for ours, theirs in rows]
    return mcnemar(sum(a > b for a, b in first), sum(a < b for a, b in first)) <= limit


def wealth(limit: float, rows: Sequence[Row]) -> bool:
    """The e-value alone, of rows and of differences."""
    found = Evidence(), Evidence()
    for place, (row, mean) in enumerate(zip(rows, averaged(rows), strict=True), 1):
        found[0].add(*row)
        found[1].add(*mean)
        if place % CHUNK == 0 and min(one.value for one in found) >= 1 / limit:
            return True
    return False


def ratio(limit: float, rows: Sequence[Row]) -> bool:
    """mSPRT of the differences, with the variance they turn out to have and a prior of 10 points."""
    found = differences(rows)
    variance = max(1e-9, math.fsum(d * d for d in found) / len(found))
    total, crossed = 0.0, False
    for count, difference in enumerate(found, 1):
        total += difference
        crossed = crossed or (total > 0 and msprt(total, count, variance, 0.01) >= 1 / limit)
    return crossed


@dataclass(frozen=True)
class Rule:
    """A way to decide. `spend`: the part of alpha for the k-th candidate since the last release (None: LORD++)."""

    name: str
    decide: Callable[[float, Sequence[Row]], bool]
    spend: Callable[[int], float] | None
    repeats: int = REPEATS
    saves: bool = False  # whether an era leaves its budget's rest to the next one


def whole(turn: int) -> float:
    return 1.0


def squares(turn: int) -> float:
    return 6 / (math.pi * turn) ** 2


RULES = {
    rule.name: rule
    for rule in (
        Rule("the gate", product, share, saves=True),
        Rule("nothing left over", product, share),
        Rule("wins > losses", luckier, whole, 1),
        Rule("McNemar, 5% each", paired, whole, 1),
        Rule("budget 6/(pi k)^2", product, squares),
        Rule("LORD++", product, None),
        Rule("e-value only", wealth, share),
        Rule("mSPRT", ratio, share),
        Rule("test of rows only", lambda limit, rows: tail(rows) <= limit, share),
        Rule("one test at the end", lambda limit, rows: chance(rows) <= limit, share),
        Rule("1 incumbent answer", product, share, 1),
        Rule("2 incumbent answers", product, share, 2),
        Rule("5 incumbent answers", product, share, 5),
    )
}


def lord(turn: int, since: Sequence[int]) -> float:
    """LORD++ (Ramdas, Yang, Wainwright, Jordan 2017) as a part of alpha. `turn` counts all candidates; `since`: the
    places of the releases. Its gamma is the usual one, 0.0772 log(max(j, 2)) / (j exp(sqrt(log j)))."""

    def gamma(j: int) -> float:
        return 0.07720838 * math.log(max(j, 2)) / (j * math.exp(math.sqrt(math.log(j)))) if j > 0 else 0.0

    spent = 0.5 * gamma(turn)
    for place, release in enumerate(since):
        spent += (0.5 if place == 0 else 1.0) * gamma(turn - release)
    return spent


# --- (a), (b): one look -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """How often one rule accepts candidates of one quality."""

    policy: str | None  # a name of CLAIMS, or None: a rule
    rule: str | None
    world: World
    tasks: int
    turn: int
    lift: float
    kind: Kind
    looks: int

    def run(self) -> tuple[float, float]:
        """(share accepted, mean tasks asked)."""
        rng = random.Random(repr(self))
        rule = RULES[self.rule or "the gate"]
        spent = lord(self.turn, ()) if rule.spend is None else rule.spend(self.turn)
        accepted = asked = 0
        for _ in range(self.looks):
            rows = Generation(self.world, rng, self.tasks, rule.repeats).rows(self.lift, self.kind)
            if self.policy is not None:
                found, used = look(CLAIMS[self.policy](ALPHA * spent, self.tasks), rows)
            else:
                found, used = rule.decide(ALPHA * spent, rows), self.tasks
            accepted, asked = accepted + found, asked + used
        return accepted / self.looks, asked / self.looks


def cells(quick: bool) -> Iterator[Cell]:
    few, many = (20, 40) if quick else (150, 600)
    for policy in CLAIMS:
        for tasks in SIZES[-1:] if quick else SIZES:
            for turn in TURNS[::2] if quick else TURNS:
                looks = many if (policy, tasks) == ("better", TASKS) else few
                yield Cell(policy, None, "alike", tasks, turn, 0.2, "same", looks)
                yield Cell(policy, None, "alike", tasks, turn, 0.1, "same", looks)
                yield Cell(policy, None, "alike", tasks, turn, -0.05 if policy == "no_worse" else 0.0, "same", looks)
    for turn in (10,) if quick else (1, 10, 100):
        yield Cell("better", None, "mixed", TASKS, turn, 0.2, "same", few)
        yield Cell("better", None, "mixed", TASKS, turn, 0.1, "same", few)
        yield Cell("better", None, "mixed", TASKS, turn, 0.0, "changed", few)
    for rule in sorted(set(RULES) - {"nothing left over"}):  # which differs in lives only
        for turn in (10,) if quick else (1, 10, 100):
            yield Cell(None, rule, "alike", TASKS, turn, 0.2, "same", few)
            yield Cell(None, rule, "alike", TASKS, turn, 0.1, "same", few)
            yield Cell(None, rule, "mixed", TASKS, turn, 0.0, "changed", few)


# --- protected tasks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """As much of a task as the shield looks at."""

    id: str
    protected: bool = True


@dataclass(frozen=True)
class Answered:
    task: Named
    row: Row
    missing: None = None
    unjudged: None = None
    void: bool = False

    @property
    def id(self) -> str:
        return self.task.id


class Stand:
    """A trial whose answers are drawn: task by task a chance for each side."""

    capped = ""

    def __init__(self, chances: Sequence[tuple[float, float]], rng: random.Random) -> None:
        self.tasks = [Named(str(place)) for place in range(len(chances))]
        self._chances, self._rng = chances, rng
        self.results = [
            Answered(task, (self._draw(ours), [self._draw(theirs) for _ in range(REPEATS)]))
            for task, (ours, theirs) in zip(self.tasks, chances, strict=True)
        ]

    async def more(self, count: int) -> bool:
        return False

    async def repeat(self, task: Named, answers: int) -> tuple[list[float], list[float]]:
        ours, theirs = self._chances[int(task.id)]
        return [self._draw(ours) for _ in range(answers)], [self._draw(theirs) for _ in range(answers)]

    def _draw(self, p: float) -> float:
        return float(self._rng.random() < p)


def shielded(tasks: int, before: float, after: float, looks: int) -> float:
    """The share of candidates that are rejected when one of `tasks` protected tasks goes from `before` to `after`, and
    the others are passed with chance `before` by both sides."""
    rng = random.Random(repr((tasks, before, after)))
    chances = [(after, before), *[(before, before)] * (tasks - 1)]
    found = 0
    for _ in range(looks):
        trial: Any = Stand(chances, rng)
        found += asyncio.run(Shield().look(trial)).verdict == "reject"
    return found / looks


# --- (c): lives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """300 candidates one after the other; a share of them is better, half of those by 10 points and half by 20."""

    rule: str
    world: World
    better: float
    seed: int

    def run(self) -> Counter[str]:
        rng, rule = random.Random(repr(self)), RULES[self.rule]
        found: Counter[str] = Counter()
        turn, releases, budget = 0, list[int](), 1.0
        now = Generation(self.world, rng, repeats=rule.repeats)
        uses = 0
        for place in range(1, LIFE + 1):
            turn, uses = turn + 1, uses + 1
            lift = rng.choice((0.1, 0.2)) if rng.random() < self.better else 0.0
            kind: Kind = "changed" if lift == 0 and rng.random() < 0.5 else "same"
            spent = lord(place, releases) if rule.spend is None else budget * rule.spend(turn)
            accepted = rule.decide(ALPHA * spent, now.rows(lift, kind))
            found[f"+{round(100 * lift)}"] += 1
            if accepted:
                found["releases"] += 1
                found["false" if lift == 0 else f"found +{round(100 * lift)}"] += 1
                releases.append(place)
                budget, turn = left(budget, turn) if rule.saves else 1.0, 0
            if accepted or uses == ROTATE:
                now, uses = Generation(self.world, rng, repeats=rule.repeats), 0
        return found


LIVED = ("the gate", "nothing left over", "budget 6/(pi k)^2", "LORD++", "McNemar, 5% each", "wins > losses")


def lives(quick: bool) -> Iterator[Life]:
    for world in ("alike",) if quick else ("alike", "mixed"):
        for better in (0.3,) if quick else (0.0, 0.1, 0.3):
            for rule in LIVED[::2] if quick else LIVED:
                count = 1 if quick else (100 if better == 0 else 24) if rule == "the gate" else 8
                for seed in range(count):
                    yield Life(rule, world, better, seed)


def told(of: Sequence[tuple[Life, Counter[str]]]) -> list[dict[str, Any]]:
    """The lives of one rule, world and share of better candidates as one entry each."""
    groups: dict[tuple[str, World, float], list[Counter[str]]] = {}
    for life, found in of:
        groups.setdefault((life.rule, life.world, life.better), []).append(found)
    entries = []
    for (rule, world, better), each in groups.items():
        total = sum(each, Counter[str]())
        entry: dict[str, Any] = {"rule": rule, "world": world, "better": better, "lives": len(each)}
        entry |= {"releases": total["releases"], "false": total["false"]}
        entry["lives_with_a_false_one"] = sum(one["false"] > 0 for one in each)
        for lift in ("+10", "+20"):
            entry[f"found {lift}"] = round(total[f"found {lift}"] / total[lift], 3) if total[lift] else None
        entries.append(entry)
    return entries


# --- the tables -------------------------------------------------------------------------------------------------------


def work(job: Cell | Life) -> Any:
    return job.run()


def measure(quick: bool) -> dict[str, Any]:
    began = time.monotonic()
    jobs: list[Cell | Life] = [*lives(quick), *cells(quick)]
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(work, jobs, chunksize=1 if quick else 4))
    done = list(zip(jobs, found, strict=True))
    looks = [
        {**{name: value for name, value in vars(job).items() if value is not None}, "accepted": got[0], "asked": got[1]}
        for job, got in done
        if isinstance(job, Cell)
    ]
    count = 50 if quick else 500
    shield = [
        {"tasks": tasks, "before": before, "after": after, "rejected": shielded(tasks, before, after, count)}
        for tasks in (5, 20, 100)
        for before, after in ((0.8, 0.8), (0.95, 0.95), (0.95, 0.5), (0.95, 0.05), (1.0, 0.0))
    ]
    said = told([(job, got) for job, got in done if isinstance(job, Life)])
    return {"seconds": round(time.monotonic() - began), "looks": looks, "protected": shield, "lives": said}


def tables(found: dict[str, Any]) -> str:
    return "\n\n".join([_policies(found), _rules(found), _lives(found), _protected(found)])


def _pick(found: dict[str, Any], **of: Any) -> str:
    for one in found["looks"]:
        if all(one.get(name) == value for name, value in of.items()):
            return f"{one['accepted']:.2f}"
    return ""


def _policies(found: dict[str, Any]) -> str:
    turns = [turn for turn in TURNS if _pick(found, policy="better", tasks=TASKS, turn=turn)]
    lines = [
        "Share of candidates accepted: +20 points / +10 points / none (for `no_worse`: 5 points worse), world `alike`.",
        "",
        "| policy | tasks | " + " | ".join(f"candidate {turn}" for turn in turns) + " |",
        "|---|---|" + "---|" * len(turns),
        "| always | any | " + " | ".join(["1 / 1 / 1"] * len(turns)) + " |",
    ]
    for policy in CLAIMS:
        for tasks in SIZES:
            row = []
            for turn in turns:
                lifts = (0.2, 0.1, -0.05 if policy == "no_worse" else 0.0)
                row.append(
                    " / ".join(
                        _pick(found, policy=policy, tasks=tasks, turn=turn, lift=lift, world="alike") for lift in lifts
                    )
                )
            if any(row[0].split(" / ")):
                lines.append(f"| {policy} | {tasks} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _rules(found: dict[str, Any]) -> str:
    turns = sorted({one["turn"] for one in found["looks"] if one.get("rule") == "the gate"})
    lines = [
        "Other rules, 192 tasks: +20 / +10 in `alike` / changed and no better in `mixed`.",
        "",
        "| rule | " + " | ".join(f"candidate {turn}" for turn in turns) + " |",
        "|---|" + "---|" * len(turns),
    ]
    for rule in sorted({one["rule"] for one in found["looks"] if "rule" in one}, key=list(RULES).index):
        row = []
        for turn in turns:
            of: dict[str, Any] = {"rule": rule, "turn": turn}
            picks = [_pick(found, **of, lift=lift, world="alike") for lift in (0.2, 0.1)]
            row.append(" / ".join([*picks, _pick(found, **of, lift=0.0, world="mixed")]))
        lines.append(f"| {rule} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _lives(found: dict[str, Any]) -> str:
    lines = [
        f"Lives of {LIFE} candidates.",
        "",
        "| rule | world | better | lives | releases | false | lives with a false one | found of +10 | of +20 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found["lives"]:
        share_ = f"{one['false']} ({one['false'] / one['releases']:.1%})" if one["releases"] else "0"
        hits = " | ".join(
            "" if one[f"found {lift}"] is None else f"{one[f'found {lift}']:.0%}" for lift in ("+10", "+20")
        )
        lines.append(
            f"| {one['rule']} | {one['world']} | {one['better']:.0%} | {one['lives']} | {one['releases']} | {share_} | "
            f"{one['lives_with_a_false_one']} | {hits} |"
        )
    return "\n".join(lines)


def _protected(found: dict[str, Any]) -> str:
    lines = [
        "`protected`: share of candidates rejected when one task's chance to pass changes and the others keep theirs.",
        "",
        "| protected tasks | "
        + " | ".join(["0.8, no change", "0.95, no change", "0.95 to 0.5", "0.95 to 0.05", "1 to 0"])
        + " |",
        "|---|---|---|---|---|---|",
    ]
    for tasks in (5, 20, 100):
        row = [f"{one['rejected']:.2f}" for one in found["protected"] if one["tasks"] == tasks]
        lines.append(f"| {tasks} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for lift, style in ((0.2, "-"), (0.1, "--")):
        for tasks in SIZES:
            points = [
                (one["turn"], one["accepted"])
                for one in found["looks"]
                if one.get("policy") == "better" and (one["world"], one["tasks"], one["lift"]) == ("alike", tasks, lift)
            ]
            if points:
                axes.plot(
                    *zip(*sorted(points), strict=True), style, marker="o", label=f"+{100 * lift:.0f}, {tasks} tasks"
                )
    axes.set(
        xscale="log", xlabel="candidate since the last release", ylabel="accepted", ylim=(0, 1), title="policy better"
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer simulations: to see that it runs")
    parser.add_argument("--stored", action="store_true", help="show what the last full run stored")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/gate.md")
    parser.add_argument("--png", type=Path, help="plot the power of policy better")
    options = parser.parse_args()
    store = HERE / "gate.json"
    found = json.loads(store.read_text()) if options.stored else measure(options.quick)
    print(tables(found))
    print(f"\n{found['seconds']} s")
    if not options.quick and not options.stored:
        store.write_text(json.dumps(found, indent=1) + "\n")
    if options.png:
        plot(found, options.png)
    if options.write:
        before, _, rest = DOCS.read_text().partition("<!-- frontier -->")
        after = rest.partition("<!-- /frontier -->")[2]
        DOCS.write_text(f"{before}<!-- frontier -->\n{tables(found)}\n<!-- /frontier -->{after}")


if __name__ == "__main__":
    main()
