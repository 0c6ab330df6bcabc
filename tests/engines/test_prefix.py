"""What the cache keeps of prompts: how much is computed again, that nobody is told what other weights would say, and
that clients are told."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.engines import Answer, Ask, Piece, WeightFiles
from reef.engines.dialect import read, translate
from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.engines.local.layout import Layout
from reef.engines.local.scheduler import Job
from reef.engines.sse import Events
from tests.engines.kit import RECEIPT, Releases, ask, lora_files, make_lora, running
from tests.engines.test_client import collect
from tests.engines.test_scheduler import Rig

SYSTEM = list(range(20, 60))
"""How every conversation here begins."""


class Talk:
    """A conversation as its client keeps it: what was said so far, tokens and all."""

    def __init__(self, rig: Rig, seed: int, limit: int = 4) -> None:
        self.rig, self.limit = rig, limit
        self.numbers = random.Random(seed)
        self.said = list(SYSTEM)

    def words(self, count: int) -> list[int]:
        return [self.numbers.randrange(60, 250) for _ in range(count)]

    def turn(self, count: int = 8) -> Job:
        self.said += self.words(count)
        return self.rig.job(list(self.said), self.limit, self.numbers.randrange(1 << 30))

    def over(self, job: Job) -> int:
        """Take the answer; how many tokens of the prompt were computed for it."""
        self.said += self.rig.tokens(job)
        return len(job.prompt) - job.cached

    def play(self, count: int = 8) -> int:
        job = self.turn(count)
        self.rig.submit(job)
        self.rig.finish()
        return self.over(job)


@pytest.mark.parametrize("others", [0, 15])
def test_twenty_turns_compute_only_what_is_new(tiny: Path, others: int) -> None:
    """Also with other sessions in between, as many as fit: here all of them begin alike."""
    rig = Rig(tiny, slots=16)
    mine, rest = Talk(rig, 0), [Talk(rig, 1 + number) for number in range(others)]
    assert mine.play() == len(SYSTEM) + 8
    for _ in range(19):
        for other in rest:
            other.play()
        rig.rows.clear()
        answer = len(mine.said)
        assert mine.play() == 8 + 1  # the last token of an answer is drawn, and not computed before it is read
        assert sum(rig.rows) == 8 + 1 + (len(mine.said) - answer - 8) - 1
    begun = [other.play() for other in rest]
    assert begun == [9] * others
    assert sum(len(slot.ids) >= len(SYSTEM) for slot in rig.scheduler._slots) == 1 + others


def test_a_new_session_takes_the_slot_that_was_not_used_for_longest(tiny: Path) -> None:
    rig = Rig(tiny, slots=4)
    talks = [Talk(rig, number) for number in range(4)]
    for talk in talks:
        talk.play()
    talks[0].play()
    talks[2].play()
    stranger, another = Talk(rig, 10), Talk(rig, 11)
    assert stranger.play() == 8  # the common beginning is copied
    assert another.play() == 8
    assert [talk.play() for talk in (talks[0], talks[2], stranger, another)] == [9] * 4
    assert talks[1].play() >= 20
    assert talks[3].play() >= 20


def test_what_somebody_who_waits_will_need_is_left(tiny: Path) -> None:
    rig = Rig(tiny, slots=3)
    oldest, middle, newest = (Talk(rig, number) for number in range(3))
    for talk in (oldest, middle, newest):
        talk.play()
    stranger = Talk(rig, 10)
    first, second = stranger.turn(), oldest.turn()
    rig.submit(first, second)
    rig.finish()
    assert stranger.over(first) == 8
    assert oldest.over(second) == 9
    assert newest.play() == 9
    assert middle.play() >= 20  # somebody's had to go


def test_who_asks_the_same_leaves_the_answer_to_whom_it_was_given(tiny: Path) -> None:
    rig = Rig(tiny, slots=4)
    talk = Talk(rig, 0, limit=40)
    assert talk.play() == len(SYSTEM) + 8
    prompt, answer = talk.said[:48], talk.said[48:]
    assert len(answer) == 40
    again = rig.job(prompt, 40, 99)
    rig.submit(again)
    rig.finish()
    assert len(prompt) - again.cached == 1
    assert talk.play() == 9


def test_who_goes_on_elsewhere_in_an_answer_takes_its_place(tiny: Path) -> None:
    """A client may write an answer down in other tokens than were drawn: it is still the same conversation."""
    rig = Rig(tiny, slots=4)
    talk, other = Talk(rig, 0, limit=40), Talk(rig, 1)
    talk.play()
    other.play()
    talk.said[60:] = [3] * 28
    assert talk.play() == 28 + 8
    assert sum(bool(slot.length) for slot in rig.scheduler._slots) == 2


def test_an_evaluation_drives_no_conversation_out(tiny: Path) -> None:
    rig = Rig(tiny, slots=6, share=0.5)
    talks = [Talk(rig, number) for number in range(3)]
    for talk in talks:
        talk.play()
    numbers = random.Random(5)
    for _ in range(10):
        asked = [rig.job([numbers.randrange(60, 250) for _ in range(30)], 3, priority=1) for _ in range(2)]
        rig.submit(*asked)
        rig.finish()
    assert [talk.play() for talk in talks] == [9] * 3


def test_a_short_beginning_is_not_shared(tiny: Path) -> None:
    rig = Rig(tiny)
    for _ in range(2):
        job = rig.job([5] * 12, 3)
        rig.submit(job)
        rig.finish()
        assert job.cached == 0


# --- no answer of other weights ---------------------------------------------------------------------------------------


def full_files(base: Path, folder: Path, seed: int) -> WeightFiles:
    """The base's weights, each moved a little."""
    folder.mkdir()
    seeded = torch.Generator().manual_seed(seed)
    tensors = load_file(base / "model.safetensors")
    moved = {name: one + torch.randn(one.shape, generator=seeded) * 0.05 for name, one in tensors.items()}
    save_file(moved, folder / "model.safetensors")
    return WeightFiles("full", {"model.safetensors": folder / "model.safetensors"}, {})


