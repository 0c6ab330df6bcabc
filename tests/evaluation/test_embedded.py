"""A look on the real model: equal weights and seeds answer alike, the incumbent answers once, a kill costs little."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.evaluation import Means, Sizes, Task
from reef.evaluation.ask import Question
from reef.evaluation.book import Book
from reef.evaluation.scorers import make
from reef.evaluation.suite import Listed, Sources
from reef.evaluation.trial import Trial

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SERVE = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.engines.local.server import Options, run
run(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), lambda name: WeightFiles("base", {}, {}), Options())
"""
THINGS = ["rain", "bread", "the moon", "chess", "salt", "honey", "a bridge", "a violin"]
SIZES = Sizes(tasks=8)


class Heard(LocalEngine):
    """Remembers what was asked of whom, and what was said."""

    def __init__(self, address):
        super().__init__(address, model="smollm2-135m")
        self.said = []

    async def answer(self, ask):
        body = json.loads(ask.body)
        async for item in super().answer(ask):
            if getattr(item, "choices", None):
                words = body["messages"][-1]["content"]
                self.said.append((ask.release_id, words, body["seed"], item.choices[0].text))
            yield item


def look(engine, book):
    scorer = make({"use": "regex", "answer": "(?i)[aeiou]"})
    tasks = [Task(thing, Question.of(f"What is {thing}?", max_tokens=8, temperature=1.0), scorer) for thing in THINGS]
    return Means("s", engine, "base", book=book, suite=Sources("s", [Listed("things", tasks)], book))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = Path(tmp_path_factory.mktemp("run")) / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(listener.fileno()), str(prepare("smollm2-135m").path)],
            pass_fds=[listener.fileno()],
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
            cwd=Path(__file__).parents[2],
        )
    yield path
    process.terminate()
    process.wait(30)


async def ready(engine):
    for _ in range(240):
        if await engine.ready():
            return
        time.sleep(0.5)


async def test_equal_weights_and_seeds_answer_alike_and_the_incumbent_once(address, release, tmp_path):
    engine, book = Heard(address), Book(tmp_path / "gate.db")
    try:
        await ready(engine)
        trial = await Trial.open(look(engine, book), release("c", "w1"), release("i"), sizes=SIZES)
        while await trial.more(4):
            pass
        assert Counter(side for side, *_ in engine.said) == {"c": 8, "i": 24}
        theirs = {(words, seed): text for side, words, seed, text in engine.said if side == "i"}
        pairs = [(text, theirs[words, seed]) for side, words, seed, text in engine.said if side == "c"]
        assert sum(ours == other for ours, other in pairs) > 4, pairs
        assert len(set(theirs.values())) > 12, "other seeds give other answers"
        assert len(trial.rows) == 8
        assert trial.cost.calls == 32
        assert trial.cost.output_tokens > 100
        engine.said.clear()
        second = await Trial.open(look(engine, book), release("d", "w2"), release("i"), sizes=SIZES)
        await second.more(8)
        assert Counter(side for side, *_ in engine.said) == {"d": 8}
        assert [theirs for _, theirs in second.rows] == [theirs for _, theirs in trial.rows]
    finally:
        await engine.close()
        book.close()


LOOK = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from test_embedded import Book, Heard, SIZES, Trial, look, ready
from reef.core.nouns import Part, Release

def release(name, weights):
    part = Part("lora", {{"adapter_model.safetensors": (weights, 1)}})
    return Release(name, 1, "s", "publish", None, {{"weights": part}}, None, 0, None, None, None, {{}}, "t", "", 0.0)

async def main():
    engine, book = Heard({address!r}), Book({path!r})
    await ready(engine)
    trial = await Trial.open(look(engine, book), release("c", "w1"), release("i", "w0"), sizes=SIZES)
    while await trial.more(4):
        pass
    print(json.dumps([len(engine.said), len(trial.rows), book.spent("s").calls]))
    await engine.close()

asyncio.run(main())
"""


async def test_a_killed_look_asks_only_what_is_not_kept(address, tmp_path):
    path = tmp_path / "gate.db"
    code = LOOK.format(tests=str(Path(__file__).parent), path=str(path), address=str(address))

    def run(**environment):
        return subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
        )

    assert run(REEF_FAILPOINT="book.after_keep:11").returncode == -signal.SIGKILL
    with Book(path)._base as base:
        (kept,) = base.execute("SELECT count(*) FROM scores").fetchone()
    assert kept == 11
    done = run()
    assert done.returncode == 0, done.stderr
    asked, rows, _ = json.loads(done.stdout)
    assert (asked, rows) == (32 - kept, 8)
