"""Who writes, and what stands in an answer: `recipe.writer`, `recipe.answers`, `recipe.complaints`."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ConfigError, EngineError, UpstreamError, WireError
from reef.core.nouns import Record, Report, Timing, Unit
from reef.recipe import answers, complaints, writer
from reef.recipe.writer import LONGEST, Writer
from tests.recipes.kit_bench import Desk

HERE = "tests.recipes.test_writer"


async def later(prompt):
    return prompt.upper()


def shows(prompt):
    return f"plain {prompt}"


def hands(prompt):
    return later(prompt)


def number(prompt):
    return 7


def breaks(prompt):
    raise RuntimeError("no idea")


def leaves(prompt):
    raise SystemExit(3)


async def never(prompt):
    await asyncio.sleep(3600)


def away(prompt):
    raise EngineError("nobody is there")


@pytest.mark.parametrize(
    ("name", "said"),
    [("later", "HI"), ("shows", "plain hi"), ("hands", "HI"), ("number", ""), ("breaks", "")],
)
async def test_code_that_writes(tmp_path, name, said):
    found = await Writer(f"{HERE}:{name}").write(Desk(tmp_path), "hi")
    assert found.text == said
    assert bool(found.why) == (not said)


async def test_why_code_wrote_nothing(tmp_path, monkeypatch):
    assert "RuntimeError: no idea" in (await Writer(f"{HERE}:breaks").write(Desk(tmp_path), "hi")).why
    assert "gave no text" in (await Writer(f"{HERE}:number").write(Desk(tmp_path), "hi")).why
    assert "SystemExit: 3" in (await Writer(f"{HERE}:leaves").write(Desk(tmp_path), "hi")).why
    monkeypatch.setattr(writer, "WAITED", 0.05)
    assert "no answer within 0.05 s" in (await Writer(f"{HERE}:never").write(Desk(tmp_path), "hi")).why
    with pytest.raises(EngineError):
        await Writer(f"{HERE}:away").write(Desk(tmp_path), "hi")


async def test_an_engine_that_refuses_or_is_away(tmp_path):
    def raising(error):
        def writes(prompt):
            raise error

        return Desk(tmp_path, writes=writes)

    assert "refused" in (await Writer().write(raising(UpstreamError("too long", status=413)), "hi")).why
    for error in (UpstreamError("busy", status=429), WireError("gone"), ConfigError("no such engine")):
        with pytest.raises(type(error)):
            await Writer("big").write(raising(error), "hi")
    with pytest.raises(RuntimeError):  # a bench that breaks is nobody's answer
        await Writer().write(raising(RuntimeError("?")), "hi")
    assert (await Writer().write(Desk(tmp_path, writes=lambda _: " \n"), "hi")).why == "the answer is empty"
    long = await Writer().write(Desk(tmp_path, writes=lambda _: "x" * 100_000 + "end"), "hi")
    assert len(long.text) == LONGEST
    assert long.text.endswith("end")


# --- what stands in an answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', [{"a": 1}]),
        ('x {"a": {"b": [1]}} y {"c": 2} z', [{"a": {"b": [1]}}, {"c": 2}]),
        ('[{"a": 1}, {"b": 2}]', [[{"a": 1}, {"b": 2}]]),
        ("[1, 2] {not json} [] {}", [{}]),
        ('{"a": NaN} {"b": 1}', [{"b": 1}]),
        ('<think>{"a": 1}</think>{"b": 2}', [{"b": 2}]),
        ('{"a": "}{"} tail', [{"a": "}{"}]),
        ('{"a": 1', []),
    ],
)
def test_objects_in_an_answer(text, found):
    assert answers.objects(text) == found


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3), max_size=5))
def test_objects_between_sentences_are_all_found(values):
    text = "Well: " + " and then, ".join(map(json.dumps, values)) + " that is all"
    assert answers.objects(text) == values


@given(st.text(max_size=200))
def test_any_text_is_read(text):
    answers.objects(text)
    assert answers.fenced(text) == answers.fenced(text).strip()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["{", '{"a":', '[{"', "```x\n", '{"a', "<think>", '"', "[" * 3])
def test_no_answer_takes_for_ever(piece):
    text = piece * (LONGEST // len(piece))
    assert answers.objects(text) == []
    answers.fenced(text)


def test_a_fence_is_closed_by_its_own_mark():
    assert answers.fenced("````\n```\nx\n```\n````") == "```\nx\n```"
    assert answers.fenced("```a\nx") == "```a\nx"
    assert answers.fenced("```\n\n```") == ""


# --- complaints -------------------------------------------------------------------------------------------------------


def unit(feedback, score=None):
    record = Record("a" * 32, "s", "r", "live", "chat", "complete", b"{}", Timing(0.0))
    return Unit("a:0", record, 0, Report("rep_1", "s", ("a",), 0.0, feedback=feedback, score=score), score, None)


def test_what_was_said():
    assert complaints.said(unit("  so so ")) == "so so"
    assert complaints.said(unit({"why": "ö"})) == '{"why": "ö"}'
    assert complaints.said(unit("x" * 9_000)) == "x" * complaints.LONGEST
    for nothing in (None, "", " ", [], {}, 3, True):
        assert complaints.said(unit(nothing)) == ""
        assert not complaints.told(unit(nothing), 0.0)
        assert complaints.told(unit(nothing, 0.0), 0.0)
        assert not complaints.told(unit(nothing, 0.1), 0.0)
