"""transformers' `generate`, in bfloat16 and a process of its own: one static batch of prompts of one length.

Knows: how its child is asked (a JSON line of prompts' tokens) and what it answers (a line with each step's moment).
Does not know: what it is measured beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Transformers:
    name = "transformers"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Transformers:
        # As a module, not a file: a script's own folder would come before the packages it imports.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from peers.generate import answer; answer({str(self._folder)!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answers(self, prompts: Sequence[str], ids: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        shortest = min(map(len, ids))
        asked = time.perf_counter()
        self._process.stdin.write(json.dumps({"ids": [each[-shortest:] for each in ids], "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("transformers' process ended; its error is above")
        # The clock is the machine's, so moments of the child can stand beside those of this process.
        return [[asked, *json.loads(line)] for _ in prompts]


def answer(folder: str) -> None:
    """In the child: read prompts, generate, tell when each token of the batch was there."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    times: list[float] = []

    class Clock(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            times.append(time.perf_counter())
            return scores

    for line in sys.stdin:
        given = json.loads(line)
        times.clear()
        ids = torch.tensor(given["ids"])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=given["tokens"],
            max_new_tokens=given["tokens"],
            pad_token_id=0,
            logits_processor=LogitsProcessorList([Clock()]),
        )
        print(json.dumps(times), flush=True)
