"""Demonstrations and contexts: rendered and tokenised as the engine would, and refused one by one if they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError, TrainError
from reef.core.wire import Datum
from reef.engines.local.text import Text
from reef.trainers.local.llama import Llama
from reef.trainers.local.rows import Known, build, context, demonstration
from reef.trainers.local.shelf import Shelf
from tests.engines.kit import make_tiny

USER = {"role": "user", "content": "Name a colour."}
BLUE = {"role": "assistant", "content": "Blue."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}],
}


def chat(*messages: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"messages": list(messages), **fields})


def shown(text: str, number: int = 0) -> Datum:
    return Datum(
        tokens=[], prompt_length=0, mask=[], logprobs=[], reward=None, record_id=f"{number:032x}", choice=0,
        temperature=1.0, lag=0, chat=text,
    )  # fmt: skip


def sampled(prompt: list[int], response: list[int], contexts: list[str], number: int = 0) -> Datum:
    return Datum(
        tokens=prompt + response, prompt_length=len(prompt), mask=[1] * len(response), logprobs=[-1.0] * len(response),
        reward=1.0, record_id=f"{number:032x}", choice=0, temperature=1.0, lag=0, contexts=contexts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("spoken") / "model")


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text(folder)


@pytest.fixture(scope="module")
def known(folder: Path) -> Known:
    return Shelf(Llama.load(folder, torch.float32)).known()


def test_a_demonstration_is_the_last_message_and_what_ends_it(text: Text, known: Known) -> None:
    prompt, response = demonstration(chat(USER, BLUE), text, known.layout.ends)
    assert text.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.tokenizer.decode(response, skip_special_tokens=False) == "Blue.<|im_end|>"
    assert prompt == text.encode(text.render([USER]))  # the engine's own prompt, token for token


def test_the_end_of_turn_is_learnt(known: Known) -> None:
    """Without it in the mask the model would never learn to stop."""
    (rows,) = build([shown(chat(USER, BLUE))], known)
    end = int(rows.targets[-1])
    assert end in known.layout.ends
    assert float(rows.mask[-1]) == 1
    assert bool(rows.mask.all())
    assert rows.logprobs.tolist() == [0.0] * len(rows.targets)
    assert rows.total.tokens == len(rows.targets)


def test_earlier_turns_are_prompt(text: Text, known: Known) -> None:
    more = {"role": "user", "content": "Another."}
    red = {"role": "assistant", "content": "Red."}
    prompt, response = demonstration(chat(USER, BLUE, more, red), text, known.layout.ends)
    assert "Blue.<|im_end|>" in text.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.decode(response) == "Red."


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_calls_are_written_as_the_template_writes_them(text: Text, known: Known, fields: dict[str, Any]) -> None:
    _, response = demonstration(chat(USER, CALL, **fields), text, known.layout.ends)
    said = text.decode(response)
    assert "look" in said
    assert "sky" in said
    assert ("<tool_call>" in said) == bool(fields)  # with tools as the model is told to write them


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (chat(USER), "not the assistant's answer"),
        (chat(BLUE), "not the assistant's answer"),
        (chat(USER, BLUE, USER), "not the assistant's answer"),
        (chat(USER, {"role": "assistant", "content": "Blue.<|im_end|> or so"}), "end token inside"),
        (chat(USER, {"role": "assistant", "content": "long " * 500}), "tokens long; the model's context is 512"),
        ("{}", "messages must be a list"),
        ("no json", "not JSON"),
    ],
)
def test_one_that_cannot_be_used_does_not_cost_the_others(known: Known, given: str, words: str) -> None:
    left_out: list[str] = []
    (rows,) = build([shown(given, 1), shown(chat(USER, BLUE), 2)], known, left_out=left_out)
    assert rows.total.samples == 1
    assert words in left_out[0]
    assert f"{1:032x}:0" in left_out[0]
    with pytest.raises(TrainError, match=words.replace("(", r"\(")):
        build([shown(given, 1)], known)


def test_a_template_that_writes_no_end_or_another_answer(tmp_path: Path) -> None:
    place = make_tiny(tmp_path / "model")
    config = json.loads((place / "tokenizer_config.json").read_text())
    ask = "{% if add_generation_prompt %}ai: {% endif %}"
    for template, words in (
        ("{% for m in messages %}{{ m.role[0] + 'i: ' + m.content + '\n' }}{% endfor %}" + ask, "no end token"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}" + ask, "otherwise than it asks"),
    ):
        (place / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        with pytest.raises(InputError, match=words):
            demonstration(chat(USER, BLUE), Text(place), (2,))


def test_a_sample_is_one_or_the_other(known: Known) -> None:
    both = msgspec.structs.replace(sampled([5, 6], [7], []), chat=chat(USER, BLUE))
    with pytest.raises(TrainError, match="must have one of them"):
        build([both], known)


def test_without_a_template_nothing_can_be_rendered(known: Known) -> None:
    for datum in (shown(chat(USER, BLUE)), sampled([5, 6], [7], [chat(USER)])):
        with pytest.raises(TrainError, match="chat template"):
            build([datum], known.layout)


def test_recorded_tokens_stay_as_they_are_behind_a_context(text: Text, known: Known) -> None:
    """Also those that no tokenizer would have made of the text, in their recorded order."""
    hint = chat({"role": "user", "content": "Name a colour. Hint: the sky."})
    letters = text.encode("t") + text.encode("h") + text.encode("e")
    assert text.encode("the") != letters
    data = [
        sampled([5, 6, 7], letters, [hint], 1),
        sampled([9], [11, 12], [], 2),
        sampled([8, 9], [13], [hint, hint], 3),
    ]
    (rows,) = build(data, known)
    assert len(rows.contexts) == len(rows.taught) == 2
    for number, other in enumerate(rows.contexts):
        assert torch.equal(other.targets, rows.targets)
        assert other.lengths == rows.lengths
        at = 0
        for length in rows.lengths:
            cut = slice(at, at + length)
            before = other.packed.ids[other.predicts[cut]].tolist()
            assert before[1:] == rows.targets[cut].tolist()[:-1]
            datum = next(one for one in data if one.tokens[one.prompt_length :] == rows.targets[cut].tolist())
            has = number < len(datum.contexts)
            assert rows.taught[number][cut].tolist() == [float(has)] * length
            prompt = context(hint, text) if has else datum.tokens[: datum.prompt_length]
            assert before[0] == prompt[-1]
            assert int(other.packed.positions[other.predicts[at]]) == len(prompt) - 1
            at += length


def test_a_context_that_is_too_long_names_the_sample(known: Known) -> None:
    long = chat({"role": "user", "content": "x" * 600})
    left_out: list[str] = []
    build([sampled([5], [6], [long], 1), sampled([5], [6], [], 2)], known, left_out=left_out)
    assert f"{1:032x}:0" in left_out[0]
    assert "behind a context; the model's limit is 512" in left_out[0]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_pass_is_the_same_however_the_batch_is_split(folder: Path, data: st.DataObject) -> None:
    """Log-probs of each sample, under its prompt and each context, in a batch of any split and alone."""
    model = Llama.load(folder, torch.float32)
    known = Shelf(model).known()
    words = st.sampled_from(["", "a", "the sky", "Blue? the"])
    made: list[Datum] = []
    for number in range(data.draw(st.integers(1, 4))):
        ids = st.lists(st.integers(3, 250), min_size=1, max_size=6)
        system = {"role": "system", "content": "Be short."}  # shared, so that there is a prefix to share
        hints = data.draw(st.lists(words, max_size=2))
        chats = [chat(system, {"role": "user", "content": hint}) for hint in hints]
        if data.draw(st.booleans()):
            made.append(shown(chat(system, USER, {"role": "assistant", "content": data.draw(words)}), number))
        else:
            made.append(sampled([4, 5, *data.draw(ids)], data.draw(ids), chats, number))
            made[-1] = msgspec.structs.replace(made[-1], group=f"g{number % 2}")

    @torch.no_grad()
    def passes(batch: list[Datum], tokens: int) -> list[tuple[str | None, list[list[float]]]]:
        found = []
        for rows in build(batch, known, tokens=tokens):
            each = [torch.log_softmax(model.logits(model.hidden(one.packed)[one.predicts]), -1).gather(
                1, one.targets[:, None])[:, 0].split(list(rows.lengths)) for one in (rows, *rows.contexts)]  # fmt: skip
            for number in range(len(rows.lengths)):
                start = sum(rows.lengths[:number])
                kept = [0, *(k + 1 for k, taught in enumerate(rows.taught) if taught[start])]
                found.append((rows.groups[number], [each[k][number].tolist() for k in kept]))
        return sorted(found, key=repr)

    alone = sorted([one for datum in made for one in passes([datum], 10_000)], key=repr)
    for tokens in (1, 60, 10_000):
        together = passes(made, tokens)
        assert sum(len(one) for _, one in together) == sum(len(one) for _, one in alone)
        for wanted in alone:
            assert any(
                wanted[0] == got[0] and len(wanted[1]) == len(got[1]) and all(
                    a == pytest.approx(b, abs=2e-4) for a, b in zip(wanted[1], got[1], strict=True))
                for got in together
            )  # fmt: skip


def test_bad_samples_are_counted_by_the_step(
    folder: Path, tmp_path: Path, order: Callable[..., Any], base: Callable[[str], Any]
) -> None:
    from reef.trainers.local.step import advance

    data = [sampled([5, 6], [7, 8], [], 1), shown(chat(USER), 2)]
    done = advance(Llama.load(folder, torch.float32), tmp_path, order(data=data), base)
    assert done.metrics["left_out"] == 1
    assert done.metrics["samples"] == 1
