"""How recipes ask models about units: the right engine, the base release, errors as errors, no record."""

import json
from pathlib import Path

import pytest

from reef.cli.ask import asking
from reef.cli.main import main
from reef.config import Settings
from reef.core.errors import EngineError, UpstreamError
from reef.engines import Answer, Head, Piece
from reef.engines.fake import FakeEngine, Fault

BODY = {"messages": [{"role": "system", "content": "Judge."}, {"role": "user", "content": "good?"}], "temperature": 0.5}


def made(**engines):
    settings = Settings.model_validate({"engines": {"other": {"kind": "fake", "model": "big"}}})
    return asking(settings, {"fake": FakeEngine(), **engines}, "fake", "base0")


async def test_none_is_the_scenarios_own_engine_with_its_base():
    own, other = FakeEngine(), FakeEngine(reply=lambda release, body: f"{body.get('model')} says yes")
    ask = asking(
        Settings.model_validate({"engines": {"other": {"kind": "fake", "model": "big"}}}),
        {"fake": own, "other": other}, "fake", "base0",
    )  # fmt: skip
    assert "good?" in await ask(None, BODY)
    (asked,) = own.asked
    assert (asked.release_id, asked.priority, asked.stream, json.loads(asked.body)) == ("base0", 1, False, BODY)
    assert await ask("other", BODY) == "big says yes"
    assert await ask("other", {**BODY, "model": "small"}) == "small says yes"
    assert len(own.asked) == 1


async def test_what_goes_wrong_is_raised():
    engine = FakeEngine()
    ask = made(fake=engine)
    engine.faults.append(Fault("status", status=503))
    with pytest.raises(UpstreamError) as caught:
        await ask(None, BODY)
    assert caught.value.status == 503
    engine.faults.append(Fault("refuse"))
    with pytest.raises(EngineError, match="refused"):
        await ask(None, BODY)
    with pytest.raises(EngineError, match="there is no engine 'nobody' to ask; there are fake"):
        await ask("nobody", BODY)


class Provider:
    """Knows nothing but bytes, and speaks Messages only."""

    dialects = frozenset({"messages"})

    def __init__(self, answer):
        self.said, self.seen = answer, []

    async def answer(self, ask):
        self.seen.append((ask.dialect, json.loads(ask.body)))
        yield Head(200, {})
        yield Piece(self.said, terminal=True)
        yield Answer()


async def test_an_engine_that_speaks_messages_is_asked_in_its_dialect():
    engine = Provider(json.dumps({"content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]}).encode())
    assert await made(fake=engine)(None, BODY) == "yes"
    ((dialect, body),) = engine.seen
    assert dialect == "messages"
    assert body == {
        "system": "Judge.", "messages": [BODY["messages"][1]], "temperature": 0.5, "max_tokens": 1024,
    }  # fmt: skip


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": 3}]}'])
async def test_bytes_that_are_no_answer_are_an_engines_error(said):
    with pytest.raises(EngineError, match="no completion"):
        await made(fake=Provider(said))(None, BODY)


def test_a_recipe_that_asks_an_unknown_engine_is_told_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "reef:\n  engine: fake\n  recipe: openclawrl\n  judge: {}\ntraining: {{backend: fake}}\n"
    Path("reef.yaml").write_text(text.format("fkae"))
    assert main(["config"]) == 2
    said = capsys.readouterr().err
    assert "there is no engine 'fkae'; did you mean fake?" in said
    assert "reef.yaml:4: reef.judge: " in said
    Path("reef.yaml").write_text(text.format("fake"))
    assert main(["config"]) == 0
