from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from reef.core.errors import EngineError
from reef.engines.local.layout import read_layout, weight_files
from reef.engines.local.lora import Resident, Source
from reef.engines.local.model import Model, Weights, load_weights
from reef.engines.local.sample import Draw
from reef.engines.local.scheduler import Ended, Event, Failed, Job, Sampled, Scheduler, Scored, common
from reef.engines.local.text import Stream, Text


def files(name: str) -> Source:
    return ((f"{name}.safetensors", f"/{name}", 1, 1, 1),)


class Rig:
    """A scheduler stepped by hand: everything it would do in its thread, one step at a time."""

    def __init__(self, folder: Path, *, slots: int = 16, share: float = 0.5, weights: Weights | None = None) -> None:
        layout = read_layout(folder)
        self.text = Text(folder)
        self.model = Model(layout, slots, 512, torch.float32)
        held = weights or load_weights(weight_files(folder), layout, torch.float32)
        self.base = Resident("base", "base", held, source=())
        self.events: list[tuple[Job, Event]] = []
        self.now = 0.0  # a row of a step takes a millisecond
        self.scheduler = Scheduler(self.model, self.text, self.events.extend, share=share, clock=lambda: self.now)
        self.rows: list[int] = []
        forward = self.model.forward

        def counted(weights: Weights, work: Any) -> torch.Tensor:
            self.rows.append(len(work.ids))
            self.now += len(work.ids) / 1000
            return forward(weights, work)

        self.model.forward = counted  # type: ignore[method-assign]

    def job(self, prompt: list[int], limit: int = 8, seed: int = 0, **more: Any) -> Job:
        draw = Draw(more.pop("temperature", 1.0), 1.0, 0, random.Random(seed))
        stream = Stream(self.text, more.pop("stops", ()))
        return Job(prompt, self.base, more.pop("priority", 0), lambda event: None, draw, limit, stream, **more)

    def submit(self, *jobs: Job) -> None:
        self.scheduler.submit(jobs)

    def step(self) -> None:
        self.scheduler._receive(block=False)
        self.scheduler.step()

    def finish(self) -> None:
        for _ in range(2000):
            self.step()
            if not self.scheduler.running and not self.scheduler.waiting:
                return
        raise AssertionError("still running after 2000 steps")

    def tokens(self, job: Job) -> list[int]:
        return [event.token for each, event in self.events if each is job and isinstance(event, Sampled)]

    def reason(self, job: Job) -> str | None:
        return next((e.reason for each, e in self.events if each is job and isinstance(e, Ended)), None)


@pytest.fixture
def rig(tiny: Path) -> Rig:
    return Rig(tiny)


def prompts(count: int) -> list[list[int]]:
    numbers = random.Random(3)
    return [[numbers.randrange(3, 250) for _ in range(numbers.randrange(2, 200))] for _ in range(count)]


def test_sixteen_together_say_what_each_says_alone(tiny: Path) -> None:
    alone = []
    for seed, prompt in enumerate(prompts(16)):
        one = Rig(tiny)
        job = one.job(prompt, 12, seed)
        one.submit(job)
        one.finish()
        alone.append(one.tokens(job))
    rig = Rig(tiny)
    jobs = [rig.job(prompt, 12, seed) for seed, prompt in enumerate(prompts(16))]
    for job in jobs:  # one more each step, so that prompts and answers of all ages share steps
        rig.submit(job)
        rig.step()
    rig.finish()
    assert [rig.tokens(job) for job in jobs] == alone
    assert max(rig.rows) > 16


def test_a_cancelled_job_is_out_before_the_next_step(rig: Rig) -> None:
    first, second = rig.job([5] * 9, 50), rig.job([6] * 9, 50)
    rig.submit(first, second)
    rig.step()
    rig.step()
    rig.scheduler.cancel(first)
    before = len(rig.tokens(first))
    rig.step()
    assert rig.rows[-1] == 1
    assert len(rig.tokens(first)) == before
    assert rig.scheduler.running == 1
    waiting = rig.job([7], 5)
    rig.submit(waiting)
    rig.scheduler.cancel(waiting)
    rig.finish()
    assert rig.tokens(waiting) == []


def test_live_goes_first_and_evaluation_has_its_share(tiny: Path) -> None:
    rig = Rig(tiny, slots=4, share=0.5)
    lower = [rig.job([9 + i] * 5, 30, priority=1) for i in range(4)]
    rig.submit(*lower)
    rig.step()
    assert rig.scheduler.running == 2
    live = [rig.job([19 + i] * 5, 30) for i in range(3)]
    rig.submit(*live)
    rig.step()
    assert [bool(rig.tokens(job)) for job in live] == [True, True, False]
    order = []
    for _ in range(200):
        rig.step()
        order = [job for job, event in rig.events if isinstance(event, Ended)]
        if len(order) == 7:
            break
    assert {rig.reason(job) for job in [*lower, *live]} <= {"length", "stop"}
    assert order.index(live[2]) < order.index(lower[3])


