"""What limited answers cost the decode step: 16 answers at once, free and in a form, and compiling new forms.

    .venv/bin/python bench/legal.py             print the figures beside `bench/legal.json`
    .venv/bin/python bench/legal.py --write     and make them the baseline

Processor time of the model's own thread, with one thread, so that whatever else the machine does counts little. A step
computes one token of each of the 16 answers. Rounds take turns, so that a slow minute meets all kinds alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from reef.engines.local.folder import prepare
from reef.engines.local.layout import check, weight_files
from reef.engines.local.lora import Resident
from reef.engines.local.model import Model, load_weights
from reef.engines.local.sample import Draw
from reef.engines.local.scheduler import Job, Scheduler
from reef.engines.local.text import Stream, Text

BASELINE = Path(__file__).with_suffix(".json")
MANY, TOKENS = 16, 24
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "story": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "story", "age"],
}
FORMS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "regex": {"regex": "[a-zA-Z ,.]{400}"},
    "choice": {"choice": [f"word{number} " * 20 for number in range(500)]},
    "lark": {"grammar": 'start: sum\nsum: NUM | sum ("+" | "-" | "*") NUM\nNUM: /[0-9]{1,3}/'},
    "json": {"json": PERSON},
}


class Rig:
    def __init__(self) -> None:
        folder = prepare("smollm2-135m").path
        torch.set_num_threads(1)
        layout = check(folder)
        self.folder, self.layout, self.text = folder, layout, Text(folder)
        weights = load_weights(weight_files(folder), layout, torch.bfloat16)
        self.model = Model(layout, MANY, 512, torch.bfloat16)
        self.base = Resident("base", "base", weights, source=())
        self.scheduler = Scheduler(self.model, self.text, lambda events: None)
        self.prompt = self.text.encode(self.text.render([{"role": "user", "content": "Tell me about the sea. " * 8}]))

    def round(self, guide: Any, seed: int) -> list[float]:
        """Seconds of each step in which all 16 answers got a token."""
        jobs = []
        for number in range(MANY):
            draw, stream = Draw(1.0, 1.0, 0, random.Random(seed * MANY + number)), Stream(self.text)
            more = {} if guide is None else {"guide": guide.copy()}
            jobs.append(Job(self.prompt, self.base, 0, lambda event: None, draw, TOKENS, stream, **more))
        self.scheduler.submit(jobs)
        self.scheduler._receive(block=False)
        times = []
        while self.scheduler.waiting or self.scheduler.running:
            whole = sum(not job.over and job.left == 1 for job in jobs) == MANY
            began = time.thread_time()
            self.scheduler.step()
            if whole:
                times.append(time.thread_time() - began)
        return times


def measure(rounds: int, only_free: bool) -> dict[str, list[float]]:
    rig, found = Rig(), dict[str, list[float]]()
    guides: dict[str, Any] = {"free": None}
    if not only_free:
        from reef.engines.local.legal import Grammars

        grammars = Grammars(rig.folder, rig.layout)
        grammars.guide('{"regex":"a"}')  # starts the child and reads the tokenizer
        for name, form in FORMS.items():
            if form is not None:
                began = time.perf_counter()
                guides[name] = grammars.guide(json.dumps(form))
                found[f"compile {name}"] = [1000 * (time.perf_counter() - began)]
        grammars.close()
    for number in range(rounds + 1):
        for name, guide in guides.items():
            times = rig.round(guide, number)
            if number:  # the first round warms up
                found.setdefault(f"step {name}", []).extend(1000 * each for each in times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--free", action="store_true", help="only free answers, as before there were any forms")
    given = parser.parse_args()
    baseline = json.loads(BASELINE.read_text())["milliseconds"] if BASELINE.exists() else {}
    summary = {}
    print(f"{'milliseconds':16} {'median':>9} {'lowest':>9} {'highest':>9} {'count':>6} {'baseline':>9}")
    for name, values in measure(given.rounds, given.free).items():
        middle, known = statistics.median(values), baseline.get(name, {}).get("median")
        print(
            f"{name:16} {middle:9.2f} {min(values):9.2f} {max(values):9.2f} {len(values):6} "
            f"{'' if known is None else format(known, '.2f'):>9}"
        )
        summary[name] = {"median": round(middle, 2), "lowest": round(min(values), 2), "highest": round(max(values), 2)}
    if given.write:
        load = round(os.getloadavg()[0], 1)
        settings = {"machine": platform.machine(), "cpus": os.cpu_count(), "load": load, "answers": MANY}
        BASELINE.write_text(json.dumps({"settings": settings, "milliseconds": summary}, indent=2) + "\n")


if __name__ == "__main__":
    main()
