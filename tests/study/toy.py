"""A study without a model: two arms, four batches of four, an engine and a trainer that are fakes. The score is how far
along the chain the release is that answers. `TOY_KILL=batch/report` kills the program there, once."""

import os
import signal
import sqlite3

from reef.study import Arm, Demand, Study

BATCHES, SIZE = 4, 4
CONFIG = {
    "reef": {"engine": "fake", "recipe": "sao", "batch_size": SIZE},
    "training": {"backend": "fake"},
    "gate": {"policy": "always"},
}


def arm(name, **options):
    return Arm(name, CONFIG, {"reports": True, **options}, seeds=(0, 1) if name == "main" else (0,), note=f"toy {name}")


def die(place):
    if os.environ.get("TOY_KILL") == place:
        os.kill(os.getpid(), signal.SIGKILL)


async def count(run):
    """Exchanges that were recorded: one asked twice would be there twice."""
    with sqlite3.connect(f"file:{run.state / 'records.db'}?mode=ro", uri=True) as store:
        return store.execute("SELECT count(*) FROM records").fetchone()[0]


async def drive(run):
    async def measure():
        answer = await run.ask("how far?", seed=5, max_tokens=8, record=False)
        return [one["release_id"] for one in await run.releases()].index(answer.release_id) / BATCHES

    kept = run.kept
    curve = kept.get("curve") or [[0, await measure()]]
    first = kept.get("first") or await run.head()
    for batch in range(kept.get("batch", 0), BATCHES):
        numbers = run.at("batch", batch)
        seeds = [numbers.randrange(1000) for _ in range(SIZE)]
        for number, seed in enumerate(seeds):
            answer = await run.ask(f"question {seed}", seed=seed, max_tokens=6)
            assert answer.receipt
            assert answer.text.split()[1] == "heard:"
            if run.arm.options["reports"]:
                await run.report(answer.receipt, numbers.random())
            die(f"{batch}/{number}")
        words = await run.learnt()
        curve.append([(batch + 1) * SIZE, await measure()])
        run.point(batch=batch, score=curve[-1][1], trained=words["trained"])
        die(f"{batch}/end")
        run.keep(batch=batch + 1, curve=curve, first=first, trained=words["trained"])
    chain = await run.releases()
    assert chain[0]["release_id"] == first
    drift = await run.drift(first, await run.head())
    return {
        "base": curve[0][1],
        "end": curve[-1][1],
        "curve": curve,
        "drift": drift,
        "trained": run.kept["trained"],
        "releases": len(chain),
        "records": await count(run),
        "steps": [one["step"] for one in chain],
    }


def demands(results):
    main, silent = results.get("main", {}), results.get("silent", {})
    ends = [run["end"] for run in main.values()]
    yield Demand("main reaches 1", min(ends) >= 1.0 if ends else None, f"ends {ends}")
    left = [run["end"] for run in silent.values()]
    yield Demand("silent stays", max(left) == 0.0 if left else None, f"ends {left}")


def demands_list(results):
    return list(demands(results))


ARMS = (arm("main"), arm("silent", reports=False))
STUDY = Study("toy", "A toy that counts", "releases made", "reports", ARMS, drive, demands_list)