def test_a_long_prompt_does_not_hold_up_answers(tiny: Path) -> None:
    rig = Rig(tiny)
    quick = rig.job([5] * 5, 60)
    rig.submit(quick)
    rig.step()
    rig.submit(rig.job(list(range(3, 253)) * 2, 1))
    for _ in range(4):
        before = len(rig.tokens(quick))
        rig.step()
        assert len(rig.tokens(quick)) == before + 1 or rig.reason(quick)
        assert rig.rows[-1] <= 129


def test_prompts_of_an_evaluation_do_not_hold_up_live_answers(tiny: Path) -> None:
    rig = Rig(tiny)
    lower = [rig.job([9 + i] * 100, 1, priority=1) for i in range(8)]
    rig.submit(*lower)
    rig.step()
    assert rig.rows[-1] <= 200  # nobody is waiting yet, and still the step is short
    live = rig.job([5] * 5, 40)
    rig.submit(live)
    rig.step()
    assert len(rig.tokens(live)) == 1
    for _ in range(6):
        before = len(rig.tokens(live))
        rig.step()
        assert len(rig.tokens(live)) == before + 1
        assert rig.rows[-1] <= 101 + len(lower)
    rig.finish()
    assert all(rig.reason(job) for job in lower)


def test_while_somebody_waits_an_evaluation_has_a_part_of_the_time(tiny: Path) -> None:
    """Rows stand for time: beside live answers, the others have their part of it and not much more."""
    rig = Rig(tiny)
    lower = [rig.job([9 + i] * 60, 40, priority=1) for i in range(6)]
    live = [rig.job([5 + i] * 5, 300) for i in range(2)]
    rig.submit(*lower, *live)
    steps = 0
    while not any(rig.reason(job) for job in live) and steps < 200:
        rig.step()
        steps += 1
    mine = sum(len(rig.tokens(job)) for job in live)
    assert steps > 30  # the tiny model's answers may end by themselves
    assert 2 * steps - 2 <= mine <= 2 * steps  # no step passes live answers over
    others = sum(rig.rows) - mine
    assert others > 60  # they are not starved either
    assert others <= 0.3 * sum(rig.rows) + 80  # one chunk may be ahead
    rig.finish()
    assert all(rig.reason(job) for job in lower)


def test_choices_of_one_prompt_share_it(rig: Rig) -> None:
    prompt = list(range(10, 110))
    first = rig.job(prompt, 6, 1)
    rest = [rig.job(prompt, 6, seed, after=first) for seed in (2, 3, 4)]
    rig.submit(first, *rest)
    rig.finish()
    assert sum(rig.rows) < 2 * len(prompt)
    alone = rig.job(prompt, 6, 4)
    rig.submit(alone)
    rig.finish()
    assert rig.tokens(alone) == rig.tokens(rest[2])


def test_a_conversation_goes_on_from_its_tokens(rig: Rig, tiny: Path) -> None:
    prompt = list(range(10, 90))
    first = rig.job(prompt, 5, 1)
    rig.submit(first)
    rig.finish()
    rig.rows.clear()
    longer = [*prompt, *rig.tokens(first), *range(100, 120)]
    second = rig.job(longer, 5, 2)
    rig.submit(second)
    rig.finish()
    assert rig.rows[0] <= 21
    fresh = Rig(tiny)
    expected = fresh.job(longer, 5, 2)
    fresh.submit(expected)
    fresh.finish()
    assert rig.tokens(second) == fresh.tokens(expected)


def test_tokens_of_other_weights_are_never_gone_on_from(rig: Rig) -> None:
    prompt = list(range(10, 90))
    rig.submit(rig.job(prompt, 5, 1))
    rig.finish()
    rig.rows.clear()
    other = rig.job(prompt, 5, 1)
    other.resident = Resident("r1", "full", rig.base.weights, source=files("r1"))
    rig.submit(other)
    rig.finish()
    assert rig.rows[0] == len(prompt)


def test_a_failed_step_fails_its_jobs_only(rig: Rig) -> None:
    infinite = Weights(rig.base.weights.embed, (), rig.base.weights.norm, lambda x: x / 0)
    broken = Resident("broken", "full", infinite, source=files("broken"))
    failing, fine = rig.job([5] * 9), rig.job([6] * 9)
    failing.resident = broken
    rig.submit(failing, fine)
    rig.finish()
    assert rig.reason(fine)
    (error,) = [event.error for job, event in rig.events if job is failing and isinstance(event, Failed)]
    assert isinstance(error, EngineError)
    again = rig.job([6] * 9)
    rig.submit(again)
    rig.finish()
    assert rig.tokens(again) == rig.tokens(fine)


