"""Answers in a given form: what may be drawn, what is refused at the door, and what is recorded can be recomputed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import BusyError, InputError
from reef.core.nouns import Choice
from reef.engines import Answer, Ask, Piece
from reef.engines.local import legal, proof, service
from reef.engines.local.client import LocalEngine
from reef.engines.local.form import LARGEST, read_form
from reef.engines.local.layout import read_layout
from reef.engines.local.legal import Grammars, masks, open_grammars, unpack
from reef.engines.local.proof import Proof
from reef.engines.local.text import Text
from reef.engines.local.tools import Offer
from tests.engines.kit import Releases, ask, make_tiny, running

SUM = 'start: sum\nsum: NUM | sum "+" NUM | "(" sum ")"\nNUM: /[0-9]/'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "regex": ({"regex": "[a-z]{2,6}(-[0-9]{2})?"}, lambda text: re.fullmatch("[a-z]{2,6}(-[0-9]{2})?", text)),
    "choice": (
        {"choice": ["yes", "no", 'né "x"\n', "yes indeed"]},
        {"yes", "no", 'né "x"\n', "yes indeed"}.__contains__,
    ),
    "grammar": ({"grammar": SUM}, lambda text: re.fullmatch(r"[0-9+()]+", text) and eval(text) >= 0),
    "json": ({"json": PERSON}, lambda text: set(json.loads(text)) == {"name", "age"}),
}


async def told(engine: LocalEngine, question: Ask) -> Answer:
    found = None
    async for part in engine.answer(question):
        found = part
    assert isinstance(found, Answer)
    return found


def only(answer: Answer) -> Choice:
    assert answer.choices is not None
    return answer.choices[0]


@pytest.fixture(scope="session")
def grammars(tiny: Path) -> Grammars:
    return open_grammars(tiny)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMS)
async def test_every_answer_has_its_form_and_its_legal_tokens_can_be_found_again(
    tiny: Path, grammars: Grammars, kind: str
) -> None:
    form, fits = FORMS[kind]
    layout = read_layout(tiny)
    ended = 0
    async with running(tiny, Releases()) as engine:
        for temperature in (1.0, 0.7, 0.0):
            question = ask("go", structured_outputs=form, n=12, seed=5, temperature=temperature, max_tokens=60)
            answer = await told(engine, question)
            assert answer.sampling is not None
            assert json.loads(answer.sampling.legal or "") == form
            assert answer.sampling.plain is (temperature > 0)
            for choice in answer.choices or ():
                ids = list(choice.output_ids or ())
                found = unpack(masks(answer.sampling.legal or "", ids, grammars), layout.vocab)
                assert found[np.arange(len(ids)), ids].all()
                # The end of the turn is legal exactly where what was said so far is whole.
                text = Text(tiny)
                for place in range(1, len(ids)):
                    whole = bool(_try(fits, text.decode(ids[:place])))
                    assert found[place, layout.ends[0]] == whole
                if choice.finish_reason == "stop":
                    ended += 1
                    assert fits(choice.text), choice.text
    assert ended >= 12


def _try(fits: Any, text: str) -> Any:
    try:
        return fits(text)
    except (SyntaxError, ValueError):
        return False


async def test_the_recorded_logprobs_are_over_the_legal_tokens(tiny: Path, grammars: Grammars) -> None:
    """A uniform choice between two digits that the tiny model gives some logits: the two chances add up to one."""
    async with running(tiny, Releases()) as engine:
        seen: dict[str, float] = {}
        for seed in range(40):
            answer = await told(
                engine, ask("go", structured_outputs={"choice": ["a", "b"]}, seed=seed, temperature=0.8)
            )
            choice = only(answer)
            assert choice.finish_reason == "stop"
            assert len(choice.logprobs or ()) == 1
            seen[choice.text] = (choice.logprobs or ())[0]
    assert sum(np.exp(list(seen.values()))) == pytest.approx(1, abs=1e-5) or len(seen) == 1


async def test_a_seed_gives_the_same_answer_whoever_shares_the_batch(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        limited = ask("go", structured_outputs={"regex": "[a-z]{30}"}, seed=3, logprobs=True, top_logprobs=5)
        free = ask("go", seed=4, max_tokens=30)
        alone = [only(await told(engine, question)) for question in (limited, free)]
        import asyncio

        together = await asyncio.gather(*(told(engine, question) for question in (limited, free, limited, free)))
    assert [only(each).text for each in together] == [each.text for each in alone] * 2
    assert only(together[0]).logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)


async def test_top_logprobs_list_legal_tokens_only(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        question = ask("go", structured_outputs={"regex": "[ab]{4}"}, logprobs=True, top_logprobs=20)
        body = b""
        async for part in engine.answer(question):
            if isinstance(part, Piece):
                body += part.data
    for each in json.loads(body)["choices"][0]["logprobs"]["content"]:
        assert 1 <= len(each["top_logprobs"]) <= 2
        assert all(isinstance(other["logprob"], float) for other in each["top_logprobs"])


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}},
        {"structured_outputs": {"json": json.dumps(PERSON)}, "response_format": {"type": "text"}},
    ],
)
async def test_json_by_every_name(tiny: Path, given: dict[str, Any]) -> None:
    async with running(tiny, Releases()) as engine:
        answer = await told(engine, ask("go", n=16, seed=1, max_tokens=120, **given))
    whole = [json.loads(each.text) for each in answer.choices or () if each.finish_reason == "stop"]
    assert whole
    assert all(isinstance(each, dict) for each in whole)


async def test_a_limit_cuts_an_answer_before_its_form_is_whole(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        answer = await told(engine, ask("go", structured_outputs={"regex": "[a-z]{50}"}, max_tokens=9))
    assert only(answer).finish_reason == "length"
    assert len(only(answer).output_ids or ()) == 9


async def test_the_end_of_the_turn_is_never_in_a_grammar_s_middle(tiny: Path) -> None:
    """A grammar may name the token; where the answer ends is not its to say."""
    async with running(tiny, Releases()) as engine:
        with pytest.raises(InputError, match="no token"):  # its sender's to change: no 503
            await told(engine, ask("go", structured_outputs={"grammar": 'start: "a" <|im_end|> "b"'}))
        with pytest.raises(InputError, match="no token"):
            await told(engine, ask("go", structured_outputs={"choice": ["<|im_end|>"]}))
        assert only(await told(engine, ask("go", max_tokens=3))).output_ids


async def test_too_many_new_forms_at_once_are_refused_for_now(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FORMS", 0)
    async with running(tiny, Releases()) as engine:
        with pytest.raises(BusyError, match="try again later"):
            await told(engine, ask("go", structured_outputs={"choice": ["a"]}))


# --- refusals ---------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a" * LARGEST}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(ab"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "whatever"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "contains": {}}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format"),
    ({"structured_outputs": {"regex": "a"}, "stop": "x"}, "stop"),
]


async def test_what_cannot_be_is_refused_before_anything_ran(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        for _ in range(2):  # the second time from memory
            for given, param in REFUSED:
                with pytest.raises(InputError) as caught:
                    async for part in engine.answer(ask("go", **given)):
                        raise AssertionError(f"{given} was answered with {part}")
                assert caught.value.param == param, given
        closed = ask("go", tools=TOOLS, tool_choice="none", structured_outputs={"choice": ["a"]}, stop=[])
        assert only(await told(engine, closed)).text == "a"


HOSTILE: dict[str, dict[str, Any]] = {
    "deep lark": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "deep regex": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "repeats": {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000})"},
    "exponential": {"regex": "(a|b)*a(a|b){40}(.*x){300}"},
    "chain": {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} | "x"\n' for i in range(3000)) + 'r3000: "a"'},
    "doubling": {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "a"'},
    "many items": {"grammar": 'start: ("a" "b"){100000}'},
    "ambiguous": {"grammar": 'start: x\nx: x x x | "a" | "aa" | ""'},
    "meet": {"json": {"allOf": [{"type": "string", "pattern": f"a.*b{i}.*"} for i in range(100)]}},
    "product": {
        "json": {
            "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": 1}}} for j in range(4)]} for i in range(12)]
        }
    },
    "loop": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
}


async def test_hostile_forms_are_refused_or_answered_and_the_engine_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PATIENCE", 2.0)
    outcomes: dict[str, str] = {}
    async with running(tiny, Releases()) as engine:
        for name, form in HOSTILE.items():
            try:
                answer = await told(engine, ask("go", structured_outputs=form, max_tokens=40))
                outcomes[name] = only(answer).finish_reason or ""
            except InputError as error:
                outcomes[name] = type(error).__name__
            assert only(await told(engine, ask("go", structured_outputs={"choice": ["a"]}))).text == "a"
    assert {outcomes[name] for name in ("deep lark", "deep regex", "chain", "doubling", "meet", "product", "loop")} == {
        "InputError"
    }, outcomes
    assert set(outcomes.values()) <= {"InputError", "stop", "length"}


def test_a_child_that_is_slow_or_falls_over_is_replaced(tiny: Path) -> None:
    child = Proof(tiny, patience=1.0)
    try:
        assert child.check(json.dumps({"regex": "a"})) == ""
        for name in ("meet", "chain"):
            assert child.check(json.dumps(HOSTILE[name])) == proof.TOO_MUCH
            assert child.check(json.dumps({"regex": "a+"})) == ""
    finally:
        child.close()


# --- the form as it is kept, and found again --------------------------------------------------------------------------


def test_a_form_s_text_keeps_the_order_of_a_schema() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    found = read_form({"structured_outputs": {"json": schema}}, None, ())
    assert found is not None
    assert found.text == '{"json":{"type":"object","properties":{"z":{},"a":{}}}}'
    assert read_form({"response_format": {"type": "text"}}, Offer((), ()), ("x",)) is None


words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(st.lists(words, min_size=1, max_size=5, unique=True))
def test_any_words_can_be_a_choice(tiny_grammars: tuple[Grammars, Text], choice: list[str]) -> None:
    grammars, text = tiny_grammars
    form = json.dumps({"choice": choice})
    for each in choice:
        ids = text.encode(each)
        found = masks(form, [*ids, 2], grammars) if _open(grammars, form, ids) else masks(form, ids, grammars)
        assert len(found) >= len(ids)


def _open(grammars: Grammars, form: str, ids: list[int]) -> bool:
    """Whether more could follow these words, so that the end is drawn."""
    guide = grammars.guide(form)
    for token in ids:
        done = guide.take(token)
        if not done:
            guide.look()
    return not done


@pytest.fixture(scope="session")
def tiny_grammars(tiny: Path, grammars: Grammars) -> tuple[Grammars, Text]:
    return grammars, Text(tiny)


def test_tokens_that_are_no_answer_in_the_form_are_an_error(tiny: Path, grammars: Grammars) -> None:
    text = Text(tiny)
    with pytest.raises(InputError, match="token 1 "):
        masks('{"choice":["ab","ac"]}', text.encode("ax"), grammars)
    with pytest.raises(InputError, match="token 0 "):
        masks('{"choice":["ab","ac"]}', [2], grammars)
    with pytest.raises(InputError):
        masks('{"regex":"("}', [5], grammars)


def test_copies_of_a_guide_go_their_own_ways(tiny: Path, grammars: Grammars) -> None:
    text = Text(tiny)
    one = grammars.guide('{"choice":["ab","cd"]}')
    other = one.copy()
    (a,), (c,) = text.encode("a"), text.encode("c")
    one.take(a)
    one.look()
    other.take(c)
    other.look()
    assert unpack(one.bits, one.vocab).nonzero()[0].tolist() == text.encode("b")
    assert unpack(other.bits, one.vocab).nonzero()[0].tolist() == text.encode("d")


def test_few_forms_are_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal, "KEPT", 3)
    grammars = open_grammars(tiny)
    for number in range(6):
        grammars.guide(json.dumps({"regex": f"a{{{number + 1}}}"}))
    assert grammars.known('{"regex": "a{3}"}') is None
    assert grammars.known('{"regex": "a{6}"}') is not None


def test_a_model_whose_vocabulary_is_padded(tmp_path: Path) -> None:
    """Rows of the embedding without a token are never legal."""
    folder = make_tiny(tmp_path / "padded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 13}))
    found = unpack(open_grammars(folder).guide('{"regex":"(?s:.)+"}').bits, config["vocab_size"] + 13)
    assert found[: config["vocab_size"]].sum() > 150
    assert not found[config["vocab_size"] :].any()


def test_masked_rows_leave_their_neighbours_alone() -> None:
    import random

    from reef.engines.local.sample import Draw, sample

    logits = torch.randn(3, 40)
    kept = logits.clone()
    allowed = torch.zeros(40, dtype=torch.bool)
    allowed[[7, 9]] = True

    def draws() -> list[Draw]:
        return [Draw(1.0, 1.0, 0, random.Random(row)) for row in range(3)]

    found = sample(logits, draws(), {1: allowed})
    assert torch.equal(logits, kept)
    assert found[1].token in (7, 9)
    assert [found[0], found[2]] == [each for row, each in enumerate(sample(logits, draws())) if row != 1]
    expected = torch.log_softmax(logits[1][[7, 9]], -1)[(7, 9).index(found[1].token)]
    assert found[1].logprob == pytest.approx(expected.item(), abs=1e-6)