TOLD = "Tell me once more what the sea looks like from the harbour in the morning."


def turns(answers: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation so far; the client's next words are the same whatever was answered."""
    said: list[dict[str, Any]] = [{"role": "user", "content": TOLD}]
    for answer in answers:
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    return said


async def say(engine: LocalEngine, release: str, messages: list[dict[str, Any]]) -> Answer:
    return (await collect(engine, ask(messages, release=release, max_tokens=12, seed=4)))[2]


def drawn(answer: Answer) -> tuple[tuple[int, ...], list[float]]:
    (choice,) = answer.choices or ()
    assert {span.release_id for span in choice.spans} <= {answer_release(answer)}
    return choice.output_ids or (), list(choice.logprobs or ())


def answer_release(answer: Answer) -> str:
    return (answer.choices or ())[0].spans[0].release_id


async def test_twenty_swaps_and_never_an_answer_of_other_weights(tiny: Path, tmp_path: Path, layout: Layout) -> None:
    """LoRAs and full weights, fewer resident than there are, back to earlier ones, and one file put in another's place:
    each release says exactly what it says in an engine that has never seen another."""
    loras = [make_lora(tmp_path / f"l{seed}", layout, seed=seed) for seed in range(3)]
    known = {"l0": lora_files(loras[0]), "l1": lora_files(loras[1])}
    known |= {f"f{seed}": full_files(tiny, tmp_path / f"f{seed}", seed) for seed in range(2)}
    releases = Releases(known)
    expected: dict[str, list[Answer]] = {}

    async def alone(release: str) -> None:
        async with running(tiny, releases) as engine:
            first = await say(engine, release, turns([]))
        async with running(tiny, releases) as engine:
            expected[release] = [first, await say(engine, release, turns([(first.choices or ())[0].text]))]

    for release in ("base", *known):
        await alone(release)
    assert len({drawn(each[0])[0] for each in expected.values()}) == 5  # they do say different things

    order = random.Random(1)
    line = ["base", "l0", "f0", "l0", "f1", "base", "l1", "f0", "f1", "l1"]
    line += [order.choice(["base", *known]) for _ in range(10)]
    async with running(tiny, releases, loras=1, full=1, slots=4) as engine:
        seen: set[str] = set()
        shared = 0
        for number, release in enumerate(line):
            if number == 15:  # another file under the path of one that was served, as long as that was
                shutil.copy(loras[2] / "adapter_model.safetensors", tmp_path / "new")
                os.replace(tmp_path / "new", loras[0] / "adapter_model.safetensors")
                releases.known["l2"] = lora_files(loras[0])
                await alone("l2")
                release = "l2"
            elif release == "l0" and number > 15:
                release = "l2"
            for step in range(2):
                texts = [(each.choices or ())[0].text for each in expected[release][:step]]
                found = await say(engine, release, turns(texts))
                ids, logprobs = drawn(found)
                wanted, values = drawn(expected[release][step])
                assert (number, release, ids) == (number, release, wanted)
                assert logprobs == pytest.approx(values, abs=1e-4)
                if release not in seen and step == 0:
                    assert found.cached == 0
                shared += found.cached > 0
            seen.add(release)
        assert shared >= 20  # each conversation at least goes on from its own first turn


# --- what clients are told --------------------------------------------------------------------------------------------


async def test_chat_answers_tell_what_was_cached(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        _, pieces, first = await collect(engine, ask(TOLD, seed=1, max_tokens=4))
        _, again, second = await collect(engine, ask(TOLD, seed=1, max_tokens=4, n=2))
        streamed = ask(TOLD, seed=1, max_tokens=4, stream=True, stream_options={"include_usage": True})
        _, chunks, third = await collect(engine, streamed)
    length = len(first.prompt_ids or ())
    usage = json.loads(pieces[0].data)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (length, {"cached_tokens": 0})
    usage = json.loads(again[0].data)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (length, {"cached_tokens": length - 1})
    last = [json.loads(event.data or "") for event in Events().feed(b"".join(piece.data for piece in chunks[:-1]))][-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": length - 1}
    assert [first.cached, second.cached, third.cached] == [0, length - 1, length - 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_other_dialects_tell_it_in_their_own_words(tiny: Path, stream: bool) -> None:
    """OpenAI counts cached tokens among those of the input, Anthropic beside them."""
    bodies: dict[str, dict[str, Any]] = {
        "responses": {"model": "any", "input": TOLD, "max_output_tokens": 16, "stream": stream},
        "messages": {
            "model": "any",
            "messages": [{"role": "user", "content": TOLD}],
            "max_tokens": 4,
            "stream": stream,
        },
    }
    async with running(tiny, Releases()) as engine:
        for dialect, body in bodies.items():
            counts = []
            for _ in range(2):
                made = translate(Ask(RECEIPT, "base", dialect, json.dumps(body).encode(), stream))
                items = [item async for item in made.answer(engine.answer(made.ask))]
                data = b"".join(item.data for item in items if isinstance(item, Piece))
                (told,) = [item for item in items if isinstance(item, Answer)]
                said = read(dialect, data, stream=stream)
                assert said.usage is not None
                length = len(told.prompt_ids or ())
                assert said.usage.prompt_tokens == length  # the whole prompt, in either dialect's way of counting
                reply = json.loads(said.reply or b"{}")
                counts.append(reply["usage"])
            if dialect == "responses":
                assert counts[1]["input_tokens"] == length
                assert counts[1]["input_tokens_details"]["cached_tokens"] == length - 1
            else:
                assert counts[0]["input_tokens"] + counts[0]["cache_read_input_tokens"] == length
                assert (counts[1]["input_tokens"], counts[1]["cache_read_input_tokens"]) == (1, length - 1)


@pytest.mark.model
async def test_a_session_of_the_real_model_computes_only_its_new_text() -> None:
    async with running(prepare("smollm2-135m").path, Releases(), context=2048, dtype="auto") as engine:
        messages: list[dict[str, Any]] = []
        before, computed = 0, []
        for turn in range(20):
            messages.append({"role": "user", "content": f"Name {turn + 2} things that are found at sea."})
            _, pieces, answer = await collect(engine, ask(messages, temperature=0, max_tokens=12))
            usage = json.loads(pieces[0].data)["usage"]
            computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            assert usage["prompt_tokens"] > before
            before = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({"role": "assistant", "content": (answer.choices or ())[0].text})
            await asyncio.gather(*(collect(engine, ask(f"{turn} {n}", max_tokens=1)) for n in range(3)))
        # A turn's own words and marks are 20 tokens; an answer may be written in other tokens than it was drawn in.
        assert sorted(computed)[:18][-1] <= 24
        assert sum(computed) < 20 * 24 + 40
        assert before > 600