def test_a_rating_that_ended_in_a_step_that_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rating = Job([5] * 9, rig.base, 0, lambda event: None, start=1)
    drawing = rig.job([6] * 9)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("reef.engines.local.scheduler.sample", fails)
        rig.submit(rating, drawing)
        rig.step()
    told = {id(job): type(event) for job, event in rig.events}
    assert told == {id(rating): Scored, id(drawing): Failed}
    again = rig.job([6] * 9)
    rig.submit(again)
    rig.finish()
    assert rig.reason(again)


def test_what_is_not_finite_leaves_the_slot_with_its_job(tiny: Path) -> None:
    """Keys that are hidden are weighed with zero, and zero times infinity would reach the next answer in the slot."""
    rig, fresh = Rig(tiny, slots=2), Rig(tiny, slots=2)
    layers = [dataclasses.replace(layer, qkv=lambda x, run=layer.qkv: run(x) / 0) for layer in rig.base.weights.layers]
    broken = rig.job([5] * 90)
    weights = dataclasses.replace(rig.base.weights, layers=tuple(layers))
    broken.resident = Resident("broken", "full", weights, source=files("broken"))
    rig.submit(broken)
    rig.finish()
    assert any(isinstance(event, Failed) for job, event in rig.events if job is broken)
    said = []
    for one in (rig, fresh):
        pair = [one.job([6] * 9, 12, 1), one.job([7] * 80, 12, 2)]  # side by side, the short one sees 80 keys, hidden
        one.submit(*pair)
        one.finish()
        said.append([one.tokens(job) for job in pair])
    assert said[0] == said[1]
    assert all(said[0])


def test_half_a_prompt_that_is_not_finite_leaves_the_slot(tiny: Path) -> None:
    """A client that goes in the middle of its prompt: no token was drawn that would have shown it."""
    rig, fresh = Rig(tiny, slots=2), Rig(tiny, slots=2)
    layers = [dataclasses.replace(layer, qkv=lambda x, run=layer.qkv: run(x) / 0) for layer in rig.base.weights.layers]
    weights = dataclasses.replace(rig.base.weights, layers=tuple(layers))
    broken = rig.job([5] * 300)
    broken.resident = Resident("broken", "full", weights, source=files("broken"))
    rig.submit(broken)
    rig.step()
    assert 0 < broken.done < 300
    rig.scheduler.cancel(broken)
    rig.step()
    said = []
    for one in (rig, fresh):
        pair = [one.job([6] * 9, 12, 1), one.job([7] * 80, 12, 2)]
        one.submit(*pair)
        one.finish()
        said.append([one.tokens(job) for job in pair])
    assert said[0] == said[1]
    assert all(said[0])


def test_the_end_token_is_recorded_and_not_said(rig: Rig) -> None:
    ends = rig.model.layout.ends[0]
    head = rig.base.weights.head

    def certain(x: torch.Tensor) -> torch.Tensor:
        return head(x).index_fill(1, torch.tensor([ends]), 100.0)

    job = rig.job([5] * 9)
    job.resident = Resident(
        "e",
        "full",
        Weights(rig.base.weights.embed, rig.base.weights.layers, rig.base.weights.norm, certain),
        source=files("e"),
    )
    rig.submit(job)
    rig.finish()
    assert rig.tokens(job) == [ends]
    assert rig.reason(job) == "stop"
    assert "".join(event.text for each, event in rig.events if each is job and isinstance(event, Sampled)) == ""


def test_rating_gives_what_sampling_gave(rig: Rig) -> None:
    prompt = list(range(10, 150))
    job = rig.job(prompt, 40, 3)
    rig.submit(job)
    rig.finish()
    drawn = [event.logprob for each, event in rig.events if each is job and isinstance(event, Sampled)]
    rate = Job([*prompt, *rig.tokens(job)], rig.base, 1, lambda event: None, start=len(prompt))
    rig.submit(rate)
    rig.finish()
    (scored,) = [event for each, event in rig.events if each is rate and isinstance(event, Scored)]
    assert scored.logprobs == pytest.approx(drawn, abs=1e-4)


def test_the_thread_starts_tells_and_stops(tiny: Path) -> None:
    rig = Rig(tiny)
    told = threading.Event()

    def deliver(events: list[tuple[Job, Event]]) -> None:
        rig.events.extend(events)
        if any(isinstance(event, Ended) for _, event in events):
            told.set()

    rig.scheduler._deliver = deliver
    rig.scheduler.start()
    job = rig.job([5] * 9)
    rig.submit(job)
    assert told.wait(10)
    rig.scheduler.stop()
    assert rig.tokens(job)


def test_common_beginnings() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        one = [numbers.randrange(2) for _ in range(numbers.randrange(12))]
        other = [numbers.randrange(2) for _ in range(numbers.randrange(12))]
        slow = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        assert common(one, other) == (min(len(one), len(other)) if slow is None else slow)
