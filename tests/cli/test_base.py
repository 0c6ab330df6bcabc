"""A base model that changed or vanished: a state of the scenario, told everywhere; the others serve; it comes back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from reef.cli import assemble, base
from reef.cli.process import Boot
from reef.cli.route import Scenarios, answering
from reef.config import load
from reef.core.errors import EngineError, InputError
from reef.releases import Draft, NewPart

FAKE = "reef: {port: 0, engine: fake, recipe: record}\nscenarios: {fixed: {engine: fake}}\ntraining: {backend: fake}\n"
GONE = FAKE.replace("engine: fake, recipe", "engine: local, model: /nonexistent/model, recipe", 1)
LOCAL = FAKE.replace("engine: fake, recipe", "engine: local, recipe", 1)
UPSTREAM = (
    FAKE.replace("engine: fake, recipe", "engine: up, recipe", 1) + 'engines: {up: {url: "http://127.0.0.1:9"}}\n'
)
MODEL = {"path": "", "name": "mine", "digest": "d" * 64}
ASK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".reef").mkdir()
    return tmp_path


def boot(folder, text, model=None):
    (folder / "reef.yaml").write_text(text)
    return Boot(load().settings.model_dump(mode="json"), folder / "run", "http://x", model)


def opened(made):
    settings, chain = assemble._settings(made), assemble.open_chain(Path(".reef"))
    return settings, chain, assemble.open_board(Path(".reef"))


def test_a_changed_base_is_a_sentence_and_only_its_scenario_stops(folder):
    assemble.prepare(boot(folder, FAKE))  # its releases name the fake model
    made = boot(folder, LOCAL, MODEL)
    settings, chain, board = opened(made)
    scenarios = Scenarios(
        settings, board, {"local": object(), "fake": object()}, answering(made, settings),
        lambda *of: assemble.trouble(made, settings, chain, *of),
    )  # fmt: skip
    for name in ("default", "fixed"):
        assemble._ready(made, settings, chain, board, name)  # no error
    said = (
        r"^base changed: the releases of scenario default belong to the model fake \(0{12}\), and the server has mine"
    )
    with pytest.raises(EngineError, match=said):
        scenarios.route("default", None)
    assert "start the server with that model" in scenarios.trouble("default")
    assert scenarios.route("fixed", None).name == "fake"
    assert scenarios.trouble("fixed") is None
    right = boot(folder, LOCAL, {**MODEL, "name": "fake", "digest": "0" * 64})
    assert assemble.trouble(right, settings, chain, "default", "local") is None
    board.close()


def test_weights_of_ours_are_not_answered_by_a_provider(folder):
    assemble.prepare(boot(folder, FAKE))
    made = boot(folder, UPSTREAM)
    settings, chain, board = opened(made)
    assert assemble.trouble(made, settings, chain, "default", "up") is None, "nothing was learnt yet"
    part = NewPart("lora", {"weights.json": b"{}"}, {"base": {"name": "fake", "digest": "0" * 64}})
    chain.publish("default", Draft("publish", {"weights": part}), chain.head("default").id)
    assert "give the scenario a local engine" in assemble.trouble(made, settings, chain, "default", "up")
    board.close()


def test_a_model_that_is_not_there_stops_a_start_when_nothing_else_serves(folder):
    only = GONE.replace("scenarios: {fixed: {engine: fake}}\n", "")
    for _ in range(2):
        with pytest.raises(InputError, match="no model folder"):
            assemble.prepare(boot(folder, only))
    with pytest.raises(InputError, match="no model folder"):
        assemble.prepare(boot(folder, GONE))  # a fresh folder: a typing error is told at once
    assemble.prepare(boot(folder, FAKE))
    found = assemble.prepare(boot(folder, GONE))
    assert "no model folder at /nonexistent/model" in found["missing"]


async def test_the_engine_of_a_lost_model_says_so():
    engine = base.Absent("no model folder")
    assert not await engine.ready()
    for work in (engine.load("x"), engine.rate("x", [], []), anext(engine.answer(None))):
        with pytest.raises(EngineError, match="base missing: no model folder"):
            await work
    await engine.close()


def serve(folder):
    place = folder / "said"
    with place.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "reef", "serve"], cwd=folder, stdout=said, stderr=said,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "REEF_URL": "", "REEF_TOKEN": ""},
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while b"Ctrl-C stops" not in place.read_bytes():
        assert process.poll() is None, place.read_text()
        assert time.monotonic() < deadline, place.read_text()
        time.sleep(0.05)
    token = (folder / ".reef/token").read_text().strip()
    client = httpx.Client(
        base_url=(folder / ".reef/run/address").read_text().strip(), headers={"authorization": f"Bearer {token}"}
    )
    return process, client


def stop(process, client):
    client.close()
    process.terminate()
    assert process.wait(30) == 0


def test_a_server_without_its_model_serves_the_others_and_is_whole_again_when_it_is_back(folder):
    (folder / "reef.yaml").write_text(FAKE)
    stop(*serve(folder))
    (folder / "reef.yaml").write_text(GONE)
    process, client = serve(folder)
    try:
        said = (folder / "said").read_text()
        assert "base missing: no model folder at /nonexistent/model" in said
        refused = client.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("base missing: no model folder at /nonexistent/model")
        assert client.post("/s/fixed/v1/chat/completions", json=ASK).status_code == 200
        shown = client.get("/reef/status").json()["scenarios"]
        assert shown["default"]["trouble"].startswith("base missing")
        assert "trouble" not in shown["fixed"]
        assert client.get("/readyz").json()["reason"].startswith("base missing")
        done = subprocess.run(
            [sys.executable, "-m", "reef", "status"], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert "default is not served: base missing" in done.stdout
    finally:
        stop(process, client)
    (folder / "reef.yaml").write_text(FAKE)
    process, client = serve(folder)
    try:
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200
        assert "trouble" not in client.get("/reef/status").json()["scenarios"]["default"]
    finally:
        stop(process, client)
